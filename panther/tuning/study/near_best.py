"""Small steps from the best trial: its parameters with small changes of some of them, and a smaller budget.

A few tens of trials are too few to learn a complete space. The first trials, the choices of pr.compress, are good, and
better choices are near them.
"""

__all__ = ["near", "step_from"]

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from panther.tuning.plan import Plan
from panther.tuning.result import Trial
from panther.tuning.space.layers import LayerSpaceBase

# A step changes at most this share of the parameters, and on average at most this number.
_SHARE, _MOST = 0.5, 2.0
# Standard deviation of a step, as a share of the range of a parameter or of its logarithm.
_SIZE = 0.17
# Standard deviation of the decrease of the budget's logarithm below the cost of the best trial.
_LOWER = 0.12
_STEPS = 8  # attempts to find a new plan


def near(
    best: Trial,
    distributions: Mapping[str, Any],
    space: LayerSpaceBase,
    is_new: Callable[[Plan], bool],
    draw: random.Random,
    lower: bool,
) -> dict[str, Any] | None:
    """Return parameters of a new plan near the parameters of a trial, or None if no step leads to a new plan.

    Args:
        best: The trial.
        distributions: Optuna's distributions of its parameters.
        space: The space, which draws plans from parameters.
        is_new: Whether a plan was not tried yet.
        draw: Random numbers.
        lower: Whether the budget should be smaller than the cost of the trial's plan.
    """
    from optuna.trial import FixedTrial

    for attempt in range(_STEPS):
        params = step_from(best.params, distributions, draw, 1 + attempt / _STEPS)
        if lower:
            params = space.below(params, best.plan, abs(draw.gauss(0.0, _LOWER)))
        try:
            plan = space.draw(FixedTrial(params))
        except ValueError:  # The form has a parameter that the best trial lacks.
            continue
        if is_new(plan):
            return params
    return None


def step_from(
    params: Mapping[str, Any], distributions: Mapping[str, Any], draw: random.Random, scale: float
) -> dict[str, Any]:
    """Change some parameters, within their ranges.

    Args:
        params: The parameters of the best trial.
        distributions: Optuna's distributions of the parameters.
        draw: Random numbers.
        scale: Factor of the size of the step.
    """
    moved_params = dict(params)
    names = [name for name in params if not distributions[name].single()]
    if not names:
        return moved_params
    changed_names = [name for name in names if draw.random() < min(_SHARE, _MOST / len(names))]
    for name in changed_names or [draw.choice(names)]:
        moved_params[name] = _moved(params[name], distributions[name], draw, _SIZE * scale)
    return moved_params


def _moved(value: Any, distribution: Any, draw: random.Random, size: float) -> Any:
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return draw.choice([choice for choice in choices if choice != value])
    low, high, step = distribution.low, distribution.high, distribution.step
    if distribution.log:
        moved = math.exp(math.log(value) + draw.gauss(0.0, size) * math.log(high / low))
    else:
        moved = value + draw.gauss(0.0, size) * (high - low)
    if step is None:
        return min(max(moved, low), high)
    num_steps = round((moved - low) / step)
    if low + num_steps * step == value:  # An integer changes by at least one step.
        num_steps += 1 if moved > value else -1
    moved = min(max(low + num_steps * step, low), high)
    return round(moved) if isinstance(value, int) else moved
