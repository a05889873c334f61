"""Fit all weights, from moments gathered pass by pass, and give each weight's options their losses."""

__all__ = ["fit_targets"]

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from panther.compression.calibration.runner import MOMENTS, Runner, return_freed_memory
from panther.compression.calibration.targets import Survey, Target
from panther.compression.config import HealConfig
from panther.compression.forms import DENSE, Fits, FormSettings, Option, Options, TargetFit, form_named, least_bytes
from panther.compression.forms.metric import RIDGE, Fit, factor, metric_of, wide_dtype
from panther.compression.forms.rounding import (
    JOINT_ENTRIES,
    LOSS_PER_BIT,
    QuantizedFit,
    RoundingTask,
    fit_quantized,
)
from panther.compression.memory import fit_bytes, predict_peak_bytes
from panther.compression.moments import (
    Gathered,
    Summary,
    check_calibration,
    gather_moments,
    moments_bytes,
    split_passes,
)
from panther.compression.selection.allocation import choose_global, choose_uniform, options_near_global
from panther.compression.selection.trials import batches_of_losses

_log = logging.getLogger(__name__)

# Factor by which the estimated loss of a weight can be wrong, relative to the other weights. In a sentence encoder, the
# standard deviation of its logarithm was 0.17, and measured losses of single layers were 0.4 to 2.6 times the
# predicted ones. The factor between widths of one bit more or less is four, so two widths are fitted on average.
_WRONG = 2.0
_DEFAULT_MEMORY_BYTES = 2**30  # for moments, if at least twice as many bytes are free


def fit_targets(
    runner: Runner, survey: Survey, settings: FormSettings, options: Options, limit: int | None, *, memory: int | None,
    keep: bool, heal: HealConfig | None, seed: int, ridge: float = RIDGE,
) -> Fits:  # fmt: skip
    """Gather moments pass by pass, and fit every weight in their metric.

    Args:
        runner: The model and its batches.
        survey: The weights to fit.
        settings: The forms to fit.
        options: The options of each weight, without losses.
        limit: Bytes that all layers may take, which bounds the components and widths to fit; None if it is unknown.
        memory: Largest number of bytes of the moments of one pass; None is half of the free memory, up to a gigabyte.
        keep: Whether to keep the moments, for fitting in sequence.
        heal: Settings of healing, whose memory is then part of the predicted peak memory.
        seed: Seed of random directions and of the randomized SVD.
        ridge: Ridge of the metrics, relative to the mean of a moment's diagonal.
    """
    share = 1.0 if limit is None else limit / sum(target.dense_bytes for target in survey.targets)
    names = {target: f"fit-{ridge:g}-{number}" for number, target in enumerate(survey.targets)}
    num_components = {target: settings.num_components(target, share) for target in survey.targets}
    widths = {target: _widths_of(options[target]) for target in survey.targets}
    memory = runner.spare_bytes(_DEFAULT_MEMORY_BYTES) if memory is None else memory
    # The parts of a streamed model have their moments one after another in one pass, and share none.
    parts = runner.divided(survey.inputs)
    passes = [[group for part in parts for group in part]]
    if not runner.is_streaming:
        parts = passes = split_passes(survey.inputs, survey.gradients, memory)
    peaks = predict_peak_bytes(runner, survey, settings, num_components, widths, parts, limit, keep=keep, heal=heal)
    _log.info(
        "number of weights: %d, passes: %d, batches: %d, predicted peak memory on top of the present use: %.0f MB (%s)",
        len(num_components), len(passes), len(runner.batches), max(peaks.values()) / 1e6,
        ", ".join(f"{phase} {size / 1e6:.0f}" for phase, size in peaks.items()),
    )  # fmt: skip

    sizes = {
        target: (fit_bytes(target, count, len(widths[target]), settings), moments_bytes([target], survey.gradients))
        for target, count in num_components.items()
    }
    if runner.is_streaming:
        is_measured = survey.gradients and runner.loss_fn is None
        measured = batches_of_losses(runner) if is_measured else []
        new_layers = sum(target.dense_bytes for target in survey.targets) if limit is None else limit
        runner.check_disk(f"disk-{ridge:g}", sizes, measured, new_layers, gradients=survey.gradients)

    weights = _Weights(
        survey=survey,
        settings=settings,
        options=options,
        share=None if limit is None else share,
        num_components=num_components,
        widths=widths,
        seeds=survey.seeds(seed),
        stored=lambda target, fit: runner.remembered(names[target], lambda: fit),
        is_partial=runner.is_streaming and not runner.keeps_moments,
        is_comparable=survey.gradients and runner.loss_fn is None,
        keep=keep,
        ridge=ridge,
    )

    def gather(state: Mapping[str, Any] | None) -> Iterator[Gathered]:
        for number, inputs in enumerate(passes):
            description = f"moments {number + 1}/{len(passes)}"
            yield from gather_moments(
                runner, inputs, gradients=survey.gradients, seed=seed, description=description, keep=keep, state=state
            )

    gathering: Iterator[Gathered] | None = None

    def gather_next(before: Gathered | _FittedPart | None) -> Gathered | None:
        nonlocal gathering
        if gathering is None:
            gathering = gather(None if before is None else before.state)
        gathered = next(gathering, None)
        return_freed_memory()  # of activations
        return gathered

    waiting: list[Gathered] = []  # parts with their moments, if these stay on disk until all weights are fitted
    if runner.keeps_moments:
        while part := runner.remembered(
            f"{MOMENTS}{len(waiting)}", lambda: gather_next(waiting[-1] if waiting else None)
        ):
            waiting.append(part)
        weights.plan(runner.remembered(f"sensitivities-{ridge:g}", lambda: weights.sensitivities(waiting, runner)))
    fitted: list[_FittedPart] = []

    def fit_next() -> _FittedPart | None:
        if runner.keeps_moments:
            # The passes are over, so that nothing needs the state again.
            next_part = replace(waiting[len(fitted)], state={}) if len(fitted) < len(waiting) else None
        else:
            next_part = gather_next(fitted[-1] if fitted else None)
        if next_part is None:
            return None
        description = f"fits {min(len(fitted) + 1, len(parts))}/{len(parts)}"
        return weights.fit_part(next_part, partial(runner.over, description=description), runner, names)

    while (fitted_part := runner.remembered(f"fits-{ridge:g}-{len(fitted)}", fit_next)) is not None:
        weights.add(fitted_part)
        fitted.append(fitted_part)
        return_freed_memory()  # of moments and factors
    if not passes:  # without calibration there are no moments, and the metric is the identity
        weights.fit(dict.fromkeys(survey.targets), 0.0, runner.over(survey.targets, "fits"))
    if runner.is_streaming:
        weights.finish([target for targets in survey.inputs for target in targets])
    summaries = {target: summary for part in fitted for target, summary in part.summaries.items()}
    positions = {target: summary.positions for target, summary in summaries.items()}
    constant = [target for target, summary in summaries.items() if summary.is_constant]
    tokens = {target: summary.tokens for target, summary in summaries.items() if summary.tokens}
    return Fits(
        fits=weights.fits,
        options=weights.options_with_losses,
        settings=settings,
        moments=weights.kept_moments,
        passes=len(passes),
        memory=peaks,
        comparable=weights.is_comparable,
        calibration_notes=check_calibration(positions, constant, tokens),
        ridge=ridge,
        inputs=tuple(tuple(targets) for part in fitted for targets in part.inputs),
    )


# Weights of equal shapes are rounded jointly, and wait for each other until their metrics take this number of bytes.
_WAITING_BYTES = 2**24


@dataclass(frozen=True)
class _FittedPart:
    """The results for weights whose moments were complete at the same time, except for the fits themselves.

    Attributes:
        inputs: The weights, in sets that share an input.
        summaries: What is left of their moments.
        losses: Their options, with losses, and their estimated losses, if the choice of widths needs them.
        state: What the passes over the batches need to continue.
    """

    inputs: Sequence[Sequence[Target]]
    summaries: Mapping[Target, Summary]
    losses: Mapping[Target, tuple[Sequence[Option], float | None]]
    state: Mapping[str, Any]


@dataclass(frozen=True)
class _Fitted:
    """A weight whose components are fitted, and the task to round it, if it has codes."""

    target: Target
    components: Fit
    special: Mapping[str, Any]
    scale: float
    rounding: RoundingTask | None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the metric and of the weight in it."""
        metric = None if self.rounding is None else self.rounding.metric
        return 0 if metric is None else sum(x.nbytes for x in (metric.source, metric.L, metric.R) if x is not None)


@dataclass(frozen=True)
class _Weights:
    """The weights to fit, and the results so far.

    Attributes:
        share: Share of their bytes that the weights keep; None if it is unknown.
        num_components: Components of each weight to store.
        widths: Widths of the codes of each weight, in bits.
        stored: Takes a target and its fit, and returns the fit as it is kept; without reading it, if it is kept from a
            process that was killed.
        is_partial: Whether the moments of a part are forgotten before those of the next part come, so that a choice
            among all weights is possible only at the end. All widths are then fitted, and :meth:`finish` drops those
            that would not have been.
        planned_widths: The widths to fit, where the moments of all weights were there for this choice.
    """

    survey: Survey
    settings: FormSettings
    options: Options
    share: float | None
    num_components: Mapping[Target, int]
    widths: Mapping[Target, tuple[int, ...]]
    seeds: Mapping[Target, int]
    stored: Callable[[Target, Any], TargetFit]
    is_partial: bool
    is_comparable: bool
    keep: bool
    ridge: float
    fits: dict[Target, TargetFit] = field(default_factory=dict)
    options_with_losses: dict[Target, Sequence[Option]] = field(default_factory=dict)
    kept_moments: dict[Target, Any] = field(default_factory=dict)
    losses_per_bit: dict[Target, float] = field(default_factory=dict)
    planned_widths: dict[Target, tuple[int, ...]] = field(default_factory=dict)

    def sensitivities(self, parts: Sequence[Gathered], runner: Runner) -> dict[str, float]:
        """Return the estimated losses of the weights of all parts and ranks, by the names of the weights."""
        if self.share is None:
            return {}
        estimated = {
            target.name: self._estimated_loss(target, target_moments)
            for part in parts
            for target, target_moments in part.moments.items()
            if self.widths[target]
        }
        return {name: loss for of_rank in runner.gathered(estimated) for name, loss in of_rank.items()}

    def plan(self, sensitivities: Mapping[str, float]) -> None:
        """Choose the widths to fit among those of all weights, from their sensitivities."""
        targets = [target for targets in self.survey.inputs for target in targets if target.name in sensitivities]
        self.losses_per_bit.update({target: sensitivities[target.name] for target in targets})
        if targets:
            self.planned_widths.update(self._plan_widths(self.losses_per_bit))

    def fit_part(
        self,
        part: Gathered,
        over: Callable[[Sequence[Target]], Iterable[Target]],
        runner: Runner,
        names: Mapping[Target, str],
    ) -> _FittedPart:
        """Fit the weights of a part; ``over`` shows the progress through targets."""
        fitted_here = list(part.moments)
        # `fit` empties the dictionary and adds nothing to it.
        self.fit(part.moments, part.energy, over(fitted_here))
        losses = {target: (self.options_with_losses[target], self.losses_per_bit.get(target)) for target in fitted_here}
        losses = runner.exchange(losses, {target: names[target] for target in part.summaries})
        return _FittedPart(part.inputs, part.summaries, losses, part.state)

    def add(self, part: _FittedPart) -> None:
        """Add the results of a part, which another process may have fitted."""
        for target in part.summaries:
            if target not in self.fits:
                self.fits[target] = self.stored(target, None)
        for target, (options, loss_per_bit) in part.losses.items():
            self.options_with_losses[target] = options
            if loss_per_bit is not None:
                self.losses_per_bit[target] = loss_per_bit

    def fit(self, moments: dict[Target, Any], energy: float, targets: Iterable[Target]) -> None:
        """Fit the weights of one pass, and empty ``moments``; ``energy`` is the squared norm of the output.

        ``targets`` are the keys of ``moments``, which may show the progress.
        """
        planned_widths = {target: self.planned_widths.get(target, self.widths[target]) for target in moments}
        if self.share is not None and not self.planned_widths:
            estimated = {
                target: self._estimated_loss(target, moments[target]) for target in moments if self.widths[target]
            }
            self.losses_per_bit.update(estimated)
            planned_widths |= {} if self.is_partial else self._plan_widths(estimated)
        waiting: dict[Hashable, list[_Fitted]] = {}
        ordered_targets = list(moments)
        for target in targets:
            widths = planned_widths.get(target, ())
            if not target.kind.has_metric:
                self._fit_alone(target, moments.pop(target), energy, widths)
                continue
            fitted = self._fit_components(target, moments.pop(target), energy, widths)
            if fitted.rounding is None:
                self._add([fitted], [{}])
                continue
            group = waiting.setdefault(fitted.rounding.kind, [])
            group.append(fitted)
            if sum(each.rounding.num_entries for each in group if each.rounding is not None) >= JOINT_ENTRIES:
                self._round(waiting.pop(fitted.rounding.kind))
            elif sum(each.num_bytes for group in waiting.values() for each in group) > _WAITING_BYTES:
                while waiting:
                    self._round(waiting.popitem()[1])
        while waiting:
            self._round(waiting.popitem()[1])
        for target in ordered_targets:  # The order of the results is the order of the targets.
            self.fits[target] = self.fits.pop(target)
            self.options_with_losses[target] = self.options_with_losses.pop(target)

    def _fit_alone(self, target: Target, target_moments: Any, energy: float, widths: Sequence[int]) -> None:
        """Fit a weight that has no metric, and waits for no other weight."""
        fit = target.kind.fit(target, target_moments, widths, self.settings, self.ridge)
        self._keep(target, fit, self._scale_of(target_moments, energy))

    def _scale_of(self, target_moments: Any, energy: float) -> float:
        """Return the factor from losses for each position to shares of the output's squared norm."""
        if target_moments is None or not self.survey.gradients:
            return 0.0
        return target_moments.positions / (energy if energy > 0 and self.is_comparable else 1.0)

    def _fit_components(self, target: Target, target_moments: Any, energy: float, widths: Sequence[int]) -> "_Fitted":
        """Return everything about a weight except for its codes."""
        metric, seed = metric_of(target, target_moments, ridge=self.ridge), self.seeds[target]
        scale = self._scale_of(target_moments, energy)
        if self.keep and target_moments is not None:
            self.kept_moments[target] = target_moments
        del target_moments  # The caller holds it no more.
        dtype, settings = wide_dtype(target), self.settings
        components = factor(metric.source, metric, most=self.num_components[target], seed=seed, dtype=dtype)
        special = {form.name: form.fit(metric, settings, seed) for form in settings.forms_of(target)}
        rounding = None
        if widths:
            rounding = RoundingTask(metric, widths, settings.correction_rank(target), seed, dtype)
        return _Fitted(target, components, special, scale, rounding)

    def _round(self, group: Sequence["_Fitted"]) -> None:
        tasks = [fitted.rounding for fitted in group if fitted.rounding is not None]
        self._add(group, fit_quantized(tasks, self.settings.group_size, symmetric=self.settings.symmetric))

    def _add(self, group: Sequence["_Fitted"], codes: Sequence[Mapping[int, QuantizedFit]]) -> None:
        for fitted, target_codes in zip(group, codes, strict=True):
            target = fitted.target
            self._keep(target, TargetFit(fitted.components, target_codes, fitted.special), fitted.scale)

    def _keep(self, target: Target, fit: TargetFit, scale: float) -> None:
        self.fits[target] = self.stored(target, fit)
        self.options_with_losses[target] = _with_losses(self.options[target], fit, scale)

    def finish(self, targets: Sequence[Target]) -> None:
        """Put the results in the order of ``targets``, and drop the options of widths that are not needed."""
        estimated_losses = {target: self.losses_per_bit[target] for target in targets if target in self.losses_per_bit}
        planned_widths = {} if self.share is None else self._plan_widths(estimated_losses)
        for target in targets:
            self.fits[target] = self.fits.pop(target)
            options = self.options_with_losses.pop(target)
            planned = planned_widths.get(target, self.widths[target])
            self.options_with_losses[target] = [
                option
                for option in options
                if not (option.bits and form_named(option.form).uses_rounding) or option.bits in planned
            ]

    def _estimated_loss(self, target: Target, target_moments: Any) -> float:
        """Return the estimated loss of a weight's codes, up to a factor that depends on their width alone."""
        loss = target.kind.sensitivity(target, target_moments, self.ridge)
        if target_moments is not None and target_moments.positions and self.survey.gradients:
            loss *= target_moments.positions
        return loss

    def _plan_widths(self, estimated_losses: Mapping[Target, float]) -> dict[Target, tuple[int, ...]]:
        """Return the widths of each weight to fit, from the estimated losses of the weights that can have codes.

        Fitting a width takes as long as fitting the components. The losses are therefore estimated first, from the
        sensitivity of each weight and a factor of four for each bit. The widths to fit are the ones that the uniform
        choice takes by these estimates, and the ones that the global choice takes with losses near them.
        """
        assert self.share is not None
        targets = list(estimated_losses)
        estimated_options = {target: self._estimate(target, loss) for target, loss in estimated_losses.items()}
        limit = int(self.share * sum(target.dense_bytes for target in targets))
        if least_bytes(estimated_options) > limit:  # then some weights take other forms, and leave bytes
            return {target: self.widths[target] for target in targets}
        uniform, near = choose_uniform(estimated_options, limit), options_near_global(estimated_options, limit, _WRONG)
        exact = choose_global(estimated_options, limit)  # it fits into the limit
        planned = {target: {*near[target], uniform[target], exact[target]} for target in targets}
        return {  # The dense weight may not be among the forms, and then the widest codes are.
            target: tuple(sorted({option.bits or self.widths[target][-1] for option in near_options}))
            for target, near_options in planned.items()
        }

    def _estimate(self, target: Target, loss: float) -> list[Option]:
        """Return the options of codes with estimated losses, and the dense option."""
        group_size = self.settings.group_size
        sizes = {bits: target.kind.code_bytes(target, bits, 0, group_size) for bits in self.widths[target]}
        options = [Option(f"int{bits}", size, None, bits, loss * LOSS_PER_BIT**-bits) for bits, size in sizes.items()]
        smaller = [option for option in options if option.bytes < target.dense_bytes]
        return [*smaller, Option(DENSE, target.dense_bytes)]


def _widths_of(options: Sequence[Option]) -> tuple[int, ...]:
    """Return the widths of the codes that options need, in rising order."""
    return tuple(sorted({option.bits for option in options if option.bits and form_named(option.form).uses_rounding}))


def _with_losses(options: Sequence[Option], fit: TargetFit, scale: float) -> list[Option]:
    """Return the options that were fitted, with ``scale`` times the losses of the fits."""
    total, scored = fit.components.local_tails[0].item(), []
    for option in options:
        if option.form == DENSE:
            scored.append(option)
        elif (losses := form_named(option.form).loss(fit, option)) is not None:
            loss, local = losses
            scored.append(replace(option, loss=loss * scale, error=(local / total) ** 0.5 if total > 0 else 0.0))
    return sorted(scored, key=lambda option: (option.bytes, option.loss))
