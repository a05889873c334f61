"""A target for the model's speed: check whether it can be reached, and choose the forms that reach it at least loss.

The time limit of the layers is their time as dense layers minus the time that the model has to save. The model is then
timed with the chosen layers. If its time differs from the sum of the times of its layers, the limit is corrected.
"""

__all__ = ["SpeedTarget", "check_speed_target", "choose_in_time"]

import logging
import math
from dataclasses import dataclass, replace

from panther.compression.calibration.runner import Runner
from panther.compression.calibration.targets import Survey
from panther.compression.forms import DENSE, Choice, Fits, FormSettings, Option, Options, form_named
from panther.compression.selection.allocation import (
    CHOOSERS,
    Allocation,
    allocate_forms,
    seconds,
    with_predicted_losses,
)
from panther.compression.selection.timing import Timing
from panther.compression.selection.trials import Trials, convert_all, model_speed
from panther.errors import CompressionError

_log = logging.getLogger(__name__)

_CORRECTIONS = 5  # largest number of times that the model is timed and the limit corrected
_AIM = 1.015  # aim at this multiple of the target, so that noise in the measurement does not miss it
_CLOSE = 1.04  # up to this multiple of the target, a difference is within the noise of a measurement


@dataclass(frozen=True)
class SpeedTarget:
    """A speed-up of the model, which the user's argument ``setting`` asks for.

    ``layers_s`` of the dense model's ``dense_s`` seconds for the first held-out batch are those of its layers.
    """

    setting: str
    speedup: float
    dense_s: float
    layers_s: float

    @property
    def limit_s(self) -> float:
        """Return the limit for the sum of the layers' seconds."""
        return self.layers_s - self.dense_s * (1 - 1 / (_AIM * self.speedup))


def check_speed_target(
    runner: Runner, settings: FormSettings, options: Options, timing: Timing, *, speedup: float | None,
    max_latency_ms: float | None,
) -> SpeedTarget:  # fmt: skip
    """Time the model with every layer in its fastest form, and raise CompressionError if it misses the target.

    Nothing has to be fitted for this, because layers of random numbers are as fast as fitted ones.
    """
    fastest = seconds(timing.times).cheapest(options)
    replacement = {
        module: form_named(option.form).random_layer(target, module, option, settings)
        for target, option in fastest.items()
        if option.form != DENSE
        for module in target.modules
    }
    dense_s, reached = model_speed(runner, replacement)
    if speedup is not None:
        needed_speedup, setting = float(speedup), f"speedup={speedup}"
    else:
        assert max_latency_ms is not None  # one of the two is given
        needed_speedup, setting = 1e3 * dense_s / max_latency_ms, f"max_latency_ms={max_latency_ms}"
    layers_s = sum(times.dense_s for times in timing.times.values())
    speed_target = SpeedTarget(setting, needed_speedup, dense_s, layers_s)
    if max(reached, 1.0) < needed_speedup:
        raise _missed(speed_target, reached)
    return speed_target


def _missed(speed_target: SpeedTarget, reached: float) -> CompressionError:
    reached = max(reached, 1.0)
    if speed_target.setting.startswith("speedup"):
        best = f"speedup={math.floor(100 * reached) / 100}"
    else:
        latency_ms = 1e3 * speed_target.dense_s / reached
        unit = 10.0 ** (math.floor(math.log10(latency_ms)) - 2)
        best = f"max_latency_ms={math.ceil(latency_ms / unit) * unit:.3g}"
    before, after = 1e3 * speed_target.dense_s, 1e3 * speed_target.dense_s / reached
    return CompressionError(
        f"{speed_target.setting} cannot be reached: the model takes {after:.3g} ms for the first held-out batch with "
        f"every layer in its fastest form, and {before:.3g} ms without compression: the best feasible is {best}"
    )


def choose_in_time(
    runner: Runner, survey: Survey, fits: Fits, timing: Timing, allocate: str, speed_target: SpeedTarget, seed: int
) -> Allocation:
    """Choose the forms of the least loss with which the model reaches the speed target, or raise."""
    if speed_target.speedup <= 1:
        dense = {target: Option(DENSE, target.dense_bytes, error=0.0) for target in survey.targets}
        return Allocation(
            dense, allocate, notes=(f"{speed_target.setting} is met by the dense model, so nothing is compressed",)
        )
    cost, limit = seconds(timing.times), speed_target.limit_s
    allocation = allocate_forms(Trials(runner, survey, fits, seed), fits, allocate, limit, None, cost)
    choose, least = CHOOSERS[allocation.allocate], cost.least(allocation.options)
    met: dict[float, Choice] = {}  # choices that reach the target, by the limit of the layers
    choice, tried = allocation.choice, []
    for _ in range(_CORRECTIONS):
        tried.append(choice)
        _, speedup = model_speed(runner, convert_all(survey, fits, choice, seed))
        _log.info(
            "%s: the model is %.3f times as fast with layers of %.4g ms", speed_target.setting, speedup, 1e3 * limit
        )
        if speedup >= speed_target.speedup:
            met[limit] = choice
            if speedup <= _CLOSE * speed_target.speedup:
                break
        # The layers have to save the time by which the model misses its aim, or may use the time by which it beats it.
        limit = max(limit - speed_target.dense_s * (1 / speedup - 1 / (_AIM * speed_target.speedup)), least)
        choice = with_predicted_losses(fits, allocation.options, choose(allocation.options, limit, cost))
        if choice in tried:
            break
    if not met:
        choice = cost.cheapest(fits.options)
        _, speedup = model_speed(runner, convert_all(survey, fits, choice, seed))
        if speedup < speed_target.speedup:
            raise _missed(speed_target, speedup)
        met[least] = choice
    return replace(allocation, choice=met[max(met)])
