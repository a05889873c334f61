"""The gallery: settings of sphinx-gallery, and the figures of full-size runs that are committed.

``make docs`` runs every script of docs/gallery at reduced size, for which it sets PANTHER_DOCS_QUICK, and shows the
committed figures in its page. ``make docs-full`` (PANTHER_DOCS_FULL=1) runs them at full size and writes those figures.
PANTHER_DOCS_SCRIPTS names the scripts that run, such as ``compress/encoder.py``, separated by spaces; the pages of the
other scripts have no output. ``.ci/run`` sets it, because all of them take minutes.
"""

__all__ = [
    "FULL",
    "ORDER",
    "executed_scripts",
    "reset",
    "setup",
    "show_full_figures",
    "sphinx_gallery_conf",
    "use_full_thumbnails",
]

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parent
_FIGURES = _DOCS / "_static" / "gallery"
_THUMBNAIL = (400, 280)  # pixels, sphinx-gallery's default
FULL = bool(os.environ.get("PANTHER_DOCS_FULL"))
if not FULL:
    os.environ["PANTHER_DOCS_QUICK"] = "1"

# Folders and scripts in the order of the page; a script that is missing here is an error of tests/docs/test_gallery.py.
ORDER = {
    "layers": ["first_steps.py", "from_scratch.py", "linear_attention.py"],
    "distributed": [
        "data_parallel.py",
        "tensor_parallel.py",
        "pipeline.py",
        "hybrid.py",
        "strategies.py",
        "advisor.py",
        "checkpoints_and_faults.py",
        "laptop_to_cluster.py",
    ],
    "compress": [
        "serve_an_encoder.py",
        "encoder.py",
        "quantize.py",
        "vision.py",
        "decoder.py",
        "ranks_and_budget.py",
        "own_metric.py",
    ],
    "linalg": [
        "randomized_svd.py",
        "streaming_pca.py",
        "least_squares.py",
        "kernel_ridge.py",
        "pivoted_qr.py",
        "activations.py",
        "custom_sketch.py",
    ],
}


def _position(filename: str) -> int:
    return [name for names in ORDER.values() for name in names].index(filename)


def executed_scripts() -> str:
    """Return the regular expression of the paths of the scripts that run."""
    names = os.environ.get("PANTHER_DOCS_SCRIPTS")
    if names is None:
        return r"\.py$"
    return "|".join(f"/{re.escape(name)}$" for name in names.split()) or "(?!)"


def reset(gallery_conf: dict[str, Any], fname: str) -> None:
    """Set the seeds and the style of figures before each script."""
    import matplotlib
    import torch

    random.seed(0)
    torch.manual_seed(0)
    matplotlib.rcParams.update(
        {"figure.figsize": (7, 3.6), "figure.dpi": 100, "figure.constrained_layout.use": True, "font.size": 10}
    )


sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": executed_scripts(),
    "subsection_order": [f"gallery/{folder}" for folder in ORDER],
    "within_subsection_order": "gallery_build._position",
    "doc_module": ("panther",),
    # Names as the reference has them: without it, panther.plan_parallelism for panther.distributed.plan_parallelism.
    "prefer_full_module": {r"^panther\."},
    "backreferences_dir": "examples/backreferences",
    "reference_url": {"panther": None},
    "reset_modules": ("matplotlib", "gallery_build.reset"),
    "capture_repr": (),
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 10_000,
    "plot_gallery": "True",
    "remove_config_comments": True,
    "first_notebook_cell": "# Needs Panther with extras: pip install '.[demo,tune,transformers]'\n%matplotlib inline",
    "copyfile_regex": r"GALLERY_HEADER\.rst",
}


def use_full_thumbnails(app: Any) -> None:
    """Make the gallery's thumbnails from the figures of the full-size run, in place of those of the reduced run."""
    from sphinx_gallery.utils import scale_image  # here, because the tests read ORDER without sphinx-gallery

    for folder, names in ORDER.items():
        for stem in (name.removesuffix(".py") for name in names):
            thumbnail = Path(app.srcdir) / "examples" / folder / "images/thumb" / f"sphx_glr_{stem}_thumb.png"
            figure = _FIGURES / f"{stem}-1.png"
            if not FULL and figure.exists() and thumbnail.exists():
                scale_image(figure, thumbnail, *_THUMBNAIL)


def show_full_figures(page: str, name: str) -> str:
    """Return the page of a script with the figures of the full-size run in place of those of the reduced run.

    Figures that the page does not have, because its script did not run, are shown at its end.
    """
    figures = {int(path.stem.rpartition("-")[2]): path.name for path in sorted(_FIGURES.glob(f"{name}-*.png"))}
    download = "to download the full example code."
    hint = " The output here is of a reduced run; the text is about the full run"
    hint += ", and so are the figures." if figures else "."
    page = page.replace(download, download + hint, 1)

    def full_figure(match: re.Match[str]) -> str:
        if (figure := figures.pop(int(match["number"]), None)) is None:
            return match[0]
        indent = match["indent"]
        options = f"{indent}   :alt: {match['alt']}\n{indent}   :class: sphx-glr-single-img\n"
        return f"{indent}.. figure:: /_static/gallery/{figure}\n{options}"

    page = re.sub(
        rf"^(?P<indent> *)\.\. image-sg:: \S*/sphx_glr_{name}_(?P<number>\d{{3}})\.png\n"
        r" +:alt: (?P<alt>.*)\n(?: +:.*\n)*",
        full_figure,
        page,
        flags=re.M,
    )
    section = ["", "", "At full size", "------------", "", "These are figures of the full script.", ""]
    for number, figure in figures.items():
        section += [f".. figure:: /_static/gallery/{figure}", f"   :alt: Figure {number} at full size", ""]
    return (
        page.replace(".. _sphx_glr_download", "\n".join(section) + "\n\n.. _sphx_glr_download", 1) if figures else page
    )


def _add_full_figures(app: Any, docname: str, source: list[str]) -> None:
    """Show the figures of the full-size run on a page that was made at reduced size."""
    if not FULL and docname.startswith("examples/") and "sphx-glr-download" in source[0]:
        source[0] = show_full_figures(source[0], docname.rpartition("/")[2])


def _keep_full_figures(app: Any, exception: Exception | None) -> None:
    if not FULL or exception is not None:
        return
    _FIGURES.mkdir(exist_ok=True)
    for folder, names in ORDER.items():
        for name in names:
            stem = name.removesuffix(".py")
            for number, image in enumerate(
                sorted((_DOCS / "examples" / folder / "images").glob(f"sphx_glr_{stem}_[0-9]*.png"))
            ):
                shutil.copy(image, _FIGURES / f"{stem}-{number + 1}.png")


def setup(app: Any) -> dict[str, bool]:
    """Connect them to the build."""
    app.connect("builder-inited", use_full_thumbnails, priority=600)  # sphinx-gallery makes its pages at 500
    app.connect("source-read", _add_full_figures)
    app.connect("build-finished", _keep_full_figures)
    return {"parallel_read_safe": True}
