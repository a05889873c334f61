"""Streams of unequal length, last batches and stops: every sample counts once, and no rank waits without end."""

import logging

import pytest
import torch
from breaking import Breaks, BrokenError
from ranks import on_ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from panther.distributed import checkpoint, get_rank
from panther.errors import ConfigError, DistributedError, TrainingError
from panther.nn import SKLinear
from panther.train import Callback, TrainConfig, Trainer

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
RATE = 0.2


def build():
    torch.manual_seed(0)
    return nn.Sequential(SKLinear(24, 20, 2), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def samples(n, seed=7):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 24, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (n,), generator=generator)


class Stream(IterableDataset):
    """The samples of a rank, of several ranks that share them, or of none."""

    def __init__(self, lengths, sharing=1):
        self.lengths, self.sharing = lengths, sharing

    def __iter__(self):
        rank = get_rank() // self.sharing % len(self.lengths)
        x, y = samples(self.lengths[rank], seed=rank)
        yield from zip(x, y, strict=True)


class Batches:
    """A loader of batches with a state."""

    def __init__(self, lengths, size):
        rank = get_rank() % len(lengths)
        x, y = samples(lengths[rank], seed=rank)
        self.batches = [*zip(x.split(size), y.split(size), strict=True)] if len(x) else []
        self.at = 0

    def __iter__(self):
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def expected_of(lengths, size, accumulation, epochs):
    """Losses of a plain loop over what all ranks have in each step, and the loss over all samples at the end."""
    model, loss_fn = build(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    data = [samples(n, seed=rank) for rank, n in enumerate(lengths)]
    step, losses = size * accumulation, []
    for _ in range(epochs):
        for begin in range(0, max(lengths), step):
            x, y = (torch.cat([part[begin : begin + step] for part in parts]) for parts in zip(*data, strict=True))
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    x, y = map(torch.cat, zip(*data, strict=True))
    with torch.no_grad():
        return losses, loss_fn(model(x), y).item()


# Numbers of samples of each data-parallel rank; batches have 3, and two make a step.
LENGTHS = {
    "one shorter": (12, 7),
    "first empty": (0, 10),
    "last empty": (10, 0),
    "one sample": (1, 6),
    "ends in a group": (18, 9),
    "far apart": (30, 2),
}
STRATEGIES = {
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "zero1": (2, {"strategy": "zero1"}),
    "replicate": (2, {"strategy": "replicate"}),
    "tp": (2, {"strategy": "tp"}),
    "ddp, with unused parameters": (2, {"strategy": "ddp", "find_unused_parameters": True}),
    "hybrid": (4, {"strategy": "hybrid", "tensor_parallel_size": 2}),
    "fsdp with tp": (4, {"strategy": "fsdp", "tensor_parallel_size": 2}),
}


def trained(lengths, accumulation=2, epochs=2, make=Stream, folder=None, callbacks=(), sharing=1, **settings):
    config = TrainConfig(
        epochs=epochs,
        gradient_accumulation_steps=accumulation,
        learning_rate=RATE,
        log_every_n_steps=1,
        checkpoint_dir=None if folder is None else str(folder),
        **settings,
    )
    trainer = Trainer(build(), torch.optim.SGD, nn.CrossEntropyLoss(), config, callbacks)

    def data(size):
        return Batches(lengths, size) if make is Batches else DataLoader(Stream(lengths, sharing), size)

    trainer.fit(data(3), data(4))
    return trainer


def results_of(trainer):
    return trainer.history["loss"][1], trainer.history["validation_loss"][1][-1]


@pytest.mark.parametrize(
    ("names", "strategies"),
    [
        (("ends in a group", "first empty"), ("ddp", "fsdp")),
        pytest.param(
            tuple(LENGTHS), tuple(name for name, (n, _) in STRATEGIES.items() if n == 2), marks=pytest.mark.slow
        ),
        pytest.param(
            tuple(LENGTHS), tuple(name for name, (n, _) in STRATEGIES.items() if n == 4), marks=pytest.mark.slow
        ),
    ],
    ids=["quick", "2 ranks", "4 ranks"],
)
def test_every_sample_of_streams_of_unequal_length_counts_once(names, strategies):
    """In training and validation, also after some ranks have ended, and in the second epoch."""
    world = STRATEGIES[strategies[0]][0]

    def run():
        results = {}
        for strategy in strategies:
            for name in names:
                settings = STRATEGIES[strategy][1]
                if settings["strategy"] == "tp" and not LENGTHS[name][0]:
                    continue
                lengths = LENGTHS[name][:1] if strategy == "tp" else LENGTHS[name]
                results[strategy, name] = results_of(trained(lengths, sharing=world // 2, **settings))
        return results

    for results in on_ranks(run, world):
        for (strategy, name), (losses, validation) in results.items():
            lengths = LENGTHS[name][:1] if strategy == "tp" else LENGTHS[name]
            wanted, wanted_validation = expected_of(lengths, 3, 2, epochs=2)
            assert losses == pytest.approx(wanted, rel=1e-8), (strategy, name)
            assert validation == pytest.approx(wanted_validation, rel=1e-8), (strategy, name)


@pytest.mark.parametrize("make", [Stream, pytest.param(Batches, marks=pytest.mark.slow)])
def test_a_run_continues_after_a_rank_s_stream_has_ended(tmp_path, make):
    """The rank must not begin its stream anew in an epoch that the other rank is still in."""
    lengths = (30, 4)

    def run(name):
        settings = {"strategy": "ddp", "make": make, "checkpoint_every_n_steps": 1}
        whole = trained(lengths, folder=tmp_path / f"{name}-whole", **settings)
        with pytest.raises(BrokenError):
            trained(lengths, folder=tmp_path / name, callbacks=[Breaks(4)], **settings)
        resumed = trained(lengths, folder=tmp_path / name, **settings)
        return results_of(whole), results_of(resumed)

    for whole, resumed in on_ranks(lambda: run("run"), 2):
        assert resumed == whole
        assert whole[0] == pytest.approx(expected_of(lengths, 3, 2, epochs=2)[0], rel=1e-8)


class Recorded(logging.Handler):
    """What is logged while it is entered."""

    def __enter__(self):
        self.messages = []
        logging.getLogger("panther").addHandler(self)
        return self.messages

    def __exit__(self, *error):
        logging.getLogger("panther").removeHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())


def test_ranks_that_share_layers_must_read_the_same_stream_and_others_must_not():
    def run():
        outcomes = []
        for strategy in ("tp", "pp"):
            with pytest.raises(DistributedError) as caught:
                trained((12, 12), strategy=strategy)
            outcomes.append(str(caught.value))
        with pytest.warns(UserWarning, match="the streams of all 2 data-parallel ranks begin with the same batch"):
            trained((6,), epochs=1, strategy="ddp")
        with Recorded() as messages:
            trained((6, 0), epochs=1, strategy="ddp")
        with pytest.raises(ConfigError) as caught:
            trained((0, 0), epochs=1, strategy="ddp")
        return [*outcomes, str(caught.value)], messages

    (outcomes, messages), (others, nothing) = on_ranks(run, 2)
    assert others == outcomes
    for outcome in outcomes[:2]:
        assert outcome.startswith("ranks 0, 1 share layers or stages and must read the same batches, and their streams")
    assert outcomes[2] == "the training data is empty"
    assert nothing == []
    assert "the stream of rank 1 is empty, and others have samples: divide it evenly" in messages


def test_pipelines_take_the_batches_of_streams_that_fit_and_say_how_many_do_not():
    """Of 3 and 3 and 1 samples in microbatches of 1 and a half: none fits. Of 4, 4 and 3: two."""

    def run():
        outcomes = []
        with Recorded() as messages:
            for length, size in ((11, 4), (7, 3)):
                config = TrainConfig(epochs=1, learning_rate=RATE, log_every_n_steps=1, strategy="pp")
                trainer = Trainer(build(), torch.optim.SGD, nn.CrossEntropyLoss(), config)
                try:
                    trainer.fit(DataLoader(Stream((length,)), size), DataLoader(Stream((length,)), 5))
                except ConfigError as error:
                    outcomes.append(str(error))
                    continue
                outcomes.append(results_of(trainer))
        return outcomes, messages

    (outcomes, messages), (others, _) = on_ranks(run, 2)
    assert outcomes == others
    model = build()
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=RATE), samples(11, seed=0)
    for begin in (0, 4):
        loss = nn.functional.cross_entropy(model(x[begin : begin + 4]), y[begin : begin + 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses, validation = outcomes[0]
    assert losses[-1] == pytest.approx(loss.item(), rel=1e-8)
    assert validation == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-8)
    assert messages[0].startswith(
        "3 samples of the stream were left out in this epoch, because a pipeline takes batches"
    )
    assert "and the first batches of the stream have 3 samples" in outcomes[1]


@pytest.mark.slow
def test_stages_that_are_sharded_evaluate_batches_of_unequal_size():
    """Ranks gather parameters for every piece of a batch, so that all must have as many pieces."""

    def run():
        config = TrainConfig(epochs=1, learning_rate=RATE, strategy="hybrid", pipeline_parallel_size=2)
        trainer = Trainer(build(), torch.optim.SGD, nn.CrossEntropyLoss(), config)
        x, y = samples(16)
        data = TensorDataset(*samples(19))
        first_metrics = trainer.evaluate(DataLoader(data, 13))
        trainer.fit(DataLoader(TensorDataset(x, y), 2), DataLoader(data, 13))
        return first_metrics["loss"], trainer.history["validation_loss"][1][-1]

    x, y = samples(19)
    model, (inputs, labels) = build(), samples(16)
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=RATE), nn.CrossEntropyLoss()
    first_loss = loss_fn(model(x), y).item()
    for begin in range(0, 16, 4):
        optimizer.zero_grad()
        loss_fn(model(inputs[begin : begin + 4]), labels[begin : begin + 4]).backward()
        optimizer.step()
    wanted = first_loss, loss_fn(model(x), y).item()
    for result in on_ranks(run, 4):
        assert result == pytest.approx(wanted, rel=1e-8)


class Stops(Callback):
    """Asks one rank to stop, from a method of the callback."""

    def __init__(self, rank, method, step):
        self.rank, self.method, self.at = rank, method, step

    def ask(self, trainer, method):
        if (get_rank(), method) == (self.rank, self.method) and trainer.step >= self.at:
            trainer.stop = True

    def on_step(self, trainer, loss):
        self.ask(trainer, "step")

    def on_record(self, trainer, record):
        self.ask(trainer, "record")

    def on_checkpoint(self, trainer):
        self.ask(trainer, "checkpoint")


def ask(trainer):
    trainer.stop |= get_rank() == 1 and trainer.step == 2


class Asks(Callback):
    """Has no code that stops a run, but calls a function that does."""

    def on_step(self, trainer, loss):
        ask(trainer)


class StopsInEpoch(Callback):
    def on_epoch(self, trainer):
        trainer.stop = get_rank() == 1 and trainer.epoch == 1


class StopsAtStart(Callback):
    def on_start(self, trainer):
        trainer.stop = get_rank() == 1


class StopsInLoss(nn.CrossEntropyLoss):
    """Outside of callbacks."""

    def __init__(self):
        super().__init__()
        self._calls = 0

    def forward(self, output, target):
        self._calls += 1
        if self._calls == 2 and get_rank() == 1:
            self._trainer.stop = True
        return super().forward(output, target)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_stop_on_one_rank_ends_the_run_on_all_at_the_same_step(tmp_path, strategy):
    x, y = samples(48)

    def run():
        ends = {}
        for name, callback in {
            "step": Stops(1, "step", 3),
            "first rank": Stops(0, "step", 3),
            "record": Stops(1, "record", 4),
            "checkpoint": Stops(1, "checkpoint", 2),
            "epoch": StopsInEpoch(),
            "start": StopsAtStart(),
            "function": Asks(),
            "loss": None,
        }.items():
            folder = tmp_path / name
            loss_fn = StopsInLoss() if callback is None else nn.CrossEntropyLoss()
            config = TrainConfig(
                epochs=2,
                strategy=strategy,
                checkpoint_dir=str(folder),
                checkpoint_every_n_steps=2,
                log_every_n_steps=4,
            )
            trainer = Trainer(build(), torch.optim.SGD, loss_fn, config, [] if callback is None else [callback])
            if callback is None:
                loss_fn._trainer = trainer
            trainer.fit(DataLoader(TensorDataset(x, y), 4), DataLoader(TensorDataset(x[:8], y[:8]), 4))
            latest = checkpoint.latest(str(folder))
            ends[name] = trainer.step, trainer.stop, latest and latest.name
        return ends

    first, second = on_ranks(run, 2)
    assert first == second
    for name, (step, stops, latest) in first.items():
        assert stops
        wanted = {
            "step": 3,
            "first rank": 3,
            "record": 4,
            "checkpoint": 2,
            "epoch": 6,
            "start": 0,
            "function": 2,
            "loss": 2,
        }
        assert step == wanted.get(name, 3), name
        assert latest.startswith(f"step-{step:08d}"), name


def test_a_stop_does_not_save_a_step_that_is_not_finite(tmp_path):
    """The loss is finite and its gradient is not, in a step that no setting asked to save."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.weight).sqrt().sum(1)

    class StopsEarly(Callback):
        def on_step(self, trainer, loss):
            trainer.stop = trainer.step == 2

    x = torch.ones(16, 3)
    x[6] = 0.0
    config = TrainConfig(epochs=1, batch_size=4, checkpoint_dir=str(tmp_path))
    trainer = Trainer(Root(), torch.optim.SGD, nn.MSELoss(), config, [StopsEarly()])
    with pytest.raises(
        TrainingError, match=r"the norm of the gradient of step 2 is (nan|inf), so the step is not saved"
    ):
        trainer.fit(DataLoader(TensorDataset(x, torch.zeros(16)), 4))
    assert checkpoint.latest(str(tmp_path)) is None


def norm_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()


@pytest.mark.parametrize("world", [1, 2])
def test_a_last_batch_of_one_sample_is_refused_by_batchnorm_with_advice(world):
    x, y = samples(16 + world)

    def run():
        config = TrainConfig(epochs=1, strategy="ddp", batch_size=16 // world)
        trainer = Trainer(norm_model(), torch.optim.SGD, nn.CrossEntropyLoss(), config)
        with pytest.raises(ConfigError, match=r"Expected more than 1 value per channel .* use DataLoader\("):
            trainer.fit(TensorDataset(x, y))
        config = TrainConfig(epochs=1, strategy="ddp")
        trainer = Trainer(norm_model(), torch.optim.SGD, nn.CrossEntropyLoss(), config)
        trainer.fit(DataLoader(TensorDataset(x, y), 16 // world, drop_last=True))
        return trainer.step

    assert (on_ranks(run, world) if world > 1 else [run()]) == [1] * world


def test_fillers_leave_the_statistics_of_batchnorm_alone():
    """The first rank has the statistics that all use, and its stream has ended."""

    def run():
        means = []
        for lengths in ((6, 18), (6, 6)):
            config = TrainConfig(epochs=1, strategy="ddp")
            trainer = Trainer(norm_model(), without_steps, nn.CrossEntropyLoss(), config)
            trainer.fit(DataLoader(Stream(lengths), 3))
            means.append(trainer.model.module[1].running_mean.tolist())
        return means

    long, short = on_ranks(run, 2)[0]
    assert long == short


def without_steps(parameters):
    """Changes nothing, so that statistics depend on the batches alone."""
    return torch.optim.SGD(parameters, lr=0.0)


def test_batch_samplers_of_an_odd_number_of_batches_and_of_several_sizes_train_on_every_sample():
    sizes = ((20, 4), (22, 4), (5, 8))  # five batches; the last of two; fewer samples than a batch

    def run():
        rows = []
        for n, size in sizes:
            x, y = samples(n)
            config = TrainConfig(epochs=1, learning_rate=RATE, log_every_n_steps=1, strategy="fsdp")
            trainer = Trainer(build(), torch.optim.SGD, nn.CrossEntropyLoss(), config)
            loader = DataLoader(TensorDataset(x, y), batch_sampler=BatchSampler(range(n), size, drop_last=False))
            trainer.fit(loader, loader)
            rows.append(results_of(trainer))
        return rows

    for rows in on_ranks(run, 2):
        for (n, size), (losses, validation) in zip(sizes, rows, strict=True):
            model, (x, y) = build(), samples(n)
            optimizer, wanted = torch.optim.SGD(model.parameters(), lr=RATE), []
            for begin in range(0, n, 2 * size):
                loss = nn.functional.cross_entropy(model(x[begin : begin + 2 * size]), y[begin : begin + 2 * size])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                wanted.append(loss.item())
            assert losses == pytest.approx(wanted, rel=1e-8)
            assert validation == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-8)
