"""Reports of a compression: the compressed layers, the layers that stay dense, totals, errors and speed."""

__all__ = ["CompressionReport", "HealResult", "LayerReport", "layer_reports"]

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from panther._text import counted, format_bytes, format_table
from panther.compression.calibration.targets import SkippedLayer
from panther.compression.forms import Choice, total_loss
from panther.compression.selection.trials import Measured
from panther.errors import require_extra
from panther.files import write_json


@dataclass(frozen=True)
class HealResult:
    """The result of healing.

    Losses are shares of variance that are lost: 0 is the original, and at 1 to 2 nothing of the original remains.
    """

    steps: int
    """Number of steps: fewer than ``max_steps`` only if healing diverged."""

    loss_before: float
    """Mean loss on the held-out batches before the first step; each rank counts the same number of batches."""

    loss_after: float
    """Mean loss of the healed model on the held-out batches: never above ``loss_before``."""

    error: float
    """Relative error of the healed model's output on the held-out batches."""

    best_step: int
    """The step from which the model has its parameters; 0 is the start."""

    diverged: bool
    """Whether healing ended early, at a loss that was not finite or a held-out loss above twice the best: the learning
    rate is too large."""

    history: tuple[tuple[int, float, float | None], ...]
    """For each step: its number, the loss on its batch before the step, and the loss on the held-out batches after it
    (None if the step was not checked). Steps that were skipped because they were not finite are not listed."""

    seconds: float = field(compare=False)
    """Seconds that healing took."""


@dataclass(frozen=True)
class LayerReport:
    """One weight, which more than one module can share."""

    names: tuple[str, ...]
    """The names of the modules that have this weight."""
    kind: str
    """Class of the dense layer."""
    shape: tuple[int, ...]
    """Shape of the weight."""
    form: str
    """``"dense"``, ``"low_rank"``, ``"monarch"``, ``"interpolative"``, ``"int8_low_rank"``, or the width, as in
    ``"int4"`` and ``"int4+low_rank"``."""
    bits: float
    """Bits of a weight on average, scales and factors included."""
    rank: int | None
    """Rank of a low-rank weight, in every group of a convolution, of a block of a Monarch weight, or of a correction;
    None if there is none."""
    low_rank: int | None
    """The argument ``low_rank`` or ``rank`` of the new layer, which gives it this rank."""
    bytes_before: int
    """Bytes of the dense weight."""
    bytes_after: int
    """Bytes of the new weight, as saved."""
    predicted_error: float | None
    """Relative error of the layer's own output, predicted from the moments of the calibration batches."""
    measured_error: float | None
    """Relative error of the layer's own output, measured on the held-out batches."""
    share: float | None
    """This layer's share of the predicted squared error of the model's output."""
    speedup: float | None = None
    """Measured ratio of the dense layer's time to this layer's time."""
    time_s: float | None = None
    """Measured seconds of the layer for its input in the first held-out batch."""


def layer_reports(choice: Choice, replacement: Mapping[nn.Module, Any], measured: Measured) -> tuple[LayerReport, ...]:
    """Return the report of each target."""
    total = total_loss(choice)
    return tuple(
        LayerReport(
            names=target.names,
            kind=target.class_name,
            shape=tuple(target.weight.shape),
            form=option.form,
            bits=8 * option.bytes / target.dense_numbers,
            rank=option.rank,
            low_rank=None if option.rank is None else _rank_argument(replacement[target.modules[0]]),
            bytes_before=target.dense_bytes,
            bytes_after=option.bytes,
            predicted_error=option.error,
            measured_error=measured.errors.get(target),
            share=option.loss / total if total > 0 else None,
            speedup=measured.speedups.get(target),
            time_s=measured.times.get(target),
        )
        for target, option in choice.items()
    )


def _rank_argument(layer: Any) -> int:
    rank: int = getattr(layer, layer.size_arguments[-1])
    return rank


@dataclass(frozen=True, kw_only=True, repr=False)
class CompressionReport:
    """The result of :func:`panther.compress`. ``print(report)`` shows the table."""

    layers: tuple[LayerReport, ...]
    """The eligible layers."""
    skipped: tuple[SkippedLayer, ...]
    """Modules with a matrix that are kept dense, with the reason."""
    method: str
    """The ``method`` of the call."""
    allocate: str
    """How forms were chosen: ``"global"``, ``"uniform"``, or ``"fixed"`` by :func:`panther.sketch_layers_`."""
    notes: tuple[str, ...]
    """Deviations from the arguments, and why."""
    bytes_before: int
    """Bytes of all tensors of the entire model, as saved, before compression."""
    bytes_after: int
    """Bytes of all tensors of the entire model, as saved, after compression."""
    bytes_in_bfloat16: int
    """Bytes that the original model would take with all of its floating tensors in bfloat16, for comparison."""
    predicted_error: float | None = None
    """Relative error of the model's output, predicted to first order."""
    measured_error: float | None = None
    """Relative error of the model's output on the held-out batches, before healing."""
    uniform_error: float | None = None
    """Relative error with uniform forms and ranks; None if only one choice was tried."""
    healed: HealResult | None = None
    """The result of healing; None without it."""
    measured_speedup: float | None = None
    """Speed-up of the entire model on the first held-out batch."""
    measured_latency_s: float | None = None
    """Seconds that the compressed model takes for the first held-out batch."""
    passes: int = 0
    """Number of passes over the calibration batches in which moments were gathered."""
    output: str = ""
    """The tensor of the model's output that was compared, as an expression; empty without calibration."""
    seed: int = 0
    """The seed of the call, drawn if none was given."""

    @property
    def eligible_bytes_before(self) -> int:
        """Return the bytes of the eligible layers' weights before compression."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def eligible_bytes_after(self) -> int:
        """Return the bytes of the eligible layers' weights after compression."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def slower(self) -> tuple[LayerReport, ...]:
        """Return the layers whose measured speed is below the dense layer's, by any amount."""
        return tuple(layer for layer in self.layers if layer.speedup is not None and layer.speedup < 1)

    @property
    def healed_error(self) -> float | None:
        """Return the relative error of the model's output on the held-out batches, after healing."""
        return None if self.healed is None else self.healed.error

    @property
    def ratio(self) -> float:
        """Return the bytes of the entire model after compression, as a fraction of the bytes before."""
        return self.bytes_after / self.bytes_before if self.bytes_before else 1.0

    @property
    def eligible_ratio(self) -> float:
        """Return the bytes of the eligible layers after compression, as a fraction of the bytes before."""
        return self.eligible_bytes_after / self.eligible_bytes_before if self.eligible_bytes_before else 1.0

    def __repr__(self) -> str:
        """Return the totals in one line; ``str`` has the table."""
        eligible = f"{len(self.layers)} eligible layers {self.eligible_ratio:.1%}"
        return f"<CompressionReport: whole model {self.ratio:.1%}, {eligible}>"

    def __str__(self) -> str:
        """Return the totals, then the table."""
        in_bfloat16 = ""
        if self.bytes_in_bfloat16 < self.bytes_before:
            in_bfloat16 = f", and {format_bytes(self.bytes_in_bfloat16)} in bfloat16"
        lines = [
            f"whole model  {format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)} ({self.ratio:.1%})"
            + in_bfloat16,
            f"its {counted(len(self.layers), 'eligible layer')}  {format_bytes(self.eligible_bytes_before)} -> "
            f"{format_bytes(self.eligible_bytes_after)} ({self.eligible_ratio:.1%}), method={self.method}, "
            f"allocate={self.allocate}",
        ]
        errors = [("predicted", self.predicted_error), ("measured", self.measured_error), ("healed", self.healed_error)]
        if any(error is not None for _, error in errors):
            errors_text = ", ".join(f"{name} {error:.3g}" for name, error in errors if error is not None)
            place = "" if self.output in ("", "the output") else f" ({self.output})"
            lines.append(f"relative error of the output{place}  {errors_text}")
        if self.measured_speedup is not None:
            slower = f", slower layers: {len(self.slower)} of {len(self.layers)}" if self.slower else ""
            latency = "" if self.measured_latency_s is None else f", {1e3 * self.measured_latency_s:.3g} ms a batch"
            lines.append(f"speed-up of the model  {self.measured_speedup:.2f}{latency}{slower}")
        lines += [f"note: {note}" for note in self.notes]
        rows: list[tuple[str, ...]] = [
            (
                "layer", "kind", "shape", "form", "low_rank (matrix rank)", "bits", "bytes", "", "error", "held-out",
                "share", "speed-up", "ms",
            )
        ]  # fmt: skip
        for layer in self.layers:
            figures = [(layer.predicted_error, ".3g"), (layer.measured_error, ".3g")]
            time_ms = None if layer.time_s is None else 1e3 * layer.time_s
            figures += [(layer.share, ".1%"), (layer.speedup, ".2f"), (time_ms, ".3g")]
            rows.append(
                (
                    layer.names[0] + (f" (+{len(layer.names) - 1})" if len(layer.names) > 1 else ""),
                    layer.kind,
                    "x".join(map(str, layer.shape)),
                    layer.form,
                    "" if layer.rank is None else f"{layer.low_rank} ({layer.rank})",
                    f"{layer.bits:.3g}",
                    format_bytes(layer.bytes_before),
                    format_bytes(layer.bytes_after),
                    *("" if value is None else format(value, form) for value, form in figures),
                )
            )
        lines.append(format_table(rows))
        lines += [f"kept dense: {name} ({kind}) {reason}" for name, kind, reason in self.skipped]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain numbers, strings, lists and dicts."""
        properties = ("ratio", "eligible_ratio", "eligible_bytes_before", "eligible_bytes_after", "healed_error")
        return asdict(self) | {
            "skipped": [entry._asdict() for entry in self.skipped],
            **{name: getattr(self, name) for name in properties},
        }

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`to_dict` to a file."""
        path = Path(path)
        write_json(path, self.to_dict())
        return path

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the bytes kept and the error of every layer, to a file in the format of its suffix.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        Figure = require_extra("matplotlib.figure", "demo").Figure
        figure = Figure(figsize=(9.0, 1.6 + 0.22 * len(self.layers)), layout="constrained")
        sizes, errors = figure.subplots(1, 2, sharey=True)
        names = [layer.names[0] for layer in self.layers]
        bars = sizes.barh(names, [layer.bytes_after / layer.bytes_before for layer in self.layers])
        sizes.bar_label(bars, [_label(layer) for layer in self.layers], padding=2, fontsize=7)
        sizes.axvline(self.eligible_ratio, color="black", linestyle="--", linewidth=1)
        sizes.set(xlabel="bytes kept", xlim=(0, 1))
        for label, attribute, marker in (("predicted", "predicted_error", "|"), ("held-out", "measured_error", "o")):
            values = [getattr(layer, attribute) for layer in self.layers]
            errors.plot([math.nan if error is None else error for error in values], names, marker, label=label)
        errors.set(xlabel="relative error of the layer's output")
        errors.legend(frameon=False)
        errors.grid(alpha=0.3, axis="x")
        sizes.invert_yaxis()
        figure.suptitle(f"whole model {self.ratio:.0%} of {format_bytes(self.bytes_before)}", fontsize=11)
        path = Path(path)
        figure.savefig(path)
        return path


def _label(layer: LayerReport) -> str:
    return layer.form if layer.rank is None else f"{layer.form}, rank {layer.rank}"
