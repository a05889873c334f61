"""What a release needs beside the code: the citation, and the list for the switcher between versions."""

import importlib.util
import json
from pathlib import Path

import pytest
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


def test_the_switcher_lists_the_newest_release_first(tmp_path):
    for name in ("0.2.0", "0.10.0", "dev", "images"):
        (tmp_path / name).mkdir()
    switcher().main([str(tmp_path), "https://example.org/panther/"])
    found = json.loads((tmp_path / "switcher.json").read_text())
    assert [entry["version"] for entry in found] == ["0.10.0", "0.2.0", "dev"]
    assert [entry["version"] for entry in found if entry.get("preferred")] == ["0.10.0"]
    assert found[1]["url"] == "https://example.org/panther/0.2.0/"


def test_before_the_first_release_dev_is_preferred():
    (found,) = switcher().entries(["dev"], "https://example.org")
    assert found == {"version": "dev", "url": "https://example.org/dev/", "name": "dev", "preferred": True}


def test_a_folder_without_versions_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no folder of a version"):
        switcher().main([str(tmp_path), "https://example.org"])
