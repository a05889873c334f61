"""A trial of an optimizer on small parameters, which checks its steps on sharded or divided parameters.

torch computes an optimizer's operations on sharded tensors correctly, except for numbers that the optimizer reads:
``.item()`` of a sum is the sum over this rank's shard (torch 2.13). If parameters are divided among ranks, numbers over
all parameters are numbers over a part of them. In both cases training would continue, with wrong steps.
"""

__all__ = ["check_optimizer"]

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from panther._random_state import preserved_generators
from panther.distributed import get_world_size
from panther.distributed.comm.agreement import gather_objects
from panther.errors import ConfigError

# These optimizers compute each entry by itself (Muon each matrix), and tests compare them under every strategy.
_KNOWN = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adadelta, optim.Adagrad,
    optim.ASGD, optim.Adamax, optim.Muon, optim.SparseAdam,
)  # fmt: skip
_STEPS = 4
_GROUPS = 3  # the trial has the settings of at most this many groups
_TOLERANCE = 1e-3  # for float32; a number over half of the parameters differs by more


def check_optimizer(optimizer: optim.Optimizer, strategy: str, stages: int) -> None:
    """Compare steps on small parameters, sharded or divided as by the strategy, with steps on whole parameters.

    Every rank must call it. Optimizers that do not run by themselves, or draw random numbers, are not compared.

    Raises:
        ConfigError: On every rank, if the steps differ or are refused.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = next((parameter for parameter in parameters if isinstance(parameter, DTensor)), None)
    divided = strategy == "zero1" or stages > 1
    is_known = type(optimizer) in _KNOWN or type(optimizer).__module__.startswith("panther.")
    if get_world_size() == 1 or strategy == "ddp":
        return
    if divided and any(gather_objects(getattr(optimizer, "depends_on_order", False), None)):
        raise ConfigError(
            f"the steps of {type(optimizer).__name__} without names of parameters depend on their order, which "
            f"strategy={strategy!r} changes: make the optimizer from model.named_parameters(), or from "
            "panther.optim.sketched_param_groups"
        )
    if is_known:
        return
    reason = _difference(optimizer, sharded, divided)
    if reason := next(filter(None, gather_objects(reason, None)), None):
        raise ConfigError(
            f"{reason} ({type(optimizer).__name__} was tried on small parameters as strategy={strategy!r} has them: "
            "use strategy='ddp', or another optimizer)"
        )


def _difference(optimizer: optim.Optimizer, sharded: DTensor | None, divided: bool) -> str | None:
    """Return how steps on sharded or divided parameters differ from steps on whole ones; None if they are equal."""
    settings = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups[:_GROUPS]
    ]
    try:
        reference = _run(optimizer, settings, 0, None, None)
        if _unequal(reference, _run(optimizer, settings, 1, None, None)):
            return None  # the steps depend on random numbers
    except Exception:  # the optimizer may need a closure, or not support the device
        return None
    try:
        if sharded is not None and _unequal(reference, _run(optimizer, settings, 0, sharded, None)):
            return "its steps on sharded parameters differ from those on whole ones"
        if divided:
            halves = [_run(optimizer, settings, 0, None, half) for half in range(2)]
            values = [halves[number % 2][0][number] for number in range(len(reference[0]))]
            if any(_unequal(reference, (values, numbers)) for _, numbers in halves):
                return "its steps depend on numbers of all parameters, and each rank has a part of them"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _run(
    optimizer: optim.Optimizer, settings: Sequence[dict[str, Any]], seed: int, like: DTensor | None, half: int | None
) -> tuple[list[Tensor], list[float]]:
    """Return small parameters after a few steps of a copy of an optimizer, and the numbers of its groups.

    Args:
        optimizer: The optimizer, which does not change.
        settings: The groups of the optimizer without parameters.
        seed: Seed of random numbers that the optimizer draws.
        like: A sharded parameter, over whose ranks the small parameters are sharded, or None.
        half: 0 or 1 gives the optimizer every other parameter only; None gives it all parameters.
    """
    trial = object.__new__(type(optimizer))
    # A scheduler replaces `step` by a function. Hooks belong to the user, and not to the optimizer.
    left_out = ("param_groups", "state", "step")
    for name, value in vars(optimizer).items():
        if name not in left_out:
            vars(trial)[name] = OrderedDict() if name.startswith("_optimizer_") else copy.deepcopy(value)
    trial.param_groups, trial.state = [], defaultdict(dict)
    present = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = present[0].device if present else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    size = 4 * get_world_size()

    def placed(value: Tensor) -> Tensor:
        if like is None:
            return value.to(device)
        placements = [Replicate() if placement.is_replicate() else Shard(0) for placement in like.placements]
        return distribute_tensor(value.to(device), like.device_mesh, placements)

    parameters: list[nn.Parameter] = []
    for group, place in zip(settings, optimizer.param_groups, strict=False):
        pair = [
            nn.Parameter(placed(torch.randn(shape, generator=generator).requires_grad_(False)))
            for shape in ((size, 3), (size,))
        ]
        trial_parameters = [p for number, p in enumerate(pair, start=len(parameters)) if half in (None, number % 2)]
        trial.param_groups.append({**copy.deepcopy(group), "params": trial_parameters})
        parameters += pair
        if (example := next((p for p in place["params"] if optimizer.state.get(p)), None)) is not None:
            for parameter in trial_parameters:
                trial.state[parameter] = {
                    key: _state_like(value, example.shape, parameter) for key, value in optimizer.state[example].items()
                }
    gradients = [
        [torch.randn(p.shape, generator=generator) * 10**number for p in parameters] for number in range(_STEPS)
    ]
    with preserved_generators():
        torch.manual_seed(seed)
        for gradients_of_step in gradients:
            for parameter, gradient in zip(parameters, gradients_of_step, strict=True):
                parameter.grad = placed(gradient)
            trial.step()
    values = [(p.full_tensor() if isinstance(p, DTensor) else p).detach().double().cpu() for p in parameters]
    numbers = [
        float(value)
        for group in trial.param_groups
        for value in group.values()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    ]
    return values, numbers


def _state_like(value: Any, shape: torch.Size, parameter: Tensor) -> Any:
    """Return a state like one that a constructor made for a parameter: a copy of the parameter, or numbers."""
    return parameter.detach().clone() if isinstance(value, Tensor) and value.shape == shape else copy.deepcopy(value)


def _unequal(first: tuple[list[Tensor], list[float]], second: tuple[list[Tensor], list[float]]) -> bool:
    """Return whether values or numbers differ by more than rounding."""
    pairs = [*zip(first[0], second[0], strict=True)]
    pairs += [(torch.tensor(a), torch.tensor(b)) for a, b in zip(first[1], second[1], strict=True)]
    return not all(torch.allclose(a, b, _TOLERANCE, _TOLERANCE * 1e-3, equal_nan=True) for a, b in pairs)
