"""The optimizer of a distributed model, and its learning rate in each step."""

__all__ = ["Groups", "Optimizer", "clear_gradients", "groups_by_name", "learning_rate_factor", "make_optimizer"]

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from panther.errors import ConfigError

Optimizer = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
"""What a Trainer takes: an optimizer, a function that makes one from parameters, or None for AdamW."""

Groups = list[tuple[dict[str, Any], list[str]]]  # the settings of each group, and the names of its parameters


def learning_rate_factor(schedule: str, step: float, total: int | None, warmup: int) -> float:
    """Return the factor of the peak learning rate in a step.

    It rises linearly during the warm-up, and then stays 1 or falls to 0 at the last step.

    Args:
        schedule: ``"linear"`` or ``"cosine"``; with any other value the factor stays 1.
        step: Number of steps already taken; between two where a schedule is not by steps alone.
        total: Number of steps of the run; None only where the factor stays 1.
        warmup: Number of steps of the warm-up.

    Example:
        >>> [learning_rate_factor("linear", step, 6, 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule not in ("linear", "cosine") or total is None:
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Do what ``optimizer.zero_grad()`` does, without its entry for profilers, which takes 10 us."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def groups_by_name(optimizer: Optimizer, model: nn.Module) -> Groups:
    """Return the groups of an optimizer that the user made, and none for a function or None.

    FSDP and tensor parallelism replace a model's parameters by other objects. Names stay, if they are noted before.

    Raises:
        ConfigError: If the optimizer has state already, or parameters that are not the model's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    if optimizer.state:
        raise ConfigError("the optimizer has already taken steps: pass a new one, or resume from a checkpoint")
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise ConfigError("the optimizer has parameters that are not the model's: make it from model.parameters()")
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append((settings, [names[parameter] for parameter in group["params"]]))
    return groups


def make_optimizer(
    optimizer: Optimizer, groups: Groups, named: Mapping[str, nn.Parameter], *, shard_state: bool
) -> torch.optim.Optimizer:
    """Return the optimizer of a model that is distributed, with its state sharded over the ranks or not.

    ``groups`` is a result of :func:`groups_by_name`, and ``named`` has this rank's parameters by their names
    in the model that the user built.
    """
    kind: Any = optimizer or torch.optim.AdamW
    parameters: list[Any] = [parameter for parameter in named.values() if parameter.requires_grad]
    defaults: dict[str, Any] = {}
    if isinstance(optimizer, torch.optim.Optimizer):
        current = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not shard_state and set(named.values()).issuperset(current):
            return optimizer  # callbacks and schedulers of the user may refer to it
        kind, defaults = type(optimizer), dict(optimizer.defaults)
        # A pipeline stage has only some of the parameters, so names that are not here belong to other stages.
        own = [(settings, [named[name] for name in names if name in named]) for settings, names in groups]
        parameters = [{**settings, "params": here} for settings, here in own if here]
    if shard_state:
        # Imported here because its module compiles with torch.jit, which takes a while and warns.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, kind, **defaults)
    made = kind(parameters, **defaults)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"the function of parameters returned a {type(made).__name__}: it must return an optimizer")
    return made
