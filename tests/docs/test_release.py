"""What a release needs beside the code: the citation, and the list for the switcher between versions."""

import importlib.util
import json
import re
from pathlib import Path

import yaml

import panther

ROOT = Path(__file__).resolve().parents[2]


def switcher():
    spec = importlib.util.spec_from_file_location("switcher", ROOT / "docs/switcher.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == panther.__version__
    assert {"message", "title", "authors"} <= set(citation)


def test_the_changelog_begins_with_this_version_on_a_page():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.search(r"^## \[([^\]]+)\](?: - (\S+))?$", changelog, re.M).groups()
    if "dev" in panther.__version__:
        assert version == "Unreleased"
    else:
        citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
        assert (version, date) == (panther.__version__, str(citation["date-released"]))
    first = re.split(r"^## ", changelog, flags=re.M)[1]
    assert len(first.splitlines()) <= 75


def test_the_pages_of_a_version_and_the_list_are_written_together(tmp_path):
    pages, site = tmp_path / "html", tmp_path / "site"
    pages.mkdir()
    (pages / "index.html").write_text("new")
    folder = site / switcher().folder_of(panther.__version__)
    folder.mkdir(parents=True)
    (folder / "gone.html").write_text("old")
    switcher().main([str(site), "https://example.org", str(pages)])
    assert [path.name for path in folder.iterdir()] == ["index.html"]
    (entry,) = json.loads((site / "switcher.json").read_text())
    assert (entry["version"], entry["preferred"]) == (folder.name, True)


def test_the_switcher_lists_the_newest_release_first(tmp_path):
    for name in ("0.2.0", "0.10.0", "dev", "images"):
        (tmp_path / name).mkdir()
    switcher().main([str(tmp_path), "https://example.org/panther/"])
    found = json.loads((tmp_path / "switcher.json").read_text())
    assert [entry["version"] for entry in found] == ["0.10.0", "0.2.0", "dev"]
    assert [entry["version"] for entry in found if entry.get("preferred")] == ["0.10.0"]
    assert found[1]["url"] == "https://example.org/panther/0.2.0/"
