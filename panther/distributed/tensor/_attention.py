"""Attention sharded by heads over the ranks of a mesh axis: RandMultiHeadAttention and nn.MultiheadAttention.

Every rank projects, attends and projects back with its own heads, and the outputs are summed.
"""

__all__ = ["HeadwiseMultiheadAttention", "HeadwiseRandAttention", "heads_refusal", "shard_heads_"]

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from panther._torch import buffers_of, parameters_of
from panther.distributed.comm.collectives import (
    all_gather,
    all_reduce,
    sum_in_backward,
    sum_together_in_backward,
)
from panther.distributed.comm.mesh import chunk_ranges
from panther.distributed.tensor._module import (
    ShardedModule,
    become_,
    distribute,
    local_parameters,
    local_tensor,
    shard_parameter_,
)
from panther.errors import ShapeError, check_size
from panther.nn import RandMultiHeadAttention
from panther.nn.attention.decoding.states import AttentionState


class HeadwiseAttention(ShardedModule):
    """Base of both classes: attention sharded by heads."""

    action = "heads sharded"
    local_heads: range
    """The heads of this rank."""

    def enter(self, *inputs: Tensor) -> list[Tensor]:
        """Return the inputs, whose gradients are summed over the ranks, because each rank computes a part of them.

        The gradient of a tensor that is passed more than once, as in self-attention, is sent once.
        """
        entered = {id(x): x for x in inputs}
        entered = {key: sum_in_backward(x, self.tp_group) for key, x in entered.items()}
        return [entered[id(x)] for x in inputs]


class HeadwiseRandAttention(HeadwiseAttention, RandMultiHeadAttention):
    """Random-feature attention, sharded by heads. Each rank draws the random directions of its heads."""

    placements: ClassVar[Mapping[str, Placement]] = {
        **dict.fromkeys(("Wq", "Wk", "Wv", "bq", "bk", "bv"), Shard(0)), "W0": Shard(1),
    }  # fmt: skip

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Attend with this rank's heads, and sum."""
        query, key, value = self.enter(query, key, value)
        with self._local_heads() as bias:
            output, _ = super().forward(query, key, value, *args, **kwargs)
        return self._summed(output, bias), None

    def init_state(self, batch_size: int) -> AttentionState:
        """Return the state of this rank's heads before the first token."""
        check_size("batch_size", batch_size, least=0)
        like = self.local("Wq").new_empty(batch_size, len(self.local_heads), 0, self.head_dim)
        return self._first_state(like, like)

    def step(
        self, x: Tensor, state: AttentionState, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        """Attend from the next tokens with this rank's heads, and sum; the state is of this rank's heads."""
        (x,) = self.enter(x)
        with self._local_heads() as bias:
            output, state = super().step(x, state, key_padding_mask)
        return self._summed(output, bias), state

    @contextmanager
    def _local_heads(self) -> Iterator[Tensor | None]:
        """Use this rank's shards of parameters and directions, and no output bias, which is yielded."""
        bias, directions = self.local("b0"), self.local("directions")
        center = self.local("center") if "center" in buffers_of(self) else None
        with local_parameters(self):
            # The bias is added once, after the sum. nn.Module looks up parameters before buffers of the same name.
            parameters_of(self).update(b0=None, directions=directions)
            if "center" in buffers_of(self):
                parameters_of(self).update(center=center)
            yield bias

    def _summed(self, output: Tensor, bias: Tensor | None) -> Tensor:
        output = all_reduce(output, group=self.tp_group)
        return output if bias is None else output + bias.to(output.dtype)

    def _heads(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # (N, n, in) -> (N, H here, n, d)
        return F.linear(x, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _draw_directions(self) -> None:
        if self.directions is None:
            return
        with torch.no_grad():  # a rank draws the same directions for its heads as the unsharded layer
            directions = self.local("directions")
            # While materialize_ draws a layer in full, the directions of all heads are drawn.
            heads = range(self.num_heads) if len(directions) == self.num_heads else self.local_heads
            directions.copy_(self._current_directions(heads))


class HeadwiseMultiheadAttention(HeadwiseAttention, nn.MultiheadAttention):
    """torch's attention, sharded by heads.

    Its packed projection is one parameter, in which the rows of some heads are not contiguous. It stays replicated,
    each rank uses its heads' rows, and the gradient is summed. The output projection is sharded.
    """

    placements: ClassVar[Mapping[str, Placement]] = {
        **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), Shard(0)), "out_proj.weight": Shard(1),
    }  # fmt: skip

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as nn.MultiheadAttention does; the returned attention weights include all heads."""
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint about attn_mask: pass the causal mask too")
        query, key, value = self.enter(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), *self._rows(), strict=True)
        )  # (N, heads here, n, d)
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            logits = q @ k.mT / math.sqrt(self.head_dim)
            weights = F.dropout((logits if mask is None else logits + mask).softmax(-1), dropout)
            attended = weights @ v
            if average_attn_weights:
                weights = all_reduce(weights.sum(1) / self.num_heads, group=self.tp_group)
            else:
                weights = all_gather(weights, 1, self.tp_group)
            weights = weights if batched else weights[0]
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        partial = F.linear(attended.transpose(1, 2).flatten(2), local_tensor(self.out_proj.weight))
        output = all_reduce(partial, group=self.tp_group)
        # The bias is added after the sum, because otherwise every rank would add it.
        if self.out_proj.bias is not None:
            output = output + local_tensor(self.out_proj.bias).to(output.dtype)
        if not batched:
            return output[0], weights
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _rows(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Return weights and biases of this rank's heads, for queries, keys and values."""
        names = ("in_proj_weight", "in_proj_bias") if self._qkv_same_embed_dim else ("in_proj_bias",)
        packed = [self.local(name) for name in names if getattr(self, name) is not None]
        # Each rank uses some rows of these tensors, whose gradients are summed in one message.
        packed = sum_together_in_backward(packed, self.tp_group)
        start, stop = self.local_heads.start * self.head_dim, self.local_heads.stop * self.head_dim
        rows = [x.unflatten(0, (3, self.embed_dim))[:, start:stop].unbind(0) for x in packed]
        if not self._qkv_same_embed_dim:
            rows.insert(0, tuple(self.local(name) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")))
        return rows[0], rows[1] if len(rows) > 1 else (None,) * 3

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Return the mask to add to the logits of this rank's heads."""
        total = None
        if attn_mask is not None:
            total = _additive(attn_mask, q.dtype)
            if total.dim() == 3:  # (N all heads, L, S)
                total = total.unflatten(0, (-1, self.num_heads))[:, self.local_heads.start : self.local_heads.stop]
        if key_padding_mask is not None:
            added = _additive(key_padding_mask, q.dtype)[:, None, None]
            total = added if total is None else total + added
        return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Any:
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
    return mask.to(dtype)


def shard_heads_(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard an attention that is equal on all ranks by heads, in place; nothing is sent."""
    if reason := heads_refusal(module, mesh.size()):
        raise (ShapeError if "ranks" in reason else TypeError)(f"{type(module).__name__} {reason}")
    heads = chunk_ranges(module.num_heads, mesh.size())[mesh.get_local_rank()]  # type: ignore[arg-type]
    kind = HeadwiseRandAttention if isinstance(module, RandMultiHeadAttention) else HeadwiseMultiheadAttention
    become_(module, kind, mesh, local_heads=heads)
    for name in [name for name, _ in module.named_parameters()]:
        owner, _, own_name = name.rpartition(".")
        shard_parameter_(module.get_submodule(owner), own_name, mesh, kind.placement(name))
    if isinstance(module, RandMultiHeadAttention) and module.directions is not None:
        module.directions = distribute(module.directions, mesh, Shard(0))
        if "center" in buffers_of(module):
            module.center = distribute(module.center, mesh, Shard(0))
    return module


def heads_refusal(module: nn.Module, ranks: int) -> str | None:
    """Return why the heads of an attention cannot be sharded over ``ranks`` ranks, or None if they can."""
    if type(module) not in (RandMultiHeadAttention, nn.MultiheadAttention):
        return "is not an attention whose heads can be sharded: name its projections"
    if module.num_heads % ranks:  # type: ignore[operator]
        return f"has {module.num_heads} heads, which are not a multiple of the {ranks} ranks"
    if isinstance(module, nn.MultiheadAttention):
        appends = module.bias_k is not None or module.add_zero_attn
        return "has add_bias_kv or add_zero_attn" if appends else None
    return "has relative positions of all heads" if module.SRPE is not None else None
