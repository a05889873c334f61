"""Momentum and orthogonalised updates of matrices on one rank, in batches of equal shapes."""

__all__ = [
    "MatrixUpdate", "advance_momenta", "apply_updates", "batch_limit", "batches_of", "iteration_dtype", "local_part",
    "moment_dtype", "orthogonalize_batch", "placed_like", "placements_like",
]  # fmt: skip

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from panther.optim.newton_schulz import orthogonalize

if TYPE_CHECKING:
    from panther.optim.shards import ShardLayout

_Update = TypeVar("_Update", bound=Any)  # with a batch_key and a count, as MatrixUpdate
_RMS = 0.2  # root mean square of the entries of an update at rate 1, as for usual updates of Adam
# Matrices with a shorter side below this iterate in float32, which takes less time than bfloat16 for them.
_SHORT_SIDE = 64
_BATCH_BYTES = 1 << 26  # of the complete matrices, in float32, that a rank orthogonalises together


class MatrixUpdate:
    """The next update of a parameter (m, n), or of a stack of matrices (experts, m, n), on this rank.

    ``shape`` is (m, n) of the complete matrices, tall after a transposition; ``layout`` is None if this rank has them.
    """

    def __init__(
        self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any], layout: "ShardLayout | None" = None
    ) -> None:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=moment_dtype(parameter))
        gradient: Any = parameter.grad
        state["momentum_buffer"] = placed_like(parameter, state["momentum_buffer"])
        self._group = group
        self._parameter = local_part(parameter)
        self._momentum = local_part(state["momentum_buffer"])
        self._gradient = local_part(placed_like(parameter, gradient))
        m, n = parameter.shape[-2:]
        self.layout = layout
        self._is_transposed = m < n if layout is None else layout.is_transposed
        self.shape = (n, m) if self._is_transposed else (m, n)
        self.dtype = iteration_dtype(parameter, group)
        self.count = self._parameter.shape[0] if parameter.dim() == 3 else 1
        self.batch_key: tuple[Any, ...] = (
            self.shape, self.layout, self.dtype, self._momentum.dtype, self._parameter.device
        )  # fmt: skip

    def advance_momentum(self) -> Tensor:  # (count, m, n) of this rank
        """Add the gradient to the momentum, and return Nesterov's combination of both, tall after a transposition."""
        decay = self._group["momentum"]
        torch.add(self._gradient, self._momentum, alpha=decay, out=self._momentum)
        return self._as_tall(torch.add(self._gradient, self._momentum, alpha=decay))

    def _as_tall(self, tensor: Tensor) -> Tensor:
        """Return a view as a stack of tall matrices."""
        stack = tensor[None] if tensor.dim() == 2 else tensor
        return stack.mT if self._is_transposed else stack

    def apply(self, update: Tensor) -> None:
        """Change the parameter by an orthogonalised update of the shape that ``advance_momentum`` returned."""
        rate = float(self._group["lr"])  # `alpha` takes no tensor of shape (1,)
        update = update.mT if self._is_transposed else update
        wide = self._parameter.to(self._momentum.dtype)  # half precision is rounded once
        wide.mul_(1 - rate * self._group["weight_decay"])
        wide.add_(update.reshape(wide.shape), alpha=-_RMS * rate * math.sqrt(self.shape[0]))
        if wide is not self._parameter:
            self._parameter.copy_(wide)


def iteration_dtype(parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in which a matrix is orthogonalised, the same in every layout."""
    is_short = min(parameter.shape[-2:]) < _SHORT_SIDE
    if group.get("precision") == "bfloat16" and not is_short and parameter.dtype != torch.float64:
        return torch.bfloat16
    return moment_dtype(parameter)


def batch_limit(update: MatrixUpdate) -> int:
    """Return the number of matrices like those of an update that are computed together."""
    ranks = 1 if update.layout is None else update.layout.ranks
    limit = max(1, ranks * _BATCH_BYTES // (4 * max(1, math.prod(update.shape))))
    return max(limit // ranks, 1) * ranks  # the owners then have equal numbers of matrices


def batches_of(updates: Iterable[_Update], limit_of: Callable[[_Update], int]) -> Iterator[list[_Update]]:
    """Yield updates that are computed together: of one shape, layout, dtype and device, and of limited size.

    ``limit_of`` returns the largest number of matrices like those of an update in a batch, equal on all ranks.
    """
    by_key: dict[tuple[Any, ...], list[_Update]] = {}
    for update in updates:
        by_key.setdefault(update.batch_key, []).append(update)
    for updates_of_key in by_key.values():
        limit = limit_of(updates_of_key[0])
        batch: list[_Update] = []
        for update in updates_of_key:
            if batch and sum(member.count for member in batch) + update.count > limit:
                yield batch
                batch = []
            batch.append(update)
        yield batch


def orthogonalize_batch(batch: Sequence[MatrixUpdate]) -> None:
    """Update complete matrices."""
    apply_updates(batch, orthogonalize(advance_momenta(batch), dtype=batch[0].dtype))


def advance_momenta(batch: Sequence[MatrixUpdate]) -> Tensor:  # (count, m, n) of this rank
    """Advance the momenta of a batch, and return its matrices in the dtype of the iteration."""
    return torch.cat([update.advance_momentum().to(update.dtype) for update in batch])


def apply_updates(batch: Sequence[MatrixUpdate], updates: Tensor) -> None:
    """Change the parameters of a batch by its orthogonalised updates."""
    for member, update in zip(batch, updates.split([member.count for member in batch]), strict=True):
        member.apply(update)


def moment_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's moments: its own one, or float32 for half precision."""
    return torch.promote_types(parameter.dtype, torch.float32)


def local_part(tensor: Any) -> Tensor:
    """Return this rank's shard, with the same memory, or a tensor that is not sharded itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def placed_like(parameter: Any, tensor: Any, dim: int | None = None) -> Any:
    """Return a tensor with the placements of a parameter; gradients may be terms of sums, for example.

    With ``dim``, the tensor is sharded as the parameter is along this dimension, and replicated along other axes.
    """
    if not hasattr(parameter, "to_local"):
        return tensor
    placements = placements_like(parameter, dim)
    return tensor if tuple(tensor.placements) == placements else tensor.redistribute(placements=placements)


def placements_like(parameter: Any, dim: int | None) -> tuple[Any, ...]:
    """Return the placements of a DTensor along a dimension, and Replicate in place of the rest; None keeps all."""
    from torch.distributed.tensor import Replicate

    return tuple(p if dim in (None, getattr(p, "dim", None)) else Replicate() for p in parameter.placements)
