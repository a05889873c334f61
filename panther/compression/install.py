"""Put the new layers into the model, and make the report."""

__all__ = ["Outcome", "install_layers"]

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import nn

from panther._model_libraries import layers_replaced
from panther.compression.calibration.model_state import deferred_interrupts
from panther.compression.calibration.targets import Survey, replace_modules, swap_modules
from panther.compression.forms import Fits, Replacement, inherit_flags, total_loss
from panther.compression.report import CompressionReport, HealResult, layer_reports
from panther.compression.selection.allocation import Allocation, model_bytes
from panther.compression.selection.measurement import Measured
from panther.compression.selection.timing import SLOWER
from panther.errors import PerformanceWarning


@dataclass(frozen=True)
class Outcome:
    """What is put into a model, and what the report says about it.

    Attributes:
        survey: The layers of the model.
        allocation: The choice of a form for each weight.
        replacement: The new layer of each old layer that is replaced.
        method: The method by which the new layers were made.
        seed: Seed of the new layers.
        fits: The fits behind the choice; empty if nothing was fitted.
        measured: Errors and speed on the held-out batches.
        healed: The result of healing; None without it.
        write_: Writes the healed parameters of the remaining layers; None if there are none.
        notes: Further deviations from the arguments, with reasons.
        allow_slower: Whether layers may be slower than the dense ones; otherwise there is a warning.
        output: Name of the tensor of the model's output that is compared.
        disk_bytes: Predicted peak of the bytes that were kept on disk.
    """

    survey: Survey
    allocation: Allocation
    replacement: Replacement
    method: str
    seed: int
    fits: Fits = field(default_factory=Fits)
    measured: Measured = field(default_factory=Measured)
    healed: HealResult | None = None
    write_: Callable[[], None] | None = None
    notes: Sequence[str] = ()
    allow_slower: bool | None = None
    output: str = ""
    disk_bytes: int = 0

    def without_fits(self) -> Self:
        """Return the same without the tensors of the fits."""
        return replace(self, fits=replace(self.fits, fits={}, moments={}))

    @property
    def predicted_error(self) -> float | None:
        """Return the relative error of the output that the losses predict; None if they are in a different unit."""
        return total_loss(self.allocation.choice) ** 0.5 if self.fits.comparable else None


def install_layers(model: nn.Module, outcome: Outcome) -> CompressionReport:
    """Put the new layers into the model, and return the report."""
    survey, allocation, replacement = outcome.survey, outcome.allocation, outcome.replacement
    fits, measured = outcome.fits, outcome.measured
    with replace_modules(model, replacement):
        bytes_after = model_bytes(model)
    report = CompressionReport(
        layers=layer_reports(allocation.choice, replacement, measured),
        skipped=survey.skipped,
        method=outcome.method,
        allocate=allocation.allocate,
        notes=(*survey.notes, *allocation.notes, *outcome.notes, *_nested_tensor_notes(model, replacement)),
        bytes_before=model_bytes(model),
        bytes_after=bytes_after,
        bytes_in_bfloat16=model_bytes(model, torch.bfloat16),
        predicted_error=outcome.predicted_error,
        measured_error=measured.error,
        uniform_error=allocation.uniform_error,
        healed=outcome.healed,
        measured_speedup=measured.speedup,
        measured_latency_s=measured.latency_s,
        passes=fits.passes,
        memory=fits.memory,
        disk_bytes=outcome.disk_bytes,
        seed=outcome.seed,
        output=outcome.output,
    )
    # Lookups of embeddings are a small part of a model's time.
    lookups = {target.name for target in allocation.choice if not target.is_multiplied}
    slow = {layer.names[0]: layer.speedup or 0.0 for layer in report.slower if layer.names[0] not in lookups}
    if not outcome.allow_slower and any(speedup < SLOWER for speedup in slow.values()):
        names = sorted(slow, key=slow.__getitem__)
        warnings.warn(
            f"{len(slow)} of {len(report.layers)} layers are slower than their dense originals ({', '.join(names[:5])}"
            f"{', ...' if len(slow) > 5 else ''}), the slowest at {slow[names[0]]:.2f} of their speed: "
            "allow_slower=False keeps such layers dense, and allow_slower=True accepts them",
            PerformanceWarning,
            stacklevel=5,  # the caller of pr.compress, behind install_layers, compress_with, compress and its decorator
        )
    # The model is changed last, and only by assignments, so that any earlier failure (including a warning turned into
    # an error) leaves it unchanged.
    with deferred_interrupts():
        if outcome.write_ is not None:
            outcome.write_()
        inherit_flags(replacement)
        swap_modules(model, replacement)
        layers_replaced(model)
    return report


def _nested_tensor_notes(model: nn.Module, replacement: Mapping[nn.Module, nn.Module]) -> list[str]:
    """Return a note for each nn.TransformerEncoder whose first layer torch reads instead of calling it."""
    return [
        f"torch reads the dense weights of {name + '.' if name else ''}layers.0 if padding is masked, and computes "
        f"them again for each forward: use_nested_tensor=False of {name or 'the model'} avoids this, and changes the "
        "outputs at padded positions"
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoder)
        and module.use_nested_tensor
        and not replacement.keys().isdisjoint(module.layers[0].modules())
    ]
