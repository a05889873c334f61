"""Keep the statistics of plain transformers in files, because measuring them takes longer than planning with them.

Statistics of the sizes that ``panther advise`` names are part of the package, in ``transformers.json.gz``, for the
version of torch with which they were measured. ``tests/support/shipped_stats.py`` writes this file, and a test compares
it.
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
    """Return the result of ``measure_transformer(**sizes)``: shipped, from the folder, or measured and stored there.

    Raises:
        ShapeError: If the layer cannot be sharded over this number of ranks.
    """
    file = None if folder is None else Path(folder) / f"transformer-{_key(sizes)}.json"
    values = _shipped().get(shipped_name(sizes)) or (None if file is None else _read(file))
    if values is None:
        values = measured_values(sizes)
        if file is not None:
            _write(file, values)
    if "refused" in values:
        raise ShapeError(values["refused"])
    tensors = tuple(TensorStats(**{**t, "shape": tuple(t["shape"])}) for t in values["tensors"])
    rest = {name: value for name, value in values.items() if name not in ("tensors", "layers")}
    return Measured(tensors, tuple(map(_layer, values["layers"])), **rest)


def shipped_name(sizes: dict[str, Any]) -> str:
    """Return the name of an entry of the shipped file."""
    return json.dumps(sizes, sort_keys=True)


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """Return the shipped entries; none for a different version of torch, whose operations may save other tensors."""
    entries: dict[str, Any] = json.loads(gzip.decompress(SHIPPED.read_bytes()))
    return entries["measured"] if entries["torch"] == version("torch").partition("+")[0] else {}


def _layer(entry: dict[str, Any]) -> LayerStats:
    lines = {name: Line(*entry[name]) for name in _LINES if name in entry}
    products = tuple(Product(Line(*flops), Line(*moved), *rest) for flops, moved, *rest in entry["products"])
    return LayerStats(**{**entry, **lines, "products": products})


def measured_values(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the result of ``measure_transformer(**sizes)`` as plain values, or the reason why it refuses."""
    from panther.distributed.advisor.statistics.measured import measure_transformer

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
        values = read_json(file)
    except (OSError, ValueError):  # the file is missing or damaged, and the statistics are measured again
        return None
    is_complete = isinstance(values, dict) and ("refused" in values or "layers" in values)
    return values if is_complete else None


def _write(file: Path, values: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, values, indent=None)
    except OSError:  # the statistics are measured again the next time
        return
