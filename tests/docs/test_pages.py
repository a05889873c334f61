"""How pages read: the glossary's words, a summary first, no long tables or pages, links that exist."""

import re
import tomllib
from pathlib import Path

import pytest
from glossary import complaints, prose

ROOT = Path(__file__).resolve().parents[2]
TOPICS = ROOT / "panther/cli/explain/topics"
PAGES = [
    path
    for path in sorted((ROOT / "docs").rglob("*.rst"))
    if not {"generated", "_build", "_templates", "auto_examples", "gallery", "examples"} & set(path.parts)
]
TEXTS = [*PAGES, *sorted(TOPICS.glob("*.rst")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
NAMES = [path.relative_to(ROOT).as_posix() for path in TEXTS]

LONGEST_TABLE = 8  # rows; a longer one is behind a figure, in a dropdown, or a table to look something up in
LONGEST_PAGE = 330  # lines without what is folded


@pytest.mark.parametrize("name", NAMES)
def test_the_words_are_those_of_the_glossary(name):
    assert complaints(prose((ROOT / name).read_text())) == []


def test_a_page_begins_with_a_summary():
    found = []
    for path in PAGES:
        content = path.read_text()
        include = re.search(r"^\.\. include:: (.*topics.*)$", content, re.M)
        content = (path.parent / include[1]).resolve().read_text() if include else content
        content = re.sub(r"^\.\. _.*:\n\n", "", content)
        title, underline, *rest = content.splitlines()
        first = next((line for line in rest if line.strip()), "")
        if set(underline) != {"="} or not re.match(r"[A-Z:*`\d]|[a-z-]+ |\.\. automodule", first):
            found.append(f"{path.relative_to(ROOT)}: {first!r} after {title!r}")
    assert not found


def tables(lines):
    """The tables at the margin, which no dropdown hides: line, number of rows below the header, whether for lookup."""
    number = 0
    while number < len(lines):
        line, body, options = lines[number], [], []
        start = number
        number += 1
        if found := re.match(r"\.\. (list-table|csv-table|table)::", line):
            kind = found[1]
            while number < len(lines) and (not lines[number].strip() or lines[number].startswith("   ")):
                content = lines[number][3:]
                (options if content.startswith(":") and not body else body).append(content)
                number += 1
        elif re.match(r"=+( +=+)+$|\+-[-+]+\+$", line):
            kind = "table"
            body = [line]
            while number < len(lines) and lines[number].strip():
                body.append(lines[number])
                number += 1
        else:
            continue
        header = any(option.startswith(":header-rows:") for option in options)
        if kind == "list-table":
            rows = sum(entry.startswith("* -") for entry in body) - header
        elif kind == "csv-table":
            rows = sum(bool(entry.strip()) for entry in body) - header
        else:
            rows = drawn_rows([entry for entry in body if entry.strip()])
        yield start + 1, rows, any(":class: lookup" in option for option in options)


def drawn_rows(body):
    """Rows of a simple table, where a line with an empty first cell continues a row, or of a grid table."""
    borders = [number for number, entry in enumerate(body) if re.match(r"=+( +=+)+$|\+[=+-]+\+$", entry)]
    if body[0].startswith("+"):
        header = any(body[number].startswith("+=") for number in borders)
        return len(borders) - 1 - header
    return sum(not entry.startswith(" ") for entry in body[borders[-2] + 1 : borders[-1]])


def test_long_tables_are_behind_a_figure():
    long_tables = [
        (lookup, f"{path.relative_to(ROOT)}:{number} has {rows} rows")
        for path in [*PAGES, *sorted(TOPICS.glob("*.rst"))]
        for number, rows, lookup in tables(path.read_text().splitlines())
        if rows > LONGEST_TABLE
    ]
    assert len(long_tables) > 10  # which are tables to look something up in
    assert [place for lookup, place in long_tables if not lookup] == []


def test_titles_tell_pages_apart():
    pages = {}
    for path in PAGES:
        title = re.sub(r"^\.\. _.*:\n\n", "", path.read_text()).partition("\n")[0]
        pages.setdefault(title, []).append(path.relative_to(ROOT).as_posix())
    assert {title: names for title, names in pages.items() if len(names) > 1} == {}


def test_no_page_is_too_long():
    found = []
    for path in PAGES:
        folded, lines = False, 0
        for line in path.read_text().splitlines():
            if line.startswith(".. dropdown::"):
                folded = True
            elif line.strip() and not line.startswith("   "):
                folded = False
            lines += not folded
        if lines > LONGEST_PAGE:
            found.append(f"{path.relative_to(ROOT)} has {lines} lines: split it")
    assert not found


def test_links_and_commands_of_the_readme_exist():
    readme, makefile = ((ROOT / name).read_text() for name in ("README.md", "Makefile"))
    links = re.findall(r"\]\(([^)#:]+)\)|(?:src|srcset)=\"([^\":]+)\"", readme)
    targets = {inline or html for inline, html in links}
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
    commands = set(re.findall(r"^\$ .*\bmake ([a-z-]+)", readme, re.M))
    assert {"demo", "test"} <= commands
    assert [name for name in commands if not re.search(rf"^{name}:", makefile, re.M)] == []


def test_all_extras_are_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/start/installation.rst"))
    listed = readme[readme.index("The extras are ") :].partition("\n\n")[0]
    unlisted = [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in listed]
    assert unlisted == []
    assert [extra for extra in project["optional-dependencies"] if f"``{extra}``" not in page] == []
