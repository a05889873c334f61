"""Reports of a compression: its layers, those kept dense, totals, errors and speed."""

__all__ = ["CompressionReport", "HealResult", "LayerReport", "layer_reports"]

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from panther._text import counted, format_bytes, format_table
from panther.compression.forms.options import Choice, total_loss
from panther.compression.measurement import Measured
from panther.compression.targets import SkippedLayer
from panther.errors import require_extra
from panther.files import write_json


@dataclass(frozen=True)
class HealResult:
    """What healing did.

    Losses are shares of variance lost: 0 is the original, and 1 to 2 means that nothing of it remains.
    """

    steps: int
    """Steps done: fewer than asked for only where healing diverged, or its time was used up."""

    loss_before: float
    """Mean loss on the held-out batches before the first step; on ranks with fewer of them, as many on each."""

    loss_after: float
    """The same for the model as it is now: never above ``loss_before``."""

    error: float
    """Relative error of the model's output on the held-out batches, as it is now."""

    best_step: int
    """The step whose parameters the model now has; 0 is the start."""

    diverged: bool
    """Whether healing ended early, at a loss that was not finite or a held-out loss above twice the best: the learning
    rate is too large."""

    history: tuple[tuple[int, float, float | None], ...]
    """Step, loss on its batch before it, and, where it was checked, loss on the held-out batches after it; a step that
    was skipped because it was not finite is not in it."""

    seconds: float = field(compare=False)
    """What healing took, with the runs that this one continues."""

    kept_bytes: int = field(compare=False)
    """Bytes for outputs of the original, kept in place of computing them in every step, as logged beforehand."""


@dataclass(frozen=True)
class LayerReport:
    """One weight, which several names can share."""

    names: tuple[str, ...]
    """The names of the modules that have it."""
    kind: str
    """Class of the dense layer."""
    shape: tuple[int, ...]
    """Shape of the weight."""
    form: str
    """``"dense"``, ``"low_rank"``, ``"interpolative"``, ``"int8_low_rank"``, or the width, as in ``"int4"`` and
    ``"int4+low_rank"``."""
    bits: float
    """Bits of a weight on average, scales and factors included."""
    rank: int | None
    """Rank of a low-rank weight, in every group of a convolution, or of a correction; None if there is neither."""
    low_rank: int | None
    """The ``low_rank`` of the new layer, which has that rank."""
    bytes_before: int
    """Bytes of the dense weight."""
    bytes_after: int
    """Bytes of the new weight, as saved."""
    predicted_error: float | None
    """Relative error of the layer's own output, on the calibration batches' moments."""
    measured_error: float | None
    """The same, measured on the held-out batches."""
    share: float | None
    """This layer's share of the predicted squared error of the model's output."""
    speedup: float | None = None
    """How many times faster the layer is than the dense one, measured."""
    time_s: float | None = None
    """Seconds that the layer takes for its input in the first held-out batch, measured."""


def layer_reports(choice: Choice, replacement: Mapping[nn.Module, Any], measured: Measured) -> tuple[LayerReport, ...]:
    """Return the report of each target."""
    whole = total_loss(choice)
    return tuple(
        LayerReport(
            names=target.names,
            kind=target.kind,
            shape=tuple(target.weight.shape),
            form=option.form,
            bits=8 * option.bytes / target.dense_numbers,
            rank=option.rank,
            low_rank=None if option.rank is None else replacement[target.modules[0]].low_rank,
            bytes_before=target.dense_bytes,
            bytes_after=option.bytes,
            predicted_error=option.error,
            measured_error=measured.errors.get(target),
            share=option.loss / whole if whole > 0 else None,
            speedup=measured.speedups.get(target),
            time_s=measured.times.get(target),
        )
        for target, option in choice.items()
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class CompressionReport:
    """What :func:`panther.compress` did. ``print(report)`` shows the table."""

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
    """Bytes of all tensors of the whole model, as saved."""
    bytes_after: int
    """The same after compression."""
    predicted_error: float | None = None
    """Relative error of the model's output, to first order."""
    measured_error: float | None = None
    """The same on the held-out batches, before healing."""
    uniform_error: float | None = None
    """The same with uniform forms and ranks, where both were tried."""
    healed: HealResult | None = None
    """The result of healing; None without it."""
    measured_speedup: float | None = None
    """Speed-up of the whole model, on the first held-out batch."""
    measured_latency_s: float | None = None
    """Seconds that the compressed model takes for it."""
    passes: int = 0
    """Passes over the calibration batches that the moments took."""
    output: str = ""
    """The tensor of the model's output that was compared, as an expression; empty without calibration."""
    memory: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Predicted peak memory of each phase, in bytes over what was held before: ``"moments"`` of the
    batches, ``"fits"`` of the weights, the ``"choice"`` among forms and ``"healing"``. What the model itself takes was
    measured on the largest batch; the code of libraries that load on first use comes on top."""
    seed: int = 0
    """The seed of the call, drawn if none was given."""

    @property
    def extra_bytes(self) -> int:
        """Return the most of all phases, as logged before the first one."""
        return max(self.memory.values(), default=0)

    @property
    def eligible_bytes_before(self) -> int:
        """Return the bytes of the layers that could be compressed."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def eligible_bytes_after(self) -> int:
        """Return the bytes of their weights afterwards."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def slower(self) -> tuple[LayerReport, ...]:
        """Return the layers that were measured and are slower than the dense ones, by however little."""
        return tuple(layer for layer in self.layers if layer.speedup is not None and layer.speedup < 1)

    @property
    def healed_error(self) -> float | None:
        """Return the relative error of the model's output on the held-out batches, after healing."""
        return None if self.healed is None else self.healed.error

    @property
    def ratio(self) -> float:
        """Return the bytes of the whole model after, as a fraction of those before."""
        return self.bytes_after / self.bytes_before if self.bytes_before else 1.0

    @property
    def eligible_ratio(self) -> float:
        """Return the same for the layers that could be compressed."""
        return self.eligible_bytes_after / self.eligible_bytes_before if self.eligible_bytes_before else 1.0

    def __repr__(self) -> str:
        """Return the totals in one line; ``str`` has the table."""
        eligible = f"{len(self.layers)} eligible layers {self.eligible_ratio:.1%}"
        return f"<CompressionReport: whole model {self.ratio:.1%}, {eligible}>"

    def __str__(self) -> str:
        """Return the totals, then the table."""
        lines = [
            f"whole model  {format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)} ({self.ratio:.1%})",
            f"its {counted(len(self.layers), 'eligible layer')}  {format_bytes(self.eligible_bytes_before)} -> "
            f"{format_bytes(self.eligible_bytes_after)} ({self.eligible_ratio:.1%}), method={self.method}, "
            f"allocate={self.allocate}",
        ]
        errors = [("predicted", self.predicted_error), ("measured", self.measured_error), ("healed", self.healed_error)]
        if any(error is not None for _, error in errors):
            found = ", ".join(f"{name} {error:.3g}" for name, error in errors if error is not None)
            place = "" if self.output in ("", "the output") else f" ({self.output})"
            lines.append(f"relative error of the output{place}  {found}")
        if self.measured_speedup is not None:
            slower = f", slower layers: {len(self.slower)} of {len(self.layers)}" if self.slower else ""
            latency = "" if self.measured_latency_s is None else f", {1e3 * self.measured_latency_s:.3g} ms a batch"
            lines.append(f"speed-up of the model  {self.measured_speedup:.2f}{latency}{slower}")
        if self.memory:
            phases = ", ".join(f"{phase} {format_bytes(size)}" for phase, size in self.memory.items())
            lines.append(f"peak memory, as predicted  {format_bytes(self.extra_bytes)} ({phases})")
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
        """Return all of it as plain numbers, strings, lists and dicts."""
        properties = (
            "ratio",
            "eligible_ratio",
            "eligible_bytes_before",
            "eligible_bytes_after",
            "healed_error",
            "extra_bytes",
        )
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
        """Draw bytes kept and error of every layer, to a file of the format that its suffix names.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        Figure = require_extra("matplotlib.figure", "demo").Figure
        figure = Figure(figsize=(9.0, 1.6 + 0.22 * len(self.layers)), layout="constrained")
        kept, errors = figure.subplots(1, 2, sharey=True)
        names = [layer.names[0] for layer in self.layers]
        bars = kept.barh(names, [layer.bytes_after / layer.bytes_before for layer in self.layers])
        kept.bar_label(bars, [_label(layer) for layer in self.layers], padding=2, fontsize=7)
        kept.axvline(self.eligible_ratio, color="black", linestyle="--", linewidth=1)
        kept.set(xlabel="bytes kept", xlim=(0, 1))
        for label, attribute, marker in (("predicted", "predicted_error", "|"), ("held-out", "measured_error", "o")):
            found = [getattr(layer, attribute) for layer in self.layers]
            errors.plot([math.nan if error is None else error for error in found], names, marker, label=label)
        errors.set(xlabel="relative error of the layer's output")
        errors.legend(frameon=False)
        errors.grid(alpha=0.3, axis="x")
        kept.invert_yaxis()
        figure.suptitle(f"whole model {self.ratio:.0%} of {format_bytes(self.bytes_before)}", fontsize=11)
        path = Path(path)
        figure.savefig(path)
        return path


def _label(layer: LayerReport) -> str:
    return layer.form if layer.rank is None else f"{layer.form}, rank {layer.rank}"
