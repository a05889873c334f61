"""The gallery: settings of sphinx-gallery, and the outputs and figures of full-size runs, which are committed.

``make docs`` runs every script of docs/gallery at reduced size, for which it sets PANTHER_DOCS_QUICK. Its pages show
the committed outputs and figures all the same. ``make docs-full`` (PANTHER_DOCS_FULL=1) runs the scripts at full size
and writes docs/gallery/full-runs.json and the figures. A page whose code has changed since shows the output of its
reduced run, and says so. PANTHER_DOCS_SCRIPTS names the scripts that run, such as ``compress/encoder.py``, separated by
spaces. ``.ci/run`` sets it, because all of them take minutes.
"""

__all__ = [
    "FULL",
    "ORDER",
    "code_digest",
    "executed_scripts",
    "keep_full_runs",
    "recorded_blocks",
    "reset",
    "setup",
    "show_full_figures",
    "show_full_run",
    "sphinx_gallery_conf",
    "use_full_thumbnails",
]

import hashlib
import json
import os
import random
import re
import shutil
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parent
_FIGURES = _DOCS / "_static" / "gallery"
_FULL_RUNS = _DOCS / "gallery" / "full-runs.json"
_BLOCK = re.compile(
    r"\.\. GENERATED FROM PYTHON SOURCE LINES [^\n]*\n\n\.\. code-block:: Python\n"
    r"(?:   :[^\n]*\n)*\n(?:(?: {4}[^\n]*)?\n)*"
)
_THUMBNAIL = (480, 400)  # pixels; panther.css shows them 240 to 340 pixels wide
# The text of two panels beside each other cannot be read in a thumbnail, so it shows one. By script: the number of the
# figure, and the part of its width. Scripts that are not here have a first figure of one panel.
_THUMBNAIL_PANELS = {
    "activations": (2, 0.5, 1.0),
    "checkpoints_and_faults": (1, 0.0, 0.5),
    "custom_sketch": (1, 0.0, 0.53),
    "data_parallel": (1, 0.0, 0.5),
    "decoder": (1, 0.0, 0.5),
    "encoder": (1, 0.0, 0.5),
    "from_scratch": (1, 0.0, 0.6),
    "hybrid": (1, 0.0, 0.42),
    "kernel_ridge": (2, 0.0, 0.66),
    "laptop_to_cluster": (1, 0.0, 0.46),
    "least_squares": (1, 0.0, 0.66),
    "own_metric": (1, 0.0, 0.6),
    "pipeline": (1, 0.5, 1.0),
    "pivoted_qr": (1, 0.0, 0.66),
    "randomized_svd": (2, 0.0, 0.5),
    "ranks_and_budget": (2, 0.0, 0.5),
    "serve_an_encoder": (1, 0.0, 0.55),
    "strategies": (1, 0.5, 1.0),
    "streaming_pca": (2, 0.0, 0.66),
}
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
        "faster_decoder.py",
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
    "thumbnail_size": _THUMBNAIL,
    "first_notebook_cell": "# Needs Panther with extras: pip install '.[demo,tune,transformers]'\n%matplotlib inline",
    "copyfile_regex": r"GALLERY_HEADER\.rst",
}


def use_full_thumbnails(app: Any) -> None:
    """Make the gallery's thumbnails from the figures of the full-size run, in place of those of the reduced run."""
    from PIL import Image  # here, because the tests read ORDER without Pillow and sphinx-gallery
    from sphinx_gallery.utils import scale_image

    for folder, names in ORDER.items():
        for stem in (name.removesuffix(".py") for name in names):
            thumbnail = Path(app.srcdir) / "examples" / folder / "images/thumb" / f"sphx_glr_{stem}_thumb.png"
            number, start, end = _THUMBNAIL_PANELS.get(stem, (1, 0.0, 1.0))
            figure = _FIGURES / f"{stem}-{number}.png"
            if not FULL and figure.exists() and thumbnail.exists():
                with Image.open(figure) as picture:
                    edges = (_gap(picture, start), 0, _gap(picture, end), picture.height)
                    picture.crop(edges).save(thumbnail)
                scale_image(thumbnail, thumbnail, *_THUMBNAIL)


def _gap(picture: Any, share: float) -> int:
    """Return the column between two panels, near a share of the width: the middle of the widest white strip."""
    import numpy as np

    if share in (0.0, 1.0):
        return round(share * picture.width)
    first, last = (round((share + shift) * picture.width) for shift in (-0.06, 0.06))
    white = np.asarray(picture.convert("L"))[:, first:last].min(axis=0) > 250
    edges = np.flatnonzero(np.diff(np.concatenate(([False], white, [False])).astype(int)))
    strips = edges.reshape(-1, 2)
    if len(strips) == 0:
        return round(share * picture.width)
    left, right = strips[np.argmax(strips[:, 1] - strips[:, 0])]
    return first + int(left + right) // 2


def code_digest(script: str) -> str:
    """Return a digest of a script that changes with its code, and not with its text or its layout."""
    _, _, code = script.split('"""', 2)  # without the text at the beginning
    code = "".join(line for line in code.splitlines() if not line.lstrip().startswith("#"))
    return hashlib.sha256(re.sub(r"\s|,(?=\s*[)\]}])", "", code).encode()).hexdigest()[:16]


def recorded_blocks(page: str) -> list[dict[str, Any]]:
    """Return the output of each block of code of a page, and the alternative texts of its figures."""
    blocks = []
    for result in _results(page):
        printed = re.search(r"^ \.\. code-block:: none\n\n((?:(?: {4}[^\n]*)?\n)+)", result, re.M)
        output = textwrap.dedent(printed[1]).strip("\n") if printed else ""
        blocks.append({"output": output.splitlines(), "figures": re.findall(r"image-sg::[^\n]*\n +:alt: (.*)", result)})
    return blocks


def _results(page: str) -> list[str]:
    """Return what follows each block of code of a page, up to the text after it."""
    ends = [match.end() for match in _BLOCK.finditer(page)]
    return [
        re.split(
            r"^\.\. (?:GENERATED FROM|_sphx_glr_download|rst-class:: sphx-glr-timing)",
            page[end:],
            maxsplit=1,
            flags=re.M,
        )[0]
        for end in ends
    ]


def show_full_run(page: str, name: str, run: dict[str, Any]) -> str:
    """Return the page of a script with the outputs and figures of its full-size run after each block of code."""
    numbers = iter(range(1, 100))
    results = _results(page)
    pieces, start = [], 0
    for match, result, block in zip(_BLOCK.finditer(page), results, run["blocks"], strict=True):
        lines = []
        for alt in block["figures"]:
            lines += [f".. figure:: /_static/gallery/{name}-{next(numbers)}.png"]
            lines += [f"   :alt: {alt}", "   :class: sphx-glr-single-img", ""]
        if block["output"]:
            lines += [".. rst-class:: sphx-glr-script-out", "", " .. code-block:: none", ""]
            lines += [f"    {line}".rstrip() for line in block["output"]]
        pieces += [page[start : match.end()], "\n", "\n".join(lines), "\n\n"]
        start = match.end() + len(result)
    page = "".join([*pieces, page[start:]])
    download = "to download the full example code."
    return page.replace(download, f"{download} The output is of a run on {run['date']}, on {run['processor']}.", 1)


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


def _full_runs() -> dict[str, Any]:
    return json.loads(_FULL_RUNS.read_text()) if _FULL_RUNS.exists() else {}


def _add_full_run(app: Any, docname: str, source: list[str]) -> None:
    """Show the outputs and figures of the full-size run on a page that was made at reduced size."""
    if FULL or not docname.startswith("examples/") or "sphx-glr-download" not in source[0]:
        return
    script = f"{docname.removeprefix('examples/')}.py"
    run = _full_runs().get(script)
    stem = Path(script).stem
    if run is not None and run["code"] == code_digest((_DOCS / "gallery" / script).read_text()):
        source[0] = show_full_run(source[0], stem, run)
    else:
        source[0] = show_full_figures(source[0], stem)
    # Tables that scripts print get the room of the list of sections beside the page.
    source[0] = f":html_theme.sidebar_secondary.remove: true\n\n{source[0]}"


def _keep_full_runs(app: Any, exception: Exception | None) -> None:
    if FULL and exception is None:
        keep_full_runs(_DOCS / "examples")


def keep_full_runs(examples: Path) -> None:
    """Write the outputs and figures of the scripts that ran, from the pages and images of a folder."""
    from benchmarks.hardware import cpu_name

    _FIGURES.mkdir(exist_ok=True)
    runs = _full_runs()
    scripts = [f"{folder}/{name}" for folder, names in ORDER.items() for name in names]
    for script in (script for script in scripts if re.search(executed_scripts(), f"/{script}")):
        page, stem = (examples / script).with_suffix(".rst"), Path(script).stem
        runs[script] = {
            "code": code_digest((_DOCS / "gallery" / script).read_text()),
            "date": datetime.fromtimestamp(page.stat().st_mtime, UTC).date().isoformat(),
            "processor": cpu_name(),
            "blocks": recorded_blocks(page.read_text()),
        }
        for number, image in enumerate(sorted((page.parent / "images").glob(f"sphx_glr_{stem}_[0-9]*.png"))):
            shutil.copy(image, _FIGURES / f"{stem}-{number + 1}.png")
    ordered = {script: runs[script] for script in scripts if script in runs}
    _FULL_RUNS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def setup(app: Any) -> dict[str, bool]:
    """Connect them to the build."""
    app.connect("builder-inited", use_full_thumbnails, priority=600)  # sphinx-gallery makes its pages at 500
    app.connect("source-read", _add_full_run)
    app.connect("build-finished", _keep_full_runs)
    return {"parallel_read_safe": True}
