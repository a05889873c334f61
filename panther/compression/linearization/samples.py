"""Record queries, keys and values of attention modules from the calibration batches, a few layers at a time."""

__all__ = ["Recorder", "Sample", "record", "split_layers"]

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from panther.compression.calibration.runner import Runner
from panther.nn import LearnedLinearAttention
from panther.nn.attention.learned import first_keys


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
