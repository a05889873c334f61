"""Prepare a model for choices: survey its layers, time their forms, fit their weights, and choose within the size."""

__all__ = ["Prepared", "fit_with_care", "prepare", "survey_model"]

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from panther.compression.calibration.runner import Runner
from panther.compression.calibration.survey import survey_targets
from panther.compression.calibration.targets import Survey, replace_modules, select_targets
from panther.compression.config import CompressConfig
from panther.compression.fitting import fit_targets
from panther.compression.forms import DENSE, LOW_RANK, Fits, Options, Replacement
from panther.compression.forms.conversion import convert_all, convert_in_sequence
from panther.compression.selection.allocation import Allocation, allocate_fast_forms, allocate_forms, byte_limit
from panther.compression.selection.refit import fit_and_allocate
from panther.compression.selection.speed_target import SpeedTarget, check_speed_target, choose_in_time
from panther.compression.selection.timing import Timing, time_layers


@dataclass(frozen=True)
class Prepared:
    """A model whose weights are fitted, and the choice of a form for each weight.

    Attributes:
        runner: The model and its batches.
        survey: Its layers.
        seed: Seed of sketches, of random directions and of healing.
        fits: Fits of all weights; empty if nothing was fitted.
        allocation: The choice.
        speed_target: The speed that the model has to reach; None if the size is not a time.
    """

    runner: Runner
    survey: Survey
    seed: int
    fits: Fits = field(default_factory=Fits)
    allocation: Allocation = field(default_factory=lambda: Allocation({}, "fixed"))
    speed_target: SpeedTarget | None = None

    def convert(self, sequential: bool, max_error: float | None) -> tuple[Replacement, list[str]]:
        """Return the new layers of the choice, and notes.

        ``sequential``, each layer is fitted to its input in the compressed model. If the error is then above
        ``max_error``, the layers are fitted independently, and a note says so.
        """
        runner, choice = self.runner, self.allocation.choice
        independent = convert_all(self.survey, self.fits, choice, self.seed)
        if not sequential:
            return independent, []
        replacement = convert_in_sequence(runner, self.survey, self.fits, choice, self.seed)
        if max_error is None:
            return replacement, []
        (error,) = runner.errors([partial(replace_modules, runner.model, replacement)], "error, sequential")
        if error <= max_error:
            return replacement, []
        return independent, [
            f"layers are fitted independently, because fitting them in sequence has an error of {error:.3g}"
        ]


def prepare(runner: Runner, config: CompressConfig, seed: int) -> Prepared:
    """Survey the layers, fit their weights, and choose within the size that ``config`` asks for.

    Raises:
        CompressionError: If no layer is eligible, the size is infeasible, or the batches are too few.
    """
    settings, survey = config.form_settings, survey_model(runner, config)
    # Only with gradients of the output are the losses of different layers in the same unit.
    allocate = (config.allocate or "global") if survey.gradients else "uniform"
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
        if timing is not None and speed_target is not None:
            return choose_in_time(runner, survey, fits, timing, allocate, speed_target, seed)
        if timing is not None and config.avoids_slower:
            return allocate_fast_forms(runner, survey, fits, timing, allocate, limit, config.max_error, seed)
        return allocate_forms(runner, survey, fits, allocate, limit, config.max_error, seed)

    if config.method == "random":
        fits = Fits(options=options, settings=settings)
        allocation = allocation_of(fits)
    else:
        fits, allocation = fit_with_care(runner, survey, config, options, limit, seed, allocation_of)
    return Prepared(runner, survey, seed, fits, allocation, speed_target)


def survey_model(runner: Runner, config: CompressConfig) -> Survey:
    """Find the layers to compress, and with a calibrated method the order in which they run and their inputs."""
    settings = config.form_settings
    has_small_forms = not {DENSE, LOW_RANK}.issuperset(settings.names)
    survey = select_targets(
        runner.model,
        config.include,
        config.exclude,
        seeded=config.method == "random",
        smallest=settings.smallest_bytes if has_small_forms else None,
    ).check()
    if config.is_calibrated:
        survey = survey_targets(runner, survey, gradients=config.method == "two_sided").check()
    return survey


def fit_with_care(
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
            keep=config.sequential, heal=config.heal, seed=seed, ridge=ridge,
        )  # fmt: skip

    return fit_and_allocate(fit_with_ridge, allocation_of)
