"""The parameter groups of a run's optimizer: their learning rates in each step, and parameters that join later."""

__all__ = ["ParameterGroups", "saved_settings_stay"]

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from panther.distributed.comm.agreement import gather_objects
from panther.errors import ConfigError
from panther.train.config import TrainConfig
from panther.train.optimization.optimizer import clear_gradients, learning_rate_factor, set_learning_rate
from panther.train.optimization.scheduler import RateScheduler
from panther.train.optimization.trainable import TrainableSet, list_names


class _SavedGroup(dict[str, Any]):
    """The group of an optimizer whose settings were loaded: schedulers of torch do not change them."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self or sys._getframe(1).f_globals.get("__name__") != lr_scheduler.__name__:
            super().__setitem__(key, value)


@contextmanager
def saved_settings_stay(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Let schedulers that are made within the block leave the settings of groups as a checkpoint had them.

    The constructor of a scheduler sets the rates of the first step, and its ``load_state_dict``, which callbacks call
    next, does not set the rates that were saved. Rates that are tensors, which schedulers write in place, are restored.
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


class ParameterGroups:
    """The groups of an optimizer during a run.

    Args:
        optimizer: The optimizer of the distributed model.
        trainable: The parameters of this rank that are trained.
        config: The settings of the run.
        scheduler: The function of the Trainer that makes a scheduler, or None.
        is_extended: Whether parameters that are unfrozen later form a group with the optimizer's default settings.
        uses_ddp: Whether DDP averages gradients; it does not average the gradients of parameters unfrozen later.

    Attributes:
        peak_rates: The learning rate of each group after the warm-up.
        scheduler: The scheduler, or None.
        quantities: What was added to the history since the scheduler could step.
        rate_of_step: The learning rate of the first group in the last step; None without a scheduler.
        averaged_apart: Parameters whose gradients DDP does not average.

    Raises:
        ConfigError: If a scheduler has the optimizer, and the schedule of the run sets learning rates as well.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trainable: TrainableSet,
        config: TrainConfig,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        *,
        is_extended: bool,
        uses_ddp: bool,
    ) -> None:
        if config.schedule != "callback" and any("initial_lr" in group for group in optimizer.param_groups):
            raise ConfigError(
                f"the optimizer has a scheduler, and schedule={config.schedule!r} sets the learning rate in every "
                "step: make it by the argument scheduler of Trainer, or step it in a callback, with schedule='callback'"
            )
        self._optimizer, self._trainable, self._config = optimizer, trainable, config
        self._is_extended, self._uses_ddp = is_extended, uses_ddp
        self.peak_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.averaged_apart: list[nn.Parameter] = []
        self._rates_after_step: list[float | Tensor] = []
        self.scheduler = None if scheduler is None else RateScheduler(scheduler, optimizer, config)
        self.rate_of_step: float | Tensor | None = None
        self.quantities: dict[str, Any] = {}
        if self.scheduler is not None:
            self.end_step()
        self._find_absent()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer has, in the order of its groups."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def begin_step(self, step: int, total_steps: int | None) -> None:
        """Set the learning rates of the next step, and clear the gradients of all trainable parameters.

        Raises:
            ConfigError: If a callback has set a learning rate that this step overwrites, or has removed a group.
        """
        self._check_rates(step)
        self._set_rates(step, total_steps)
        if self.scheduler is not None:
            self.rate_of_step = copy.deepcopy(self._optimizer.param_groups[0]["lr"])
        clear_gradients(self._optimizer)
        for parameter in self._absent:
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
            self._set_rates(step, None)
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
            self._find_absent()
        first = 0 if self.scheduler is None else self.scheduler.count
        if first == len(groups):
            return
        factor = learning_rate_factor(self._config.schedule, step, total_steps, self._config.warmup_steps)
        factor = factor if self.scheduler is None else self.scheduler.factor
        for group, peak in zip(groups[first:], self.peak_rates[first:], strict=True):
            set_learning_rate(group, peak * factor)

    def _find_absent(self) -> None:
        """Find the trainable parameters that the optimizer does not have, because it does not clear their gradients."""
        present = set(self.parameters)
        trainable = self._trainable.by_name.values()
        self._absent = [p for p in trainable if p.requires_grad and p not in present]

    def adopt_changes(self, step: int, total_steps: int | None) -> None:
        """Agree with the other ranks on the parameters that are trained from now on, and add them to the optimizer.

        Raises:
            ConfigError: On every rank, if a parameter was unfrozen that the optimizer does not have and that cannot
                join with default settings.
        """
        unfrozen = self._trainable.agree()
        late = self._trainable.late()
        if self._uses_ddp:
            self.averaged_apart = list(late.values())
        self._find_absent()
        absent = [name for name in unfrozen if name in late and any(late[name] is p for p in self._absent)]
        # Every rank gets the same groups, also a stage that has none of the parameters.
        absent_anywhere = sorted({name for names in gather_objects(absent, None) for name in names})
        if not absent_anywhere:
            return
        if not self._is_extended:
            raise ConfigError(
                f"{list_names(absent_anywhere)} was unfrozen after step {step}, and the optimizer does not have it: "
                "add it in the same callback, by trainer.optimizer.add_param_group({'params': [...]}), or make the "
                "optimizer of all parameters, frozen ones too"
            )
        self._optimizer.add_param_group({"params": [late[name] for name in absent]})
        self._find_absent()
        self._set_rates(step, total_steps)

    def add_saved(self, groups: Sequence[Sequence[str]], peak_rates: Sequence[float]) -> bool:
        """Add the groups that the optimizer of a checkpoint had in addition; return whether it had any.

        Args:
            groups: The names of the parameters of each saved group.
            peak_rates: The peak learning rates of the saved groups; empty in checkpoints of earlier versions.
        """
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
        self._find_absent()
        return bool(added)
