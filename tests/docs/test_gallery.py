"""Scripts of the gallery: all are in the order of its page, read like other pages, and are linked by the reference."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from glossary import complaints

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPTS = sorted((DOCS / "gallery").glob("*/*.py"))
NAMES = [path.relative_to(DOCS / "gallery").as_posix() for path in SCRIPTS]


def settings():
    spec = importlib.util.spec_from_file_location("gallery_build", DOCS / "gallery_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(script):
    """The docstring and the comments that become text, without literals."""
    blocks = re.findall(r"^# %%\n((?:#.*\n)+)", script, re.M)
    comments = "\n".join(re.sub(r"^# ?", "", line) for block in blocks for line in block.splitlines())
    return re.sub(r"``[^`]*``|`[^`]*`", "x", f"{ast.get_docstring(ast.parse(script))}\n{comments}")


def test_every_script_has_a_place(monkeypatch):
    monkeypatch.setenv("PANTHER_DOCS_QUICK", "1")  # which the settings set
    order = settings().ORDER
    assert sorted(f"{folder}/{name}" for folder, names in order.items() for name in names) == NAMES
    assert len({name for names in order.values() for name in names}) == len(NAMES)  # names of figures
    assert all((DOCS / f"gallery/{folder}/GALLERY_HEADER.rst").exists() for folder in order)


@pytest.mark.parametrize("path", SCRIPTS, ids=NAMES)
def test_a_script_reads_like_a_page(path):
    script = path.read_text()
    title, line, *_ = ast.get_docstring(ast.parse(script)).splitlines()
    assert set(line) == {"="}
    assert len(title) <= len(line)
    assert "QUICK" in script, "smaller sizes for make docs, where PANTHER_DOCS_QUICK is set"
    assert complaints(prose(script)) == []
