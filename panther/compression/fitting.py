"""Fit all weights, from moments gathered pass by pass, and give each weight's options their losses."""

__all__ = ["fit_targets"]

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from panther.compression.calibration.runner import MOMENTS, Runner, return_freed_memory
from panther.compression.calibration.targets import Survey, Target
from panther.compression.forms import DENSE, Fits, FormSettings, Option, Options, TargetFit, form_named, least_bytes
from panther.compression.forms.codes import (
    JOINT_ENTRIES,
    LOSS_PER_BIT,
    RoundingTask,
    fit_quantized,
)
from panther.compression.forms.metric import RIDGE, Fit, QuantizedFit, factor, metric_of, wide_dtype
from panther.compression.moments import (
    Gathered,
    check_calibration,
    gather_moments,
    split_passes,
)
from panther.compression.selection.allocation import choose_global, choose_uniform, options_near_global

_log = logging.getLogger(__name__)

# Factor by which the estimated loss of a weight can be wrong, relative to the other weights. In a sentence encoder, the
# standard deviation of its logarithm was 0.17, and measured losses of single layers were 0.4 to 2.6 times the
# predicted ones. The factor between widths of one bit more or less is four, so two widths are fitted on average.
_WRONG = 2.0
_DEFAULT_MEMORY_BYTES = 2**30  # for moments, if at least twice as many bytes are free


def fit_targets(
    runner: Runner, survey: Survey, settings: FormSettings, options: Options, limit: int | None, *, memory: int | None,
    seed: int, ridge: float = RIDGE,
) -> Fits:  # fmt: skip
    """Gather moments pass by pass, and fit every weight in their metric.

    ``limit`` is the number of bytes that all layers may take, which bounds the components and widths to fit. ``memory``
    is the largest number of bytes of the moments of one pass; None is half of the free memory, up to a gigabyte.
    """
    share = None if limit is None else limit / sum(target.dense_bytes for target in survey.targets)
    names = {target: f"fit-{ridge:g}-{number}" for number, target in enumerate(survey.targets)}
    if runner.is_streaming:  # the moments of its parts are in files one after another, and are not shared
        passes: list[list[Sequence[Target]]] = [[[target] for targets in survey.inputs for target in targets]]
    else:
        memory = runner.spare_bytes(_DEFAULT_MEMORY_BYTES) if memory is None else memory
        passes = split_passes(survey.inputs, survey.gradients, memory)
    _log.info("number of weights: %d, passes: %d, batches: %d", len(survey.targets), len(passes), len(runner.batches))
    weights = _Weights(
        survey=survey,
        settings=settings,
        options=options,
        share=share,
        num_components={
            target: settings.num_components(target, 1.0 if share is None else share) for target in survey.targets
        },
        widths={target: _widths_of(options[target]) for target in survey.targets},
        seeds=survey.seeds(seed),
        stored=lambda target, fit: runner.remembered(names[target], lambda: fit),
        is_comparable=survey.gradients and runner.loss_fn is None,
        ridge=ridge,
    )
    fitted: list[Gathered] = []
    for number, inputs in enumerate(passes):
        label = f"{number + 1}/{len(passes)}"
        gather = partial(
            gather_moments, runner, inputs, gradients=survey.gradients, seed=seed, description=f"moments {label}",
        )  # fmt: skip
        parts = _gathered_parts(runner, gather)
        plan = runner.remembered(f"plan-{ridge:g}", partial(weights.plan, parts))
        for part in parts:
            fit_part = partial(weights.fit_part, part, plan, partial(runner.over, description=f"fits {label}"))
            options_of_part = runner.remembered(f"fits-{ridge:g}-{len(fitted)}", fit_part)
            weights.add(options_of_part)
            fitted.append(replace(part, moments={}, state={}))
            return_freed_memory()  # of moments and factors
    if not passes:  # without calibration there are no moments, and the metric is the identity
        unmeasured = Gathered({}, dict.fromkeys(survey.targets), 0.0, {})
        plan = weights.plan([unmeasured])
        weights.fit_part(unmeasured, plan, partial(runner.over, description="fits"))
    summaries = {target: summary for part in fitted for target, summary in part.summaries.items()}
    positions = {target: summary.positions for target, summary in summaries.items()}
    constant = [target for target, summary in summaries.items() if summary.is_constant]
    tokens = {target: summary.tokens for target, summary in summaries.items() if summary.tokens}
    order = [target for targets in survey.inputs for target in targets] or survey.targets
    return Fits(
        fits={target: weights.fits[target] for target in order},
        options={target: weights.options_with_losses[target] for target in order},
        settings=settings,
        passes=len(passes),
        comparable=weights.is_comparable,
        calibration_notes=check_calibration(positions, constant, tokens),
        ridge=ridge,
    )


def _gathered_parts(runner: Runner, gather: Callable[..., Iterator[Gathered]]) -> list[Gathered]:
    """Return the moments of one pass; a runner that streams continues after the parts whose moments are in files."""
    parts: list[Gathered] = []
    gathering: Iterator[Gathered] | None = None

    def gather_next() -> Gathered | None:
        nonlocal gathering
        if gathering is None:
            gathering = gather(state=parts[-1].state if parts else None)
        gathered = next(gathering, None)
        return_freed_memory()  # of activations
        return gathered

    while (part := runner.remembered(f"{MOMENTS}{len(parts)}", gather_next)) is not None:
        parts.append(part)
    return parts


# Weights of equal shapes are rounded jointly, and wait for each other until their metrics take this number of bytes.
_WAITING_BYTES = 2**24


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

    ``share`` is the share of their bytes that the weights keep, if it is known. ``stored`` takes a target and its fit,
    and returns the fit as it is kept; without reading it, if it is kept from a process that was killed.
    """

    survey: Survey
    settings: FormSettings
    options: Options
    share: float | None
    num_components: Mapping[Target, int]
    widths: Mapping[Target, tuple[int, ...]]
    seeds: Mapping[Target, int]
    stored: Callable[[Target, Any], TargetFit]
    is_comparable: bool
    ridge: float
    fits: dict[Target, TargetFit] = field(default_factory=dict)
    options_with_losses: dict[Target, Sequence[Option]] = field(default_factory=dict)

    def plan(self, parts: Sequence[Gathered]) -> Mapping[Target, tuple[int, ...]]:
        """Return the widths to fit for each weight of a pass.

        Fitting a width takes as long as fitting the components. The losses are therefore estimated first, from the
        sensitivity of each weight and a factor of four for each bit. The widths to fit are the ones that the uniform
        choice takes by these estimates, and the ones that the global choice takes with losses near them.
        """
        moments = {target: of_target for part in parts for target, of_target in part.moments.items()}
        planned = {target: self.widths[target] for target in moments}
        targets = [target for target, widths in planned.items() if widths]
        if self.share is None or not targets:
            return planned
        estimated = {
            target: self._estimate(target, self._estimated_loss(target, moments[target])) for target in targets
        }
        limit = int(self.share * sum(target.dense_bytes for target in targets))
        if least_bytes(estimated) > limit:  # then some weights take other forms, and leave bytes
            return planned
        uniform, near = choose_uniform(estimated, limit), options_near_global(estimated, limit, _WRONG)
        exact = choose_global(estimated, limit)  # it fits into the limit
        return planned | {  # The dense weight may not be among the forms, and then the widest codes are.
            target: tuple(
                sorted(
                    {
                        option.bits or self.widths[target][-1]
                        for option in (*near[target], uniform[target], exact[target])
                    }
                )
            )
            for target in targets
        }

    def add(self, options: Mapping[Target, Sequence[Option]]) -> None:
        """Add the options of a part, which a process that was killed may have fitted."""
        for target in options:
            if target not in self.fits:
                self.fits[target] = self.stored(target, None)
        self.options_with_losses.update(options)

    def fit_part(
        self,
        part: Gathered,
        plan: Mapping[Target, Sequence[int]],
        over: Callable[[Sequence[Target]], Iterable[Target]],
    ) -> dict[Target, Sequence[Option]]:
        """Fit the weights of a part, empty its moments, and return the options; ``over`` shows the progress."""
        moments = part.moments
        waiting: dict[Hashable, list[_Fitted]] = {}
        ordered_targets = list(moments)
        for target in over(ordered_targets):
            widths = plan[target]
            if not target.kind.has_metric:
                self._fit_alone(target, moments.pop(target), part.energy, widths)
                continue
            fitted = self._fit_components(target, moments.pop(target), part.energy, widths)
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
        return {target: self.options_with_losses[target] for target in ordered_targets}

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

    def _estimated_loss(self, target: Target, target_moments: Any) -> float:
        """Return the estimated loss of a weight's codes, up to a factor that depends on their width alone."""
        loss = target.kind.sensitivity(target, target_moments, self.ridge)
        if target_moments is not None and target_moments.positions and self.survey.gradients:
            loss *= target_moments.positions
        return loss

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
