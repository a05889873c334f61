"""The data of a run as windows of batches, in an order that follows from seed and epoch, and can start anywhere.

A window contains the batches of one optimizer step: ``accumulation`` batches on each process. Sample i of the order
goes to process i modulo n, where n is the number of processes. So n processes with batches of b samples have, in each
step, the same samples as one process with batches of n b samples. No sample is repeated or dropped: the last batches
are smaller, and every loss is weighted by its samples.
"""

__all__ = ["Batch", "Feed", "count_samples"]

import logging
from collections import deque
from collections.abc import Generator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from panther._process_settings import preserved_generators, seed_cpu_generators
from panther.distributed import get_rank
from panther.errors import ConfigError
from panther.train.agreement import agree_on_order
from panther.train.loading.loader_workers import WorkerSignals, loaded_batches
from panther.train.loading.streams import Batch, StreamWindows, count_samples

Windows = Generator[list[Batch], None, None]

_KEPT_SETTINGS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip
"""The settings of a user's DataLoader that the loader of the Feed keeps."""
_ENDED = "panther_stream_has_ended"  # key for the state of a loader that has ended before the loaders of other ranks

_log = logging.getLogger(__name__)


class _SeededDataset(Dataset[Any]):
    """A dataset that returns the batch of a seed and a list of indices.

    Random transforms in a worker process then depend on the batch, and not on the earlier batches of the worker. In the
    process of the run the seed is None, because the transforms use the generators of the run.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, batch: tuple[int | None, list[int]]) -> list[Any]:
        seed, indices = batch
        if seed is not None:
            seed_cpu_generators(seed)
        fetch = getattr(self.dataset, "__getitems__", None)
        return [self.dataset[index] for index in indices] if fetch is None else fetch(indices)


class Feed:
    """Windows of batches for one process.

    The data is a DataLoader, whose sampler defines the order and whose other settings are kept, or a Dataset or another
    object with a length that returns samples by number. If it is a stream (an IterableDataset, or a loader with its own
    iteration), each process reads its own loader, and continues where ``load_state_dict`` of the loader sets it. A
    window has ``accumulation`` batches, and ``factor`` batches of the data form one batch of this process. ``even``
    leaves out the last samples if they do not fill a batch on every process, and batches of streams that do not have
    the same size, a ``multiple``, on every process.
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
        factor: int = 1,
        even: bool = False,
        multiple: int = 1,
        shuffle: bool = True,
    ) -> None:
        if isinstance(data, nn.Module):  # it has a state, as a stream may have
            raise ConfigError(
                f"the data is a module, {type(data).__name__}: pass the model to Trainer, the data to fit"
            )
        keeps_own_state = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        if not isinstance(data, DataLoader) and not (keeps_own_state and hasattr(data, "__iter__")):
            _check_samples(data, batch_size, "training" if shuffle else "validation")
            data = DataLoader(data, batch_size, shuffle=None if isinstance(data, IterableDataset) else shuffle)
        self.seed, self.rank, self.size, self.accumulation, self.even = seed, rank, size, accumulation, even
        self.factor, self.shuffle = factor, shuffle
        self._has_warned = False
        self.left_out = 0
        """Number of samples that no process has in the epoch that was planned last."""
        self.user_loader: Any = data
        loader_batch_size = getattr(data, "batch_size", None)
        if shuffle and batch_size is not None and loader_batch_size is not None and loader_batch_size != batch_size:
            raise ConfigError(
                f"batch_size={batch_size} and a loader with batches of {loader_batch_size}: leave batch_size out"
            )
        self.is_stream = _is_stream(data)
        self._order: list[tuple[int | None, list[int]]] = []  # the batches of this process in the present epoch
        if isinstance(data, DataLoader) and data.num_workers and not isinstance(data.worker_init_fn, WorkerSignals):
            data.worker_init_fn = WorkerSignals(data.worker_init_fn)
        self.loader: Any = data if self.is_stream else self._own_loader(data)
        self.keeps_own_state = self.is_stream and keeps_own_state
        self._positioned = False  # whether load_state_dict has set the loader's position
        self.multiple = multiple
        self._stream = StreamWindows(self)
        self._has_ended = False  # whether load_state_dict has said that this process has read all of its stream

    def _own_loader(self, data: DataLoader[Any]) -> DataLoader[Any]:
        if data.batch_size is None and data.batch_sampler is None:
            raise ConfigError("a DataLoader with batch_size=None has no batches: give it batch_size or batch_sampler")
        # A new loader is needed, because the sampler of a DataLoader cannot be replaced. It iterates over the same list
        # in every epoch.
        return DataLoader(
            _SeededDataset(data.dataset),
            batch_sampler=self._order,  # type: ignore[arg-type]
            generator=torch.Generator(),  # otherwise seeds of workers would advance the run's generator
            **{name: getattr(data, name) for name in _KEPT_SETTINGS},
        )

    @property
    def window_samples(self) -> int:
        """Samples of a full window over all processes; the number of its batches if they have no fixed size."""
        return (getattr(self.user_loader, "batch_size", None) or 1) * self.size * self.factor * self.accumulation

    def first_batch(self) -> Any:
        """Return the first batch of an epoch; the random generators stay as they are. One rank may call it alone."""
        with preserved_generators():
            return next(self.windows(0, is_alone=True))[0].data

    @property
    def has_batch_size(self) -> bool:
        """Whether the Feed itself forms the batches: neither a stream nor a batch_sampler does."""
        return not self.is_stream and self.user_loader.batch_size is not None

    def divides_into(self, count: int) -> bool:
        """Return whether an epoch is a whole number of groups of ``count`` batches; the rest may have been dropped."""
        if not self.has_batch_size or self.user_loader.drop_last:
            return self.has_batch_size
        samples = sum(len(indices) for window in self._plan(0) for batch in window for indices in batch)
        return samples % (self.user_loader.batch_size * count) == 0

    def windows_per_epoch(self) -> int | None:
        """Return the number of windows of an epoch, None for a stream."""
        return None if self.is_stream else len(self._plan(0))

    def warn_of_left_out(self, name: str) -> None:
        """Log once, on the first rank, how many samples of an epoch no process has, unless the user drops them."""
        if self.is_stream or self._has_warned or get_rank() or (self.shuffle and self.user_loader.drop_last):
            return
        self._has_warned = True
        self._plan(0)
        if self.left_out:
            reason = "its DataLoader has drop_last=True"
            if self.even:
                reason = "pipelines take batches of one size: choose a batch_size that divides their number"
            _log.warning("%d samples of the %s data are left out, because %s", self.left_out, name, reason)

    def no_windows_error(self, name: str, epoch: int = 0) -> ConfigError:
        """Return the error to raise if an epoch has no windows."""
        if epoch:
            return ConfigError(
                f"the {name} data is empty in epoch {epoch + 1}: __iter__ of a stream must begin anew in every epoch"
            )
        if self.is_stream or not len(self.user_loader.dataset):
            return ConfigError(f"the {name} data is empty")
        return ConfigError(
            f"the {name} data's {len(self.user_loader.dataset)} samples do not fill a batch on every process "
            f"(together {self.window_samples // self.accumulation}), and smaller ones are dropped: lower batch_size, "
            "or use neither drop_last nor a pipeline"
        )

    def windows(self, epoch: int, start: int = 0, *, is_alone: bool = False) -> Windows:
        """Yield the windows of an epoch from the ``start``-th on. Closing the generator ends the loader's workers.

        Ranks exchange the sizes of their batches of streams, unless this rank ``is_alone``.
        """
        plan = None if self.is_stream else self._plan(epoch)
        if plan is not None and not is_alone and not _follows_from_seed(self.user_loader):
            agree_on_order(epoch, plan)
        self._order[:] = [
            (
                _mix(self.seed, epoch, step, number, self.rank) if self.loader.num_workers else None,
                # A process without samples gets a sample of another process as a filler.
                batch[self.rank] or next(filter(None, batch))[:1],
            )
            for step, window in enumerate((plan or [])[start:], start)
            for number, batch in enumerate(window)
        ]
        if self._has_ended:  # the stream has ended in the epoch that is resumed
            self._has_ended = False
            yield from self._stream.read(iter(()), None, is_alone)
            return
        with loaded_batches(self.loader) as loaded:
            if plan is None:
                # Batches before the first window of a resumed epoch are fetched again and ignored, except for the last
                # one, which may become a filler. A loader that continues from a state does not give them.
                ignored, self._positioned = 0 if self._positioned else start * self.accumulation, False
                batches = filter(count_samples, loaded)  # an empty batch is not the end
                last = next(iter(deque(islice(batches, ignored), maxlen=1)), None)
                yield from self._stream.read(batches, last, is_alone)
                return
            for window in plan[start:]:
                total = sum(len(indices) for batch in window for indices in batch)
                yield [
                    Batch(next(loaded), len(batch[self.rank]), len(batch[self.rank]) / total, batch[self.rank], largest)
                    for batch, largest in ((batch, max(map(len, batch))) for batch in window)
                ]

    def _plan(self, epoch: int) -> list[list[list[list[int]]]]:
        """Return the indices of all processes: a list of windows of batches; a batch has a list for every process."""
        loader = self.user_loader
        sampler: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
        # Drawing the order must not change the next random numbers of dropout and transforms.
        with preserved_generators():
            seed_cpu_generators(_mix(self.seed, epoch))
            order = _order_of(sampler, epoch)
        batches: list[list[list[int]]]
        if loader.batch_size is None:  # the processes take the batches of a batch_sampler in turn
            samples = sum(map(len, order))
            batches = [[*map(list, order[i : i + self.size])] for i in range(0, len(order), self.size)]
            if self.even:
                batches = _equal_batches(batches, self.size)
            elif batches:
                batches[-1] += [[] for _ in range(self.size - len(batches[-1]))]
        else:
            samples, per_step = len(order), loader.batch_size * self.size * self.factor
            planned = samples - samples % per_step if self.even or loader.drop_last else samples
            batches = [
                [order[i : min(i + per_step, planned)][rank :: self.size] for rank in range(self.size)]
                for i in range(0, planned, per_step)
            ]
        self.left_out = samples - sum(len(indices) for batch in batches for indices in batch)
        return [batches[i : i + self.accumulation] for i in range(0, len(batches), self.accumulation)]

    def state_dict(self) -> Any:
        """Return the state of the user's loader; None if the number of finished windows is enough to continue."""
        if not self.keeps_own_state:
            return None
        state = self.loader.state_dict()
        # A loader at its end would begin again, while other ranks are still in the epoch.
        return {_ENDED: state} if self._stream.has_ended else state

    def load_state_dict(self, state: Any) -> None:
        """Set the state that :meth:`state_dict` returned."""
        if state is not None and self.keeps_own_state:
            if isinstance(state, Mapping) and set(state) == {_ENDED}:
                self._has_ended, state = True, state[_ENDED]
            self.loader.load_state_dict(state)
            self._positioned = True


def _check_samples(data: Any, batch_size: int | None, name: str) -> None:
    """Raise ConfigError unless the data is a Dataset, or has samples by number and a length, for a DataLoader."""
    by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    # The rows of a tensor and the items of a tuple (inputs, targets) would be read as samples without targets.
    if isinstance(data, Tensor | np.ndarray | Mapping | tuple | str) or not (by_number or isinstance(data, Dataset)):
        kind = type(data).__name__
        raise ConfigError(
            f"the data must be a DataLoader, a Dataset or a list of samples, not a {kind}: pass TensorDataset(inputs, "
            "targets) for tensors, list(data) for an iterator, or an IterableDataset, whose __iter__ begins anew in "
            "every epoch"
        )
    if batch_size is None:
        raise ConfigError(
            f"a {type(data).__name__} needs batch_size in the configuration: set it, or pass DataLoader(data, size)"
        )
    # Without this check, torch's sampler would say that num_samples should be positive.
    if by_number and not isinstance(data, IterableDataset) and not len(data):
        raise ConfigError(f"the {name} data is empty")


def _is_stream(data: Any) -> bool:
    """Return whether the order of a loader is unknown. The order of torchdata's loader over a dataset is known."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return True
    return type(data).__iter__ is not DataLoader.__iter__ and not type(data).__module__.startswith("torchdata.")


def _order_of(sampler: Any, epoch: int) -> list[Any]:
    """Return all indices that a sampler yields in an epoch, which are equal on all processes."""
    if isinstance(sampler, DistributedSampler):  # it would split the order, and the Feed splits it itself
        size = len(sampler.dataset)  # type: ignore[arg-type]
        return torch.randperm(size).tolist() if sampler.shuffle else list(range(size))
    # The order of the usual sampler is drawn at once, in less than half of the time that iterating over it takes.
    if (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return torch.randperm(len(sampler.data_source)).tolist()
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    # The generator of a sampler is also seeded by epoch; otherwise a resumed run could not repeat its order.
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        generator.manual_seed(torch.initial_seed())
    return list(sampler)


def _equal_batches(batches: list[list[list[int]]], size: int) -> list[list[list[int]]]:
    """Return the steps in which every process has a batch. The batches of a step must have the same length."""
    for group in batches:
        if len({len(indices) for indices in group}) > 1:
            raise ConfigError(
                f"a batch_sampler gave batches of {', '.join(str(len(indices)) for indices in group)} samples for "
                f"{size} processes: for a pipeline, the batches of one step must all have the same size"
            )
    return [group for group in batches if len(group) == size]


def _follows_from_seed(loader: Any) -> bool:
    """Return whether the order follows from the seed and the number of samples, and so is equal on all ranks."""
    return loader.batch_size is not None and type(loader.sampler) in (
        SequentialSampler, RandomSampler, DistributedSampler
    )  # fmt: skip


def _mix(*numbers: int) -> int:
    """Return a seed that depends on all the numbers."""
    state = np.random.SeedSequence([number % (1 << 64) for number in numbers]).generate_state(1, np.uint64)
    # Seeds of torch are below 2^63.
    return int(state[0] >> np.uint64(1))
