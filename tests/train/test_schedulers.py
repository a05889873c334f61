"""The argument ``scheduler`` of a Trainer against plain loops of torch: rates, resuming, added groups, refusals."""

import functools
import itertools
import logging
import math
import os
import re
import signal

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.optim import lr_scheduler as L
from torch.optim.swa_utils import SWALR
from torch.utils.data import IterableDataset, TensorDataset
from whole_batches import STRATEGIES, assert_equal, build, plain, train, weights

from panther.errors import CheckpointError, ConfigError
from panther.train import Callback, TrainConfig, Trainer

try:
    import transformers
except ImportError:  # `make test` does without
    transformers = None

STEPS = 9


class Counted:
    """A factor with a state of its own, as transformers and users write them."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 1 / (1 + step + self.calls)


class Nested(L.LRScheduler):
    """A scheduler with another one inside, as warm-ups of several packages are, whose state_dict holds an object."""

    def __init__(self, optimizer):
        self.after = L.StepLR(optimizer, 2, 0.5)
        super().__init__(optimizer)

    def get_lr(self):
        return [(1 + self.last_epoch) / 4 * rate for rate in self.base_lrs]

    def step(self):
        if getattr(self, "last_epoch", 0) < 3:
            super().step()
        else:
            self.after.step()


SCHEDULERS = {
    "LambdaLR": lambda o: L.LambdaLR(o, lambda i: min(1, i / 3) * max(0, 1 - i / 20)),
    "LambdaLR of an object": lambda o: L.LambdaLR(o, Counted()),
    "LambdaLR of NumPy's numbers": lambda o: L.LambdaLR(o, lambda i: np.float32(0.9) ** i),
    "MultiplicativeLR": lambda o: L.MultiplicativeLR(o, lambda i: 0.9 if i % 2 else 1.05),
    "StepLR": lambda o: L.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: L.MultiStepLR(o, [2, 4, 4], 0.5),
    "ConstantLR": lambda o: L.ConstantLR(o, 0.1, 6),
    "LinearLR": lambda o: L.LinearLR(o, 1 / 3, 0.0, total_iters=7),
    "ExponentialLR": lambda o: L.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: L.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: L.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: L.CosineAnnealingWarmRestarts(o, 2, 2),
    "SequentialLR": lambda o: L.SequentialLR(o, [L.LinearLR(o, total_iters=3), L.MultiStepLR(o, [2])], [3]),
    "ChainedScheduler": lambda o: L.ChainedScheduler([L.ConstantLR(o, 0.1, 4), L.ExponentialLR(o, 0.9)]),
    "OneCycleLR": lambda o: L.OneCycleLR(o, [0.3, 0.2], total_steps=STEPS),
    "CyclicLR": lambda o: L.CyclicLR(o, [0.01, 0.02], 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=6),
    "nested": Nested,
}
OF_TRANSFORMERS = {
    "constant": lambda o: transformers.get_constant_schedule(o),
    "warm-up": lambda o: transformers.get_constant_schedule_with_warmup(o, 4),
    "linear": lambda o: transformers.get_linear_schedule_with_warmup(o, 3, 8),
    "cosine": lambda o: transformers.get_cosine_schedule_with_warmup(o, 3, 8),
    "restarts": lambda o: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(o, 3, 8, 2),
    "polynomial": lambda o: transformers.get_polynomial_decay_schedule_with_warmup(o, 3, 8),
    "root": lambda o: transformers.get_inverse_sqrt_schedule(o, 3),
    "stable": lambda o: transformers.get_wsd_schedule(o, 2, 2, num_stable_steps=3),
}
PLATEAUS = {
    "ReduceLROnPlateau": lambda o: L.ReduceLROnPlateau(o, patience=0, threshold=0.05, cooldown=1),
    "ReduceLROnPlateau to bounds": lambda o: L.ReduceLROnPlateau(o, patience=0, threshold=2, min_lr=[0.03, 0.01]),
}
PLATEAUS_OF_TRANSFORMERS = {
    "transformers": lambda o: transformers.get_reduce_on_plateau_schedule(o, patience=0, threshold=0.9, factor=0.5),
    "GreedyLR": lambda o: transformers.get_scheduler(
        "greedy", o, scheduler_specific_kwargs={"patience": 0, "smooth": True, "window_size": 2, "min_lr": 1e-3}
    ),
}
if transformers:
    SCHEDULERS |= OF_TRANSFORMERS
    PLATEAUS |= PLATEAUS_OF_TRANSFORMERS


class Notes(Callback):
    """Notes the settings of all groups in each step, as numbers; other callbacks change them with ``changes``."""

    def __init__(self, changes=()):
        self.rows, self.changes = [], dict(changes)

    def note(self, optimizer):
        numbers = [[group["lr"], group["momentum"]] for group in optimizer.param_groups]
        self.rows.append([float(number) for pair in numbers for number in pair])

    def on_step(self, trainer, loss):
        self.note(trainer.optimizer)
        if trainer.step in self.changes:
            self.changes[trainer.step](trainer)


def sgd(model, rate=0.1):
    groups = [{"params": [p], "lr": rate / (1 + i)} for i, p in enumerate(model.parameters())]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def data(samples=8):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3)


def run(scheduler, folder=None, steps=STEPS, rate=0.1, changes=(), validate=False, training=None, **settings):
    """The rows of a run in steps of half of the samples, and the Trainer."""
    torch.manual_seed(0)
    callback, model = Notes(changes), nn.Linear(4, 3)
    settings = {"max_steps": steps, "batch_size": 4, "log_every_n_steps": 1, "progress": False} | settings
    config = TrainConfig(checkpoint_dir=None if folder is None else str(folder), **settings)
    trainer = Trainer(model, sgd(model, rate), nn.CrossEntropyLoss(), config, [callback], scheduler=scheduler)
    trainer.fit(data() if training is None else training, data(5) if validate else None)
    return callback.rows, trainer


def stopped(make, folder, step, **settings):
    """The rows of a run that gets a signal after a step, and ends with the next one."""
    rows = []

    def stop(trainer):
        rows.append(trainer.callbacks[0].rows)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(make, folder, changes={step: stop}, **settings)
    return rows[0]


def rates(trainer):
    return [float(group["lr"]) for group in trainer.optimizer.param_groups]


def loop(make, rate=0.1, steps=STEPS, period=1, values=()):
    """The rows of a plain loop, and the rates after it; it steps the scheduler after each ``period`` steps."""
    model, notes = nn.Linear(4, 3), Notes()
    optimizer = sgd(model, rate)
    scheduler = make(optimizer)
    for step in range(1, steps + 1):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        notes.note(optimizer)
        if step % period == 0:
            scheduler.step(*([values[step // period - 1]] if values else []))
    return notes.rows, [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_those_of_a_plain_loop_and_continue_bit_for_bit(name, interval, rate, tmp_path, caplog):
    make = SCHEDULERS[name]
    settings = {"rate": rate, "scheduler_interval": interval}
    expected = loop(make, rate, period=1 if interval == "step" else 2)
    whole, trainer = run(make, **settings)
    assert (whole, rates(trainer)) == expected
    assert trainer.history["learning_rate"][1] == [row[0] for row in whole]
    for stop in (3, 6):  # step 3 is in the middle of an epoch
        first_rates, _ = run(make, tmp_path / str(stop), stop, **settings)
        later_rates, trainer = run(make, tmp_path / str(stop), **settings)
        assert (first_rates + later_rates, rates(trainer)) == expected
    assert "settings" not in caplog.text


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("metric", [None, "loss", "validation_loss"])
@pytest.mark.parametrize("name", PLATEAUS)
def test_a_scheduler_of_a_metric_steps_once_for_each_new_value(name, metric, interval, tmp_path):
    make, settings = PLATEAUS[name], {"scheduler_interval": interval, "scheduler_metric": metric, "validate": True}
    if metric != "loss":
        settings["validate_every_n_steps"] = 3  # not in the last step of each epoch
    whole, trainer = run(make, tmp_path / "whole", **settings)
    history = trainer.history
    values = history[metric or "validation_loss"]
    by_step = dict(zip(*values, strict=True))
    if interval == "epoch":  # the last value of each epoch of two steps
        by_step = {step + step % 2: value for step, value in by_step.items()}
    model, notes = nn.Linear(4, 3), Notes()
    optimizer = sgd(model)
    scheduler = make(optimizer)
    for step in range(1, STEPS + 1):
        notes.note(optimizer)
        if step in by_step:
            scheduler.step(by_step[step])
    assert whole == notes.rows
    assert len(set(map(tuple, whole))) > 1
    # Checkpoints are those of killed runs: the last step of a run adds values to the history.
    for stop in range(1, STEPS - 1):
        folder = tmp_path / str(stop)
        first = stopped(make, folder, stop, **settings)
        rest, resumed = run(make, folder, **settings)
        assert first + rest == whole
        assert rates(resumed) == rates(trainer)


def test_groups_that_join_later_are_refused():
    class Thaw(Callback):
        def on_step(self, trainer, loss):
            trainer.model[2].requires_grad_(True)

    model = build()
    model[2].requires_grad_(False)
    config = TrainConfig(max_steps=4, batch_size=8)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    scheduler = functools.partial(L.StepLR, step_size=1, gamma=0.5)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), config, [Thaw()], scheduler=scheduler)
    x = torch.randn(8, 8, dtype=torch.float64)
    with pytest.raises(ConfigError, match="a group was added to the optimizer, and the scheduler has the groups of"):
        trainer.fit(TensorDataset(x, torch.arange(8)))


class Other:
    """Objects that functions return in the place of a scheduler."""

    def __init__(self, optimizer, step):
        self.optimizer, self.step = optimizer, step


REFUSED = [
    ({"scheduler": 3}, {}, "scheduler must be a function, such as lambda optimizer: int(optimizer, ...)"),
    ({"scheduler": L.ExponentialLR(sgd(nn.Linear(4, 3)), 0.5)}, {}, "lambda optimizer: ExponentialLR(optimizer, ...)"),
    ({"scheduler": lambda o: None}, {}, "a NoneType, which is not a scheduler of the optimizer"),
    ({"scheduler": lambda o: o}, {}, "a SGD, which is not a scheduler of the optimizer"),
    ({"scheduler": lambda o: [L.StepLR(o, 1)]}, {}, "a list, which is not a scheduler of the optimizer"),
    (
        {"scheduler": lambda o: L.StepLR(sgd(nn.Linear(4, 3)), 1)},
        {},
        "a StepLR, which is not a scheduler of the optimizer: make one of the function's argument",
    ),
    ({"scheduler": lambda o: Other(o, lambda epoch, metric=None: None)}, {}, "a Other, whose step needs ['epoch']"),
    (
        {"scheduler": L.ReduceLROnPlateau},
        {},
        "has no 'validation_loss', which the scheduler takes: set scheduler_metric",
    ),
    ({"scheduler": L.ReduceLROnPlateau}, {"scheduler_metric": "validation_f1"}, "one of ['loss'], or pass validation"),
    (
        {"scheduler": L.ReduceLROnPlateau, "validation": True},
        {"scheduler_metric": "accuracy"},
        "the history has no 'accuracy', which the scheduler takes: set scheduler_metric to one of ['loss', "
        "'validation_loss', 'validation_f1']",
    ),
    (
        {"scheduler": lambda o: L.StepLR(o, 1)},
        {"scheduler_metric": "loss"},
        "a StepLR, whose step takes no metric: leave out scheduler_metric",
    ),
    ({"scheduler": lambda o: L.StepLR(o, 1)}, {"schedule": "cosine"}, "schedule='cosine' excludes the argument sch"),
    ({"scheduler": lambda o: L.StepLR(o, 1)}, {"schedule": "callback"}, "schedule='callback' excludes the argument"),
    ({"scheduler": lambda o: L.StepLR(o, 1)}, {"warmup_steps": 3}, "warmup_steps=3 excludes the argument scheduler"),
    ({}, {"scheduler_interval": "epoch"}, "scheduler_interval='epoch' needs the argument scheduler of Trainer"),
    ({}, {"scheduler_metric": "loss"}, "scheduler_metric='loss' needs the argument scheduler of Trainer"),
    (
        {"scheduler": lambda o: L.OneCycleLR(o, 0.1, total_steps=9)},
        {"learning_rate": 0.2},
        "a OneCycleLR, with its own rates: leave out learning_rate",
    ),
    (
        {"scheduler": lambda o: L.LambdaLR(o, lambda i: 1 - i)},
        {},
        "group 0 to -0.1 after 2 steps, and a rate is finite and not negative",
    ),
    ({"scheduler": lambda o: L.LambdaLR(o, lambda i: (1 - i) ** 0.5)}, {}, "and a rate is finite and not negative"),
    ({"scheduler": lambda o: L.LambdaLR(o, lambda i: math.nan)}, {}, "group 0 to nan after 0 steps"),
]


@pytest.mark.parametrize(("arguments", "settings", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_cannot_work_is_refused(arguments, settings, message):
    model, arguments = nn.Linear(4, 3), dict(arguments)
    first_values = [p.clone() for p in model.parameters()]
    validation = data(5) if arguments.pop("validation", False) else None
    metrics = {"f1": lambda output, target: 0.0}
    config = TrainConfig(max_steps=4, batch_size=4, **settings)

    def fit():
        Trainer(model, sgd(model), nn.CrossEntropyLoss(), config, metrics=metrics, **arguments).fit(data(), validation)

    with pytest.raises(ConfigError) as caught:
        fit()
    assert message in str(caught.value)
    if "a rate is finite" not in message:
        assert all(map(torch.equal, model.parameters(), first_values))


def test_a_scheduler_that_the_optimizer_has_already_is_refused():
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    scheduler = L.StepLR(optimizer, 1)
    config = TrainConfig(max_steps=1, batch_size=4)
    with pytest.raises(ConfigError, match=r"the optimizer has a scheduler, .* by the argument scheduler of Trainer"):
        Trainer(model, optimizer, nn.CrossEntropyLoss(), config, scheduler=lambda _: scheduler).fit(data())


def test_a_rate_that_a_callback_sets_is_not_overwritten_in_silence():
    def halve(trainer):
        trainer.optimizer.param_groups[1]["lr"] /= 2

    class AtStart(Callback):
        def on_start(self, trainer):
            halve(trainer)

    with pytest.raises(ConfigError, match=r"group 1 was set to 0.025 after step 2, and scheduler= sets it in every"):
        run(lambda o: L.LambdaLR(o, lambda i: 1.0), changes={2: halve})
    model = nn.Linear(4, 3)
    config = TrainConfig(max_steps=1, batch_size=4)
    trainer = Trainer(model, sgd(model), nn.CrossEntropyLoss(), config, [AtStart()], scheduler=lambda o: L.StepLR(o, 1))
    with pytest.raises(ConfigError, match=r"group 1 was set to 0.025 after step 0, and scheduler= sets it"):
        trainer.fit(data())


@pytest.mark.parametrize(
    ("second", "settings", "kind"),
    [
        (lambda o: L.LinearLR(o), {}, "LinearLR of each step"),
        (None, {}, "none"),
        (SCHEDULERS["StepLR"], {"scheduler_interval": "epoch"}, "StepLR of each epoch"),
        (PLATEAUS["ReduceLROnPlateau"], {"validate": True}, "ReduceLROnPlateau of each step by validation_loss"),
    ],
)
def test_another_scheduler_is_refused_before_anything_has_changed(second, settings, kind, tmp_path):
    run(SCHEDULERS["StepLR"], tmp_path, 3)
    torch.manual_seed(0)
    expected = nn.Linear(4, 3).weight
    models = []

    def fit(scheduler, **options):
        options = {"max_steps": 9, "batch_size": 4, "checkpoint_dir": str(tmp_path)} | options
        validation = data(5) if options.pop("validate", False) else None
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        models.append(model)
        Trainer(model, sgd(model), nn.CrossEntropyLoss(), TrainConfig(**options), scheduler=scheduler).fit(
            data(), validation
        )

    message = f"step-00000003 has the scheduler StepLR of each step, but the run has {kind}: pass the same scheduler"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        fit(second, **settings)
    assert torch.equal(models[-1].weight, expected)


def test_settings_that_were_changed_apply_and_are_said(tmp_path, caplog):
    """A run that is made longer: the rates are those of a run that had the settings from its start."""
    with caplog.at_level(logging.WARNING):
        run(lambda o: L.LinearLR(o, 1.0, 0.0, total_iters=4), tmp_path, 4)
        longer = lambda o: L.LinearLR(o, 1.0, 0.0, total_iters=12)  # noqa: E731
        rows, trainer = run(longer, tmp_path)
    expected, last = loop(longer)
    assert (rows, rates(trainer)) == (expected[4:], last)
    assert "by its settings, which have changed, the scheduler sets 0.066" in caplog.text


def test_fit_can_be_called_again(tmp_path):
    make = SCHEDULERS["StepLR"]
    whole, _ = run(make)
    trainer = run(make, tmp_path, 4)[1]
    trainer.fit(data())  # it resumes from its own last step, and is finished
    object.__setattr__(trainer.config, "max_steps", STEPS)
    trainer.fit(data())
    assert trainer.callbacks[0].rows == whole


class NaNs(nn.Module):
    """A loss that is not finite in some steps."""

    def __init__(self, *steps):
        super().__init__()
        self.steps, self.calls = steps, 0

    def forward(self, output, target):
        self.calls += 1
        return nn.functional.cross_entropy(output, target) * (math.nan if self.calls in self.steps else 1.0)


@pytest.mark.parametrize(("interval", "factors"), [("step", [0, 0, 0, 1, 1, 2]), ("epoch", [0, 0, 1, 1, 2, 2])])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_was_skipped_is_no_step_of_the_scheduler(interval, factors, scaled):
    """Torch warns, which is an error here, if the scheduler steps before the optimizer has."""

    class All(Notes):
        def on_skip(self, trainer):
            self.note(trainer.optimizer)

    model, callback = nn.Linear(4, 3), All()
    config = TrainConfig(
        max_steps=6, batch_size=4, on_nonfinite="skip", scheduler_interval=interval, log_every_n_steps=1,
        **({"mixed_precision": "fp16", "scaler_init_scale": 2.0**20} if scaled else {}),
    )  # fmt: skip
    loss = nn.CrossEntropyLoss() if scaled else NaNs(1, 2, 4)
    scheduler = lambda o: L.ExponentialLR(o, 0.5)  # noqa: E731
    trainer = Trainer(model, sgd(model), loss, config, [callback], scheduler=scheduler)
    trainer.fit(data())
    skipped = trainer.history["skipped"][1] if not scaled else None
    if scaled:  # it overflows until its scale is small enough
        flags = [later > earlier for earlier, later in itertools.pairwise([0, *trainer.history["skipped"][1]])]
        assert flags[0]
        assert not flags[-1]
        steps = [sum(not flag for flag in flags[:number]) for number in range(6)]
        factors = steps if interval == "step" else factors
    else:
        assert skipped[-1] == 3
    assert [row[0] for row in callback.rows] == [0.1 / 2**factor for factor in factors]


def test_a_step_is_a_step_of_the_optimizer(tmp_path):
    """With accumulation, and in streams, whose epochs end when they end."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data(12))

    for interval, factors in (("step", range(6)), ("epoch", [0, 0, 0, 1, 1, 1])):
        settings = {"gradient_accumulation_steps": 2, "batch_size": None, "scheduler_interval": interval}
        stream = torch.utils.data.DataLoader(Stream(), 2)
        rows, trainer = run(SCHEDULERS["ExponentialLR"], None, 6, training=stream, **settings)
        assert [row[0] for row in rows] == pytest.approx([0.1 * 0.8**factor for factor in factors], rel=1e-12)
        # The end of the stream is not known in the last step.
        end = 6 if interval == "step" else 1
        assert rates(trainer)[0] == pytest.approx(0.1 * 0.8**end, rel=1e-12)
        # A run that ends there does the rest when it continues.
        first_rows, _ = run(SCHEDULERS["ExponentialLR"], tmp_path / interval, 3, training=stream, **settings)
        later_rows, _ = run(SCHEDULERS["ExponentialLR"], tmp_path / interval, 6, training=stream, **settings)
        assert first_rows + later_rows == rows


ALL = ("ddp", "zero1", "fsdp", "replicate", "tp", "pp")
EVERYWHERE = {
    "one": lambda o: L.OneCycleLR(o, 0.3, total_steps=6),
    "sequential": lambda o: L.SequentialLR(o, [L.LinearLR(o, total_iters=2), L.CosineAnnealingLR(o, 5)], [2]),
}


def test_every_strategy_takes_the_steps_of_one_process(tmp_path):
    """Two ranks, stopped after two of four steps, in one layout and with SGD's momentum moved by OneCycleLR."""

    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run_on_rank():
        outcomes = []
        for strategy, (name, make) in itertools.product(ALL, EVERYWHERE.items()):
            settings = STRATEGIES[strategy] | {"checkpoint_dir": str(tmp_path / strategy / name)}
            for steps in (2, 4):
                model = build()
                trainer = train(model, optimizer(model), settings, steps=steps, scheduler=make)
            outcomes.append((weights(trainer), trainer.optimizer.param_groups[0]["lr"]))
        return outcomes

    outcomes = on_ranks(run_on_rank, 2)
    for number, (_, make) in enumerate(itertools.product(ALL, EVERYWHERE.values())):
        model = build()
        one = optimizer(model)
        expected = plain(model, one, scheduler=make(one))
        assert_equal([outcome[number][0] for outcome in outcomes], expected)
        assert {outcome[number][1] for outcome in outcomes} == {one.param_groups[0]["lr"]}


class Made(Notes):
    """A scheduler that on_start makes, stepped by the callback."""

    saved = None

    def on_start(self, trainer):
        self.scheduler = L.LinearLR(trainer.optimizer, 0.1, total_iters=4)
        if self.saved is not None:
            self.scheduler.load_state_dict(self.saved)

    def on_step(self, trainer, loss):
        self.note(trainer.optimizer)
        self.scheduler.step()

    def state_dict(self):
        return self.scheduler.state_dict()

    def load_state_dict(self, state):
        self.saved = state


def test_the_settings_that_zero1_saves_are_those_of_the_next_step(tmp_path):
    """Its public groups are copied to the inner ones in a step, and the inner ones were saved."""

    def run_on_rank():
        rows = []
        for steps in (2, 5):
            model, callback = build(), Made()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            settings = {"strategy": "zero1", "schedule": "callback", "checkpoint_dir": str(tmp_path)}
            train(model, optimizer, settings, [callback], steps)
            rows += callback.rows
        return [row[0] for row in rows]

    for rates_of_rank in on_ranks(run_on_rank, 2):
        assert rates_of_rank == pytest.approx([0.01, 0.0325, 0.055, 0.0775, 0.1], rel=1e-12)
