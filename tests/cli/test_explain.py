"""``panther explain``: the topics, their text as a terminal shows it, and the pages with the same text."""

import json
import re
from pathlib import Path

import pytest

from panther.cli import main
from panther.cli.explain import render, topics

ROOT = Path(__file__).resolve().parents[2]
CONCEPTS = ROOT / "docs/concepts"


def test_without_a_topic_all_are_listed(capsys):
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    files = {path.stem for path in (ROOT / "panther/cli/explain/topics").glob("*.rst")}
    assert files == set(topics())
    assert len(files) >= 9
    for name, page in topics().items():
        assert re.search(rf"^{name} +{re.escape(page.splitlines()[0])}$", listed, re.M)


@pytest.mark.parametrize("topic", topics())
def test_a_topic_is_printed_without_roles(capsys, topic):
    assert main(["explain", topic]) == 0
    out = capsys.readouterr().out
    assert out.startswith(topics()[topic].splitlines()[0] + "\n")
    assert not re.search(r":\w+:`|``|\.\. \w+::", out)
    printed = re.findall(r"[A-Za-z]{4,}", render(topics()[topic], 80))
    assert printed == re.findall(r"[A-Za-z]{4,}", render(topics()[topic], 40))  # nothing is lost in filling


def test_pages_as_data(capsys):
    assert main(["explain", "--json"]) == 0
    pages = json.loads(capsys.readouterr().out)
    assert [page["topic"] for page in pages] == list(topics())
    assert main(["explain", "seeds", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page == {"topic": "seeds", "title": topics()["seeds"].splitlines()[0], "text": topics()["seeds"]}


def test_the_forms_of_text():
    page = """\
Title
=====

See :func:`~panther.compress` and :doc:`a page </x/y>`, and ``code`` that goes on
and on::

    kept  *as*  it is

- one
  two

.. figure:: /a.svg
   :alt: A picture.

>>> 2 * 3 * 4
24

====  ======
a     ``b``
====  ======
"""
    assert render(page, 60) == (
        "Title\n=====\n\nSee panther.compress and a page, and `code` that goes on and\non::\n\n"
        "    kept  *as*  it is\n\n- one\n  two\n\n"
        "[Figure: A picture.]\n\n>>> 2 * 3 * 4\n24\n\n====  ======\na     `b`\n====  ======"
    )


def test_data_parallelism_is_explained_step_by_step():
    page = topics()["ddp"]
    for heading in ("Timeline of a step", "When to use it", "When not to use it", "Why simulate it"):
        assert f"\n{heading}\n---" in page
    assert re.findall(r"^(forward|backward|all-reduce|optimizer)$", page, re.M) == [
        "forward", "backward", "all-reduce", "optimizer",
    ]  # fmt: skip
    assert "sampler.set_epoch(epoch)" in page


def test_another_topic_is_an_error_with_a_guess(capsys):
    assert main(["explain", "sedes"]) == 2
    assert capsys.readouterr().err == "panther: error: 'sedes' is not a topic: did you mean 'seeds'?\n"
    assert main(["explain", "qqqq"]) == 2
    assert "use one of sketching, seeds, metric" in capsys.readouterr().err


def test_the_pages_include_the_same_files():
    for name in topics():
        first = (CONCEPTS / f"{name}.rst").read_text().splitlines()[0]
        assert first == f".. include:: ../../panther/cli/explain/topics/{name}.rst"
