"""Make the new layers of a choice: from fits, in sequence, or from a seed alone."""

__all__ = ["convert_all", "convert_in_sequence", "convert_target"]

from collections.abc import Callable
from functools import partial

from panther.compression.calibration.runner import Runner
from panther.compression.calibration.targets import Survey, Target, replace_modules
from panther.compression.forms import DENSE, Choice, Fits, Option, Replacement, TargetFit, form_named
from panther.compression.forms.low_rank import convert_seeded
from panther.compression.forms.metric import Metric, factor, metric_of, wide_dtype
from panther.compression.forms.rounding import RoundingTask, fit_quantized
from panther.compression.moments import gather_drift


def convert_all(
    survey: Survey,
    fits: Fits,
    choice: Choice,
    seed: int,
    stored: Callable[[Replacement], Replacement] = lambda layers: layers,
) -> Replacement:
    """Make the new layers of the chosen forms: fitted ones, or seeded sketches where nothing was fitted.

    ``stored`` returns the layers of a weight as they are kept.
    """
    new: Replacement = {}
    for target, target_seed in survey.seeds(seed).items():
        new |= stored(convert_target(target, fits, choice[target], target_seed))
    return new


def convert_target(target: Target, fits: Fits, option: Option, seed: int) -> Replacement:
    """Make the new layers of one weight; ``seed`` is the seed of this weight, not the call's."""
    if target in fits.fits:
        return form_named(option.form).convert(target, option, fits.fits[target], fits.settings, seed)
    return {} if option.rank is None else convert_seeded(target, 1, option.rank // 2, "random", seed)


def convert_in_sequence(runner: Runner, survey: Survey, fits: Fits, choice: Choice, seed: int) -> Replacement:
    """Make the new layers one after another, each fitted to its input in the model with the earlier new layers."""
    seeds = survey.seeds(seed)
    new: Replacement = {}
    for number, targets in enumerate(fits.inputs):
        choices = [(target, option) for target in targets if (option := choice[target]).form != DENSE]
        if not choices:
            continue
        # Indices do not change as layers are compressed, and a router may send tokens to different experts.
        if not targets[0].kind.has_metric:
            for target, option in choices:
                new |= convert_target(target, fits, option, seeds[target])
            continue
        compressed = partial(replace_modules, runner.model, dict(new))
        description = f"sequential {number + 1}/{len(fits.inputs)}"
        drift = gather_drift(runner, targets, fits.moments, compressed, description)
        for target, option in choices:
            metric = metric_of(target, fits.moments[target], drift[target] if drift else None, fits.ridge)
            fit = _fit_option(target, option, metric, fits, seeds[target])
            new |= form_named(option.form).convert(target, option, fit, fits.settings, seeds[target])
    return new


def _fit_option(target: Target, option: Option, metric: Metric, fits: Fits, seed: int) -> TargetFit:
    """Return the fit of one option of a weight alone."""
    form, settings, dtype = form_named(option.form), fits.settings, wide_dtype(target)
    rank = option.rank or 0
    if form.bits is None or not form.uses_rounding:
        components = factor(metric.source, metric, most=rank, seed=seed, dtype=dtype)
        return TargetFit(components, {}, {form.name: form.fit(metric, settings, seed)})
    (codes,) = fit_quantized(
        [RoundingTask(metric, [form.bits], rank, seed, dtype)], settings.group_size, symmetric=settings.symmetric
    )
    return TargetFit(factor(metric.source, metric, most=0, seed=seed, dtype=dtype), codes)
