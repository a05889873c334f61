"""Windows of streams of unknown length. Every process reads its own stream.

The forward passes of ranks may wait for each other, so all ranks must have the same number of batches in a step. In
every step the ranks exchange the number of their batches. A rank that has fewer batches repeats its last batch as a
*filler*, whose samples do not count, until the streams of all ranks have ended. So every sample of every stream is used
once.
"""

__all__ = ["Batch", "StreamWindows", "count_samples"]

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from panther._descriptions import digest_of_tensors
from panther._torch import tree_leaves
from panther.distributed import get_rank, get_world_size
from panther.distributed.comm.ranks import name_ranks
from panther.errors import ConfigError, DistributedError
from panther.train.coordination import gather_over_ranks

_log = logging.getLogger(__name__)


@dataclass
class Batch:
    """One batch on this process."""

    data: Any
    samples: int
    """Number of samples that count. It is 0 for a filler, which replaces a batch that only other processes have."""
    share: float
    """Number of samples divided by the samples of the window over all processes."""
    indices: list[int] | None
    """Indices of the samples in the dataset; None for a stream."""
    largest: int = 0
    """Number of samples of this batch on the process that has the most samples."""


class _Answer(NamedTuple):
    """The message of a rank about its next window."""

    data_rank: int
    """Number of the rank among the ranks that split the data. Ranks that share layers have the same number."""
    can_fill: bool
    digest: int
    sizes: tuple[int, ...]


class StreamWindows:
    """Read the windows of the stream of this process, for the settings of a Feed."""

    def __init__(self, feed: Any) -> None:
        self.accumulation, self.rank, self.size = feed.accumulation, feed.rank, feed.size
        self.even, self.multiple = feed.even, feed.multiple
        self.left_out, self.has_ended, self._is_compared = 0, False, False

    def read(self, loaded: Iterator[Any], last: Any, is_alone: bool = False) -> Iterator[list[Batch]]:
        """Yield the windows of an epoch; ``last`` is the batch before the first window, or None."""
        self.left_out, is_first = 0, True
        while True:
            window = list(islice(loaded, self.accumulation))
            self.has_ended = len(window) < self.accumulation
            last = window[-1] if window else last
            counts = [count_samples(data) for data in window]
            if is_alone or get_world_size() == 1:
                sizes, self._lacks_filler = [[count] for count in counts], False
            else:
                sizes = self._exchange(window, counts, last is not None)
            if not sizes:
                self.has_ended = False
                break
            if not self.even and self._lacks_filler:
                last = self._take_filler(last)
            window += [last] * (len(sizes) - len(window))
            pairs = zip(window, sizes, strict=True)
            used_batches = [(data, batch) for data, batch in pairs if not self.even or self._is_even(batch)]
            total = sum(sum(batch) for _, batch in used_batches)
            self.left_out += sum(map(sum, sizes)) - total
            if is_first and not used_batches:
                raise ConfigError(
                    "stages of a pipeline take batches of the same size on every process, a multiple of "
                    f"num_microbatches ({self.multiple}), and the first batches of the stream have "
                    f"{', '.join(map(str, sizes[0]))} samples: change the stream's batch size, and use drop_last"
                )
            is_first = False
            if used_batches:
                yield [Batch(data, n[self.rank], n[self.rank] / (total or 1), None, max(n)) for data, n in used_batches]
        if self.left_out and get_rank() == 0:
            _log.warning(
                "%d samples of the stream were left out in this epoch, because a pipeline takes batches of the same "
                "size on every process, a multiple of num_microbatches",
                self.left_out,
            )

    def _is_even(self, sizes: list[int]) -> bool:
        return len(set(sizes)) == 1 and sizes[0] > 0 and sizes[0] % self.multiple == 0

    def _exchange(self, window: list[Any], counts: list[int], can_fill: bool) -> list[list[int]]:
        """Return the sizes of the batches of a window: for each batch, a list with its size on each process."""
        is_shared = get_world_size() > self.size
        digest = digest_of_tensors(tree_leaves(window)) if is_shared or not self._is_compared else 0
        row = [self.rank, int(can_fill), digest, *counts, *[0] * (self.accumulation - len(counts))]
        answers = [_Answer(rank, bool(fills), number, tuple(n)) for rank, fills, number, *n in gather_over_ranks(row)]
        by_rank: dict[int, _Answer] = {}
        for rank, answer in enumerate(answers):
            if (first := by_rank.setdefault(answer.data_rank, answer))[2:] != answer[2:]:
                sharing = [other for other, also in enumerate(answers) if also.data_rank == answer.data_rank]
                raise DistributedError(
                    f"{name_ranks(sharing)} share layers or stages and must read the same batches, and their streams "
                    f"differ ({answers.index(first)} has sizes {first.sizes}, {rank} has {answer.sizes}): divide the "
                    f"stream among the {self.size} data-parallel ranks only, or use a dataset with a length"
                )
        if not self._is_compared and self.size > 1:
            self._warn_of_copies([by_rank[rank] for rank in sorted(by_rank)])
        self._is_compared = True
        self._answers = answers
        self._lacks_filler = not all(answer.can_fill for answer in answers)
        sizes = [by_rank[rank].sizes for rank in sorted(by_rank)]
        batches = [[of_rank[number] for of_rank in sizes] for number in range(self.accumulation)]
        return [batch for batch in batches if any(batch)]

    def _warn_of_copies(self, answers: list[_Answer]) -> None:
        if len({answer[2:] for answer in answers}) == 1 and any(answers[0].sizes):
            warnings.warn(
                f"the streams of all {self.size} data-parallel ranks begin with the same batch, so that samples may "
                "count several times: each rank reads its own stream, which must give the rank's share of the samples",
                UserWarning,
                stacklevel=2,
            )

    def _take_filler(self, last: Any) -> Any:
        """Return a batch from the first rank that has one, which ranks without batches can repeat."""
        source = next(rank for rank, answer in enumerate(self._answers) if answer.can_fill)
        empty = [rank for rank, answer in enumerate(self._answers) if not answer.can_fill]
        if get_rank() == 0:
            _log.warning("the stream of %s is empty, and others have samples: divide it evenly", name_ranks(empty))
        fillers = [last if get_rank() == source else None]
        dist.broadcast_object_list(fillers, src=source)
        return fillers[0] if last is None else last


def count_samples(data: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor."""
    for leaf in tree_leaves(data):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ConfigError("a batch holds no tensor with samples along its first dimension")
