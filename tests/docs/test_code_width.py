"""Code on pages is at most 72 columns wide: the column of a page holds 74 in a window of 1280 pixels.

Output is not code. It is as wide as what printed it, and its box scrolls.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 72
PAGES = [
    *(
        path
        for path in sorted((ROOT / "docs").rglob("*.rst"))
        if not {"generated", "_build", "examples"} & set(path.parts)
    ),
    *sorted((ROOT / "docs").rglob("*.inc")),
    *sorted((ROOT / "panther/cli/explain/topics").glob("*.rst")),
]
SOURCES = [*sorted((ROOT / "panther").rglob("*.py")), *sorted((ROOT / "kernels").rglob("*.py"))]
GALLERY = sorted((ROOT / "docs/gallery").rglob("*.py"))


def blocks(document: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The language of each code block of a text in reStructuredText, and its lines with their numbers."""
    lines, number = document.splitlines(), 0
    while number < len(lines):
        line = lines[number]
        indent, begin = len(line) - len(line.lstrip()), number
        directive = re.match(r"\s*\.\. code-block:: *(\S*)", line)
        number += 1
        if directive or (line.rstrip().endswith("::") and not re.match(r"\s*\.\. ", line)):
            while number < len(lines) and (not lines[number].strip() or indent_of(lines[number]) > indent):
                number += 1
            body = list(enumerate(lines[begin + 1 : number], begin + 2))
            body = [(place, content) for place, content in body if not re.match(r"\s*:[\w-]+:", content)]
            margin = min((indent_of(content) for _, content in body if content.strip()), default=0)
            yield directive[1] if directive else "", [(place, content[margin:]) for place, content in body]
        elif line.lstrip().startswith(">>> "):
            while number < len(lines) and lines[number].strip():
                number += 1
            yield "pycon", [(place, content[indent:]) for place, content in enumerate(lines[begin:number], begin + 1)]


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def code_lines(document: str) -> Iterator[tuple[int, str]]:
    """The lines of code blocks that somebody types: not output."""
    for language, lines in blocks(document):
        is_session = any(line.startswith(">>> ") for _, line in lines)
        continued = False
        for number, line in lines:
            if is_session:
                typed = re.match(r"(>>>|\.\.\.)( |$)", line) is not None
            elif language == "console":
                typed = continued or re.match(r"[\w-]*[$#] ", line) is not None
                continued = typed and line.endswith("\\")
            else:
                typed = language != "text"
            if typed and line.strip():
                yield number, line


def wide(path: Path, lines: Iterable[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{number} has {len(line)} columns" for number, line in lines if len(line) > WIDTH]


def docstring_lines(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (docstring := ast.get_docstring(node)):
            yield from ((getattr(node, "lineno", 1) + number, line) for number, line in code_lines(docstring))


def gallery_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The code of a script of the gallery, whose text stands in comments after ``# %%``."""
    source = path.read_text()
    title, is_text = ast.parse(source).body[0].end_lineno, False
    for number, line in enumerate(source.splitlines(), 1):
        is_text = line.startswith("# %%") or (is_text and line.startswith("#"))
        if number > title and not is_text:
            yield number, line


@pytest.mark.parametrize(("paths", "lines"), [(PAGES, None), (SOURCES, docstring_lines), (GALLERY, gallery_lines)])
def test_code_is_as_wide_as_its_column(paths, lines):
    number, too_wide = 0, []
    for path in paths:
        code = list(code_lines(path.read_text()) if lines is None else lines(path))
        number += len(code)
        too_wide += wide(path, code)
    assert too_wide == []
    assert number > 1000


def included_scripts() -> dict[Path, list[tuple[int, str]]]:
    """The lines, with their numbers, that pages show of each script."""
    included = r"^\s*\.\. literalinclude:: (\S+)\n(?:\s+:language:.*\n)?(?:\s+:lines: (\d+)-)?"
    firsts = {
        (page.parent / name).resolve(): int(first or 1)
        for page in PAGES
        for name, first in re.findall(included, page.read_text(), re.M)
    }
    assert len(firsts) > 5
    return {path: list(enumerate(path.read_text().splitlines(), 1))[first - 1 :] for path, first in firsts.items()}


def test_included_scripts_are_as_wide_as_their_column():
    assert [line for path, lines in included_scripts().items() for line in wide(path, lines)] == []


def test_included_scripts_begin_with_a_statement():
    # A page that begins within the docstring of a script shows the script in the colour of a string.
    for path, lines in included_scripts().items():
        if path.suffix == ".py":
            ast.parse("\n".join(line for _, line in lines), str(path))
