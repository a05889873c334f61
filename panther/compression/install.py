"""Put the new layers into the model, and make the report."""

__all__ = ["install_layers"]

import warnings
from collections.abc import Callable

from torch import nn

from panther.compression.calibration.model_state import deferred_interrupts
from panther.compression.conversion import Replacement, inherit_flags
from panther.compression.forms.allocation import Allocation, model_bytes
from panther.compression.forms.fitting import Fits
from panther.compression.forms.options import SLOWER, total_loss
from panther.compression.measurement import Measured
from panther.compression.report import CompressionReport, HealResult, layer_reports
from panther.compression.targets import Survey, replace_modules, swap_modules
from panther.errors import PerformanceWarning
from panther.nn._specs import note_in_config_


def install_layers(
    model: nn.Module, survey: Survey, fits: Fits, allocation: Allocation, replacement: Replacement, measured: Measured,
    healed: HealResult | None, write_: Callable[[], None] | None, notes: list[str], method: str, seed: int,
    allow_slower: bool | None = None, *, output: str = "",
) -> CompressionReport:  # fmt: skip
    """Put the new layers into the model, and return the report."""
    notes += [
        f"torch reads the dense weights of {name + '.' if name else ''}layers.0 if padding is masked, and computes "
        f"them again for each forward: use_nested_tensor=False of {name or 'the model'} avoids this, and changes the "
        "outputs at padded positions"
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoder)
        and module.use_nested_tensor
        and not replacement.keys().isdisjoint(module.layers[0].modules())
    ]
    with replace_modules(model, replacement):
        bytes_after = model_bytes(model)
    report = CompressionReport(
        layers=layer_reports(allocation.choice, replacement, measured),
        skipped=survey.skipped,
        method=method,
        allocate=allocation.allocate,
        notes=tuple(notes),
        bytes_before=model_bytes(model),
        bytes_after=bytes_after,
        predicted_error=total_loss(allocation.choice) ** 0.5 if fits.comparable else None,
        measured_error=measured.error,
        uniform_error=allocation.uniform_error,
        healed=healed,
        measured_speedup=measured.speedup,
        measured_latency_s=measured.latency_s,
        passes=fits.passes,
        memory=fits.memory,
        seed=seed,
        output=output,
    )
    slow = {layer.names[0]: layer.speedup or 0.0 for layer in report.slower}
    if not allow_slower and any(speedup < SLOWER for speedup in slow.values()):
        names = sorted(slow, key=slow.__getitem__)
        warnings.warn(
            f"{len(slow)} of {len(report.layers)} layers are slower than their dense originals ({', '.join(names[:5])}"
            f"{', ...' if len(slow) > 5 else ''}), the slowest at {slow[names[0]]:.2f} of their speed: "
            "allow_slower=False keeps such layers dense, and allow_slower=True accepts them",
            PerformanceWarning,
            stacklevel=3,
        )
    # The model is changed last, and only by assignments, so that any earlier failure (including a warning turned into
    # an error) leaves it unchanged.
    with deferred_interrupts():
        if write_ is not None:
            write_()
        inherit_flags(replacement)
        swap_modules(model, replacement)
        note_in_config_(model)
    return report
