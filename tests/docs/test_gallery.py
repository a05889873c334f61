"""Scripts of the gallery: all are in the order of its page, read like other pages, and are linked by the reference."""

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

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


def test_thumbnails_are_of_the_full_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PANTHER_DOCS_QUICK", "1")  # which the settings set
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("sphinx_gallery", reason="sphinx-gallery is in the extra docs")
    build = settings()
    thumbnail = tmp_path / "examples/compress/images/thumb/sphx_glr_vision_thumb.png"
    thumbnail.parent.mkdir(parents=True)
    image.new("RGB", (400, 280)).save(thumbnail)  # black, as no figure is
    build.use_full_thumbnails(SimpleNamespace(srcdir=tmp_path))
    made = image.open(thumbnail)
    assert made.size == (400, 280)
    assert max(high for _, high in made.convert("RGB").getextrema()) > 200


def test_figures_are_of_the_full_run(monkeypatch):
    """The page of a script has the committed figures at their places, and at the end those that it does not have."""
    monkeypatch.setenv("PANTHER_DOCS_QUICK", "1")  # which the settings set
    reduced = "/examples/linalg/images/sphx_glr_pivoted_qr_001.png"
    picture = f".. image-sg:: {reduced}\n   :alt: pixels\n   :srcset: {reduced}\n   :class: sphx-glr-single-img\n"
    note = "Go to the end to download the full example code."
    page = settings().show_full_figures(f"{note}\n\n{picture}\n\n.. _sphx_glr_download_x:\n", "pivoted_qr")
    assert "images/sphx_glr" not in page
    first, second = (page.index(f".. figure:: /_static/gallery/pivoted_qr-{number}.png") for number in (1, 2))
    assert page.index("is of a reduced run") < first < page.index("At full size") < second
    assert "   :alt: pixels\n" in page


@pytest.mark.parametrize("path", SCRIPTS, ids=NAMES)
def test_a_script_reads_like_a_page(path):
    script = path.read_text()
    title, line, *_ = ast.get_docstring(ast.parse(script)).splitlines()
    assert set(line) == {"="}
    assert len(title) <= len(line)
    assert "QUICK" in script, "smaller sizes for make docs, where PANTHER_DOCS_QUICK is set"
    assert complaints(prose(script)) == []


def found_names(path):
    """Return the names under which sphinx-gallery links a script, without those of variables that running it makes."""
    from sphinx_gallery.backreferences import _make_ref_regex, identify_names
    from sphinx_gallery.gen_rst import _backrefs_from_codeobj
    from sphinx_gallery.py_source_parser import split_code_and_text_blocks

    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = [node for node in imports if "panther" in ast.unparse(node)]
    variables = {}
    exec(ast.unparse(ast.Module(imports, [])), variables)
    _, blocks = split_code_and_text_blocks(path)
    conf = {"exclude_implicit_doc_regex": None, **settings().sphinx_gallery_conf}
    return _backrefs_from_codeobj(conf, identify_names(blocks, _make_ref_regex(), variables))


@pytest.mark.extra
def test_the_reference_links_to_the_examples(monkeypatch):
    """A page of the reference shows the examples of a name and of the methods of a class, by names in the scripts."""
    pytest.importorskip("sphinx_gallery", reason="sphinx-gallery is in the extra docs")
    monkeypatch.setenv("PANTHER_DOCS_QUICK", "1")
    names = set().union(*map(found_names, SCRIPTS))
    linked = names | {name.rpartition(".")[0] for name in names}
    assert {
        "panther.compress",
        "panther.tune",
        "panther.distributed.plan_parallelism",
        "panther.distributed.choose_parallelism_strategy",
        "panther.distributed.ModelStats",
        "panther.train.TrainConfig",
        "panther.errors.SketchMismatchError",
    } <= linked
