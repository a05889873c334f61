r"""Collective operations with gradients.

The gradient depends on what the ranks do with the result. ``grad="replicate"``: all ranks continue with the same
computation on a result that they share, as in tensor parallelism, so each of them receives the whole gradient.
``grad="partial"``: every rank computes a loss of its own, and the sum of the losses is minimised, so each rank receives
a term of the gradient. The names are those of torch's DTensor placements. Taking one for the other makes gradients
wrong by a factor of the number of ranks, and nothing else shows it.
"""

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from panther.distributed.comm._agreement import agree, in_words
from panther.distributed.comm._diagnostics import watched
from panther.distributed.comm._ranks import is_fake, ranks_of
from panther.distributed.comm.mesh import chunk_sizes, get_world_size
from panther.errors import DistributedError, DTypeError, ShapeError

_OPERATIONS = ("sum", "mean")
_GRADS = ("replicate", "partial")

Group = dist.ProcessGroup | None

_agreed: WeakKeyDictionary[Any, set[tuple[str, ...]]] = WeakKeyDictionary()
"""Calls on which the ranks of a group were found to agree: names, shapes, dtypes and settings."""


def all_reduce(x: Tensor, op: str = "sum", group: Group = None, *, grad: str = "replicate") -> Tensor:
    """Return the sum or mean of a tensor over the ranks of a group, on each of them.

    Args:
        x: A tensor of the same shape and dtype on every rank; it is not changed.
        op: ``"sum"`` or ``"mean"``.
        group: Process group; None means all ranks.
        grad: ``"replicate"`` or ``"partial"``; see the module.

    Raises:
        ValueError: If ``op`` or ``grad`` is unknown.
        DistributedError: If there is no process group, or this rank is not in it; on every rank, if dtypes, shapes or
            settings differ (compared once for each combination); if a rank is gone or late.

    Cost: the bytes of ``x``, once; backward nothing, or the same with ``"partial"``.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> all_reduce(torch.ones(2))
        tensor([1., 1.])
        >>> pr.distributed.shutdown()
    """
    if op not in _OPERATIONS:
        raise ValueError(f"op={op!r} is unknown: use one of {', '.join(map(repr, _OPERATIONS))}")
    n = _check("all_reduce", x, group, grad, op=op)
    with watched("all_reduce", group):
        total = _AllReduce.apply(x, group, grad)
    return total / n if op == "mean" else total


def all_gather(x: Tensor, dim: int = 0, group: Group = None, *, grad: str = "replicate") -> Tensor:
    """Return the tensors of all ranks, concatenated along ``dim`` in the order of ranks, on each of them.

    Args:
        x: A tensor of the same dtype on every rank, and of the same shape except along ``dim``.
        dim: Dimension to concatenate along.
        group: Process group; None means all ranks.
        grad: ``"replicate"`` or ``"partial"``; see the module.

    Raises:
        ShapeError: If ``dim`` is not a dimension of ``x``; on every rank, if shapes differ along another one.
        ValueError: If ``grad`` is unknown.
        DistributedError: If there is no process group, or this rank is not in it; on every rank, if dtypes, shapes or
            settings differ (compared once for each combination); if a rank is gone or late.

    Cost: the bytes of ``x`` to every other rank, and first those of its shape.
    """
    dim = _dimension("all_gather", x, dim)
    _check("all_gather", x, group, grad, dim=dim)
    with watched("all_gather", group):
        shapes = _shapes(x, group)
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise ShapeError(f"all_gather along dim={dim} takes shapes that differ only there, not {shapes}")
    with watched("all_gather", group):
        return _AllGather.apply(x, dim, [shape[dim] for shape in shapes], group, grad)


def reduce_scatter(x: Tensor, dim: int = 0, group: Group = None) -> Tensor:
    """Sum a tensor over ranks, and return to each rank its chunk along ``dim``, by :func:`torch.chunk`.

    Args:
        x: A tensor of the same shape and dtype on every rank.
        dim: Dimension to shard.
        group: Process group; None means all ranks.

    Raises:
        ShapeError: If ``dim`` is not a dimension of ``x``, or has fewer chunks than ranks.
        DistributedError: If there is no process group, or this rank is not in it; on every rank, if dtypes, shapes or
            settings differ (compared once for each combination); if a rank is gone or late.

    Cost: the bytes of ``x``; the same in backward, which gathers the gradients of all chunks.
    """
    dim = _dimension("reduce_scatter", x, dim)
    n = _check("reduce_scatter", x, group, "replicate", dim=dim)
    sizes = chunk_sizes(x.shape[dim], n)
    with watched("reduce_scatter", group):
        return _ReduceScatter.apply(x, dim, sizes, group)


def broadcast(x: Tensor, src: int = 0, group: Group = None, *, grad: str = "replicate") -> Tensor:
    """Return the tensor of rank ``src``, on every rank.

    Args:
        x: The tensor to send; on the other ranks one of the same shape and dtype, whose values do not matter.
        src: Global rank.
        group: Process group; None means all ranks.
        grad: ``"replicate"`` or ``"partial"``; see the module. ``src`` gets the gradient, other ranks zeros.

    Raises:
        ValueError: If ``grad`` is unknown.
        DistributedError: If there is no process group, or this rank is not in it; on every rank, if dtypes, shapes or
            settings differ (compared once for each combination); if a rank is gone or late.
    """
    if src not in (ranks := ranks_of(group)):
        raise DistributedError(f"src={src} must be a global rank of the group, one of {ranks}")
    _check("broadcast", x, group, grad, src=src)
    with watched("broadcast", group):
        return _Broadcast.apply(x, src, group, grad)


def sum_in_backward(x: Tensor, group: Group = None) -> Tensor:
    """Return the tensor itself; its gradients, a term on each rank, are summed over the ranks in backward."""
    return _SumInBackward.apply(x, group)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, grad: str) -> Tensor:
        ctx.group, ctx.grad = group, grad
        total = x.contiguous().clone()  # collectives write in place, and autograd needs x as it was
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Each rank passes the whole shared gradient to its own graph: where that is differentiated again, the
        # gradients that come back from all ranks have to be summed.
        if ctx.grad == "replicate":
            return _SumInBackward.apply(gradient, ctx.group), None, None
        return _AllReduce.apply(gradient, ctx.group, "partial"), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int], group: Group, grad: str) -> Tensor:
        ctx.dim, ctx.sizes, ctx.group, ctx.grad = dim, sizes, group, grad
        # Padded to one size, the only form that gloo's all_gather of tensors knows.
        largest = max(sizes)
        padded = x.movedim(dim, 0)
        if len(padded) < largest:
            padded = torch.cat((padded, padded.new_zeros(largest - len(padded), *padded.shape[1:])))
        parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in sizes]
        dist.all_gather(parts, padded.contiguous(), group=group)
        return torch.cat([part[:size].movedim(0, dim) for part, size in zip(parts, sizes, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grad == "partial":
            mine = _ReduceScatter.apply(gradient, ctx.dim, ctx.sizes, ctx.group)
        else:
            mine = _Chunk.apply(gradient, ctx.dim, ctx.sizes, ctx.group)
        return mine, None, None, None, None


class _Chunk(torch.autograd.Function):
    """Takes this rank's chunk of a replicated tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int], group: Group) -> Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        return x.split(sizes, dim)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AllGather.apply(gradient, ctx.dim, ctx.sizes, ctx.group, "replicate"), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int], group: Group) -> Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        rank = dist.get_rank(group)
        if len(set(sizes)) == 1:
            whole = x.movedim(dim, 0).contiguous()  # the shards of dimension 0 are contiguous
            mine = torch.empty_like(whole[: sizes[rank]])
            dist.reduce_scatter(mine, list(whole.split(sizes)), group=group)
            return mine.movedim(0, dim).clone(memory_format=torch.contiguous_format) if dim else mine
        total = x.contiguous().clone()  # gloo has no reduce_scatter of uneven shards
        dist.all_reduce(total, group=group)
        return total.split(sizes, dim)[rank].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AllGather.apply(gradient, ctx.dim, ctx.sizes, ctx.group, "partial"), None, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, group: Group, grad: str) -> Tensor:
        ctx.src, ctx.group, ctx.grad = src, group, grad
        sent = x.contiguous().clone()
        dist.broadcast(sent, src, group=group)
        return sent

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grad == "replicate":
            return _OnlyAt.apply(gradient, ctx.src, ctx.group), None, None, None
        gradient = _AllReduce.apply(gradient, ctx.group, "partial")
        # A product with 0 would keep NaN and infinity of ranks whose gradient does not count.
        here = torch.tensor(dist.get_rank() == ctx.src, device=gradient.device)
        return torch.where(here, gradient, torch.zeros_like(gradient)), None, None, None


class _OnlyAt(torch.autograd.Function):
    """Keeps a replicated tensor at rank ``src``; zeros on the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, group: Group) -> Tensor:
        ctx.src, ctx.group = src, group
        return x.clone() if dist.get_rank() == src else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Broadcast.apply(gradient, ctx.src, ctx.group, "replicate"), None, None


class _SumInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AllReduce.apply(gradient, ctx.group, "replicate"), None


def _dimension(name: str, x: Tensor, dim: int) -> int:
    """Return the dimension, counted from the front."""
    _check_tensor(name, x)
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(
            f"{name} along dim={dim} needs a tensor with this dimension, and x has {x.dim()} dimensions"
            + ("" if x.dim() else ": use x.unsqueeze(0)")
        )
    return dim % x.dim()


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor, not a {type(x).__name__}")
    if x.dtype is torch.bool and name in ("all_reduce", "reduce_scatter"):
        raise DTypeError(f"{name} sums numbers, and x is torch.bool: convert it, for example by x.int()")


def _check(name: str, x: Tensor, group: Group, grad: str, **settings: Any) -> int:
    """Return the world size of the group, if this rank is in it and the others pass the same, compared once a case."""
    if grad not in _GRADS:
        raise ValueError(f"grad={grad!r} is unknown: use one of {', '.join(map(repr, _GRADS))}")
    _check_tensor(name, x)
    ranks = ranks_of(group)
    shape = f"{x.dim()} dimensions" if name == "all_gather" else str(tuple(x.shape))
    case = {"the tensor": f"{x.dtype} {shape}", **in_words({**settings, "grad": grad})}
    # An exchange for each call would double the latency of small tensors, so a case is compared once.
    agreed = _agreed.setdefault(group or dist.group.WORLD, set())
    if len(ranks) > 1 and (key := (name, *case.values())) not in agreed and not isinstance(x, FakeTensor):
        with _disable_current_modes():  # this exchange comes once, so CommunicationCounter must not count it
            agree(name, lambda: case, group, "pass every rank the same", "tensors or settings")
        agreed.add(key)
    return len(ranks)


def _shapes(x: Tensor, group: Group) -> list[tuple[int, ...]]:
    if is_fake(group):  # nothing is sent there: assume that every rank's tensor is as large as this
        return [tuple(x.shape)] * get_world_size(group)
    # Eight dimensions at most: every rank has to send a row of the same length.
    own = torch.tensor([x.dim(), *x.shape, *([0] * (8 - x.dim()))], device=x.device)
    rows = [torch.empty_like(own) for _ in range(get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    return [tuple(row[1 : 1 + row[0]].tolist()) for row in rows]
