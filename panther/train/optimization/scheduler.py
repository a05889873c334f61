"""The scheduler of a run: when it steps, and how a resumed run repeats its steps."""

__all__ = ["RateScheduler"]

import copy
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from panther._process_settings import ignored_warnings
from panther._random_state import preserved_generators
from panther.distributed import get_rank
from panther.errors import CheckpointError, ConfigError
from panther.train.config import TrainConfig

_ROUNDING = 1e-12  # LinearLR(end_factor=0) may end as far below 0
_OF_ORDER = "Detected call of `lr_scheduler.step"
_log = logging.getLogger(__name__)


class RateScheduler:
    """The scheduler that ``make`` makes of an optimizer, for the groups that the optimizer has at the start of a run.

    Raises:
        ConfigError: If ``make`` returns something else, or a setting has no effect on the scheduler.
    """

    def __init__(self, make: Callable[[Optimizer], Any], optimizer: Optimizer, config: TrainConfig) -> None:
        groups, self._interval = optimizer.param_groups, config.scheduler_interval
        rates = [float(group["lr"]) for group in groups]
        self._keys = [group.keys() - {"lr"} for group in groups]  # without the keys that the scheduler adds
        self._optimizer, self._scheduler, self.count = optimizer, make(optimizer), len(groups)
        step, owner = (getattr(self._scheduler, name, None) for name in ("step", "optimizer"))
        is_scheduler = callable(step) and not isinstance(self._scheduler, Optimizer) and owner in (None, optimizer)
        arguments = inspect.signature(step).parameters.values() if callable(step) else ()
        needed = [x.name for x in arguments if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
        starts = [float(group.get("initial_lr", rate)) for group, rate in zip(groups, rates, strict=True)]
        has_rate = config.learning_rate is not None or config.learning_rate_scaling != "none"
        name = type(self._scheduler).__name__
        for is_wrong, fault in (
            (not is_scheduler, "which is not a scheduler of the optimizer: make one of the function's argument"),
            (any(x[:6] != "metric" for x in needed), f"whose step needs {needed}: step it in a callback instead"),
            (config.scheduler_metric and not needed, "whose step takes no metric: leave out scheduler_metric"),
            (has_rate and starts != rates, "with its own rates: leave out learning_rate and learning_rate_scaling"),
        ):
            if is_wrong:
                raise ConfigError(f"the function scheduler= returned a {name}, {fault}")
        self.metric = (config.scheduler_metric or "validation_loss") if needed else None
        self.kind = f"{name} of each {self._interval}" + (f" by {self.metric}" if needed else "")
        # OneCycleLR writes its peaks into the groups, and starts below them.
        self._peaks = [float(group.get("max_lr", start)) for group, start in zip(groups, starts, strict=True)]
        left_out = ("params", "param_names")
        self._start = [copy.deepcopy({key: group[key] for key in group if key not in left_out}) for group in groups]
        self._num_steps, self._values, self._new_value, self._follows_step = 0, list[float](), None, False
        self._check_rates()

    @property
    def factor(self) -> float:
        """The rate of the first group that has a rate, divided by its peak."""
        rates = zip(self._optimizer.param_groups, self._peaks, strict=False)
        return next((float(group["lr"]) / peak for group, peak in rates if peak), 1.0)

    def check_metric(self, names: list[str]) -> None:
        """Raise ConfigError unless the history will have the metric; ``names`` are the quantities of validation."""
        if self.metric not in (None, "loss", *names):
            raise ConfigError(
                f"the history has no {self.metric!r}, which the scheduler takes: set scheduler_metric to one of "
                f"{['loss', *names]}" + ("" if names else ", or pass validation data to fit")
            )

    def advance(self, moment: str, quantities: Mapping[str, Any]) -> None:
        """Step if due after ``moment``, with a metric once for each value among ``quantities`` since the last call."""
        self._follows_step |= moment == "step"
        self._new_value = quantities.get(self.metric or "", self._new_value)
        if self.metric is None and moment == self._interval:
            self._step()
        elif self._new_value is not None and (moment == "epoch" or self._interval == "step"):
            self._step(self._new_value)
            self._new_value = None

    def _step(self, *values: float) -> None:
        """Step the scheduler without groups that were added later, which schedulers of torch do not accept."""
        groups = self._optimizer.param_groups
        added, first = groups[self.count :], dict(groups[0])
        del groups[self.count :]
        try:
            # Torch warns if the optimizer has not stepped before, as when a run resumes at the end of an epoch.
            with nullcontext() if self._follows_step else ignored_warnings(_OF_ORDER):
                self._scheduler.step(*values)
        finally:
            groups.extend(added)
        self._num_steps += 1
        self._values += values
        self._check_rates()
        # Momentums that the scheduler moves are equal in added groups.
        moved = {key: value for key, value in groups[0].items() if key != "lr" and value is not first.get(key)}
        for group in added:
            group.update(moved)

    def _check_rates(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups[: self.count]):
            if isinstance(rate := group["lr"], Tensor):  # reading it would wait for a GPU
                continue
            if not isinstance(rate, Real) or not -_ROUNDING <= float(rate) < math.inf:
                raise ConfigError(
                    f"the scheduler set the learning rate of the optimizer's group {number} to {rate} after "
                    f"{self._num_steps} steps, and a rate is finite and not negative: correct the function scheduler="
                )
            group["lr"] = float(rate)  # it may be a number of NumPy

    def state_dict(self) -> dict[str, Any]:
        """Return how often the scheduler stepped, and by which values; the states of schedulers may hold functions."""
        return {"kind": self.kind, "steps": self._num_steps, "values": self._values, "new_value": self._new_value}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Repeat the steps of a saved run, after the optimizer was loaded; changed settings of the scheduler apply."""
        if self._num_steps not in (0, saved["steps"]):
            raise CheckpointError("the scheduler has taken steps that the checkpoint does not have: make a new Trainer")
        self._new_value = saved["new_value"]
        groups = self._optimizer.param_groups[: self.count]
        loaded = [dict(group) for group in groups]
        if self._num_steps:  # fit is called again
            return
        for group, start in zip(groups, self._start, strict=True):
            group.update(copy.deepcopy(start))
        with preserved_generators(), ignored_warnings(_OF_ORDER):
            for values in [[value] for value in saved["values"]] or [[]] * saved["steps"]:
                self._step(*values)
        for group, settings, keys in zip(groups, loaded, self._keys, strict=True):
            rates = float(settings["lr"]), float(group["lr"])
            if get_rank() == 0 and not math.isclose(*rates, abs_tol=_ROUNDING):
                _log.warning("by its settings, which have changed, the scheduler sets %s in place of %s", *rates[::-1])
            group.update({key: settings[key] for key in keys})
