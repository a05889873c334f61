r"""Collective operations with gradients.

The gradient depends on what the ranks do with the result. With ``grad="replicate"``, all ranks continue with the same
computation on a result that they share, as in tensor parallelism, so each rank receives the complete gradient. With
``grad="partial"``, every rank computes a different loss, and the sum of the losses is minimised, so each rank receives
a term of the gradient. The names are the names of torch's DTensor placements. The wrong choice makes gradients wrong by
a factor of the number of ranks, and no error shows it.
"""

__all__ = ["ReduceOp", "all_gather", "all_reduce", "broadcast", "reduce_scatter"]

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from panther._torch import FakeTensor, disable_dispatch_modes, functional_collectives
from panther.distributed.comm.agreement import agree, describe_settings
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.mesh import chunk_sizes, get_world_size
from panther.distributed.comm.ranks import Group, is_fake, ranks_of
from panther.errors import DistributedError, DTypeError, ShapeError, check_size

_REDUCTIONS = ("sum", "mean", "max", "min", "product")
_NAMES = dict(
    zip(
        (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT),
        _REDUCTIONS,
        strict=True,
    )
)
"""The reductions that torch's values stand for."""

_Map = Callable[[Tensor], Tensor]

_agreed: WeakKeyDictionary[Any, set[tuple[str, ...]]] = WeakKeyDictionary()
"""For each group, the calls on which its ranks agree: names, shapes, dtypes and settings."""


class ReduceOp(dist.ReduceOp):
    """torch's reductions, which torch's functions accept as well: ``SUM``, ``AVG``, ``MAX``, ``MIN`` and ``PRODUCT``.

    Attributes:
        AVERAGE: Another name of ``AVG``.

    Example:
        >>> ReduceOp.SUM is torch.distributed.ReduceOp.SUM
        True
    """

    AVERAGE = dist.ReduceOp.AVG


def all_reduce(
    x: Tensor, op: str | dist.ReduceOp.RedOpType = "sum", group: Group = None, *, grad: str = "replicate"
) -> Tensor:
    """Return the sum, mean, maximum, minimum or product of a tensor over the ranks of a group, on every rank.

    The gradient of a maximum or minimum goes to the ranks that have this value, in equal shares.

    Args:
        x: A tensor of the same shape and dtype on every rank; it is not changed.
        op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"product"``; or a value of :class:`ReduceOp`.
        group: Process group; None means all ranks.
        grad: ``"replicate"`` or ``"partial"``; see the module.

    Raises:
        ValueError: If ``op`` or ``grad`` is unknown.
        DistributedError: If no process group exists, or this rank is not in it; on every rank, if dtypes, shapes or
            settings differ (they are compared once for each combination); if a rank has ended or is late.

    Cost: the bytes of ``x``; a maximum, minimum or product gathers ``x`` of all ranks. The backward pass sends nothing
    with ``"replicate"`` and the bytes of ``x`` with ``"partial"``.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> all_reduce(torch.ones(2))
        tensor([1., 1.])
        >>> pr.distributed.shutdown()
    """
    op = _reduction(op)
    n = _check("all_reduce", x, group, grad, op=op)
    if op not in ("sum", "mean"):
        # torch's own functions have the right gradients: of equal maxima, and of products with factors of zero.
        gathered = all_gather(x.unsqueeze(0), 0, group, grad=grad)
        if op == "product":
            return gathered.prod(0, dtype=x.dtype)
        return gathered.amax(0) if op == "max" else gathered.amin(0)
    total = partial(_sum, group=group)
    adjoint = _view if grad == "replicate" else total
    with watched("all_reduce", group):
        # The sum over ranks is its own adjoint. If the ranks share the result, each rank has the complete gradient
        # already.
        result = _Collective.apply(x, total, adjoint)
    return result / n if op == "mean" else result


def all_gather(x: Tensor, dim: int = 0, group: Group = None, *, grad: str = "replicate") -> Tensor:
    """Return the tensors of all ranks, concatenated along ``dim`` in the order of ranks, on every rank.

    Args:
        x: A tensor of the same dtype on every rank, and of the same shape except along ``dim``.
        dim: Dimension to concatenate along.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.

    Raises:
        ShapeError: If ``dim`` is not a dimension of ``x``; on every rank, if shapes differ along a different dimension.
        ValueError: If ``grad`` is unknown.
        DistributedError: As :func:`all_reduce`.

    Cost: the bytes of the shape and then of ``x``, sent to every other rank.
    """
    dim = _dimension("all_gather", x, dim)
    _check("all_gather", x, group, grad, dim=dim)
    with watched("all_gather", group):
        shapes = _shapes(x, group)
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
            raise ShapeError(f"all_gather along dim={dim} takes shapes that differ only there, not {shapes}")
        place: dict[str, Any] = {"dim": dim, "sizes": [shape[dim] for shape in shapes], "group": group}
        adjoint = _own_chunk if grad == "replicate" else _sum_own_chunk
        return _Collective.apply(x, partial(_gather, **place), partial(adjoint, **place))


def reduce_scatter(
    x: Tensor,
    dim: int | str | dist.ReduceOp.RedOpType = 0,
    group: Group = None,
    *,
    op: str | dist.ReduceOp.RedOpType = "sum",
) -> Tensor:
    """Reduce a tensor over ranks, and return to each rank its chunk along ``dim``, by :func:`torch.chunk`.

    Args:
        x: A tensor of the same shape and dtype on every rank.
        dim: Dimension to shard. A reduction in this place, as in other libraries, is ``op``, with dimension 0.
        group: Process group; None means all ranks.
        op: As for :func:`all_reduce`.

    Raises:
        ShapeError: If ``dim`` is not a dimension of ``x``, or has fewer chunks than ranks.
        TypeError: If there are two reductions.
        DistributedError: As :func:`all_reduce`.

    Cost: the bytes of ``x``; the same in backward, which gathers the gradients of all chunks. A maximum, minimum or
    product costs an :func:`all_reduce`.
    """
    if isinstance(dim, str | dist.ReduceOp.RedOpType):
        if op != "sum":
            raise TypeError(f"reduce_scatter has two reductions, {dim!r} and op={op!r}: give one")
        op = dim
        dim = 0
    dim = _dimension("reduce_scatter", x, dim)
    op = _reduction(op)
    n = _check("reduce_scatter", x, group, dim=dim, op=op)
    place: dict[str, Any] = {"dim": dim, "sizes": chunk_sizes(x.shape[dim], n), "group": group}
    if op not in ("sum", "mean"):
        # The loss of each rank depends on a different chunk, so gradients are summed.
        return all_reduce(x, op, group, grad="partial").split(place["sizes"], dim)[dist.get_rank(group)].clone()
    with watched("reduce_scatter", group):
        chunk = _Collective.apply(x, partial(_sum_own_chunk, **place), partial(_gather, **place))
    return chunk / n if op == "mean" else chunk


def broadcast(x: Tensor, src: int = 0, group: Group = None, *, grad: str = "replicate") -> Tensor:
    """Return the tensor of rank ``src``, on every rank.

    Args:
        x: The tensor to send. All other ranks pass a tensor of the same shape and dtype, whose values do not matter.
        src: Global rank.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`. ``src`` gets the gradient, other ranks zeros.

    Raises:
        ValueError: If ``grad`` is unknown.
        DistributedError: As :func:`all_reduce`.
    """
    src = check_size("src", src, least=0)
    if src not in (ranks := ranks_of(group)):
        raise DistributedError(f"src={src} must be a global rank of the group, one of {ranks}")
    _check("broadcast", x, group, grad, src=src)

    def adjoint(gradient: Tensor) -> Tensor:
        return _keep_at(gradient if grad == "replicate" else _sum(gradient, group), src)

    with watched("broadcast", group):
        return _Collective.apply(x, partial(_send, src=src, group=group), adjoint)


def gather_states(x: Tensor, group: Group = None) -> Tensor:  # (*shape) -> (ranks, *shape)
    """Return the tensors of all ranks, without derivatives; all have the shape of ``x``."""
    n = _check("gather_states", x, group)
    with watched("gather_states", group):
        return _gather(x.detach()[None], 0, [1] * n, group)


def sum_before(
    x: Tensor,
    weights: Tensor,  # (ranks, ranks, *), broadcast to the shape of x
    group: Group = None,
) -> Tensor:
    """Return the sum over the ranks before this rank of their ``x``, weighted by ``weights[this rank, rank]``.

    The weights are equal on all ranks and have no derivative. Backward, the gradients of the later ranks are gathered.
    """
    n, rank = _check("sum_before", x, group, "partial"), dist.get_rank(group)

    def sum_of_earlier(x: Tensor) -> Tensor:
        # Later ranks are left out and not weighted by 0, so that their values have no influence even if they are NaN.
        return (_gather(x[None], 0, [1] * n, group)[:rank] * weights[rank, :rank]).sum(0)

    def sum_of_later(x: Tensor) -> Tensor:
        return (_gather(x[None], 0, [1] * n, group)[rank + 1 :] * weights[rank + 1 :, rank]).sum(0)

    with watched("sum_before", group):
        return _Collective.apply(x, sum_of_earlier, sum_of_later)


def send_to_next(x: Tensor, received_rows: int, group: Group = None) -> Tensor:  # (rows, *) -> (received_rows, *)
    """Send rows to the next rank of the group, and return those of the previous rank; gradients go back.

    The last rank sends nothing and the first rank receives nothing, whatever they pass.
    """
    n, rank = len(ranks_of(group)), dist.get_rank(group)
    rows_to, rows_from = [0] * n, [0] * n  # for each rank
    if rank + 1 < n:
        rows_to[rank + 1] = len(x)
    else:
        x = x[:0]
    if rank:
        rows_from[rank - 1] = received_rows

    def exchange(from_ranks: list[int], to_ranks: list[int], x: Tensor) -> Tensor:
        return _functional("all_to_all_single", x, from_ranks, to_ranks, group=group)

    if n == 1:
        return x
    with watched("send_to_next", group):
        return _Collective.apply(x, partial(exchange, rows_from, rows_to), partial(exchange, rows_to, rows_from))


def sum_in_backward(x: Tensor, group: Group = None) -> Tensor:
    """Return the tensor itself; the backward pass sums the terms of its gradient over the ranks."""
    return _Collective.apply(x, _view, partial(_sum, group=group))


def on_first_rank(x: Tensor, group: Group = None) -> Tensor:
    """Return a tensor, equal on all ranks, on the first rank, and zeros on the others: a term of a sum over ranks."""
    return _Collective.apply(x, partial(_keep_at, src=ranks_of(group)[0]), _view)


def sum_together_in_backward(tensors: Sequence[Tensor], group: Group = None) -> list[Tensor]:
    """Return tensors as :func:`sum_in_backward` does, with one collective for all gradients of a dtype."""
    results = list(tensors)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        if x.requires_grad:
            by_dtype.setdefault(x.dtype, []).append(i)
    for places in by_dtype.values():
        for i, result in zip(places, _SumTogether.apply(group, *(tensors[i] for i in places)), strict=True):
            results[i] = result
    return results


class _Collective(torch.autograd.Function):
    """Apply a linear map, and its adjoint to gradients; derivatives of higher orders alternate between the two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Map, adjoint: _Map) -> Tensor:
        ctx.run, ctx.adjoint = run, adjoint
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Collective.apply(gradient, ctx.adjoint, ctx.run), None, None


class _SumTogether(torch.autograd.Function):
    """Return several tensors unchanged; their gradients are summed over the ranks in one message."""

    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(_view(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if len(gradients) == 1:
            return None, _Collective.apply(gradients[0], partial(_sum, group=ctx.group), _view)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        total = _Collective.apply(flat, partial(_sum, group=ctx.group), _view)
        parts = total.split([gradient.numel() for gradient in gradients])
        return None, *(part.view(g.shape) for part, g in zip(parts, gradients, strict=True))


def _reduction(op: Any) -> str:
    """Return the name of a reduction."""
    name = _NAMES.get(op, "") if isinstance(op, dist.ReduceOp.RedOpType) else op
    if not isinstance(name, str) or name not in _REDUCTIONS:
        raise ValueError(
            f"op={op!r} is unknown: use one of {', '.join(map(repr, _REDUCTIONS))}, or ReduceOp.SUM, AVG, MAX, MIN or "
            "PRODUCT"
        )
    return name


def _view(x: Tensor) -> Tensor:
    return x.view_as(x)  # autograd does not accept an input as an output


def _sum(x: Tensor, group: Group) -> Tensor:
    return _functional("all_reduce", x, "sum", group=group)


def _functional(name: str, x: Tensor, *settings: Any, group: Group) -> Tensor:
    """Call a collective as an operation whose result activation checkpointing saves: recomputation sends nothing."""
    group_name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    return functional_collectives.wait_tensor(
        getattr(functional_collectives, name)(x.contiguous(), *settings, group_name)
    )


def _gather(x: Tensor, dim: int, sizes: list[int], group: Group) -> Tensor:
    # Shards are padded to one size, because gloo gathers equal sizes only. It concatenates along dimension 0.
    largest = max(sizes)
    if x.shape[dim] < largest:
        padding_shape = (*x.shape[:dim], largest - x.shape[dim], *x.shape[dim + 1 :])
        x = torch.cat((x, x.new_zeros(padding_shape)), dim)
    joined = _functional("all_gather_into_tensor", x, len(sizes), group=group)
    if dim == 0 and min(sizes) == largest:
        return joined
    parts = joined.unflatten(0, (len(sizes), x.shape[0]))
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def _own_chunk(x: Tensor, dim: int, sizes: list[int], group: Group) -> Tensor:
    return x.split(sizes, dim)[dist.get_rank(group)].clone()


def _sum_own_chunk(x: Tensor, dim: int, sizes: list[int], group: Group) -> Tensor:
    if len(set(sizes)) > 1:  # gloo has no reduce_scatter of uneven shards
        return _own_chunk(_sum(x, group), dim, sizes, group)
    shards = torch.cat(x.split(sizes, dim)) if dim else x  # torch splits it along dimension 0
    return _functional("reduce_scatter_tensor", shards, "sum", len(sizes), group=group)


def _send(x: Tensor, src: int, group: Group) -> Tensor:
    buffer = x.contiguous().clone()
    dist.broadcast(buffer, src, group=group)
    return buffer


def _keep_at(x: Tensor, src: int) -> Tensor:
    # A product with 0 would keep NaN and infinity on ranks whose values must not count.
    return x.clone() if dist.get_rank() == src else torch.zeros_like(x)


def _dimension(name: str, x: Tensor, dim: int) -> int:
    """Check a dimension and return it, counted from the front."""
    _check_tensor(name, x)
    dim = check_size("dim", dim, least=-sys.maxsize)  # this checks the type; the tensor has the bounds
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(
            f"{name} along dim={dim} needs a tensor with this dimension, and x has {x.dim()} dimensions"
            + ("" if x.dim() else ": use x.unsqueeze(0)")
        )
    return dim % x.dim()


def _check_tensor(name: str, x: Tensor, op: str | None = None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor, not a {type(x).__name__}")
    if op is not None and x.dtype is torch.bool:
        raise DTypeError(f"{name} with op={op!r} takes integers and floating numbers, and x is torch.bool: use x.int()")


def _check(name: str, x: Tensor, group: Group, grad: str = "replicate", **settings: Any) -> int:
    """Check that this rank is in the group, and once per case that all ranks pass the same; return the world size."""
    if grad not in ("replicate", "partial"):
        raise ValueError(f"grad={grad!r} is unknown: use 'replicate' or 'partial'")
    _check_tensor(name, x, settings.get("op"))
    ranks = ranks_of(group)
    shape = f"{x.dim()} dimensions" if name == "all_gather" else str(tuple(x.shape))
    case = {"the tensor": f"{x.dtype} {shape}", **describe_settings({**settings, "grad": grad})}
    # An exchange for each call would double the latency of small tensors, so a case is compared once.
    agreed = _agreed.setdefault(group or dist.group.WORLD, set())
    if len(ranks) > 1 and (key := (name, *case.values())) not in agreed and not isinstance(x, FakeTensor):
        with disable_dispatch_modes():  # CommunicationCounter must not count this exchange, which happens once
            agree(name, lambda: case, group, "pass every rank the same", "tensors or settings")
        agreed.add(key)
    return len(ranks)


def _shapes(x: Tensor, group: Group) -> list[tuple[int, ...]]:
    if is_fake(group):  # nothing is sent: assume that the tensors of all ranks have this shape
        return [tuple(x.shape)] * get_world_size(group)
    # A row has space for eight dimensions, because every rank has to send a row of the same length.
    shape_row = torch.tensor([x.dim(), *x.shape, *([0] * (8 - x.dim()))], device=x.device)
    rows = [torch.empty_like(shape_row) for _ in range(get_world_size(group))]
    dist.all_gather(rows, shape_row, group=group)
    return [tuple(row[1 : 1 + row[0]].tolist()) for row in rows]
