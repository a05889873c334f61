"""What compress did to a model: every layer, every one left, totals, errors and speed."""

__all__ = ["CompressionReport", "LayerReport"]

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from panther.compression.healing import HealResult
from panther.compression.planning import Left
from panther.errors import require_extra


@dataclass(frozen=True)
class LayerReport:
    """One weight, which several names can share."""

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    rank: int | None
    """Of the new weight, in every group of a convolution; None if it stays dense."""
    bytes_before: int
    bytes_after: int
    predicted_error: float | None
    """Relative error of the layer's own output, on the calibration batches' statistics."""
    measured_error: float | None
    """The same, measured on the held-out batches."""
    share: float | None
    """Of the predicted squared error of the model's output, what this layer makes."""
    speedup: float | None = None
    """How many times faster the layer is than the dense one, measured."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CompressionReport:
    """What :func:`panther.compress` did. ``print(report)`` shows the table."""

    layers: tuple[LayerReport, ...]
    left: tuple[Left, ...]
    """Modules with a matrix that were left, with the reason."""
    method: str
    allocate: str
    """How ranks were allocated: ``"global"`` or ``"uniform"``."""
    notes: tuple[str, ...]
    """What was done otherwise than asked, and why."""
    bytes_before: int
    """Of all tensors of the whole model, as saved."""
    bytes_after: int
    eligible_bytes_before: int
    eligible_bytes_after: int
    predicted_error: float | None
    """Relative error of the model's output, to first order."""
    measured_error: float | None
    """The same on the held-out batches, before healing."""
    uniform_error: float | None = None
    """What the held-out batches said of uniform ranks, where both were tried."""
    healed: HealResult | None = None
    healed_error: float | None = None
    """Relative error of the model's output on the held-out batches, after healing."""
    predicted_speedup: float | None = None
    """By the multiplications of the converted layers alone."""
    measured_speedup: float | None = None
    """Of the whole model, on a held-out batch."""
    passes: int = 0
    """Passes over the calibration batches that the statistics took."""
    extra_bytes: int = 0
    """Most memory held at once for statistics, factors, new layers and healing, as stated beforehand."""
    seed: int = 0

    @property
    def ratio(self) -> float:
        """Bytes of the whole model after, as a fraction of those before."""
        return self.bytes_after / self.bytes_before if self.bytes_before else 1.0

    @property
    def eligible_ratio(self) -> float:
        """The same of the layers that could be compressed."""
        return self.eligible_bytes_after / self.eligible_bytes_before if self.eligible_bytes_before else 1.0

    def __repr__(self) -> str:
        """The totals in one line; ``str`` has the table."""
        eligible = f"{len(self.layers)} eligible layers {self.eligible_ratio:.1%}"
        return f"<CompressionReport: whole model {self.ratio:.1%}, {eligible}>"

    def __str__(self) -> str:
        """The totals, then the table."""
        lines = [
            f"whole model  {_size(self.bytes_before)} -> {_size(self.bytes_after)} ({self.ratio:.1%})",
            f"its {len(self.layers)} eligible layers  {_size(self.eligible_bytes_before)} -> "
            f"{_size(self.eligible_bytes_after)} ({self.eligible_ratio:.1%}), method {self.method}, ranks "
            f"{self.allocate}",
        ]
        errors = [("predicted", self.predicted_error), ("measured", self.measured_error), ("healed", self.healed_error)]
        if any(error is not None for _, error in errors):
            found = ", ".join(f"{name} {error:.3g}" for name, error in errors if error is not None)
            lines.append(f"relative error of the output  {found}")
        speeds = [("predicted", self.predicted_speedup), ("measured", self.measured_speedup)]
        if any(speed is not None for _, speed in speeds):
            lines.append("times as fast  " + ", ".join(f"{name} {speed:.2f}" for name, speed in speeds if speed))
        lines += [f"note: {note}" for note in self.notes]
        rows = [("layer", "kind", "shape", "rank", "bytes", "", "error", "held-out", "share", "speed")]
        for layer in self.layers:
            rows.append(
                (
                    layer.names[0] + (f" (+{len(layer.names) - 1})" if len(layer.names) > 1 else ""),
                    layer.kind,
                    "x".join(map(str, layer.shape)),
                    "dense" if layer.rank is None else str(layer.rank),
                    _size(layer.bytes_before),
                    _size(layer.bytes_after),
                    _number(layer.predicted_error),
                    _number(layer.measured_error),
                    "" if layer.share is None else f"{layer.share:.1%}",
                    "" if layer.speedup is None else f"{layer.speedup:.2f}",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += [f"left: {name} ({kind}) {reason}" for name, kind, reason in self.left]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain numbers, strings, lists and dicts."""
        return asdict(self) | {
            "left": [entry._asdict() for entry in self.left],
            "ratio": self.ratio,
            "eligible_ratio": self.eligible_ratio,
        }

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`to_dict` to a file."""
        path = Path(path)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return path

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw bytes kept and error of every layer, to a file of the format that its suffix names.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        Figure = require_extra("matplotlib.figure", "demo").Figure
        figure = Figure(figsize=(9.0, 1.6 + 0.22 * len(self.layers)), layout="constrained")
        kept, errors = figure.subplots(1, 2, sharey=True)
        names = [layer.names[0] for layer in self.layers]
        kept.barh(names, [layer.bytes_after / layer.bytes_before for layer in self.layers])
        kept.axvline(self.eligible_ratio, color="black", linestyle="--", linewidth=1)
        kept.set(xlabel="bytes kept", xlim=(0, 1))
        for label, attribute, marker in (("predicted", "predicted_error", "|"), ("held-out", "measured_error", "o")):
            found = [(getattr(layer, attribute), name) for layer, name in zip(self.layers, names, strict=True)]
            errors.plot(*zip(*[(e, n) for e, n in found if e is not None] or [(0, names[0])], strict=True), marker,
                        label=label)  # fmt: skip
        errors.set(xlabel="relative error of the layer's output")
        errors.legend(frameon=False)
        errors.grid(alpha=0.3, axis="x")
        kept.invert_yaxis()
        figure.suptitle(f"whole model {self.ratio:.0%} of {_size(self.bytes_before)}", fontsize=11)
        path = Path(path)
        figure.savefig(path)
        return path


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 100 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
