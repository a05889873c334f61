"""Components and codes of all weights, from moments that are gathered pass by pass, and what each weight can become."""

__all__ = ["Fits", "fit_targets"]

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from panther.compression.config import HealConfig
from panther.compression.fits import RIDGE, Fit, factor, leading_components, metric_of, wide_dtype
from panther.compression.forms.options import INT8_LOW_RANK, INTERPOLATIVE, LOW_RANK, Forms, Option, Options
from panther.compression.forms.quantized import QuantizedFit, fit_quantized, planned_widths, sensitivity
from panther.compression.memory import foresee
from panther.compression.moments import Moments, check_calibration, gather_moments, split_passes
from panther.compression.runner import Runner
from panther.compression.targets import Survey, Target

_log = logging.getLogger(__name__)

_SPARE = 2**30  # bytes for moments by default, where twice as many are free


@dataclass(frozen=True)
class Fits:
    """The components of all targets, and the figures that were computed with them.

    Attributes:
        fits: Components of each target; empty for seeded sketches, which are not fitted.
        quantized: Codes of each target, by width; empty without quantized forms.
        options: What each target can become, the smallest first, with losses as shares of the output's squared norm
            (zero without gradients).
        moments: Moments of each target, kept for fitting in sequence.
        group_size: Columns of a quantized weight that share a scale; None is the whole row.
        activations: How quantized linear layers round their inputs, None or "int8".
        passes: Passes over the batches.
        memory: Predicted peak memory of each phase, in bytes.
        comparable: Whether losses are in units of the output's squared norm.
        doubts: Why the batches say too little about some layers.
        ridge: Of the metrics.
        inputs: Sets of targets that read the same input in every batch, in the order in which they run.
    """

    fits: Mapping[Target, Fit] = field(default_factory=dict)
    quantized: Mapping[Target, Mapping[int, QuantizedFit]] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    moments: Mapping[Target, Moments] = field(default_factory=dict)
    group_size: int | None = None
    activations: str | None = None
    passes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    comparable: bool = False
    doubts: tuple[str, ...] = ()
    ridge: float = RIDGE
    inputs: tuple[tuple[Target, ...], ...] = ()


def fit_targets(
    runner: Runner, survey: Survey, forms: Forms, limit: int | None, *, memory: int | None, keep: bool,
    heal: HealConfig | None, seed: int, ridge: float = RIDGE,
) -> Fits:  # fmt: skip
    """Gather moments pass by pass, and fit every weight in their metric.

    ``limit``, the bytes that all layers may take, if that is known, bounds the components and widths to fit. ``memory``
    bounds the bytes of moments at once, which are kept for fitting in sequence with ``keep``. ``heal`` only adds the
    memory of healing to what is stated. ``ridge`` is that of the metrics.
    """
    dense = sum(target.dense_bytes for target in survey.targets)
    share = 1.0 if limit is None else limit / dense
    most = {target: _stored_components(forms, target, share) for target in survey.targets}
    memory = runner.spare_bytes(_SPARE) if memory is None else memory
    split = split_passes(survey.inputs, survey.gradients, memory)
    stated = foresee(runner, survey, forms, most, split, limit, keep=keep, heal=heal)
    _log.info(
        "number of weights: %d, passes: %d, batches: %d, peak memory over what is held now: %.0f MB (%s)",
        len(most), len(split), len(runner.batches), max(stated.values()) / 1e6,
        ", ".join(f"{phase} {size / 1e6:.0f}" for phase, size in stated.items()),
    )  # fmt: skip
    seeds, comparable = survey.seeds(seed), survey.gradients and runner.loss_fn is None
    fits: dict[Target, Fit] = {}
    quantized: dict[Target, Mapping[int, QuantizedFit]] = {}
    options: dict[Target, Sequence[Option]] = {}
    kept: dict[Target, Moments] = {}
    positions: dict[Target, float] = {}
    constant: set[Target] = set()
    shared: list[Sequence[Target]] = []

    def fit(found: dict[Target, Moments | None], energy: float) -> None:
        linear = [target for target in found if forms.quantizes(target)]
        ours = sum(target.dense_bytes for target in linear)
        within = None if limit is None else int(share * ours)
        values = {target: sensitivity(metric_of(target, found[target], ridge=ridge)) for target in linear}
        for target, own in found.items():
            if own is not None and own.positions and target in values and survey.gradients:
                values[target] *= own.positions
        widths = planned_widths(forms, values, within)
        for target in list(found):
            own = found.pop(target)  # so that its memory is free once it is used
            metric, dtype = metric_of(target, own, ridge=ridge), wide_dtype(target)
            scale = 0.0
            if own is not None and survey.gradients:
                scale = own.positions / energy if energy > 0 and comparable else own.positions
            if keep and own is not None:
                kept[target] = own
            own = None
            fits[target] = factor(metric.source, metric, most=most[target], seed=seeds[target], dtype=dtype)
            if planned := widths.get(target):
                rank = forms.largest_correction(target)
                quantized[target] = fit_quantized(
                    metric, planned, forms.group_size, most=rank, seed=seeds[target], dtype=dtype
                )
            options[target] = _scored(forms.options(target), fits[target], quantized.get(target, {}), scale)

    for number, inputs in enumerate(split):
        description = f"moments {number + 1}/{len(split)}"
        found, energy, groups = gather_moments(
            runner, inputs, gradients=survey.gradients, seed=seed, description=description, keep=keep
        )
        shared += groups
        positions |= {target: own.positions for target, own in found.items()}
        constant |= {target for target, own in found.items() if own.constant}
        fit(found, energy)  # type: ignore[arg-type]  # which empties it
    if not split:  # without calibration there are no inputs, and weights are fitted in the plain metric
        fit(dict.fromkeys(survey.targets), 0.0)
    doubts = check_calibration(positions, constant)
    return Fits(
        fits, quantized, options, kept, forms.group_size, forms.activations, len(split), stated, comparable,
        doubts, ridge, tuple(map(tuple, shared)),
    )  # fmt: skip


def _stored_components(forms: Forms, target: Target, share: float) -> int:
    """Return how many components of a weight to store: enough for each form, and for its smallest option."""
    most = 0
    for name in forms.names:
        ranks = forms.ranks(target, name)
        if name == LOW_RANK:
            most = max(most, leading_components(target, ranks[-1], share * ranks[-1]), ranks[0])
        elif name == INTERPOLATIVE and ranks:
            half = (target.inner + target.outer) / 2
            uniform = half - max(half**2 - share * target.dense_numbers, 0.0) ** 0.5  # of r (inner + outer - r) numbers
            most = max(most, leading_components(target, ranks[-1], uniform), ranks[0])
        elif name == INT8_LOW_RANK and ranks:
            uniform = share * target.dense_bytes / (target.inner + target.outer)
            most = max(most, leading_components(target, ranks[-1], uniform), ranks[0])
    return most


def _scored(options: Sequence[Option], fit: Fit, quantized: Mapping[int, QuantizedFit], scale: float) -> list[Option]:
    """Return the options that were fitted, with their losses, which are those of the fits times ``scale``."""
    whole, scored = fit.local_tails[0].item(), []
    for option in options:
        found = fit
        if option.bits is not None:
            if option.bits not in quantized:
                continue
            found = quantized[option.bits].residual
        elif option.rank is None:
            scored.append(option)  # dense
            continue
        rank = option.rank or 0
        if rank >= len(found.tails):
            continue
        loss = found.tails[rank] + (0.0 if option.form in (LOW_RANK, INTERPOLATIVE) else found.rounding[rank])
        error = (found.local_tails[rank].item() / whole) ** 0.5 if whole > 0 else 0.0
        scored.append(replace(option, loss=loss.item() * scale, error=error))
    return sorted(scored, key=lambda option: (option.bytes, option.loss))
