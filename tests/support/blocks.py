"""A transformer block of the usual kind: norms, attention by heads, and a feed-forward block with a gate."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel

from panther.distributed import ColwiseSKParallel, RowwiseSKParallel


class Attention(nn.Module):
    def __init__(self, make, width, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (make(width, width) for _ in range(4))

    def forward(self, x, other=None):
        keys = x if other is None else other
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer, y in ((self.q_proj, x), (self.k_proj, keys), (self.v_proj, keys))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=other is None)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, make, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = make(width, inner), make(width, inner), make(inner, width)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """``make(in, out)`` builds the layers."""

    _tp_plan: ClassVar = {
        **{f"self_attn.{name}_proj": "colwise" for name in "qkv"}, "self_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise",
    }  # fmt: skip

    def __init__(self, make, width=24, inner=36, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.LayerNorm(width)
        self.self_attn, self.mlp = Attention(make, width, heads), Gated(make, width, inner)

    def forward(self, x, other=None):
        x = x + self.self_attn(self.norm1(x), other)
        return x + self.mlp(self.norm2(x))


def block(make, seed=0, **sizes):
    torch.manual_seed(seed)
    return Block(make, **sizes)


def sequence_plan():
    """Shard the sequence wherever neither heads nor features are sharded."""
    rowwise = RowwiseSKParallel(output_layouts=Shard(1))
    return {
        "norm?": SequenceParallel(use_local_output=True),
        "self_attn.[qkv]_proj": ColwiseSKParallel(input_layouts=Shard(1)), "self_attn.o_proj": rowwise,
        "mlp.gate_proj": ColwiseSKParallel(input_layouts=Shard(1)),
        "mlp.up_proj": ColwiseSKParallel(input_layouts=Shard(1)), "mlp.down_proj": rowwise,
    }  # fmt: skip
