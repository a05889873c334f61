"""A mixture of experts with stacked weights, as transformers has them, without transformers."""

import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    """Experts with a gate, computed one after another, with the attributes that transformers sets."""

    has_post_expert_norm = False

    def __init__(self, count, width, inner, *, transposed=False, bias=False):
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = True, bias, transposed
        self.num_experts = count

        def weight(rows, columns):
            matrix = torch.randn(count, rows, columns) / columns**0.5
            return nn.Parameter(matrix.mT.contiguous() if transposed else matrix)

        self.gate_up_proj = weight(2 * inner, width)
        if bias:
            self.gate_up_proj_bias = nn.Parameter(0.1 * torch.randn(count, 2 * inner))
        self.down_proj = weight(width, inner)
        if bias:
            self.down_proj_bias = nn.Parameter(0.1 * torch.randn(count, width))

    def _apply_gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _product(self, name, x, expert):
        weight = getattr(self, name)[expert]
        y = x @ (weight if self.is_transposed else weight.mT)
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y

    def forward(self, hidden_states, top_k_index, top_k_weights):
        total = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique():
            tokens, places = torch.where(top_k_index == expert)
            y = self._product("gate_up_proj", hidden_states[tokens], expert)
            y = self._product("down_proj", self._apply_gate(y), expert)
            total.index_add_(0, tokens, y * top_k_weights[tokens, places, None])
        return total


class Mixture(nn.Module):
    """A router that chooses two experts, or one, for each token; experts in ``unused`` are never chosen."""

    def __init__(self, experts, width, unused=()):
        super().__init__()
        self.router = nn.Linear(width, experts.num_experts, bias=False)
        self.experts = experts
        self.unused = list(unused)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        scores = self.router(tokens)
        scores[:, self.unused] = -torch.inf
        weights, index = scores.softmax(-1).topk(min(2, scores.shape[1]))
        return x + self.experts(tokens, index, weights).view_as(x)


class Mixtures(nn.Module):
    """Two mixtures and a head. ``attention_mask`` is only read by pr.compress."""

    def __init__(self, count=4, width=24, inner=20, *, unused=(), layers=2, experts=Experts, **options):
        super().__init__()
        self.layers = nn.ModuleList(
            Mixture(experts(count, width, inner, **options), width, unused) for _ in range(layers)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixtures(seed=0, **options):
    torch.manual_seed(seed)
    return Mixtures(**options).eval()


def sequences(count=12, width=24, seed=1):
    mixing = torch.randn(10, width, generator=torch.Generator().manual_seed(0)) / 10**0.5
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(8, 10, 10, generator=generator) @ mixing + 0.1 * torch.randn(8, 10, width, generator=generator)
        for _ in range(count)
    ]
