"""The data of a run as windows of batches, in an order that follows from seed and epoch and can be entered anywhere.

A window is what one step of the optimizer sees: ``accumulation`` batches a process. Sample i of the order goes to
process i modulo the processes, so that n processes with batches of b see together, step by step, what one with batches
of n b sees. Nothing is padded or dropped: the last batches are smaller, and every loss is weighted by its samples.
"""

__all__ = ["Batch", "Feed"]

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from panther.errors import ConfigError, DistributedError
from panther.train.drawing import kept_generators, seed_generators

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class Batch:
    """One batch of this process."""

    data: Any
    samples: int
    """Those that count; 0 for a batch that is only there because the other processes have one more."""
    share: float
    """Of the samples of the window, over all processes."""
    indices: list[int] | None
    """Of its samples in the dataset; None where it has none."""


class _Indices(list[int]):
    """Indices of a batch, and the seed of whatever is random in fetching them."""

    def __init__(self, indices: Sequence[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> Any:
        return _Indices, (list(self), self.seed)


class _Seeded(Dataset[Any]):
    """A dataset in a worker process: what is random there follows from the batch, not from what was fetched before."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: _Indices) -> list[Any]:
        seed_generators(indices.seed)
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(list(indices))
        return [self.dataset[index] for index in indices]


class _Shielded:
    """What a worker of a DataLoader runs first: a signal to the whole group must not end it before the step is over.

    Only the first is passed over, so that a worker that hangs can be ended.
    """

    def __init__(self, then: Any) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: signal.signal(number, signal.SIG_DFL))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if self.then is not None:
            self.then(worker)


@contextmanager
def _signals_held(loader: Any) -> Iterator[None]:
    """While a loader starts its workers: they inherit that signals wait, until they can pass over them."""
    if not isinstance(getattr(loader, "worker_init_fn", None), _Shielded):
        yield
        return
    if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
        resource_tracker.ensure_running()  # when it starts, it lets signals go
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Order:
    """What a DataLoader takes for its batch sampler: this process's batches of the present epoch."""

    def __init__(self) -> None:
        self.batches: list[_Indices] = []

    def __iter__(self) -> Iterator[_Indices]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Feed:
    """Windows of batches for one process.

    Args:
        data: A DataLoader, whose sampler says the order and whose other settings are kept; or a Dataset. Of a stream,
            that is an IterableDataset, or a loader that iterates in a way of its own, every process takes what its
            own loader gives it, from the place that its ``load_state_dict`` sets, if it has one.
        batch_size: For a Dataset; a DataLoader must have the same if it is to train on.
        seed: Of the order.
        rank: This process, among those that split the data.
        size: Processes that split the data.
        accumulation: Batches a window.
        even: Leave out the samples that do not fill a window's batches.
        shuffle: For a Dataset: whether its order is random.

    Raises:
        ConfigError: If ``data`` is neither, or the size of batches is not said, or said twice.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None,
        seed: int,
        rank: int,
        size: int,
        accumulation: int = 1,
        even: bool = False,
        shuffle: bool = True,
    ) -> None:
        keeps_own_state = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        if not isinstance(data, DataLoader) and not (keeps_own_state and hasattr(data, "__iter__")):
            if not isinstance(data, Dataset):
                raise ConfigError(f"the data must be a DataLoader or a Dataset, not a {type(data).__name__}")
            if batch_size is None:
                raise ConfigError("a Dataset needs batch_size in the configuration, or pass a DataLoader")
            data = DataLoader(data, batch_size, shuffle=None if isinstance(data, IterableDataset) else shuffle)
        self.seed, self.rank, self.size, self.accumulation, self.even = seed, rank, size, accumulation, even
        self.user_loader: Any = data
        own = getattr(data, "batch_size", None)
        if shuffle and batch_size is not None and own is not None and own != batch_size:
            raise ConfigError(f"batch_size={batch_size} and a loader with batches of {own}: leave batch_size out")
        self.streams = _streams(data)
        self._order = _Order()
        if isinstance(data, DataLoader) and data.num_workers and not isinstance(data.worker_init_fn, _Shielded):
            data.worker_init_fn = _Shielded(data.worker_init_fn)
        self.loader: Any = data if self.streams else self._own_loader(data)
        self.keeps_own_state = self.streams and keeps_own_state
        self._placed = False  # by load_state_dict

    def _own_loader(self, data: DataLoader[Any]) -> DataLoader[Any]:
        if data.batch_size is None and data.batch_sampler is None:
            raise ConfigError("a DataLoader with batch_size=None has no batches: give it batch_size or batch_sampler")
        workers = data.num_workers
        return DataLoader(
            _Seeded(data.dataset) if workers else data.dataset,
            batch_sampler=self._order,
            num_workers=workers,
            collate_fn=data.collate_fn,
            pin_memory=data.pin_memory,
            timeout=data.timeout,
            worker_init_fn=data.worker_init_fn,
            multiprocessing_context=data.multiprocessing_context,
            generator=torch.Generator(),  # its workers' seeds must not come from the generator of the run
            prefetch_factor=data.prefetch_factor,
            persistent_workers=data.persistent_workers,
        )

    @property
    def window_samples(self) -> int:
        """Samples of a full window over all processes; batches, where these have no one size."""
        return (getattr(self.user_loader, "batch_size", None) or 1) * self.size * self.accumulation

    def steps(self) -> int | None:
        """Windows an epoch, None where nobody knows."""
        return None if self.streams else len(self._plan(0))

    def nothing(self, name: str) -> ConfigError:
        """What to raise if there are no windows."""
        if self.streams or not len(self.user_loader.dataset):
            return ConfigError(f"the {name} data is empty")
        return ConfigError(
            f"the {name} data's {len(self.user_loader.dataset)} samples are fewer than a batch on all processes "
            f"has ({self.window_samples // self.accumulation}), and smaller batches are left out: lower batch_size, or "
            "leave out drop_last or the pipeline"
        )

    def windows(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """Windows of an epoch from the ``start``-th on.

        The generators of the run are as they were after this call until the first batch is fetched.
        """
        if self.streams:
            return self._streamed(start)
        plan, workers = self._plan(epoch)[start:], self.loader.num_workers
        self._order.batches = [
            _Indices(mine or batch[:1], _mix(self.seed, epoch, start + step, number, self.rank) if workers else 0)
            for step, window in enumerate(plan)
            for number, (mine, batch) in enumerate((batch[self.rank :: self.size], batch) for batch in window)
        ]
        with _signals_held(self.loader):
            return self._planned(plan, iter(self.loader))

    def _planned(self, plan: list[list[list[int]]], loaded: Iterator[Any]) -> Iterator[list[Batch]]:
        for window in plan:
            total = sum(map(len, window))
            batches = []
            for batch in window:
                mine = batch[self.rank :: self.size]
                batches.append(Batch(next(loaded), len(mine), len(mine) / total, mine))
            yield batches

    def _plan(self, epoch: int) -> list[list[list[int]]]:
        """Indices of all processes: a list of windows of batches."""
        loader = self.user_loader
        sampler: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
        with kept_generators():
            seed_generators(_mix(self.seed, epoch))
            whole = _order_of(sampler, epoch)
        if loader.batch_size is None:  # the user's own batches: every process takes one of as many as there are
            groups = [whole[i : i + self.size] for i in range(0, len(whole), self.size)]
            batches = [_interleaved(group, self.size) for group in groups if len(group) == self.size or not self.even]
        else:
            per_step = loader.batch_size * self.size
            batches = [whole[i : i + per_step] for i in range(0, len(whole), per_step)]
            if batches and len(batches[-1]) < per_step and (self.even or loader.drop_last):
                batches.pop()
        return [batches[i : i + self.accumulation] for i in range(0, len(batches), self.accumulation)]

    def _streamed(self, start: int) -> Iterator[list[Batch]]:
        """What the user's loader gives, without a plan; where it was told its place, nothing is skipped."""
        with _signals_held(self.loader):
            loaded = iter(self.loader)
        if not self._placed:
            for _ in islice(loaded, start * self.accumulation):
                pass
        self._placed = False
        return self._counted(loaded)

    def _counted(self, loaded: Iterator[Any]) -> Iterator[list[Batch]]:
        while window := list(islice(loaded, self.accumulation)):
            counts = [_count(data) for data in window]
            yield [
                Batch(data, count, count / sum(counts) / self.size, None)
                for data, count in zip(window, counts, strict=True)
            ]

    def state_dict(self) -> Any:
        """The user's loader's own state, None where the place in the epoch is enough."""
        return self.loader.state_dict() if self.keeps_own_state else None

    def load_state_dict(self, state: Any) -> None:
        """Take up what :meth:`state_dict` gave."""
        if state is not None and self.keeps_own_state:
            self.loader.load_state_dict(state)
            self._placed = True


def _streams(data: Any) -> bool:
    """Whether a loader's order is its own affair; torchdata's over a map-style dataset has that of its sampler."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return True
    return type(data).__iter__ is not DataLoader.__iter__ and not type(data).__module__.startswith("torchdata.")


def _order_of(sampler: Any, epoch: int) -> list[Any]:
    """All that a sampler gives in an epoch, the same on every process."""
    if isinstance(sampler, DistributedSampler):  # it would split the order, which is done here
        size = len(sampler.dataset)  # type: ignore[arg-type]
        return torch.randperm(size).tolist() if sampler.shuffle else list(range(size))
    if isinstance(sampler, SequentialSampler):
        return list(sampler)
    if (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return torch.randperm(len(sampler.data_source)).tolist()
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        generator.manual_seed(torch.initial_seed())
    return list(sampler)


def _interleaved(group: list[list[int]], size: int) -> list[int]:
    """A list of which every ``size``-th element, from r on, is the r-th of the batches, which must be of one length."""
    if len({len(batch) for batch in group}) > 1 or len(group) < size:
        if size == 1:
            return group[0]
        raise DistributedError(
            f"a batch_sampler gave batches of {', '.join(str(len(batch)) for batch in group)} samples for {size} "
            "processes: it must give as many batches of one size"
        )
    return [index for together in zip(*group, strict=True) for index in together]


def _count(data: Any) -> int:
    """Samples of a batch: the length of its first tensor."""
    for leaf in tree_leaves(data):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ConfigError("a batch holds no tensor with samples along its first dimension")


def _mix(*numbers: int) -> int:
    """A seed that follows from several numbers."""
    state = np.random.SeedSequence([number % (1 << 64) for number in numbers]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
