"""Keep the statistics of plain transformers in files, because measuring them takes longer than planning with them.

Those of the sizes that ``panther advise`` names come with the package, in ``transformers.json.gz``, for the version of
torch that they were measured with. ``tests/support/shipped_stats.py`` writes that file, and a test compares it.
"""

__all__ = ["SHIPPED", "default_folder", "measured_values", "shipped_name", "transformer_stats"]

import gzip
import hashlib
import json
import os
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from panther.distributed.advisor.statistics.layer_stats import LayerStats, Line, Measured, Product, TensorStats
from panther.errors import ShapeError
from panther.files import read_json, write_json

SHIPPED = Path(__file__).with_name("transformers.json.gz")
_LINES = ("flops", "activations", "output", "largest", "tp_bytes", "tp_gathered", "moved", "recomputed")


def default_folder() -> Path:
    """Return the user's cache folder for Panther, which need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "panther"


def transformer_stats(folder: str | Path | None, sizes: dict[str, Any]) -> Measured:
    """Return what ``measure_transformer(**sizes)`` measures: shipped, from the folder, or measured and kept there.

    Raises:
        ShapeError: If the layer cannot be sharded over this number of ranks.
    """
    file = None if folder is None else Path(folder) / f"transformer-{_key(sizes)}.json"
    found = _shipped().get(shipped_name(sizes)) or (None if file is None else _read(file))
    if found is None:
        found = measured_values(sizes)
        if file is not None:
            _write(file, found)
    if "refused" in found:
        raise ShapeError(found["refused"])
    tensors = tuple(TensorStats(**{**t, "shape": tuple(t["shape"])}) for t in found["tensors"])
    rest = {name: value for name, value in found.items() if name not in ("tensors", "layers")}
    return Measured(tensors, tuple(map(_layer, found["layers"])), **rest)


def shipped_name(sizes: dict[str, Any]) -> str:
    """Return the name of an entry of the shipped file."""
    return json.dumps(sizes, sort_keys=True)


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """Return the shipped entries; none for another version of torch, whose operations may save other tensors."""
    entries: dict[str, Any] = json.loads(gzip.decompress(SHIPPED.read_bytes()))
    return entries["measured"] if entries["torch"] == version("torch").partition("+")[0] else {}


def _layer(kept: dict[str, Any]) -> LayerStats:
    lines = {name: Line(*kept[name]) for name in _LINES if name in kept}
    products = tuple(Product(Line(*flops), Line(*moved), *rest) for flops, moved, *rest in kept["products"])
    return LayerStats(**{**kept, **lines, "products": products})


def measured_values(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return what ``measure_transformer(**sizes)`` measures, as plain values, or why it refuses."""
    from panther.distributed.advisor.statistics._measured_stats import measure_transformer

    try:
        stats = measure_transformer(**sizes)
    except (ShapeError, ValueError, RuntimeError) as error:  # a forward may fail on sharded layers in many ways
        return {"refused": str(error)}
    listed = {"tensors": [asdict(t) for t in stats.tensors], "layers": [asdict(layer) for layer in stats.layers]}
    return {**stats._asdict(), **listed}


def _key(sizes: dict[str, Any]) -> str:
    """Return a digest of the sizes and of all code that the statistics depend on."""
    digest = hashlib.sha256(json.dumps([sizes, version("torch")], sort_keys=True).encode())
    root = Path(__file__).parents[3]
    for part in ("distributed", "nn"):
        for source in sorted((root / part).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = read_json(file)
    except (OSError, ValueError):  # absent, or damaged: measured again
        return None
    whole = isinstance(found, dict) and ("refused" in found or "layers" in found)
    return found if whole else None


def _write(file: Path, found: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, found, indent=None)
    except OSError:  # the statistics are measured again the next time
        return
