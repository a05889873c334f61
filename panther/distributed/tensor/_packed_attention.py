"""torch's nn.MultiheadAttention cut by heads over the ranks of one mesh axis.

Its packed projection is one parameter, whose rows of a few heads are no contiguous part: it stays whole on every rank,
which uses its heads' rows, and the gradient is summed. The output's projection is cut.
"""

__all__ = ["HeadwiseMultiheadAttention", "cannot_cut_packed_heads", "shard_packed_heads_"]

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from panther.distributed.comm._chunks import chunk_ranges
from panther.distributed.comm.collectives import all_gather, all_reduce, sum_in_backward
from panther.distributed.tensor._module import ShardedModule, local_part, shard_parameter_
from panther.distributed.tensor._record import remember_
from panther.nn._sketched import keep_own_forward


class HeadwiseMultiheadAttention(ShardedModule, nn.MultiheadAttention):
    """Every rank attends with its heads, and the outputs are summed."""

    heads: range
    """The heads of this rank."""

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
        """Attend, as nn.MultiheadAttention does; the weights are those of all heads."""
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True says what attn_mask is: pass the causal mask too")
        entered: dict[int, Tensor] = {}
        for x in (query, key, value):
            if id(x) not in entered:
                entered[id(x)] = sum_in_backward(x, self.tp_group)
        query, key, value = (entered[id(x)] for x in (query, key, value))
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            F.linear(x, *self._rows(i)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for i, x in enumerate((query, key, value))
        )  # (N, heads here, n, d)
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            logits = q @ k.mT / math.sqrt(self.head_dim)
            weights = F.dropout((logits if mask is None else logits + mask).softmax(-1), dropout)
            attended = weights @ v
            weights = self._of_all_heads(weights, average_attn_weights)
            weights = weights if batched else weights[0]
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        partial = F.linear(attended.transpose(1, 2).flatten(2), local_part(self.out_proj.weight))
        output = all_reduce(partial, group=self.tp_group)
        if self.out_proj.bias is not None:
            output = output + local_part(self.out_proj.bias).to(output.dtype)
        if not batched:
            return output[0], weights
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _rows(self, i: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of this rank's heads, of queries, keys or values."""
        start, stop = self.heads.start * self.head_dim, self.heads.stop * self.head_dim
        packed = slice(i * self.embed_dim + start, i * self.embed_dim + stop)
        if self._qkv_same_embed_dim:
            weight = sum_in_backward(self.local("in_proj_weight"), self.tp_group)[packed]
        else:
            weight = self.local(("q_proj_weight", "k_proj_weight", "v_proj_weight")[i])
        bias = self.local("in_proj_bias")
        return weight, None if bias is None else sum_in_backward(bias, self.tp_group)[packed]

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """What is added to the logits of this rank's heads."""
        total = None
        if attn_mask is not None:
            added = _added(attn_mask, q.dtype)
            if added.dim() == 3:  # (N all heads, L, S)
                added = added.unflatten(0, (-1, self.num_heads))[:, self.heads.start : self.heads.stop]
            total = added
        if key_padding_mask is not None:
            added = _added(key_padding_mask, q.dtype)[:, None, None]
            total = added if total is None else total + added
        return total

    def _of_all_heads(self, weights: Tensor, average: bool) -> Tensor:
        if average:
            return all_reduce(weights.sum(1) / self.num_heads, group=self.tp_group)
        return all_gather(weights, 1, self.tp_group)


def shard_packed_heads_(module: nn.MultiheadAttention, mesh: DeviceMesh) -> nn.Module:
    """Cut such an attention by heads, in place; that the ranks divide them is the caller's to check."""
    remember_(module, ("tp_mesh", "heads", "summed"))
    module.__class__ = HeadwiseMultiheadAttention
    assert isinstance(module, HeadwiseMultiheadAttention)
    module.tp_mesh, module.heads = mesh, chunk_ranges(module.num_heads, mesh.size())[mesh.get_local_rank()]
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        shard_parameter_(module, name, mesh, Shard(0))
    for owner, name, placement in (
        (module, "in_proj_weight", Replicate()),
        (module, "in_proj_bias", Replicate()),
        (module.out_proj, "weight", Shard(1)),
        (module.out_proj, "bias", Replicate()),
    ):
        shard_parameter_(owner, name, mesh, placement)
    module.register_forward_pre_hook(keep_own_forward)
    return module


def cannot_cut_packed_heads(module: nn.MultiheadAttention) -> str | None:
    """Why such an attention cannot be cut by heads, if the ranks divide them, or None."""
    if module.bias_k is not None or module.add_zero_attn:
        return "has add_bias_kv or add_zero_attn"
    return None


def _added(mask: Tensor, dtype: torch.dtype) -> Any:
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
    return mask.to(dtype)
