"""The groups of a run's optimizer: their learning rates, the scheduler, and parameters that join later."""

__all__ = ["ParameterGroups", "RateScheduler", "saved_settings_stay"]

import copy
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from panther._process_settings import ignored_warnings, preserved_generators
from panther._text import list_names
from panther.distributed import get_rank
from panther.errors import CheckpointError, ConfigError
from panther.train.config import TrainConfig
from panther.train.optimization.optimizer import learning_rate_factor, set_learning_rate
from panther.train.optimization.trainable import TrainableSet

_ROUNDING = 1e-12  # LinearLR(end_factor=0) may end as far below 0
_OF_ORDER = "Detected call of `lr_scheduler.step"
_log = logging.getLogger(__name__)


class _SavedGroup(dict[str, Any]):
    """The group of an optimizer whose settings were loaded: schedulers of torch do not change them."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self or sys._getframe(1).f_globals.get("__name__") != lr_scheduler.__name__:
            super().__setitem__(key, value)


@contextmanager
def saved_settings_stay(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Let schedulers that are made within the block leave the settings of groups as a checkpoint had them.

    The constructor of a scheduler sets the rates of the first step, and its ``load_state_dict`` does not set the rates
    that were saved. Rates that are tensors, which schedulers write in place, are restored.
    """
    loaded, rates = groups[:], [copy.deepcopy(group["lr"]) for group in groups]
    groups[:] = map(_SavedGroup, groups)
    try:
        yield
    finally:
        for group, present, rate in zip(loaded, groups, rates, strict=False):
            group.clear()
            group.update(present)
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
        groups[: len(loaded)] = loaded


class RateScheduler:
    """The scheduler that ``make`` makes of an optimizer, for the groups at the start of a run."""

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
        left_out = ("params", "param_names")
        self._start = [copy.deepcopy({key: group[key] for key in group if key not in left_out}) for group in groups]
        self._num_steps, self._values, self._new_value, self._follows_step = 0, list[float](), None, False
        self._check_rates()

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
        # Torch warns if the optimizer has not stepped before, as when a run resumes at the end of an epoch.
        with nullcontext() if self._follows_step else ignored_warnings(_OF_ORDER):
            self._scheduler.step(*values)
        self._num_steps += 1
        self._values += values
        self._check_rates()

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


class ParameterGroups:
    """The groups of the optimizer of a distributed model during a run.

    With ``is_extended``, parameters that are unfrozen later form a group with the optimizer's default settings. The
    ``quantities`` are those that were added to the history since the scheduler could step, and ``rate_of_step`` is None
    without a scheduler.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        trainable: TrainableSet,
        config: TrainConfig,
        scheduler: Callable[[Optimizer], Any] | None,
        is_extended: bool,
    ) -> None:
        if config.schedule != "callback" and any("initial_lr" in group for group in optimizer.param_groups):
            raise ConfigError(
                f"the optimizer has a scheduler, and schedule={config.schedule!r} sets the learning rate in every "
                "step: make it by the argument scheduler of Trainer, or step it in a callback, with schedule='callback'"
            )
        self._optimizer, self._trainable, self._config = optimizer, trainable, config
        self._is_extended = is_extended
        self.peak_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._rates_after_step: list[float | Tensor] = []
        self.scheduler = None if scheduler is None else RateScheduler(scheduler, optimizer, config)
        self.rate_of_step: float | Tensor | None = None
        self.quantities: dict[str, Any] = {}
        if self.scheduler is not None:
            self.end_step()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer has, in the order of its groups."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def begin_step(self, step: int, total_steps: int | None) -> None:
        """Set the learning rates of the next step, and clear the gradients of all trainable parameters."""
        self._check_rates(step)
        self._set_rates(step, total_steps)
        if self.scheduler is not None:
            self.rate_of_step = copy.deepcopy(self._optimizer.param_groups[0]["lr"])
        self._optimizer.zero_grad()
        for parameter in self._trainable.by_name.values():  # the optimizer may not have all of them
            if parameter.requires_grad:
                parameter.grad = None

    def end_step(self) -> None:
        """Note the learning rates, which callbacks must not change."""
        self._rates_after_step = [group["lr"] for group in self._optimizer.param_groups]

    def step_scheduler(self, moment: str, step: int) -> None:
        """Step the scheduler if it is due after ``moment``: a ``"step"``, a ``"skipped step"`` or an ``"epoch"``."""
        if self.scheduler is not None:
            self._check_rates(step)
            self.scheduler.advance(moment, self.quantities)
            self.quantities = {}
            self.end_step()

    def _check_rates(self, step: int) -> None:
        """Raise ConfigError if a callback has set a rate that the next step would overwrite."""
        if self._config.schedule == "callback":
            return
        # Rates that are tensors are not read, because reading them would wait for a GPU.
        groups = zip(self._optimizer.param_groups, self._rates_after_step, strict=False)
        for number, (group, rate) in enumerate(groups):
            if not isinstance(group["lr"], Tensor) and group["lr"] != rate:
                setter = "scheduler=" if self.scheduler else f"schedule={self._config.schedule!r}"
                raise ConfigError(
                    f"the learning rate of the optimizer's group {number} was set to {group['lr']} after step {step}, "
                    f"and {setter} sets it in every step: set schedule='callback'"
                )

    def _set_rates(self, step: int, total_steps: int | None) -> None:
        """Set the rates of the next step, also for groups that were added since the last step."""
        if self._config.schedule == "callback":
            return
        groups = self._optimizer.param_groups
        if len(groups) < len(self.peak_rates):
            raise ConfigError(
                f"the optimizer has {len(groups)} groups, and had {len(self.peak_rates)}: to leave parameters as they "
                "are, set requires_grad=False for them"
            )
        if len(groups) > len(self.peak_rates):
            self.peak_rates += [float(group["lr"]) for group in groups[len(self.peak_rates) :]]
        if self.scheduler is not None:
            if len(groups) > self.scheduler.count:
                raise ConfigError(
                    "a group was added to the optimizer, and the scheduler has the groups of the start of the run: "
                    "add it before fit, or step a scheduler in a callback, with schedule='callback'"
                )
            return
        factor = learning_rate_factor(self._config.schedule, step, total_steps, self._config.warmup_steps)
        for group, peak in zip(groups, self.peak_rates, strict=True):
            set_learning_rate(group, peak * factor)

    def adopt_changes(self, step: int, total_steps: int | None) -> None:
        """Agree with the other ranks on the parameters that are trained from now on, and add them to the optimizer."""
        present = set(self.parameters)
        absent = {name: p for name, p in self._trainable.agree().items() if p not in present}
        if not absent:
            return
        if not self._is_extended:
            raise ConfigError(
                f"{list_names(list(absent))} was unfrozen after step {step}, and the optimizer does not have it: "
                "add it in the same callback, by trainer.optimizer.add_param_group({'params': [...]}), or make the "
                "optimizer of all parameters, frozen ones too"
            )
        self._optimizer.add_param_group({"params": list(absent.values())})
        self._set_rates(step, total_steps)

    def add_saved(self, groups: Sequence[Sequence[str]], peak_rates: Sequence[float]) -> bool:
        """Add the groups that the optimizer of a checkpoint had in addition; return whether it had any."""
        self._rates_after_step = []
        count = len(self._optimizer.param_groups)
        present, by_name = set(self.parameters), self._trainable.by_name
        added = groups[count:]
        if any(by_name[name] in present for names in added for name in names if name in by_name):
            return False  # this run's optimizer has the parameters in different groups
        for number, names in enumerate(added, start=count):
            here = [name for name in names if name in by_name]  # a pipeline stage has only some of the parameters
            group = {"params": [by_name[name] for name in here]}
            # torch refuses groups without names in an optimizer whose other groups have names.
            names_of_group = {"param_names": here} if "param_names" in self._optimizer.param_groups[0] else {}
            self._optimizer.add_param_group(group | names_of_group)
            self.peak_rates.append(float(peak_rates[number]) if number < len(peak_rates) else self.peak_rates[0])
        return bool(added)
