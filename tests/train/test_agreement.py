"""What differs between ranks and must not is named before the first step; what may differ does not end a run."""

import functools
import itertools
import logging

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

from panther._descriptions import describe_value
from panther.distributed import get_rank
from panther.errors import DistributedError
from panther.train import Callback, TrainConfig, Trainer

pytestmark = [pytest.mark.distributed]


def build(dropout=0.0):
    torch.manual_seed(get_rank())  # weights may differ: the first rank's are taken
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 3))


def samples(n=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator))


class Keeps(Callback):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Sharpened(nn.CrossEntropyLoss):
    def __init__(self, power):
        super().__init__()
        self.power = power


class Unseeded(Sampler):
    """Draws from a generator of its own, which every rank seeds with another number."""

    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed)).tolist())

    def __len__(self):
        return self.n


class Halves(Unseeded):
    """Gives each rank its half, which the Trainer would divide again."""

    def __iter__(self):
        return iter(range(get_rank(), self.n, 2))


def trainer_of(
    loss_fn=None, optimizer=torch.optim.SGD, callbacks=(), metrics=None, dropout=0.0, evaluates=(), **settings
):
    model = build(dropout)
    if callable(optimizer) and getattr(optimizer, "takes_model", False):
        optimizer = optimizer(model)
    for name in evaluates:
        model.get_submodule(name).eval()
    config = TrainConfig(**{"strategy": "ddp", "epochs": 1, "batch_size": 4, **settings})
    return Trainer(model, optimizer, loss_fn or nn.CrossEntropyLoss(), config, callbacks, metrics=metrics)


def grouped(decay=0.0, names=("0", "2")):
    def make(model):
        # A group for each module.
        groups = [{"params": model.get_submodule(name).parameters(), "weight_decay": decay} for name in names]
        return torch.optim.AdamW(groups, lr=0.01)

    make.takes_model = True
    return make


def smooth(power):
    return lambda output, target: F.cross_entropy(output, target) ** power


def changed_code(rank):
    if rank:
        return lambda output, target: F.cross_entropy(output, target)
    return lambda output, target: 1.0 * F.cross_entropy(output, target)


class Scheduler(Callback):
    def on_epoch(self, trainer):
        if get_rank() == 1:
            trainer.optimizer.param_groups[0]["lr"] *= 0.5


class OfData:
    """Data of fit, which is made on the rank."""

    def __init__(self, make, **settings):
        self.make, self.settings = make, settings


def by_rank(*values):
    return values[get_rank()]


# What differs, as functions that every rank calls: the arguments of trainer_of, or the data; and what the error names.
DIFFERENCES = {
    "learning rate": (lambda: {"learning_rate": by_rank(0.1, 0.2)}, "learning_rate=0.1 on rank 0 and 0.2 on rank 1"),
    "epochs": (lambda: {"epochs": by_rank(2, 3)}, "epochs=2 on rank 0 and 3 on rank 1"),
    "seed": (lambda: {"seed": by_rank(0, 5)}, "seed=0 on rank 0 and 5 on rank 1"),
    "strategy": (lambda: {"strategy": by_rank("ddp", "fsdp")}, "strategy='ddp' on rank 0 and 'fsdp' on rank 1"),
    "accumulation": (lambda: {"gradient_accumulation_steps": by_rank(1, 2)}, "gradient_accumulation_steps=1 on rank 0"),
    "records": (lambda: {"log_every_n_steps": by_rank(1, 2)}, "log_every_n_steps=1 on rank 0 and 2 on rank 1"),
    "a folder": (lambda: {"checkpoint_dir": by_rank(None, "folder")}, "checkpoint_dir=None on rank 0 and 'a path'"),
    "optimizer's type": (
        lambda: {"optimizer": by_rank(torch.optim.SGD, torch.optim.Adam)},
        "the optimizer is SGD on rank 0 and Adam on rank 1",
    ),
    "optimizer's partial": (
        lambda: {"optimizer": functools.partial(torch.optim.SGD, lr=by_rank(0.1, 0.2))},
        "the optimizer is partial(function=SGD, args=[], lr=0.1) on rank 0 and partial(function=SGD, args=[], lr=0.2)",
    ),
    "optimizer's groups": (
        lambda: {"optimizer": grouped(by_rank(0.0, 0.1))},
        "weight_decay of the optimizer's group 0 is 0.0 on rank 0 and 0.1 on rank 1",
    ),
    "order of groups": (
        lambda: {"optimizer": grouped(names=by_rank(("0", "2"), ("2", "0")))},
        "the list of parameters of the optimizer's group 0 is 0.weight, 0.bias on rank 0 and 2.weight, 2.bias on",
    ),
    "loss": (
        lambda: {"loss_fn": by_rank(nn.CrossEntropyLoss(), nn.MultiMarginLoss())},
        "loss_fn=CrossEntropyLoss(",
    ),
    "loss's setting": (
        lambda: {"loss_fn": nn.CrossEntropyLoss(label_smoothing=by_rank(0.0, 0.1))},
        "label_smoothing=0.1",
    ),
    "class weights": (
        lambda: {"loss_fn": nn.CrossEntropyLoss(torch.full((3,), by_rank(1.0, 2.0)))},
        "weight=torch.float32 (3,) with the digest",
    ),
    "loss's own attribute": (lambda: {"loss_fn": Sharpened(by_rank(1, 2))}, "power=2"),
    "enclosed number": (lambda: {"loss_fn": smooth(by_rank(1, 2))}, "power=1) on rank 0"),
    "code of a function": (lambda: {"loss_fn": changed_code(get_rank())}, "with the digest"),
    "metrics": (lambda: {"metrics": by_rank(None, {"zero": lambda output, target: 0.0})}, "metrics={} on rank 0 and"),
    "callback with a state": (
        lambda: {"callbacks": by_rank([Keeps()], [])},
        "the list of callbacks with a state is ['Keeps'] on rank 0 and [] on rank 1",
    ),
    "dropout": (lambda: {"dropout": by_rank(0.0, 0.5)}, "module '1' is Dropout(p=0.0, inplace=False) in training mode"),
    "evaluation mode": (lambda: {"evaluates": by_rank((), ("1",))}, "in evaluation mode on rank 1"),
    "number of samples": (
        lambda: OfData(lambda: samples(by_rank(24, 20))),
        "the number of samples of the training data is 24 on rank 0 and 20 on rank 1",
    ),
    "samples of ranks that share layers": (
        lambda: OfData(lambda: samples(seed=get_rank()), strategy="tp"),
        "rank 1 has different samples in the training data than rank 0, and ranks that share layers or stages must",
    ),
    "a list of samples under a pipeline": (
        lambda: OfData(lambda: list(samples(seed=get_rank())), strategy="pp"),
        "rank 1 has different samples in the training data than rank 0",
    ),
    "batch size": (
        lambda: OfData(lambda: DataLoader(samples(), by_rank(4, 3)), batch_size=None),
        "batch_size of the training data is 4 on rank 0 and 3 on rank 1",
    ),
    "shuffling": (
        lambda: OfData(lambda: DataLoader(samples(), 4, shuffle=by_rank(True, False))),
        "the sampler of the training data is RandomSampler on rank 0 and SequentialSampler on rank 1",
    ),
    "drop_last": (
        lambda: OfData(lambda: DataLoader(samples(), 4, drop_last=by_rank(True, False))),
        "drop_last of the training data is True on rank 0 and False on rank 1",
    ),
    "stream and samples": (lambda: OfData(lambda: by_rank(samples(), Batches())), "the training data is "),
    "order": (
        lambda: OfData(lambda: DataLoader(samples(), 4, sampler=Unseeded(24, get_rank()))),
        "orders of samples differ between ranks: the order of epoch 0 is 24 samples with the digest",
    ),
    "halves": (
        lambda: OfData(lambda: DataLoader(samples(), 4, sampler=Halves(24, 0))),
        "because the Trainer divides them itself",
    ),
    "own batches": (
        lambda: OfData(
            lambda: DataLoader(samples(), batch_sampler=BatchSampler(Unseeded(24, get_rank()), 4, False)),
            batch_size=None,
        ),
        "orders of samples differ between ranks",
    ),
    "validation on one rank": (
        lambda: OfData(lambda: (samples(), by_rank(samples(5), None))),
        "the validation data is TensorDataset on rank 0 and NoneType on rank 1",
    ),
    "what a function makes": (
        lambda: {"optimizer": make_with(by_rank(0.1, 0.2))},
        "the optimizer is ",
    ),
    "rate from the rank": (
        lambda: {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1 * (1 + get_rank()))},
        "lr of the optimizer's group 0 is 0.1 on rank 0 and 0.2 on rank 1",
    ),
    "changed by a callback of one rank": (
        lambda: {"callbacks": [Scheduler()], "schedule": "callback", "optimizer": grouped()},
        "optimizers or steps differ between ranks: lr of the optimizer's group 0 is 0.01 on rank 0 and 0.005 on rank 1",
    ),
}
QUICK = ("learning rate", "optimizer's groups", "class weights", "number of samples", "order", "rate from the rank")


class Batches:
    """A loader of the user's own."""

    def __iter__(self):
        return iter(DataLoader(samples(), 4))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def make_with(rate):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def message_of(difference):
    given = difference()
    data, settings = samples(), given
    if isinstance(given, OfData):
        data, settings = given.make(), given.settings
    validation = None
    if isinstance(data, tuple):
        data, validation = data
    try:
        trainer_of(**settings).fit(data, validation)
    except DistributedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(DIFFERENCES), marks=pytest.mark.slow)], ids=len)
def test_what_differs_is_named_on_every_rank(names):
    messages = on_ranks(lambda: [message_of(DIFFERENCES[name][0]) for name in names], 2)
    for name, first, second in zip(names, *messages, strict=True):
        assert first == second, name
        assert DIFFERENCES[name][1] in first, (name, first)


def test_what_may_differ_does_not_end_a_run(tmp_path):
    """A callback without a state, and how a rank shows and loads; but not another spelling of the folder."""

    def run():
        rank = get_rank()
        different = {
            "progress": rank == 0,
            "run_name": f"rank {rank}",
            "trackers": ("jsonl",) if rank == 0 else (),
            "timeout_s": 100.0 + rank,
            "callbacks": [] if rank else [Callback()],
            "batch_size": None,
        }
        loader = DataLoader(samples(), 4, shuffle=True, generator=torch.Generator().manual_seed(rank))
        trainer = trainer_of(checkpoint_dir=str(tmp_path / "run"), **different)
        trainer.fit(loader)
        (tmp_path / "other").mkdir(exist_ok=True)
        spelled = tmp_path / "run" if rank == 0 else tmp_path / "other" / ".." / "run"
        differs = r"checkpoint_dir is '.*/run' on rank 0 and '.*/other/\.\./run' on rank 1"
        with pytest.raises(DistributedError, match=differs):
            trainer_of(checkpoint_dir=str(spelled), **different).fit(loader)
        return trainer.step

    assert on_ranks(run, 2) == [3, 3]


def test_samples_of_a_rank_alone_are_told_of():
    """Each rank takes its part of its own dataset; a stream would be read whole."""

    def run():
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("panther").addHandler(handler)
        try:
            for data in (samples(), samples(seed=get_rank()), list(samples(seed=get_rank()))):
                trainer_of().fit(data)
        finally:
            logging.getLogger("panther").removeHandler(handler)
        return messages

    first, second = on_ranks(run, 2)
    assert second == []
    assert len(first) == 2
    assert first[0] == first[1]
    assert first[0].startswith(
        "rank 1 has different samples in the training data than rank 0, and each rank takes only its"
    )


def test_three_ranks_are_told_which_one_differs():
    def run():
        with pytest.raises(DistributedError) as caught:
            trainer_of(learning_rate=by_rank(0.1, 0.2, 0.1), seed=by_rank(0, 0, 3)).fit(samples())
        return str(caught.value)

    (message,) = set(on_ranks(run, 3))
    assert message == (
        "settings or data differ between ranks: learning_rate=0.1 on ranks 0, 2 and 0.2 on rank 1; seed=0 on "
        "ranks 0, 1 and 3 on rank 2: start every rank with the same script, arguments, data and versions"
    )


def test_equal_settings_have_equal_descriptions_and_others_do_not():
    def make(label):
        return [
            make_with(0.1 + len(label)),
            functools.partial(F.cross_entropy, weight=torch.ones(len(label))),
            nn.CrossEntropyLoss(weight=torch.ones(len(label))),
            {"a": [label, {len(label)}], "b": torch.arange(len(label))},
            Unseeded(len(label), 0).__iter__,
            tuple(range(40 + len(label))),
        ]

    first, again, other = (list(map(describe_value, make(label))) for label in ("x", "x", "xyz"))
    assert first == again
    assert all(itertools.starmap(lambda one, two: one != two, zip(first, other, strict=True)))
    assert describe_value(torch.zeros(0)) != describe_value(torch.zeros(0, 2))
    assert "0x" not in str(first)
