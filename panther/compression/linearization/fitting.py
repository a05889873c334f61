r"""Learn the feature maps of one attention module, all heads at once, from recorded queries, keys and values.

The initial features are centres of the keys beyond the window. They are computed by k-means with the attention that a
key gets as its weight, so that a first position that gets most of the attention has a separate centre. Adam then lowers
the cross-entropy of the exact weights p and the approximate ones,

.. math:: -\sum_j p_{ij} \log \hat p_{ij},

over random queries, where the sum includes the keys within the window and beyond it.

Reference: the loss is that of M. Zhang et al., "The hedgehog and the porcupine", ICLR 2024, arXiv:2402.04347.
"""

__all__ = ["Quality", "Recorder", "Sample", "fit", "quality", "record", "split_layers"]

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from panther.compression.calibration.runner import Runner
from panther.nn import LearnedLinearAttention
from panther.nn.attention.learned import first_keys, window_masks


@dataclass(frozen=True)
class Sample:
    """One sequence of one attention module: queries (scaled), keys and values of the heads, (H, T, width) each.

    Attributes:
        key_mask: True where a key takes part, (T,), or None for all.
        causal: Whether a query sees only the keys up to its own position.
        queries: Positions of queries that have keys beyond the window and are not padding.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    causal: bool
    queries: Tensor

    @property
    def first(self) -> Tensor | None:
        """Position of the first key that takes part, from which blocks are counted; None is position 0."""
        return None if self.key_mask is None else first_keys(self.key_mask)


@dataclass
class Recorder:
    """A recorder of the calls of an attention module; see LearnedLinearAttention.recorder."""

    window: int
    keep: bool = True
    samples: list[Sample] = field(default_factory=list)
    refusal: str | None = None
    calls: int = 0
    longest: int = 0
    bytes: int = 0  # bytes of the operands of all calls

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool) -> None:
        """Count a call and, with ``keep``, store its sequences."""
        self.calls += 1
        self.longest = max(self.longest, q.shape[-2])
        self.bytes += q.nbytes + k.nbytes + v.nbytes
        if not (q.isfinite().all() and k.isfinite().all()):
            self.refuse("has queries or keys that are NaN or infinite on the calibration batches")
        if not self.keep:
            return
        for n in range(len(q)):
            mask = None if key_mask is None else key_mask[n % len(key_mask)]
            queries = far_queries(q.shape[-2], self.window, mask, causal, q.device)
            if len(queries):
                q_, k_, v_ = (x[n].detach().clone() for x in (q, k, v))
                self.samples.append(Sample(q_, k_, v_, mask, causal, queries))

    def refuse(self, reason: str) -> None:
        """Store the reason why the module cannot be converted; the first reason is kept."""
        self.refusal = self.refusal or reason


def far_queries(n: int, window: int, mask: Tensor | None, causal: bool, device: torch.device) -> Tensor:
    """Return the positions that are not padding and have keys beyond the window."""
    positions = torch.arange(n, device=device)
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
    counts = torch.cat((real.new_zeros(1, dtype=torch.long), real.cumsum(0)))  # real keys before each position
    first = first_keys(real)
    starts = (positions - first) // window * window + first  # of the blocks
    far = counts[(starts - window).clamp(0, n)] > 0
    if not causal:
        far |= counts[-1] > counts[(starts + 2 * window).clamp(0, n)]
    return positions[real & far]


def split_layers(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Yield groups of layers such that the samples of a group fit into ``limit`` bytes, unless it is a single layer."""
    group: list[str] = []
    group_bytes = 0
    for name, size in sizes.items():
        if group and group_bytes + size > limit:
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += size
    if group:
        yield group


@contextmanager
def recording(attentions: Mapping[str, LearnedLinearAttention], recorders: Mapping[str, Recorder]) -> Iterator[None]:
    """Attach the recorders within the block, in which attention is exact."""
    try:
        for name, attention in attentions.items():
            attention.recorder = recorders[name]
        yield
    finally:
        for attention in attentions.values():
            attention.recorder = None


@torch.no_grad()
def record(
    runner: Runner,
    batches: Sequence[object],
    attentions: Mapping[str, LearnedLinearAttention],
    keep: Sequence[str],
    window: int,
    description: str,
) -> dict[str, Recorder]:
    """Run the batches with exact attention in all modules, and return their recorders.

    Recorders store samples for the modules named in ``keep``, and only sizes for the remaining modules.
    """
    recorders = {name: Recorder(window, name in keep) for name in attentions}
    with recording(attentions, recorders):
        for batch in runner.over(batches, description):
            runner.output(batch)
    return recorders


_QUERIES = 64  # of each step
_ROWS = 128  # queries in each sequence from which the attention of keys is summed for the clustering
_KEYS = 2**14  # keys of a head in the clustering
_ROUNDS = 8  # iterations of k-means
_BETAS = (0.9, 0.95)
_WARM_UP = 20  # steps in which the learning rate rises


@dataclass(frozen=True)
class Quality:
    """Differences of approximate from exact attention; :class:`LinearizedLayer` describes them."""

    far_mass: float
    divergence: float
    error: float


@torch.enable_grad()
def fit(
    attention: LearnedLinearAttention, samples: Sequence[Sample], steps: int, learning_rate: float, seed: int
) -> None:
    """Learn the parameters of ``attention`` in place; they must be float32 or wider."""
    generator = torch.Generator().manual_seed(seed)
    _start(attention, samples, generator)
    parameters = list(attention.parameters())
    flags = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, betas=_BETAS)
    order = torch.randint(len(samples), (steps,), generator=generator).tolist()
    for step, index in enumerate(order):
        rate = min((step + 1) / _WARM_UP, (1 + math.cos(math.pi * step / steps)) / 2)
        optimizer.param_groups[0]["lr"] = learning_rate * rate
        sample = samples[index]
        positions = _draw(sample, _QUERIES, generator)
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
