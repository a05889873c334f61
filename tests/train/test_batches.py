"""The order of samples: shared out over ranks, entered anywhere, whatever the loader."""

import importlib
import random
import signal

import numpy as np
import pytest
import torch
from breaking import Breaks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from panther.errors import ConfigError
from panther.train import TrainConfig, Trainer
from panther.train.loading.feed import Feed
from panther.train.loading.loader_workers import workers_needed


def numbers(n):
    return TensorDataset(torch.arange(n))


class Drawn(Sampler):
    """From a generator of Python's or NumPy's."""

    def __init__(self, draw, n=20):
        self.draw, self.n = draw, n

    def __iter__(self):
        return iter([int(i) for i in self.draw(self.n)])

    def __len__(self):
        return self.n


LOADERS = {
    "in order": lambda n: DataLoader(numbers(n), 3),
    "shuffled": lambda n: DataLoader(numbers(n), 3, shuffle=True),
    "own generator": lambda n: DataLoader(numbers(n), 3, shuffle=True, generator=torch.Generator()),
    "sampler with a generator": lambda n: DataLoader(
        numbers(n), 3, sampler=RandomSampler(numbers(n), num_samples=n, generator=torch.Generator())
    ),
    "distributed sampler": lambda n: DataLoader(numbers(n), 3, sampler=DistributedSampler(numbers(n), 4, 1)),
    "python's generator": lambda n: DataLoader(numbers(n), 3, sampler=Drawn(lambda k: random.sample(range(k), k), n)),
    "numpy's generator": lambda n: DataLoader(numbers(n), 3, sampler=Drawn(np.random.permutation, n)),
}


def feed(data, rank=0, size=1, **settings):
    return Feed(data, **{"batch_size": None, "seed": 5, "rank": rank, "size": size, **settings})


def seen(data, size, epoch=0, start=0, **settings):
    """Of every window and rank, the samples of its batches that count, as they were loaded and as they are told."""
    ranks = []
    for rank in range(size):
        rows = []
        for window in feed(data(), rank, size, **settings).windows(epoch, start):
            loaded = [batch.data[0][: batch.samples].tolist() for batch in window]
            assert loaded == [batch.indices for batch in window]
            rows.append((loaded, [batch.share for batch in window]))
        ranks.append(rows)
    assert len({len(rows) for rows in ranks}) == 1
    return list(zip(*ranks, strict=True))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("n", "size", "accumulation"), [(20, 1, 1), (20, 2, 2), (19, 3, 2), (2, 4, 1), (1, 3, 2)])
def test_the_ranks_together_see_every_sample_once_in_the_order_of_one(loader, n, size, accumulation):
    many = seen(lambda: LOADERS[loader](n), size, accumulation=accumulation)
    order = []
    for window in many:
        for batch in range(len(window[0][0])):
            pieces = [loaded[batch] for loaded, _ in window]
            width = max(map(len, pieces))
            order += [piece[i] for i in range(width) for piece in pieces if i < len(piece)]
        assert sum(share for _, shares in window for share in shares) == pytest.approx(1)
    assert sorted(order) == list(range(n))
    [rows] = zip(*seen(lambda: LOADERS[loader](n), 1), strict=True)
    assert order == [i for loaded, _ in rows for batch in loaded for i in batch]


@pytest.mark.parametrize("loader", LOADERS)
def test_a_window_is_the_same_entered_from_anywhere(loader):
    whole = seen(lambda: LOADERS[loader](20), 2, epoch=3, accumulation=2)
    random.seed(99)
    np.random.seed(98)
    assert [seen(lambda: LOADERS[loader](20), 2, 3, start, accumulation=2) for start in range(3)] == [
        whole[start:] for start in range(3)
    ]
    other = seen(lambda: LOADERS[loader](20), 2, epoch=4, accumulation=2)
    assert (other == whole) == (loader == "in order")


def test_planning_draws_nothing_from_the_generators_of_the_run(monkeypatch):
    """Nor does it seed those of GPUs, whose states nothing would restore: dropout would repeat in every epoch."""

    def refused(seed):
        raise AssertionError("the generators of GPUs are seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refused)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    for make in LOADERS.values():
        one = feed(make(20))
        assert one.windows_per_epoch() == 7
        list(one.windows(1))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()


def test_own_batches_go_to_the_ranks_in_turn():
    def loader(n=24):
        return DataLoader(numbers(n), batch_sampler=BatchSampler(range(n), 4, drop_last=False))

    found = [[loaded for loaded, _ in window] for window in seen(loader, 2)]
    assert found[0] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert len(found) == 3


@pytest.mark.parametrize(("n", "size"), [(20, 2), (22, 2), (22, 4), (3, 2)])
def test_an_odd_number_of_own_batches_and_batches_of_several_sizes_are_used_once(n, size):
    """The last step has fewer batches than processes, and the last batch fewer samples."""

    def loader():
        return DataLoader(numbers(n), batch_sampler=BatchSampler(range(n), 4, drop_last=False))

    steps = seen(loader, size)
    samples = [i for window in steps for loaded, _ in window for batch in loaded for i in batch]
    assert samples == list(range(n))
    for window in steps:
        sizes = [len(loaded[0]) for loaded, _ in window]
        assert [shares[0] for _, shares in window] == [count / sum(sizes) for count in sizes]


def test_pipelines_are_told_which_batches_they_cannot_take(caplog):
    """Batches of one step must have one size; a step that has not a batch for every process is left out, and said."""

    def loader(n):
        return DataLoader(numbers(n), batch_sampler=BatchSampler(range(n), 4, drop_last=False))

    with pytest.raises(ConfigError, match="a batch_sampler gave batches of 4, 2 samples for 2 processes: for a pipel"):
        list(feed(loader(22), 0, 2, even=True).windows(0))
    odd = feed(loader(20), 0, 2, even=True)
    assert [[batch.indices for batch in window] for window in odd.windows(0)] == [[[0, 1, 2, 3]], [[8, 9, 10, 11]]]
    odd.warn_of_left_out("training")
    short = feed(DataLoader(numbers(10), 4, drop_last=True), shuffle=False)
    short.warn_of_left_out("validation")
    short.warn_of_left_out("validation")
    assert [record.getMessage() for record in caplog.records] == [
        "4 samples of the training data are left out, because pipelines take batches of one size: choose a batch_size "
        "that divides their number",
        "2 samples of the validation data are left out, because its DataLoader has drop_last=True",
    ]


def test_persistent_workers_read_every_epoch():
    loader = DataLoader(numbers(10), 4, shuffle=True, num_workers=1, persistent_workers=True)
    one = feed(loader, rank=1, size=2)
    plain = feed(DataLoader(numbers(10), 4, shuffle=True), rank=1, size=2)
    for epoch, start in ((0, 0), (1, 1), (2, 0)):
        rows = [[[b.data[0].tolist() for b in w] for w in f.windows(epoch, start)] for f in (one, plain)]
        assert rows[0] == rows[1]


def test_wrong_data_is_named():
    assert list(feed(DataLoader(numbers(0), 3)).windows(0)) == []
    assert str(feed(DataLoader(numbers(0), 3)).no_windows_error("training")) == "the training data is empty"
    small = feed(DataLoader(numbers(5), 3, drop_last=True), 0, 2)
    assert small.windows_per_epoch() == 0
    assert "the training data's 5 samples do not fill a batch on every process (together 6)" in str(
        small.no_windows_error("training")
    )
    with pytest.raises(ConfigError, match="batch_size=None has no batches"):
        feed(DataLoader(numbers(5), None))
    with pytest.raises(ConfigError, match="batch_size=4 and a loader with batches of 3: leave batch_size out"):
        feed(DataLoader(numbers(5), 3), batch_size=4)


class Words(IterableDataset):
    """A stream that keeps its own place."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 20:
            self.at += 1
            x = torch.full((4,), self.at / 10.0)
            yield x, x[:2]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Own:
    """A loader of a user's, with no more than a state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            x = torch.full((3, 4), self.at / 10.0)
            yield x, x[:, :2]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Samples(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        x = torch.full((4,), index / 10.0)
        return x, x[:2]


def stateful(dataset, **settings):
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return module.StatefulDataLoader(dataset, 4, **settings)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 calls it
@pytest.mark.parametrize("stopped", [1, 3, 5, 6])
@pytest.mark.parametrize(
    "make",
    [lambda: stateful(Words()), lambda: stateful(Samples(), shuffle=True), Own],
    ids=["StatefulDataLoader of a stream", "StatefulDataLoader of samples", "own loader"],
)
def test_loaders_with_a_state_continue_where_they_were(tmp_path, make, stopped):
    def run(folder=None, callbacks=(), **settings):
        torch.manual_seed(0)
        config = TrainConfig(max_steps=8, gradient_accumulation_steps=2, checkpoint_dir=folder, **settings)
        trainer = Trainer(nn.Linear(4, 2), None, nn.MSELoss(), config, callbacks)
        trainer.fit(make())
        return trainer

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [Breaks(stopped + 1, KeyboardInterrupt)], checkpoint_every_n_steps=1)
    resumed = run(tmp_path, checkpoint_every_n_steps=4)
    assert (resumed.step, resumed.epoch) == (whole.step, whole.epoch)
    assert torch.equal(whole.model.weight, resumed.model.weight)


SIGNALLED = """
import os, signal
from torch.utils.data import IterableDataset, TensorDataset

class Samples(TensorDataset):
    def __setstate__(self, state):  # in a worker that starts
        self.__dict__.update(state)
        os.kill(os.getpid(), signal.SIGTERM)

class Stream(IterableDataset):
    __setstate__ = Samples.__setstate__
    def __init__(self):
        self.n = 20
    def __iter__(self):
        return iter(range(self.n))
"""


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["Samples", pytest.param("Stream", marks=pytest.mark.slow)])
def test_a_signal_does_not_end_a_worker_that_starts(tmp_path, monkeypatch, kind):
    (tmp_path / f"signalled_{kind}.py").write_text(SIGNALLED)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = getattr(importlib.import_module(f"signalled_{kind}"), kind)
    data = found(torch.arange(20)) if kind == "Samples" else found()
    loader = DataLoader(data, 5, num_workers=1, multiprocessing_context="spawn")
    feed = Feed(loader, batch_size=None, seed=0, rank=0, size=1)
    with workers_needed():  # as in a Trainer
        assert sum(batch.samples for window in feed.windows(0) for batch in window) == 20
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
