"""Reports of a conversion to linear attention: the converted layers, the layers that stay exact, errors and speed."""

__all__ = ["LinearizationReport", "LinearizedLayer"]

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from panther._text import counted, format_seconds, format_table
from panther.compression.calibration.targets import SkippedLayer
from panther.compression.report import HealResult
from panther.files import write_json


@dataclass(frozen=True)
class LinearizedLayer:
    """One converted attention module. Figures are measured on held-out batches, and None without calibration."""

    name: str
    """Name of the module."""
    kind: str
    """Class of the module before the conversion."""
    num_heads: int
    """Number of heads."""
    head_dim: int
    """Width of a head."""
    is_causal: bool | None
    """Whether its calls were causal; None without calibration."""
    far_mass: float | None = None
    """Share of the exact weights beyond the window, on queries that have keys there."""
    divergence: float | None = None
    """Kullback-Leibler divergence of the exact weights from the approximate ones, in nats, on the same queries."""
    error: float | None = None
    """Relative error of the heads' outputs, on the same queries and the inputs of the original model."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LinearizationReport:
    """The result of :func:`panther.linearize_`. ``print(report)`` shows the table."""

    layers: tuple[LinearizedLayer, ...]
    """The converted modules."""
    skipped: tuple[SkippedLayer, ...]
    """Attention modules that keep their softmax, with the reason."""
    num_features: int
    """Number of features of each head."""
    window: int
    """Number of positions of a block of exact attention."""
    notes: tuple[str, ...] = ()
    """Deviations from the arguments, and why."""
    measured_error: float | None = None
    """Relative error of the model's output on the held-out batches, before healing."""
    healed: HealResult | None = None
    """The result of healing; None without it."""
    measured_speedup: float | None = None
    """Speed-up of the entire model on a held-out batch; see ``length``."""
    length: int | None = None
    """Longest sequence of the calibration batches."""
    passes: int = 0
    """Number of passes over the calibration batches in which queries, keys and values were recorded."""
    fit_s: float = 0.0
    """Seconds that learning the feature maps took, without the passes."""
    seed: int = 0
    """The seed of the call, drawn if none was given."""

    @property
    def healed_error(self) -> float | None:
        """Return the relative error of the model's output on the held-out batches, after healing."""
        return None if self.healed is None else self.healed.error

    def __repr__(self) -> str:
        """Return the totals in one line; ``str`` has the table."""
        return f"<LinearizationReport: {counted(len(self.layers), 'layer')}, {len(self.skipped)} kept exact>"

    def __str__(self) -> str:
        """Return the totals, then the table."""
        lines = [
            f"{counted(len(self.layers), 'attention layer')} converted, {len(self.skipped)} kept exact  "
            f"num_features={self.num_features}, window={self.window}"
        ]
        errors = [("measured", self.measured_error), ("healed", self.healed_error)]
        if self.measured_error is not None:
            errors_text = ", ".join(f"{name} {error:.3g}" for name, error in errors if error is not None)
            lines.append(f"relative error of the output  {errors_text}")
        if self.fit_s:
            lines.append(f"learned in {format_seconds(self.fit_s)}, after {counted(self.passes, 'pass', 'passes')}")
        if self.measured_speedup is not None:
            lines.append(f"speed-up of the model  {self.measured_speedup:.2f} at {self.length} positions")
        lines += [f"note: {note}" for note in self.notes]
        rows: list[tuple[str, ...]] = [("layer", "kind", "heads", "causal", "far mass", "divergence", "error")]
        for layer in self.layers:
            figures = [(layer.far_mass, ".1%"), (layer.divergence, ".3g"), (layer.error, ".3g")]
            causal = {None: "", True: "yes", False: "no"}[layer.is_causal]
            heads = f"{layer.num_heads}x{layer.head_dim}"
            figures_text = ("" if value is None else format(value, form) for value, form in figures)
            rows.append((layer.name, layer.kind, heads, causal, *figures_text))
        lines.append(format_table(rows))
        lines += [f"kept exact: {name} ({kind}) {reason}" for name, kind, reason in self.skipped]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain numbers, strings, lists and dicts."""
        skipped = [entry._asdict() for entry in self.skipped]
        return asdict(self) | {"skipped": skipped, "healed_error": self.healed_error}

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`to_dict` to a file."""
        path = Path(path)
        write_json(path, self.to_dict())
        return path
