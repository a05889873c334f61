"""Count the lines of the library by package: ``python tests/support/count_lines.py [REVISION]``.

Beside them stand the lines of a revision: the tag of the last release, or, before there is one, the commit since which
the library is to become smaller. ``make verify`` prints the table.

A line of code is not blank, and neither a comment nor part of a docstring. A line *refuses* if it is part of a
``raise``, of the condition of an ``if`` whose body only raises, or of a function whose name begins with ``check``.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = ("lines", "code", "comments", "refusing")
BEFORE_RELEASES = "f7ae3fc2"


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


def count_revision(revision):
    """Return the counts at a revision; empty on a clone without its history."""
    archive = subprocess.run(["git", "archive", revision, "panther", "kernels"], cwd=ROOT, capture_output=True)
    if archive.returncode != 0:
        return {}
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
        return count_packages(Path(folder))


def last_release():
    """Return the tag of the last release, or the commit to compare with before there is one."""
    tag = subprocess.run(["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT, capture_output=True, text=True)
    return tag.stdout.strip() or BEFORE_RELEASES


def table(revision):
    """Return the lines of a table of the packages, beside their lines at a revision."""
    counts, earlier = count_packages(), count_revision(revision)
    counts |= {package: Counter() for package in earlier if package not in counts}
    for packages in (counts, earlier):
        packages["in all"] = sum(packages.values(), Counter())
    lines = [f"{'':24}{''.join(f'{name:>10}' for name in COLUMNS)}  comments per 100  refusing in %  {revision[:9]:>9}"]
    for package, numbers in counts.items():
        shares = (100 * numbers[name] / max(1, numbers["code"]) for name in ("comments", "refusing"))
        cells = "".join(f"{numbers[name]:10,}" for name in COLUMNS)
        lines_then = f"{earlier[package]['lines']:9,}" if package in earlier else f"{'-':>9}"
        lines.append(f"{package:24}{cells}  {next(shares):16.1f}  {next(shares):13.1f}  {lines_then}")
    return lines


if __name__ == "__main__":
    print("\n".join(table(sys.argv[1] if len(sys.argv) > 1 else last_release())))
