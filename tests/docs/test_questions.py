"""Questions of three readers, written down before the site was read, are answered within two clicks of the first page.

A row of questions.csv has the page that answers, the page on the way to it, if there is one, and the words that answer.
"""

import csv
import posixpath
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
with Path(__file__).with_name("questions.csv").open(newline="") as lines:
    QUESTIONS = list(csv.DictReader(lines))


def source(page: str) -> str:
    """The source of a page, with what it includes; a script of the gallery for a page of an example."""
    if page == "examples/index":
        return (DOCS / "gallery/GALLERY_HEADER.rst").read_text()
    if page.startswith("examples/"):
        return (DOCS / f"{page.replace('examples', 'gallery', 1)}.py").read_text()
    path = DOCS / f"{page}.rst"
    content = path.read_text()
    for name in re.findall(r"^\.\. include:: (\S+)$", content, re.M):
        content += (DOCS / name[1:] if name.startswith("/") else (path.parent / name).resolve()).read_text()
    return content


def labels() -> dict[str, str]:
    """The page of each label."""
    return {
        label: path.relative_to(DOCS).as_posix().removesuffix(".rst")
        for path in DOCS.rglob("*.rst")
        if not {"_build", "generated", "examples"} & set(path.parts)
        for label in re.findall(r"^\.\. _([\w-]+):$", path.read_text(), re.M)
    }


def links(page: str) -> set[str]:
    """The pages that a page links to, in its text, its cards and its lists of pages."""
    content = source(page)
    targets = re.findall(r":doc:`(?:[^`<]*<)?([^`>]+)>?`", content) + re.findall(r"^\s+:link: (\S+)$", content, re.M)
    for entries in re.findall(r"^\.\. toctree::\n((?:   .*\n|\n)*)", content, re.M):
        targets += re.findall(r"^   (?!:)(?:.*<)?([\w/-]+)>?$", entries, re.M)
    pages = {posixpath.normpath(posixpath.join("/", posixpath.dirname(page), target))[1:] for target in targets}
    if page == "examples/index":
        pages |= {f"examples/{path.parent.name}/{path.stem}" for path in (DOCS / "gallery").glob("*/*.py")}
    return pages | {labels().get(label, "") for label in re.findall(r":ref:`(?:[^`<]*<)?([^`>]+)>?`", content)}


@pytest.mark.parametrize("row", QUESTIONS, ids=[row["question"] for row in QUESTIONS])
def test_a_question_is_answered_within_two_clicks(row):
    path = ["index", *filter(None, [row["clicks"]]), row["page"]]
    absent_links = [f"{page} to {following}" for page, following in pairwise(path) if following not in links(page)]
    assert absent_links == [], "links that the path needs"
    content = " ".join(re.sub(r"[*`]|^#", "", source(row["page"]), flags=re.M).split())
    assert [phrase for phrase in row["answer"].split("; ") if phrase not in content] == []
