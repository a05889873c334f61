"""Hooks between the replicas of hybrid sharding: the gradients of a unit of FSDP2 as a bucket."""

__all__ = ["ReplicaBucket", "reduce_over_replicas"]

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from panther._torch import fsdp_shards, running_backward_id
from panther.errors import DistributedError


class ReplicaBucket:
    """The gradients of a unit's shards on this rank, with the methods of :class:`torch.distributed.GradBucket`.

    Args:
        flat_gradients: The gradients with their padding.
        shards: The sharded parameters, and the views of their gradients on this rank.
        position: The number of units that this step has reduced before.
        is_last: Whether this is the last unit of the step, if it reduces as many as the step before.
    """

    def __init__(
        self, flat_gradients: Tensor, shards: list[tuple[nn.Parameter, Tensor]], position: int, is_last: bool
    ) -> None:
        self._flat_gradients, self._shards, self._position, self._ends_step = flat_gradients, shards, position, is_last

    def index(self) -> int:
        """Return the number of units that this step has reduced before."""
        return self._position

    def is_last(self) -> bool:
        """Return whether this is the last unit of the step."""
        return self._ends_step

    def buffer(self) -> Tensor:
        """Return the flat gradients with their padding."""
        return self._flat_gradients

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters."""
        return [parameter for parameter, _ in self._shards]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's shards, views of the buffer without the padding."""
        return [gradient for _, gradient in self._shards]


def reduce_over_replicas(model: nn.Module, send: Callable[[Any], Any]) -> None:
    """Let a hook average the gradients of a sharded model over its replicas.

    Args:
        model: The model, sharded by ``fully_shard`` over the ranks of one replica.
        send: Returns the future of the mean over the replicas for a bucket.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule) and fsdp_shards(module)]
    step = _Step(len(units))
    for unit in units:
        unit.set_all_reduce_hook(partial(_reduce_unit, unit, send, step))


class _Step:
    """The units that the present step has reduced, from whose number the last unit of the next step is predicted.

    Units without gradients, such as a branch that the forward does not take, are not reduced.
    """

    def __init__(self, num_units: int) -> None:
        self._expected = num_units
        self._reduced: set[nn.Module] = set()
        self._backward_id = -1

    def add(self, unit: nn.Module) -> tuple[int, bool]:
        """Return how many units the step has reduced before this unit, and whether this unit is probably the last."""
        backward_id = running_backward_id()
        # Reentrant checkpointing runs a step in several backward passes, so a new pass alone does not begin a step.
        is_after_last = len(self._reduced) >= self._expected and backward_id != self._backward_id
        if unit in self._reduced or is_after_last:
            self._expected = len(self._reduced)
            self._reduced.clear()
        self._reduced.add(unit)
        self._backward_id = backward_id
        return len(self._reduced) - 1, len(self._reduced) == self._expected


def _reduce_unit(unit: Any, send: Callable[[Any], Any], step: _Step, buffer: Tensor) -> None:
    """Replace the flat gradients of a unit, which are means over the ranks of a replica, by means over all ranks."""
    shards = _shards(unit, buffer)
    bucket = ReplicaBucket(buffer, shards, *step.add(unit))
    mean = send(bucket).wait()
    if mean.data_ptr() != buffer.data_ptr():
        buffer.copy_(mean)


def _shards(unit: Any, buffer: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters of a unit that are trained, and the views of their gradients in the flat gradients."""
    trained = [(parameter, size) for parameter, size in fsdp_shards(unit) if parameter.requires_grad]
    if sum(size for _, size in trained) != buffer.numel():
        raise DistributedError(
            f"comm_hook keeps a part of each gradient for the next step, and a {type(unit).__name__} has trained "
            "parameters that got no gradient in this step: freeze them, or leave comm_hook out"
        )
    shards, start = [], 0
    for parameter, size in trained:
        local: Tensor = parameter.to_local()  # type: ignore[attr-defined]
        if local.numel():  # a dimension may have fewer rows than the mesh has ranks
            shards.append((parameter, buffer[start : start + local.numel()].view(local.shape)))
        start += size
    return shards
