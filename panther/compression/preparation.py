"""Prepare a model for choices: survey its layers, time their forms, fit their weights, and choose within a size.

:func:`prepare` does so for the one size of :func:`panther.compress`. :func:`prepare_for_budgets` fits everything that
any size needs, so that :func:`panther.tune` can choose many times.
"""

__all__ = ["Prepared", "make_runner", "prepare", "prepare_for_budgets", "survey_model"]

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from panther.compression.calibration.runner import Runner
from panther.compression.calibration.survey import select_targets, survey_targets
from panther.compression.calibration.targets import Survey, Target
from panther.compression.config import CompressConfig
from panther.compression.fitting import fit_targets
from panther.compression.forms import (
    DENSE,
    LOW_RANK,
    Choice,
    Fits,
    Option,
    Options,
    Replacement,
    form_named,
    total_loss,
)
from panther.compression.selection.allocation import (
    BYTES,
    CHOOSERS,
    Allocation,
    Cost,
    allocate_fast_forms,
    allocate_forms,
    byte_limit,
    fit_and_allocate,
    seconds,
)
from panther.compression.selection.speed_target import SpeedTarget, check_speed_target, choose_in_time
from panther.compression.selection.timing import Timing, time_layers
from panther.compression.selection.trials import Trials, convert_all

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
        times = time_layers(runner, survey.targets, settings)
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
