"""Context parallelism of a model: every linear attention in it exchanges states, and all else is computed by shard."""

__all__ = ["ContextParallelReport", "context_parallel"]

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from panther._text import format_table
from panther.distributed.comm.collectives import gather_states, send_to_next, sum_before
from panther.distributed.comm.mesh import groups_of
from panther.distributed.comm.ranks import Group, is_fake, ranks_of
from panther.distributed.sync.replicas import broadcast_model
from panther.errors import ShapeError
from panther.nn import AttentionState, LearnedLinearAttention, RandMultiHeadAttention, sinSRPE
from panther.nn.attention.feature_map import FeatureMap
from panther.nn.attention.interface import calls_interface
from panther.nn.attention.linearized import CHILD


@dataclass(frozen=True)
class ContextParallelReport:
    """The attention that :func:`context_parallel` shards along the sequence; ``print`` shows a table."""

    layers: tuple[tuple[str, str], ...]
    """Name and class of each attention that exchanges states."""
    ranks: int
    """Shards of a sequence."""

    def __str__(self) -> str:
        """Return a table with a line for each attention."""
        head = f"{len(self.layers)} attention layers over {self.ranks} ranks"
        return "\n".join((head, format_table([("attention", "kind"), *self.layers])))


def context_parallel(model: nn.Module, mesh: DeviceMesh | dist.ProcessGroup | None = None) -> ContextParallelReport:
    r"""Shard sequences over ranks: each rank passes its shard to the model and gets the outputs of its shard.

    The ranks hold consecutive shards of equal length, in the order of the group, for example
    ``x.chunk(world_size, dim=1)[rank]``. Causal linear attention then needs from earlier ranks only the sum
    :math:`\sum_j \phi(k_j) [v_j \mid 1]` over their keys, and the layers of :func:`panther.linearize_` also the keys
    and values of at most two blocks of the previous rank. These are the only messages: their size does not depend on
    the length of the sequence. All other layers are computed on the shard, and must treat positions one by one, as
    linear layers, norms and embeddings do; convolutions and recurrent layers do not.

    The outputs, and the gradients, are those of one process with the whole sequence, up to rounding. The losses of the
    ranks are the terms of a sum, so that a rank's gradients of parameters are terms too: sum them over the ranks. If
    each loss is a mean over the shard, average them, as :func:`data_parallel` over the same ranks does. Every rank must
    call backward.

    Positions: a model that counts its positions itself counts them from 0 on every rank. Pass the positions of the
    shard (``position_ids`` in transformers). ``sinSRPE`` of RandMultiHeadAttention counts on by itself. If the target
    is the next token, shift targets before sharding.

    Args:
        model: The model, equal on every rank; the first rank's weights are used. It is changed in place.
        mesh: One-dimensional DeviceMesh, or a process group; None is the world.

    Returns:
        A report of the attention that exchanges states.

    Raises:
        ValueError: If attention of the model is not linear, or there is none. Attention that a model computes without
            nn.MultiheadAttention or transformers' attention functions is not noticed: it sees its shard alone.
        TypeError: If the model or the mesh has a different type.
        DistributedError: On every rank, if models or arguments differ, or there is no process group. Later, in calls,
            if a rank has ended or is late.

    Calls raise ``ShapeError`` on every rank if shards differ in shape, and ``ValueError`` if attention is not causal,
    masks keys with a window, or continues a cache. A shard must have at least the positions that the next rank's window
    reaches back: ``window``, if shards are multiples of it, and otherwise up to ``2 window - 1``.

    Cost: for each layer, sequence and head, forward and again backward, D (E + 1) numbers to every other rank, and one
    for its units; for layers with a window also ``window`` to ``2 window`` keys and values to the next rank. Each layer
    compares the shapes of the shards first, 32 bytes a rank.

    Example:
        >>> import panther as pr, torch
        >>> pr.distributed.init()
        >>> model = torch.nn.TransformerEncoderLayer(
        ...     32, 4, 64, batch_first=True
        ... )
        >>> model.self_attn = pr.nn.RandMultiHeadAttention(32, 4, 40, seed=0)
        >>> print(context_parallel(model))
        1 attention layers over 1 ranks
        attention  kind
        self_attn  RandMultiHeadAttention
        >>> x, mask = (
        ...     torch.randn(2, 10, 32),
        ...     torch.nn.Transformer.generate_square_subsequent_mask(10),
        ... )
        >>> model(x, mask, is_causal=True).shape
        torch.Size([2, 10, 32])
        >>> pr.distributed.shutdown()

    References: W. Sun et al., "Linear attention sequence parallelism", 2024, arXiv:2404.02882, for the exchange of
    states between ranks.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"context_parallel takes a model, an nn.Module, not {type(model).__name__}")
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        raise TypeError(f"context_parallel takes a mesh of one axis, not {mesh.mesh_dim_names}: choose one, mesh['cp']")
    group: Any = groups_of(mesh)[0] if isinstance(mesh, DeviceMesh) else mesh
    attention = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FeatureMap | LearnedLinearAttention)
    }

    def settings() -> dict[str, Any]:
        _check(model, attention)
        return {"attention": ", ".join(attention)}

    broadcast_model(model, group, "context_parallel", settings)
    shards = SequenceShards(group)
    for module in attention.values():
        module.shards = shards
    layers = tuple((name, type(module).__name__) for name, module in attention.items())
    return ContextParallelReport(layers, shards.size)


def _check(model: nn.Module, attention: dict[str, Any]) -> None:
    exact = [
        name
        for name, module in model.named_modules()
        if not hasattr(module, CHILD) and (isinstance(module, nn.MultiheadAttention) or calls_interface(module))
    ]
    if exact:
        more = f" and {len(exact) - 1} more" if len(exact) > 1 else ""
        raise ValueError(
            f"{exact[0]!r}{more} is softmax attention, which needs all keys of the sequence on every rank: convert it "
            "by pr.linearize_ or to RandMultiHeadAttention first"
        )
    if not attention:
        raise ValueError(
            "the model has no linear attention: convert it by pr.linearize_, or use RandMultiHeadAttention"
        )
    for name, module in attention.items():
        if isinstance(module, RandMultiHeadAttention) and module.SRPE is not None and type(module.SRPE) is not sinSRPE:
            raise ValueError(
                f"{name!r} has relative positions by {type(module.SRPE).__name__}, which count from 0 on every rank: "
                "use sinSRPE or none"
            )


class SequenceShards:
    r"""The ranks of a group, in its order. They hold the equal, consecutive shards of a sequence, one each.

    Sums over keys have units, :math:`e^{u}` with the running maximum u of each rank: the sum before rank r is
    :math:`\sum_{s<r} e^{u_s - U_r} S_s` in units of the maximum :math:`U_r` of the ranks before it.
    """

    def __init__(self, group: Group = None) -> None:
        self.group = group
        self.size = len(ranks_of(group))
        self.rank = dist.get_rank(group)

    def check(self, keys: Tensor) -> None:
        """Raise on every rank if the shards differ in shape, from a message of 32 bytes in every call.

        Comparing each shape once would not notice a last batch that one rank has divided differently.
        """
        if is_fake(self.group):  # no other rank exists
            return
        rows = gather_states(torch.tensor(keys.shape, device=keys.device), self.group).tolist()
        if any(row != rows[0] for row in rows):
            shapes = ", ".join(map(str, map(tuple, rows)))
            raise ShapeError(
                "the shards of a sequence must have one shape (batch, heads, positions, width) on all ranks, and have "
                f"{shapes}: pad the sequence at its end to a multiple of the {self.size} ranks"
            )

    def state_before(self, state: AttentionState) -> AttentionState:
        """Return the state before this rank's shard, from the state of the shard alone."""
        sums, norms, num_keys = state.sums, state.norms, state.num_keys
        N, H = sums.shape[:2]
        units = sums.new_zeros(N, H, 1) if state.units is None else state.units
        # Numbers without derivatives: the units, and how many keys are not masked.
        numbers = units[..., 0] if num_keys is None else torch.cat((units[..., 0], num_keys.to(units.dtype)), -1)
        gathered = gather_states(numbers, self.group)  # (ranks, N, H or H + 1)
        weights, units = _weights_and_units(gathered[..., :H, None], self.rank)
        flat = sums.flatten(-2) if norms is None else torch.cat((sums.flatten(-2), norms), -1)
        flat = sum_before(flat, weights, self.group)
        if state.units is None:  # All units are 0, unless keys of other ranks are weighted by a mask of numbers.
            flat = flat * units.masked_fill(units == -torch.inf, 0).exp()
        norms = None if norms is None else flat[..., -1:]
        sums = flat[..., : sums.shape[-2] * sums.shape[-1]].unflatten(-1, sums.shape[-2:])
        if num_keys is not None:
            num_keys = gathered[: self.rank, :, H:].sum(0)
        state_units = None if state.units is None else units
        return AttentionState(sums, state_units, norms, num_keys, self.rank * state.length, state.feature_map)

    def sums_before(self, sums: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums (N, H, m, E + 1) over the ranks before this rank, and their units (N, H, 1)."""
        weights, units = _weights_and_units(gather_states(units, self.group), self.rank)
        return sum_before(sums.flatten(-2), weights, self.group).unflatten(-1, sums.shape[-2:]), units

    def from_previous(self, rows: Tensor, received_rows: int) -> Tensor:  # (rows, *) -> (received_rows, *)
        """Send rows to the next rank, and return the rows that the previous rank sends."""
        return send_to_next(rows, received_rows, self.group)

    def __deepcopy__(self, memo: Any) -> "SequenceShards":
        """Return the same object: copies of a model have the same ranks."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(  # a process group exists in one process
            "a model that is sharded along the sequence belongs to a process group and cannot be pickled: save its "
            "state_dict, or use pr.save_compressed"
        )


def _weights_and_units(units: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the weights of the sums of each rank before each rank, and the units before this rank.

    Weights (ranks, ranks, N, H, 1) are to be used for earlier ranks alone; units (N, H, 1) are -inf before the first.
    """
    maxima = torch.cat((torch.full_like(units[:1], -torch.inf), units.cummax(0).values[:-1]))
    finite_maxima = maxima.masked_fill(maxima == -torch.inf, 0)
    # The largest weight that is used is 1. Weights of later ranks are not used, and may be large.
    weights = (units[None] - finite_maxima[:, None]).clamp_max(0).exp()
    return weights, maxima[rank]
