"""Fit components and codes of all weights, from moments gathered pass by pass, and list each weight's options."""

__all__ = ["Fits", "fit_targets"]

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from panther.compression.config import HealConfig
from panther.compression.fits import RIDGE, Fit, factor, leading_components, metric_of, wide_dtype
from panther.compression.forms.options import INT8_LOW_RANK, INTERPOLATIVE, LOW_RANK, Forms, Option, Options
from panther.compression.forms.quantized import QuantizedFit, fit_quantized, planned_widths, sensitivity
from panther.compression.memory import predict_peak_bytes
from panther.compression.moments import Moments, check_calibration, gather_moments, split_passes
from panther.compression.runner import Runner
from panther.compression.targets import Survey, Target

_log = logging.getLogger(__name__)

_DEFAULT_MEMORY_BYTES = 2**30  # for moments, if at least twice as many bytes are free


@dataclass(frozen=True)
class Fits:
    """The components of all targets, and their options with losses.

    Attributes:
        fits: Components of each target; empty for seeded sketches, which are not fitted.
        quantized: Codes of each target, by width; empty without quantized forms.
        options: The options of each target, the smallest first, with losses as shares of the output's squared norm
            (zero without gradients).
        moments: Moments of each target, kept for fitting in sequence.
        group_size: Columns of a quantized weight that share a scale; None is the entire row.
        activations: How quantized linear layers round their inputs, None or "int8".
        passes: Passes over the batches.
        memory: Predicted peak memory of each phase, in bytes.
        comparable: Whether losses are in units of the output's squared norm.
        calibration_notes: Reasons why the batches do not suffice for some layers.
        ridge: Ridge of the metrics, relative to the mean of a moment's diagonal.
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
    calibration_notes: tuple[str, ...] = ()
    ridge: float = RIDGE
    inputs: tuple[tuple[Target, ...], ...] = ()


def fit_targets(
    runner: Runner, survey: Survey, forms: Forms, limit: int | None, *, memory: int | None, keep: bool,
    heal: HealConfig | None, seed: int, ridge: float = RIDGE,
) -> Fits:  # fmt: skip
    """Gather moments pass by pass, and fit every weight in their metric.

    Args:
        runner: The model and its batches.
        survey: The weights to fit.
        forms: The forms to fit.
        limit: Bytes that all layers may take, which bounds the components and widths to fit; None if it is unknown.
        memory: Largest number of bytes of the moments of one pass; None is half of the free memory, up to a gigabyte.
        keep: Whether to keep the moments, for fitting in sequence.
        heal: Settings of healing, whose memory is then part of the predicted peak memory.
        seed: Seed of random directions and of the randomized SVD.
        ridge: Ridge of the metrics, relative to the mean of a moment's diagonal.
    """
    dense = sum(target.dense_bytes for target in survey.targets)
    share = 1.0 if limit is None else limit / dense
    most = {target: _stored_components(forms, target, share) for target in survey.targets}
    memory = runner.spare_bytes(_DEFAULT_MEMORY_BYTES) if memory is None else memory
    split = split_passes(survey.inputs, survey.gradients, memory)
    stated = predict_peak_bytes(runner, survey, forms, most, split, limit, keep=keep, heal=heal)
    _log.info(
        "number of weights: %d, passes: %d, batches: %d, predicted peak memory on top of the present use: %.0f MB (%s)",
        len(most), len(split), len(runner.batches), max(stated.values()) / 1e6,
        ", ".join(f"{phase} {size / 1e6:.0f}" for phase, size in stated.items()),
    )  # fmt: skip
    seeds, comparable = survey.seeds(seed), survey.gradients and runner.loss_fn is None
    fits: dict[Target, Fit] = {}
    quantized: dict[Target, Mapping[int, QuantizedFit]] = {}
    options: dict[Target, Sequence[Option]] = {}
    kept_moments: dict[Target, Moments] = {}
    positions: dict[Target, float] = {}
    constant: set[Target] = set()
    shared: list[Sequence[Target]] = []

    def fit(moments: dict[Target, Moments | None], energy: float) -> None:
        linear = [target for target in moments if forms.quantizes(target)]
        linear_bytes = sum(target.dense_bytes for target in linear)
        within = None if limit is None else int(share * linear_bytes)
        values = {target: sensitivity(metric_of(target, moments[target], ridge=ridge)) for target in linear}
        for target, target_moments in moments.items():
            if target_moments is not None and target_moments.positions and target in values and survey.gradients:
                values[target] *= target_moments.positions
        widths = planned_widths(forms, values, within)
        for target in list(moments):
            target_moments = moments.pop(target)  # popped, so that its memory is freed after the fit
            metric, dtype = metric_of(target, target_moments, ridge=ridge), wide_dtype(target)
            scale = 0.0
            if target_moments is not None and survey.gradients:
                scale = target_moments.positions / energy if energy > 0 and comparable else target_moments.positions
            if keep and target_moments is not None:
                kept_moments[target] = target_moments
            target_moments = None
            fits[target] = factor(metric.source, metric, most=most[target], seed=seeds[target], dtype=dtype)
            if planned := widths.get(target):
                rank = forms.largest_correction(target)
                quantized[target] = fit_quantized(
                    metric, planned, forms.group_size, most=rank, seed=seeds[target], dtype=dtype
                )
            options[target] = _with_losses(forms.options(target), fits[target], quantized.get(target, {}), scale)

    for number, inputs in enumerate(split):
        description = f"moments {number + 1}/{len(split)}"
        moments, energy, groups = gather_moments(
            runner, inputs, gradients=survey.gradients, seed=seed, description=description, keep=keep
        )
        shared += groups
        positions |= {target: target_moments.positions for target, target_moments in moments.items()}
        constant |= {target for target, target_moments in moments.items() if target_moments.constant}
        fit(moments, energy)  # type: ignore[arg-type]  # `fit` empties the dictionary and adds nothing to it
    if not split:  # without calibration there are no moments, and the metric is the identity
        fit(dict.fromkeys(survey.targets), 0.0)
    calibration_notes = check_calibration(positions, constant)
    return Fits(
        fits, quantized, options, kept_moments, forms.group_size, forms.activations, len(split), stated, comparable,
        calibration_notes, ridge, tuple(map(tuple, shared)),
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
            # The rank r at which r (inner + outer - r) numbers are `share` of the dense ones.
            uniform = half - max(half**2 - share * target.dense_numbers, 0.0) ** 0.5
            most = max(most, leading_components(target, ranks[-1], uniform), ranks[0])
        elif name == INT8_LOW_RANK and ranks:
            uniform = share * target.dense_bytes / (target.inner + target.outer)
            most = max(most, leading_components(target, ranks[-1], uniform), ranks[0])
    return most


def _with_losses(
    options: Sequence[Option], fit: Fit, quantized: Mapping[int, QuantizedFit], scale: float
) -> list[Option]:
    """Return the options that were fitted, with ``scale`` times the losses of the fits."""
    total, scored = fit.local_tails[0].item(), []
    for option in options:
        component_fit = fit
        if option.bits is not None:
            if option.bits not in quantized:
                continue
            component_fit = quantized[option.bits].residual
        elif option.rank is None:
            scored.append(option)  # dense
            continue
        rank = option.rank or 0
        if rank >= len(component_fit.tails):
            continue
        loss = component_fit.tails[rank] + (
            0.0 if option.form in (LOW_RANK, INTERPOLATIVE) else component_fit.rounding[rank]
        )
        error = (component_fit.local_tails[rank].item() / total) ** 0.5 if total > 0 else 0.0
        scored.append(replace(option, loss=loss.item() * scale, error=error))
    return sorted(scored, key=lambda option: (option.bytes, option.loss))
