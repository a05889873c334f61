r"""Learn the feature maps of one attention module, all heads at once, from recorded queries, keys and values.

The initial features are centres of the keys beyond the window. They are computed by k-means with the attention that a
key gets as its weight, so that a first position that gets most of the attention has a separate centre. Adam then lowers
the cross-entropy of the exact weights p and the approximate ones,

.. math:: -\sum_j p_{ij} \log \hat p_{ij},

over random queries, where the sum includes the keys within the window and beyond it.

Reference: the loss is that of M. Zhang et al., "The hedgehog and the porcupine", ICLR 2024, arXiv:2402.04347.
"""

__all__ = ["FitConfig", "Quality", "fit", "quality"]

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from panther.compression.linearization.samples import Sample
from panther.nn import LearnedLinearAttention
from panther.nn.attention.learned import window_masks

_ROWS = 128  # queries in each sequence from which the attention of keys is summed for the clustering
_KEYS = 2**14  # keys of a head in the clustering
_ROUNDS = 8  # iterations of k-means
_BETAS = (0.9, 0.95)
_WARM_UP = 20  # steps in which the learning rate rises


@dataclass(frozen=True)
class FitConfig:
    """Number of steps of Adam, peak of its learning rate, and number of queries in each step."""

    steps: int = 300
    learning_rate: float = 3e-2
    rows: int = 64


@dataclass(frozen=True)
class Quality:
    """Differences of approximate from exact attention, on queries that have keys beyond the window.

    Attributes:
        far_mass: Share of the exact attention weights beyond the window.
        divergence: Kullback-Leibler divergence of the weights, in nats.
        error: Relative error of the output.
    """

    far_mass: float
    divergence: float
    error: float


@torch.enable_grad()
def fit(attention: LearnedLinearAttention, samples: Sequence[Sample], config: FitConfig, seed: int) -> None:
    """Learn the parameters of ``attention`` in place; they must be float32 or wider."""
    generator = torch.Generator().manual_seed(seed)
    _start(attention, samples, generator)
    parameters = list(attention.parameters())
    flags = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(parameters, lr=config.learning_rate, betas=_BETAS)
    order = torch.randint(len(samples), (config.steps,), generator=generator).tolist()
    for step, index in enumerate(order):
        rate = min((step + 1) / _WARM_UP, (1 + math.cos(math.pi * step / config.steps)) / 2)
        optimizer.param_groups[0]["lr"] = config.learning_rate * rate
        sample = samples[index]
        positions = _draw(sample, config.rows, generator)
        exact, approximate, visible = _weights(attention, sample, positions)
        # A weight of 0 times a logarithm of -inf is NaN.
        loss = -(exact * approximate.masked_fill(~visible, 0)).sum(-1).mean()
        # `inputs`, because the graph can contain further parameters, such as a projection that is healed.
        optimizer.zero_grad()
        loss.backward(inputs=parameters)
        optimizer.step()
    for parameter, flag in zip(parameters, flags, strict=True):
        parameter.grad = None
        parameter.requires_grad_(flag)


@torch.no_grad()
def quality(attention: LearnedLinearAttention, samples: Sequence[Sample], seed: int, rows: int = 256) -> Quality:
    """Compare exact and approximate attention on random queries of held-out sequences."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(5, dtype=torch.float64)
    for sample in samples:
        positions = _draw(sample, rows, generator)
        exact, approximate, visible = _weights(attention, sample, positions)
        near, _ = window_masks(positions, sample.k.shape[-2], attention.window, sample.causal, sample.first)
        v = sample.v.to(exact.dtype)
        y = exact @ v
        divergence = torch.special.xlogy(exact, exact) - exact * approximate.masked_fill(~visible, 0)
        error = approximate.exp() @ v - y
        figures = (exact.masked_fill(near, 0).sum(), divergence.sum(), error.square().sum(), y.square().sum())
        sums += torch.tensor([*map(float, figures), exact[..., 0].numel()], dtype=torch.float64)
    mass, divergence_, lost, total, count = sums.tolist()
    return Quality(mass / count, divergence_ / count, math.sqrt(lost / total) if total else 0.0)


def _draw(sample: Sample, rows: int, generator: torch.Generator) -> Tensor:
    indices = torch.randperm(len(sample.queries), generator=generator)[:rows]
    return sample.queries[indices.to(sample.queries.device)]


def _weights(attention: LearnedLinearAttention, sample: Sample, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exact weights, logarithms of approximate weights, and the mask of visible keys, (H, rows, T) each."""
    dtype = torch.promote_types(sample.q.dtype, torch.float32)
    q, k = sample.q[:, positions].to(dtype), sample.k.to(dtype)
    mask = None if sample.key_mask is None else sample.key_mask[None]
    logits = attention.scores(q[None], k[None], positions, sample.causal, mask)[0]
    visible = logits > -torch.inf
    exact = (q @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1)
    return exact, logits.log_softmax(-1), visible


@torch.no_grad()
def _start(attention: LearnedLinearAttention, samples: Sequence[Sample], generator: torch.Generator) -> None:
    """Initialize the features with centres of the keys that get attention beyond the window."""
    keys, weights = [], []
    share = max(1, _KEYS // len(samples))
    for sample in samples:
        positions = _draw(sample, _ROWS, generator)
        dtype = attention.query_weight.dtype
        q, k = sample.q[:, positions].to(dtype), sample.k.to(dtype)
        near, visible = window_masks(positions, k.shape[-2], attention.window, sample.causal, sample.first)
        if sample.key_mask is not None:
            visible = visible & sample.key_mask
        mass = (q @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(near, 0).sum(-2)  # (H, T)
        top = mass.topk(min(share, mass.shape[-1]))
        keys.append(k.gather(1, top.indices[..., None].expand(-1, -1, k.shape[-1])))
        weights.append(top.values)
    for head, (K, weight) in enumerate(zip(torch.cat(keys, 1), torch.cat(weights, 1), strict=True)):
        centres = _cluster(K, weight, attention.num_features, generator)
        attention.query_weight[head] = centres
        attention.key_weight[head] = centres
        attention.key_bias[head] = -centres.square().sum(-1) / 2
    for parameter in (attention.query_bias, attention.key_scale, attention.key_offset):
        parameter.zero_()


def _cluster(K: Tensor, weight: Tensor, count: int, generator: torch.Generator) -> Tensor:  # (n, d), (n,) -> (count, d)
    weight = weight.clamp_min(0) + 1e-9 * weight.max().clamp_min(1e-9)
    first_keys = torch.multinomial(weight.cpu(), count, replacement=len(K) < count, generator=generator)
    centres = K[first_keys.to(K.device)].clone()
    for _ in range(_ROUNDS):
        nearest = torch.cdist(K, centres).argmin(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, K * weight[:, None])
        mass = torch.zeros_like(weight[:1]).expand(count).clone().index_add_(0, nearest, weight)[:, None]
        centres = torch.where(mass > 0, sums / mass.clamp_min(torch.finfo(K.dtype).tiny), centres)
    return centres
