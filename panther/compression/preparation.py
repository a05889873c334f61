"""Prepare a model for choices: survey its layers, time their forms, fit their weights, and choose within a size.

:func:`prepare` does so for the one size of :func:`panther.compress`. :func:`prepare_for_budgets` fits everything that
any size needs, so that :func:`panther.tune` can choose many times. Weights are fitted from moments that are gathered
pass by pass.
"""

__all__ = ["Prepared", "make_runner", "prepare", "prepare_for_budgets", "survey_model"]

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from panther.compression.calibration.runner import MOMENTS, Runner, return_freed_memory
from panther.compression.calibration.survey import select_targets, survey_targets
from panther.compression.calibration.targets import Survey, Target
from panther.compression.config import CompressConfig
from panther.compression.forms import (
    DENSE,
    LOW_RANK,
    Choice,
    Fits,
    FormSettings,
    Option,
    Options,
    Replacement,
    TargetFit,
    form_named,
    least_bytes,
    total_loss,
)
from panther.compression.forms.codes import JOINT_ENTRIES, LOSS_PER_BIT, RoundingTask, fit_quantized
from panther.compression.forms.metric import RIDGE, Fit, QuantizedFit, factor, metric_of, wide_dtype
from panther.compression.moments import Gathered, check_calibration, gather_moments, split_passes
from panther.compression.selection.allocation import (
    BYTES,
    CHOOSERS,
    Allocation,
    Cost,
    allocate_fast_forms,
    allocate_forms,
    byte_limit,
    choose_global,
    choose_uniform,
    fit_and_allocate,
    options_near_global,
    seconds,
)
from panther.compression.selection.speed_target import SpeedTarget, check_speed_target, choose_in_time
from panther.compression.selection.timing import Timing, time_layers
from panther.compression.selection.trials import Trials, convert_all

_log = logging.getLogger(__name__)

# Factor by which the estimated loss of a weight can be wrong, relative to the other weights. In a sentence encoder, the
# standard deviation of its logarithm was 0.17, and measured losses of single layers were 0.4 to 2.6 times the
# predicted ones. The factor between widths of one bit more or less is four, so two widths are fitted on average.
_WRONG = 2.0
_DEFAULT_MEMORY_BYTES = 2**30  # for moments, if at least twice as many bytes are free
_SHARE_WITHOUT_LIMIT = 0.25  # of the dense weights' bytes: 8 bits of 32


@dataclass(frozen=True)
class Prepared:
    """A model whose weights are fitted, and the choice of a form for each weight. Budgets limit the ``cost``."""

    runner: Runner
    survey: Survey
    seed: int
    fits: Fits = field(default_factory=Fits)
    allocation: Allocation = field(default_factory=lambda: Allocation({}, "fixed"))
    speed_target: SpeedTarget | None = None
    cost: Cost = BYTES

    @property
    def dense_cost(self) -> float:
        """Return the cost of all unchanged layers."""
        return sum(map(self.cost.dense, self.survey.targets))

    def comparable_options(self) -> Options:
        """Return the options with losses that can be compared between layers.

        Without gradients of the model's output, the losses are the squared relative errors of the layers' outputs.
        """
        if self.survey.gradients:
            return self.allocation.options
        return {
            target: [replace(option, loss=(option.error or 0.0) ** 2) for option in options]
            for target, options in self.fits.options.items()
        }

    def allocate(self, limit: float) -> Allocation:
        """Return the choice within another limit, in units of the cost."""
        kind = _kind_of_choice(self.survey)
        fits = _with_one_rank(self.fits, CHOOSERS[kind], limit, self.cost)
        trials = Trials(self.runner, self.survey, fits, self.seed)
        return allocate_forms(trials, fits, kind, limit, None, self.cost)

    def convert(self) -> Replacement:
        """Return the new layers of the choice."""
        return convert_all(self.survey, self.fits, self.allocation.choice, self.seed, stored=self.runner.kept)


def make_runner(model: nn.Module, config: CompressConfig, forward_device: torch.device | None = None) -> Runner:
    """Return the model with the batches and functions of ``config``."""
    return Runner(
        model, config.calibration, config.forward_fn, config.mask_fn, config.group, config.progress, config.loss_fn,
        forward_device,
    )  # fmt: skip


def prepare(runner: Runner, config: CompressConfig, seed: int) -> Prepared:
    """Survey the layers, fit their weights, and choose within the size that ``config`` asks for."""
    settings, survey = config.form_settings, survey_model(runner, config)
    has_one_width = settings.reader is not None and settings.reader.has_one_width
    allocate = _kind_of_choice(survey, config.allocate, has_one_width=has_one_width)
    options: Options = {target: settings.options(target) for target in survey.targets}
    timing, speed_target = None, None
    if config.speed_setting is not None or (config.avoids_slower and config.measure_speed and runner.held_out):
        times = time_layers(runner, survey.targets, settings, anew=config.is_by_time)
        timing = Timing(times, allow_slower=config.allow_slower is not False, by_time=config.is_by_time)
        options = {target: timing.fast_options(target, options[target]) for target in options}
    if timing is not None and config.is_by_time:
        speed_target = check_speed_target(
            runner, settings, options, timing, speedup=config.speedup, max_latency_ms=config.max_latency_ms
        )
    limit = byte_limit(
        runner.model,
        options,
        budget=config.budget,
        bits=config.bits,
        max_bytes=config.max_bytes,
        slower=timing is None or timing.allow_slower,
    )

    def allocation_of(fits: Fits) -> Allocation:
        fits = _with_one_rank(fits, CHOOSERS[allocate], limit)
        if timing is not None and speed_target is not None:
            return choose_in_time(runner, survey, fits, timing, allocate, speed_target, seed)
        trials = Trials(runner, survey, fits, seed)
        if timing is not None and config.avoids_slower:
            return allocate_fast_forms(trials, fits, timing, allocate, limit, config.max_error)
        return allocate_forms(trials, fits, allocate, limit, config.max_error)

    if config.method == "random":
        fits = Fits(options=options, settings=settings)
        allocation = allocation_of(fits)
    else:
        fits, allocation = _fit_with_care(runner, survey, config, options, limit, seed, allocation_of)
    return Prepared(runner, survey, seed, fits, allocation, speed_target)


def prepare_for_budgets(runner: Runner, config: CompressConfig, seed: int, *, by_time: bool) -> Prepared:
    """Survey the layers, and fit their weights for choices within any budget; the first one is ``config.budget``.

    ``by_time``, budgets limit the seconds of the layers instead of their bytes.
    """
    assert config.budget is not None
    settings, survey = config.form_settings, survey_model(runner, config)
    options: Options = {target: settings.options(target) for target in survey.targets}
    cost = BYTES
    if by_time:
        timing = Timing(time_layers(runner, survey.targets, settings))
        options = {target: timing.fast_options(target, options[target]) for target in options}
        cost = seconds(timing.times)
    prepared = Prepared(runner, survey, seed, cost=cost)
    limit = config.budget * prepared.dense_cost

    def allocation_of(fits: Fits) -> Allocation:
        return replace(prepared, fits=fits).allocate(max(limit, cost.least(fits.options)))

    fits, allocation = _fit_with_care(runner, survey, config, options, None, seed, allocation_of)
    return replace(prepared, fits=fits, allocation=allocation)


def survey_model(runner: Runner, config: CompressConfig) -> Survey:
    """Find the layers to compress, and with a calibrated method the order in which they run and their inputs."""
    settings = config.form_settings
    has_small_forms = not {DENSE, LOW_RANK}.issuperset(settings.names)
    output_embeddings = getattr(runner.model, "get_output_embeddings", None)  # of models of transformers
    head = None if settings.reader is None or output_embeddings is None else output_embeddings()
    survey = select_targets(
        runner.model,
        config.include,
        config.exclude,
        seeded=config.method == "random",
        smallest=settings.smallest_bytes if has_small_forms else None,
        has_codes=settings.has_codes,
        refuse=lambda target: settings.why_not_read(target, runner.model, is_head=head in target.modules),
    ).check()
    if not config.is_calibrated:
        return survey
    runner.register(survey.targets)
    return runner.remembered(
        "survey", lambda: survey_targets(runner, survey, gradients=config.method == "two_sided").check()
    )


def _kind_of_choice(survey: Survey, allocate: str | None = None, *, has_one_width: bool = False) -> str:
    """Return the kind of choice; only with gradients of the output are losses of different layers in one unit."""
    return (allocate or "global") if survey.gradients and not has_one_width else "uniform"


def _fit_with_care(
    runner: Runner,
    survey: Survey,
    config: CompressConfig,
    options: Options,
    limit: int | None,
    seed: int,
    allocation_of: Callable[[Fits], Allocation],
) -> tuple[Fits, Allocation]:
    """Fit all weights and choose, and do both again with a larger ridge if the batches mislead."""

    def fit_with_ridge(ridge: float) -> Fits:
        return fit_targets(
            runner, survey, config.form_settings, options, limit, memory=config.statistics_memory_bytes,
            seed=seed, ridge=ridge,
        )  # fmt: skip

    return fit_and_allocate(fit_with_ridge, allocation_of)


def _with_one_rank(
    fits: Fits, choose: Callable[[Options, float, Cost], Choice], limit: float | None, cost: Cost = BYTES
) -> Fits:
    """Return the fits with corrections of one rank only: the rank with which the choice has the smallest loss.

    Readers take the corrections as an adapter, which is padded to its largest rank. An option's bytes are then those of
    the files, because no factor is padded, except for factors of weights that are too small for the rank, whose padding
    is counted. Without a limit, ranks are compared at a quarter of the dense weights' bytes.
    """
    ranks = sorted({option.rank for options in fits.options.values() for option in options if option.rank})
    if fits.settings.reader is None or not ranks:
        return fits
    if limit is None:
        limit, cost = _SHARE_WITHOUT_LIMIT * sum(target.dense_bytes for target in fits.options), BYTES
    candidates = [_options_of_rank(fits, rank) for rank in ranks]

    def loss(options: Options) -> tuple[float, float]:
        choice = choose(options, limit, cost)
        return total_loss(choice), sum((option.error or 0.0) ** 2 for option in choice.values())

    return replace(fits, options=min(candidates, key=loss))


def _options_of_rank(fits: Fits, rank: int) -> Options:
    """Return the options without corrections, and of each form with corrections the option of the largest fit rank."""
    options: dict[Target, list[Option]] = {}
    for target, target_options in fits.options.items():
        largest: dict[str, int] = {}
        for option in target_options:
            if option.rank is not None and option.rank <= rank:
                largest[option.form] = max(option.rank, largest.get(option.form, 0))
        options[target] = [
            option
            if option.rank is None
            else replace(option, bytes=form_named(option.form).stored_bytes(target, rank, fits.settings))
            for option in target_options
            if option.rank is None or option.rank == largest.get(option.form)
        ]
        options[target].sort(key=lambda option: option.bytes)
    return options


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
    if not passes:  # The metric without calibration is the identity, as moments are missing.
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
        self, part: Gathered, plan: Mapping[Target, Sequence[int]], over: Callable[[Sequence[Target]], Iterable[Target]]
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
        self._add(
            group, fit_quantized(tasks, self.settings.group_size, symmetric_widths=self.settings.symmetric_widths)
        )

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
