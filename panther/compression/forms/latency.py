"""A wish for the model's speed: whether it can be reached, and the forms that reach it at the least loss.

The limit for the layers is their time as dense layers, less the time that the whole model is to save. The model is
then timed with the chosen layers, and where the times of its layers do not add up to its own, the limit is corrected.
"""

__all__ = ["Wish", "check_wish", "choose_in_time"]

import logging
import math
from dataclasses import dataclass, replace

from panther.compression.conversion import convert_all, random_layer
from panther.compression.forms.allocation import CHOOSERS, Allocation, allocated, as_predicted
from panther.compression.forms.choice import seconds
from panther.compression.forms.fitting import Fits
from panther.compression.forms.options import DENSE, Choice, Forms, Option
from panther.compression.measurement import model_speed
from panther.compression.runner import Runner
from panther.compression.targets import Survey
from panther.errors import CompressionError

_log = logging.getLogger(__name__)

_CORRECTIONS = 5  # times that the model is timed, at most
_AIM = 1.015  # times the wish, so that noise does not miss it
_CLOSE = 1.04  # times the wish: nearer than what can be measured again


@dataclass(frozen=True)
class Wish:
    """A speed-up of the model.

    Attributes:
        setting: The argument that asks for it.
        speedup: How many times faster the model is to be.
        dense_s: Seconds of the dense model for the first held-out batch.
        layers_s: Those that its layers take of them.
    """

    setting: str
    speedup: float
    dense_s: float
    layers_s: float

    @property
    def limit_s(self) -> float:
        """Return the seconds that the layers may take together."""
        return self.layers_s - self.dense_s * (1 - 1 / (_AIM * self.speedup))


def check_wish(
    runner: Runner, survey: Survey, forms: Forms, speedup: float | None, max_latency_ms: float | None
) -> Wish:
    """Time the model with every layer in its fastest form, and raise CompressionError where that does not suffice.

    Nothing is fitted yet: layers of random numbers are as fast.
    """
    fastest = seconds(forms.times).cheapest({target: forms.options(target) for target in survey.targets})
    replacement = {
        module: random_layer(target, module, option, forms)
        for target, option in fastest.items()
        if option.form != DENSE
        for module in target.modules
    }
    dense_s, reached = model_speed(runner, replacement)
    if speedup is not None:
        wanted, setting = float(speedup), f"speedup={speedup}"
    else:
        assert max_latency_ms is not None  # one of the two is given
        wanted, setting = 1e3 * dense_s / max_latency_ms, f"max_latency_ms={max_latency_ms}"
    wish = Wish(setting, wanted, dense_s, sum(times.dense_s for times in forms.times.values()))
    if max(reached, 1.0) < wanted:
        raise _missed(wish, reached)
    return wish


def _missed(wish: Wish, reached: float) -> CompressionError:
    reached = max(reached, 1.0)
    if wish.setting.startswith("speedup"):
        best = f"speedup={math.floor(100 * reached) / 100}"
    else:
        latency_ms = 1e3 * wish.dense_s / reached
        unit = 10.0 ** (math.floor(math.log10(latency_ms)) - 2)
        best = f"max_latency_ms={math.ceil(latency_ms / unit) * unit:.3g}"
    before, after = 1e3 * wish.dense_s, 1e3 * wish.dense_s / reached
    return CompressionError(
        f"{wish.setting} cannot be reached: with every layer in its fastest form the model takes {after:.3g} ms for "
        f"the first held-out batch, and {before:.3g} ms as it is: the best feasible is {best}"
    )


def choose_in_time(
    runner: Runner, survey: Survey, fits: Fits, forms: Forms, allocate: str, wish: Wish, seed: int
) -> Allocation:
    """Choose the forms of the least loss with which the whole model is as fast as wished.

    Raises:
        CompressionError: If it is not, even with the fastest forms.
    """
    if wish.speedup <= 1:
        dense = {target: Option(DENSE, target.dense_bytes, error=0.0) for target in survey.targets}
        return Allocation(dense, allocate, notes=(f"{wish.setting} is met as it is, so nothing is compressed",))
    cost, limit = seconds(forms.times), wish.limit_s
    found = allocated(runner, survey, fits, allocate, limit, None, seed, cost)
    choose, least = CHOOSERS[found.allocate], cost.least(found.options)
    met: dict[float, Choice] = {}  # by the limit
    choice, tried = found.choice, []
    for _ in range(_CORRECTIONS):
        tried.append(choice)
        _, speedup = model_speed(runner, convert_all(survey, fits, choice, seed))
        _log.info("%s: the model is %.3f times as fast with layers of %.4g ms", wish.setting, speedup, 1e3 * limit)
        if speedup >= wish.speedup:
            met[limit] = choice
            if speedup <= _CLOSE * wish.speedup:
                break
        # What the model takes too much or too little, its layers must take less or may take more.
        limit = max(limit - wish.dense_s * (1 / speedup - 1 / (_AIM * wish.speedup)), least)
        choice = as_predicted(fits, found.options, choose(found.options, limit, cost))
        if choice in tried:
            break
    if not met:
        choice = cost.cheapest(fits.options)
        _, speedup = model_speed(runner, convert_all(survey, fits, choice, seed))
        if speedup < wish.speedup:
            raise _missed(wish, speedup)
        met[least] = choice
    return replace(found, choice=met[max(met)])
