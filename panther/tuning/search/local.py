"""Small steps from the best trial: the same parameters, some of them a little different, and a smaller budget.

With a few tens of trials there are too few to learn a whole space from. The choices of pr.compress, which are the first
trials, are good ones already, and better ones are near them.
"""

__all__ = ["near", "step_from"]

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from panther.tuning.prepared import Plan
from panther.tuning.result import Trial
from panther.tuning.spaces.layers import LayerSpaceBase

_SHARE, _MOST = 0.5, 2.0  # of the parameters that a step changes: this share, and on average so many
_SIZE = 0.17  # of a step: standard deviation, as a share of the range of a parameter, or of the range of its logarithm
_LOWER = 0.12  # of the logarithm of a budget below what the best trial takes, standard deviation
_STEPS = 8  # that are tried for one with a new plan


def near(
    best: Trial,
    distributions: Mapping[str, Any],
    space: LayerSpaceBase,
    is_new: Callable[[Plan], bool],
    draw: random.Random,
    lower: bool,
) -> dict[str, Any] | None:
    """Return parameters of a new plan near those of a trial; None if no step leads to one.

    Args:
        best: The trial.
        distributions: What it drew its parameters from, as Optuna has them.
        space: Makes plans of parameters.
        is_new: Whether a plan was not tried yet.
        draw: Random numbers.
        lower: Whether the budget is to be below what the trial's plan takes.
    """
    from optuna.trial import FixedTrial

    for attempt in range(_STEPS):
        params = step_from(best.params, distributions, draw, 1 + attempt / _STEPS)
        if lower:
            params = space.below(params, best.plan, abs(draw.gauss(0.0, _LOWER)))
        try:
            plan = space.draw(FixedTrial(params))
        except ValueError:  # the form has a parameter that the best trial's has not
            continue
        if is_new(plan):
            return params
    return None


def step_from(
    params: Mapping[str, Any], distributions: Mapping[str, Any], draw: random.Random, scale: float
) -> dict[str, Any]:
    """Return parameters near others: some are moved, within their ranges.

    Args:
        params: What the best trial drew.
        distributions: What it drew from, as Optuna has them.
        draw: Random numbers.
        scale: By what factor a step is larger than usual.
    """
    found = dict(params)
    names = [name for name in params if not distributions[name].single()]
    if not names:
        return found
    chosen = [name for name in names if draw.random() < min(_SHARE, _MOST / len(names))]
    for name in chosen or [draw.choice(names)]:
        found[name] = _moved(params[name], distributions[name], draw, _SIZE * scale)
    return found


def _moved(value: Any, distribution: Any, draw: random.Random, size: float) -> Any:
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return draw.choice([one for one in choices if one != value])
    low, high, step = distribution.low, distribution.high, distribution.step
    if distribution.log:
        moved = math.exp(math.log(value) + draw.gauss(0.0, size) * math.log(high / low))
    else:
        moved = value + draw.gauss(0.0, size) * (high - low)
    if step is None:
        return min(max(moved, low), high)
    whole = round((moved - low) / step)
    if low + whole * step == value:  # an integer moves by one at least
        whole += 1 if moved > value else -1
    moved = min(max(low + whole * step, low), high)
    return round(moved) if isinstance(value, int) else moved
