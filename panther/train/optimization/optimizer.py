"""The optimizer of a distributed model, and its learning rate in each step."""

__all__ = [
    "Optimizer", "is_extended_by_default", "learning_rate_factor", "make_optimizer", "names_in_optimizer",
    "set_learning_rate",
]  # fmt: skip

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from panther._text import list_names
from panther.distributed import get_rank, get_world_size
from panther.distributed.comm.agreement import gather_objects
from panther.errors import ConfigError

Optimizer = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
"""The argument of a Trainer: an optimizer, a function that makes an optimizer from parameters, or None for AdamW."""

_log = logging.getLogger(__name__)


def learning_rate_factor(schedule: str, step: float, total: int | None, warmup: int) -> float:
    """Return the factor of the peak learning rate after ``step`` steps, which may be a fraction, of ``total``.

    It rises linearly during the warm-up, and then stays 1 or falls to 0 at the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule not in ("linear", "cosine") or total is None:
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a group; a tensor is filled, because a compiled or captured step reads it in place."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def is_extended_by_default(optimizer: Optimizer) -> bool:
    """Return whether parameters that are unfrozen later can join with the defaults: not of a function or an object."""
    while isinstance(optimizer, functools.partial):
        optimizer = optimizer.func
    return optimizer is None or (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer))


def names_in_optimizer(optimizer: Optimizer, model: nn.Module) -> dict[Tensor, tuple[str, ...]]:
    """Return the names of the parameters of an optimizer that the user made; nothing for a function and for None.

    Names remain valid where a strategy replaces parameters by new objects. A tied parameter has several names, and a
    pipeline stage may use any of them.
    """
    names: dict[Tensor, tuple[str, ...]] = {}
    if not isinstance(optimizer, torch.optim.Optimizer):
        return names  # without references to the parameters, which keep their memory
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter] = (*names.get(parameter, ()), name)
    for group in optimizer.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise ConfigError(
                "the optimizer has parameters that are not the model's: make it from model.parameters(), after the "
                "last layer was replaced; parameters of a loss belong into the model, whose forward then returns the "
                "loss"
            )
    _check_rates(optimizer)
    is_distributed = get_world_size() > 1 or any(parameter.is_meta for parameter in model.parameters())
    if is_distributed and any(isinstance(key, Tensor) for key in optimizer.state):
        raise ConfigError(
            f"{type(optimizer).__name__} has a state for parameters already, which would not be the state of the "
            "distributed model: pass its class, or a function of parameters that makes it"
        )
    return names


def make_optimizer(
    optimizer: Optimizer,
    names: Mapping[Tensor, tuple[str, ...]],
    by_name: Mapping[str, nn.Parameter],
    *,
    strategy: str,
    stages: int,
) -> torch.optim.Optimizer:
    """Return the optimizer of a distributed model; every rank must call it.

    An optimizer that the user made is returned itself, with this rank's parameters in its groups, so that schedulers
    and callbacks which refer to it keep working. It is not made again: the ``defaults`` of an optimizer are not always
    arguments of its constructor. ``names`` is the result of :func:`names_in_optimizer` before the model was
    distributed, and ``by_name`` has this rank's parameters by their names in the model that the user built.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        result = optimizer
        _give_parameters(optimizer, names, by_name, strategy, stages)
    else:
        parameters: list[Any] = [parameter for parameter in by_name.values() if parameter.requires_grad]
        if not parameters and is_extended_by_default(optimizer):
            parameters = [{"params": []}]  # the stage is frozen, and may be unfrozen later
        try:
            result = (optimizer or _default_optimizer)(parameters)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{error} (no optimizer was made of the trainable parameters)") from error
        if not isinstance(result, torch.optim.Optimizer):
            kind = type(result).__name__
            raise ConfigError(f"the function of parameters returned a {kind}: it must return an optimizer")
        if stages > 1 and getattr(result, "selects_matrices", False):
            raise ConfigError(
                f"{type(result).__name__} selects hidden matrices by their order, and a stage has other "
                "first and last matrices: pass an optimizer of the model, or a function that makes groups"
            )
        _check_rates(result)
    if isinstance(result, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates the loss several times a step, which a Trainer does not: use AdamW or SGD")
    if getattr(result, "steps_in_backward", False):
        raise ConfigError(
            f"{type(result).__name__} takes steps in the backward pass, and a Trainer checks, clips and accumulates "
            "gradients before the step: call step_in_backward_(False), or write the loop yourself"
        )
    _report_untrained(result, by_name)
    _check_division(result, strategy, stages)
    return _shard_state(result) if strategy == "zero1" else result


def _check_rates(optimizer: torch.optim.Optimizer) -> None:
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(
            f"a group of {type(optimizer).__name__} has no 'lr', which a Trainer sets in every step: add it to the "
            "groups"
        )


def _default_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    """Return AdamW, by torch's fused kernel if the device has one."""
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in parameters if isinstance(p, Tensor)]
    # On a CPU the kernel takes the memory of parameters for dense, and would change what lies between the entries.
    is_dense = all(shard.is_contiguous() for shard in shards)
    try:
        return torch.optim.AdamW(parameters, fused=is_dense or None)
    except RuntimeError:
        return torch.optim.AdamW(parameters)


def _give_parameters(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, tuple[str, ...]],
    by_name: Mapping[str, nn.Parameter],
    strategy: str,
    stages: int,
) -> None:
    """Put this rank's parameters into the groups of the user's optimizer."""
    old = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # A pipeline stage has only some of the parameters. Names that it does not have belong to other stages.
    present = {names[p][0]: next((by_name[name] for name in names[p] if name in by_name), None) for p in old}
    here = {name for name, parameter in present.items() if parameter is not None}
    if absent := present.keys() - set().union(*(gather_objects(here, None) if stages > 1 else [here])):
        raise ConfigError(
            f"strategy={strategy!r} keeps no parameter of the name {next(n for n in present if n in absent)!r}, which "
            "the optimizer has: pass a function of parameters that makes the optimizer, such as its class"
        )
    for group in optimizer.param_groups:
        places = [place for place, p in enumerate(group["params"]) if present[names[p][0]] is not None]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][place] for place in places]
        group["params"] = [present[names[group["params"][place]][0]] for place in places]
    replaced = set(map(id, old)) - {id(parameter) for parameter in by_name.values()}
    if attribute := next(_attributes_with(optimizer, replaced), None):
        raise ConfigError(
            f"{type(optimizer).__name__} keeps parameters in its attribute {attribute!r} too, and "
            f"strategy={strategy!r} replaces them by shards: pass a function of parameters that makes the optimizer, "
            "such as its class or a functools.partial of it"
        )


def _attributes_with(optimizer: torch.optim.Optimizer, parameters: set[int]) -> Iterator[str]:
    """Yield the attributes of an optimizer, except for groups and state, that hold one of the parameters, by id."""

    def holds(value: Any, depth: int) -> bool:
        if isinstance(value, Tensor):
            return id(value) in parameters
        if depth == 0:
            return False
        if isinstance(value, torch.optim.Optimizer):
            return holds(vars(value), depth)
        if isinstance(value, Mapping):
            return any(holds(part, depth - 1) for pair in value.items() for part in pair)
        return isinstance(value, list | tuple | set) and any(holds(part, depth - 1) for part in value)

    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state") and holds(value, 5):
            yield name


def _check_division(optimizer: torch.optim.Optimizer, strategy: str, stages: int) -> None:
    """Warn of an optimizer that may read numbers of all parameters, or refuse one that depends on their order.

    torch computes operations on sharded tensors correctly, except for numbers that an optimizer reads: ``.item()`` of a
    sum is the sum over this rank's shard (torch 2.13).
    """
    if get_world_size() == 1 or strategy == "ddp":
        return
    name, is_divided = type(optimizer).__name__, strategy == "zero1" or stages > 1
    if is_divided and any(gather_objects(getattr(optimizer, "depends_on_order", False), None)):
        raise ConfigError(
            f"the steps of {name} without names of parameters depend on their order, which strategy={strategy!r} "
            "changes: make the optimizer from model.named_parameters(), or from panther.optim.sketched_param_groups"
        )
    # torch's and Panther's optimizers compute each entry or matrix by itself, or do not take shards.
    if type(optimizer).__module__.startswith(("torch.optim.", "panther.")) or get_rank():
        return
    _log.warning(
        "strategy=%r gives each rank a part of the parameters, and steps of %s are right only if it computes each "
        "entry by itself: compare its losses with those of strategy='ddp'",
        strategy,
        name,
    )


def _report_untrained(optimizer: torch.optim.Optimizer, by_name: Mapping[str, nn.Parameter]) -> None:
    """Log which trainable parameters the optimizer does not have."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    untrained = [name for name, parameter in by_name.items() if parameter.requires_grad and parameter not in trained]
    if untrained and get_rank() == 0:
        _log.warning(
            "the optimizer does not have the trainable parameters %s, which therefore stay as they are: add them to "
            "it, or set requires_grad=False for them, which saves their gradients",
            list_names(untrained),
        )


def _shard_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a ZeroRedundancyOptimizer, which has on each rank the optimizer's state for a part of the parameters.

    It shares the group objects with the optimizer, so that settings that a callback changes in either of them apply.
    """
    # Imported here because its module compiles with torch.jit, which takes a while and warns.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind = type(optimizer).__name__
    everything = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if attribute := next(_attributes_with(optimizer, everything), None):
        raise ConfigError(
            f"{kind} keeps parameters in its attribute {attribute!r} too, and strategy='zero1' divides them among "
            "ranks: use strategy='ddp'"
        )
    if "step" in vars(optimizer) or any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            "the optimizer has a scheduler, or another function in the place of its step, and strategy='zero1' steps a "
            "part of it: pass a function that makes the scheduler, as scheduler= of Trainer"
        )
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    if len(dtypes) > 1:
        raise ConfigError(
            f"strategy='zero1' takes parameters of one dtype, and the optimizer has {', '.join(map(str, dtypes))}: "
            "convert them, leave frozen ones out of the optimizer, or use strategy='ddp' or 'fsdp'"
        )

    # The wrapper copies all names into the groups of each rank in every step, unless its own groups have none.
    names = {
        parameter: name
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group.pop("param_names", ()), strict=False)
    }

    def for_this_rank(groups: list[dict[str, Any]]) -> Any:
        for group in groups:
            if all(parameter in names for parameter in group["params"]):
                group["param_names"] = [names[parameter] for parameter in group["params"]]
        part = object.__new__(type(optimizer))
        vars(part).update(vars(optimizer))
        part.param_groups = groups
        here = {parameter for group in groups for parameter in group["params"]}
        part.state = defaultdict(dict)
        for key, state in optimizer.state.items():
            if not isinstance(key, Tensor) or key in here:
                part.state[key] = state
        return part

    # The constructor of ZeroRedundancyOptimizer adds these group objects to its own list.
    sharded = ZeroRedundancyOptimizer(optimizer.param_groups, for_this_rank)  # type: ignore[arg-type]
    # Groups that are added later get these defaults.
    sharded.defaults = dict(optimizer.defaults)
    # The user's object then shows the state of this rank, and groups that are added later.
    optimizer.state, optimizer.param_groups = sharded.optim.state, sharded.param_groups
    return sharded
