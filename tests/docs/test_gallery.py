"""Scripts of the gallery: all are in the order of its page, read like other pages, and are linked by the reference."""

import ast
import importlib.util
import json
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


PAGE = """Go to the end to download the full example code.

.. GENERATED FROM PYTHON SOURCE LINES 1-2

.. code-block:: Python


    import torch


.. GENERATED FROM PYTHON SOURCE LINES 3-4

Text.

.. GENERATED FROM PYTHON SOURCE LINES 5-9

.. code-block:: Python


    for row in rows:
        print(row)



{result}
.. _sphx_glr_download_x:
"""
RESULT = """
.. image-sg:: /examples/x/images/sphx_glr_script_001.png
   :alt: a curve
   :srcset: /examples/x/images/sphx_glr_script_001.png

.. rst-class:: sphx-glr-script-out

 .. code-block:: none

     1 row

    20 rows
"""


def test_a_page_shows_the_outputs_of_the_full_run(monkeypatch):
    """Also a page whose script did not run, or printed something else at reduced size."""
    monkeypatch.setenv("PANTHER_DOCS_QUICK", "1")  # which the settings set
    build = settings()
    blocks = build.recorded_blocks(PAGE.format(result=RESULT))
    assert blocks == [{"output": [], "figures": []}, {"output": [" 1 row", "", "20 rows"], "figures": ["a curve"]}]
    run = {"blocks": blocks, "date": "2026-11-30", "processor": "a processor"}
    pages = [PAGE.format(result=result) for result in ("", RESULT, RESULT.replace("20 rows", "3 rows"))]
    (shown,) = {re.sub(r"\n+", "\n", build.show_full_run(page, "script", run)) for page in pages}
    assert "image-sg" not in shown
    assert (
        shown.index("print(row)") < shown.index("_static/gallery/script-1.png") < shown.index("     1 row\n    20 rows")
    )
    assert "2026-11-30, on a processor" in shown


def test_full_runs_are_of_scripts(monkeypatch):
    """The code of a run may be older; then the page shows the reduced run, and says so."""
    monkeypatch.setenv("PANTHER_DOCS_QUICK", "1")  # which the settings set
    digest = settings().code_digest
    runs = json.loads((DOCS / "gallery/full-runs.json").read_text())
    assert set(runs) <= set(NAMES)
    figures = {name: sum(len(block["figures"]) for block in run["blocks"]) for name, run in runs.items()}
    for name, count in figures.items():
        for number in range(1, count + 1):
            assert (DOCS / f"_static/gallery/{Path(name).stem}-{number}.png").exists()
    script = '"""Text."""\nf(1)  # why\n'
    assert digest(script) == digest('"""Other text."""\n\n# %%\n# More\nf(\n    1,\n)  # why\n')
    assert digest(script) != digest(script.replace("1", "2"))


@pytest.mark.parametrize("path", SCRIPTS, ids=NAMES)
def test_a_script_reads_like_a_page(path):
    script = path.read_text()
    title, line, *_ = ast.get_docstring(ast.parse(script)).splitlines()
    assert set(line) == {"="}
    assert len(title) <= len(line)
    assert "QUICK" in script, "smaller sizes for make docs, where PANTHER_DOCS_QUICK is set"
    assert complaints(prose(script)) == []
