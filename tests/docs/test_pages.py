"""How pages read: the glossary's words, a summary first, no long tables or pages, links that exist."""

import re
from pathlib import Path

import pytest
from glossary import INSTEAD

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


def prose(path):
    """The text without code, literals, tables' options and what a program printed."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)  # Markdown's blocks
    lines, block, doctest = [], None, False
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        doctest = bool(line.strip()) and (doctest or line.lstrip().startswith(">>>"))  # with its output, to a blank line
        if doctest or (block is not None and (not line.strip() or indent > block)):
            continue
        block = None
        if re.match(r"\s*\.\. (code-block|literalinclude|math|image|include|command-help)::", line):
            block = indent
            continue
        if line.rstrip().endswith("::"):
            block = indent
        lines.append(line)
    return re.sub(r"``[^`]*``|`[^`]*`", "x", "\n".join(lines))


@pytest.mark.parametrize("name", NAMES)
def test_the_words_are_those_of_the_glossary(name):
    text = prose(ROOT / name)
    found = [
        f"{match[0]!r} in {text[max(0, match.start() - 40) : match.end() + 30]!r}: write {better}"
        for pattern, better in INSTEAD.items()
        for match in re.finditer(pattern, text)
    ]
    assert not found


def test_a_page_begins_with_a_summary():
    found = []
    for path in PAGES:
        text = path.read_text()
        include = re.search(r"^\.\. include:: (.*topics.*)$", text, re.M)
        text = (path.parent / include[1]).resolve().read_text() if include else text
        text = re.sub(r"^\.\. _.*:\n\n", "", text)
        title, underline, *rest = text.splitlines()
        first = next((line for line in rest if line.strip()), "")
        if set(underline) != {"="} or not re.match(r"[A-Z:*`\d]|[a-z-]+ |\.\. automodule", first):
            found.append(f"{path.relative_to(ROOT)}: {first!r} after {title!r}")
    assert not found


def test_long_tables_are_behind_a_figure():
    found = []
    for path in PAGES:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if not re.match(r"\.\. (list-table|csv-table)::", line):  # at the margin: not in a dropdown
                continue
            block = []
            for below in lines[number + 1 :]:
                if below.strip() and not below.startswith("   "):
                    break
                block.append(below)
            rows = sum(entry.startswith("   * -") for entry in block) or sum(bool(e.strip()) for e in block) - 2
            header = any(":header-rows:" in entry for entry in block)
            if rows - header > LONGEST_TABLE and not any(":class: lookup" in entry for entry in block):
                found.append(f"{path.relative_to(ROOT)}:{number + 1} has {rows - header} rows")
    assert not found


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


def test_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#:]+)\)|(?:src|srcset)=\"([^\":]+)\"", (ROOT / "README.md").read_text())
    targets = {one or other for one, other in links}
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
