"""Hooks between the replicas of hybrid sharding: the gradients of a unit of FSDP2 as a bucket."""

__all__ = ["ReplicaBucket", "reduce_over_replicas"]

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from panther._torch import fsdp_shards
from panther.errors import DistributedError


class ReplicaBucket:
    """The gradients of a unit's shards on this rank, with the methods of :class:`torch.distributed.GradBucket`.

    ``shards`` are the sharded parameters with the views of their gradients in ``flat_gradients``.
    """

    def __init__(self, flat_gradients: Tensor, shards: list[tuple[nn.Parameter, Tensor]], position: int) -> None:
        self._flat_gradients, self._shards, self._position = flat_gradients, shards, position

    def index(self) -> int:
        """Return the number of units that this step has reduced before."""
        return self._position

    def is_last(self) -> bool:
        """Return whether torch's hook counts a step: at the first unit, because later ones may get no gradients."""
        return self._position == 0

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
    """Let a hook average the gradients of a model that ``fully_shard`` has sharded over the ranks of one replica.

    ``send`` returns the future of the mean over the replicas for a bucket.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule) and fsdp_shards(module)]
    reduced: set[nn.Module] = set()
    for unit in units:
        unit.set_all_reduce_hook(partial(_reduce_unit, unit, send, reduced))


def _reduce_unit(unit: Any, send: Callable[[Any], Any], reduced: set[nn.Module], buffer: Tensor) -> None:
    """Replace the flat gradients of a unit, which are means over the ranks of a replica, by means over all ranks.

    ``reduced`` holds the units that the present step has reduced. A step begins when a unit comes again.
    """
    shards = _shards(unit, buffer)
    if unit in reduced:
        reduced.clear()
    bucket = ReplicaBucket(buffer, shards, len(reduced))
    reduced.add(unit)
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
