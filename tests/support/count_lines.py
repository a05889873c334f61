"""Count the lines of the library by package: ``python tests/support/count_lines.py``.

A line of code is not blank, and neither a comment nor part of a docstring. A line *refuses* if it is part of a
``raise``, of the condition of an ``if`` whose body only raises, or of a function whose name begins with ``check``.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = ("lines", "code", "comments", "refusing")


def count(source):
    """Return the number of lines by kind: ``lines``, ``code``, ``comments`` and ``refusing``."""
    docstrings, refusing = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= _lines_of(node)
        elif isinstance(node, ast.Raise):
            refusing |= _lines_of(node)
        elif isinstance(node, ast.If) and all(isinstance(statement, ast.Raise) for statement in node.body):
            refusing |= set(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("check"):
            refusing |= _lines_of(node)
    comments, code = set(), set()
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in no_code:
            code |= set(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    return Counter(lines=source.count("\n"), code=len(code), comments=len(comments), refusing=len(refusing & code))


def _lines_of(node):
    return set(range(node.lineno, node.end_lineno + 1))


def count_packages(root=ROOT):
    """Return the counts of ``kernels``, of each package in ``panther``, and of the modules beside them."""
    counts = {}
    for path in sorted((*root.glob("panther/**/*.py"), *root.glob("kernels/**/*.py"))):
        parts = path.relative_to(root).parts
        package = "/".join(parts[:2]) if parts[0] == "panther" and len(parts) > 2 else parts[0]
        counts[package] = counts.get(package, Counter()) + count(path.read_text())
    return counts


def main():
    """Print a table."""
    counts = count_packages()
    counts["in all"] = sum(counts.values(), Counter())
    print(f"{'':24}{''.join(f'{name:>10}' for name in COLUMNS)}  comments per 100  refusing in %")
    for package, numbers in counts.items():
        shares = (100 * numbers[name] / numbers["code"] for name in ("comments", "refusing"))
        cells = "".join(f"{numbers[name]:10,}" for name in COLUMNS)
        print(f"{package:24}{cells}  {next(shares):16.1f}  {next(shares):13.1f}")


if __name__ == "__main__":
    main()
