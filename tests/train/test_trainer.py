"""The trainer in one process: resuming, what is recorded, what stops it."""

import copy
import dataclasses
import json
import multiprocessing
import os
import random
import re
import signal
from functools import partial

import numpy as np
import pytest
import torch
from breaking import Breaks, BrokenError
from covering import half_of
from ranks import on_ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from panther import compress, load_compressed
from panther.distributed import checkpoint
from panther.errors import CheckpointError, ConfigError, TrainingError
from panther.nn import QuantizedLinear, SKLinear
from panther.train import Callback, TrainConfig, Trainer

pytestmark = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(SKLinear(24, 24, 2), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))


def samples(n=50):
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(n, 24, generator=generator), torch.randint(3, (n,), generator=generator))


class Noisy(Dataset):
    """Draws when a sample is fetched, from torch's generator."""

    def __init__(self):
        self.data = samples()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + 0.1 * torch.randn(24), y


class Stream(IterableDataset):
    def __iter__(self):
        yield from samples()


DATA = {
    "shuffled": lambda: DataLoader(samples(), 8, shuffle=True),
    "drawn when fetched": lambda: DataLoader(Noisy(), 8, shuffle=True),
    "drawn by workers": lambda: DataLoader(Noisy(), 8, shuffle=True, num_workers=2),
    "weighted": lambda: DataLoader(samples(), 8, sampler=WeightedRandomSampler(torch.arange(1.0, 51), 40)),
    "own batches": lambda: DataLoader(samples(), batch_sampler=BatchSampler(range(50), 8, drop_last=False)),
    "stream": lambda: DataLoader(Stream(), 8),
}
SETTINGS = {
    "learning_rate": 0.05,
    "schedule": "cosine",
    "warmup_steps": 3,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "log_every_n_steps": 3,
    "max_steps": 10,
}


def run(data, directory=None, callbacks=(), seed=0, optimizer=torch.optim.AdamW, **more):
    config = TrainConfig(**{**SETTINGS, **more}, checkpoint_dir=None if directory is None else str(directory))
    trainer = Trainer(build(seed), optimizer, nn.CrossEntropyLoss(), config, callbacks)
    trainer.fit(DATA[data](), DataLoader(samples(20), 7))
    return trainer


@pytest.mark.parametrize(("data", "stopped"), half_of([*DATA], [1, 4, 6, 9]))
def test_a_run_that_is_stopped_and_resumed_ends_bit_for_bit_as_one_that_was_not(tmp_path, data, stopped):
    expected = run(data)
    with pytest.raises(BrokenError):
        run(data, tmp_path, [Breaks(stopped + 1)], checkpoint_every_n_steps=1)
    trainer = run(data, tmp_path, seed=5, checkpoint_every_n_steps=4)
    assert trainer.step == expected.step == 10
    state = expected.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in trainer.model.state_dict().items())
    names = ("step", "epoch", "loss", "learning_rate", "gradient_norm", "validation_loss")
    rows = [[{name: row.get(name) for name in names} for row in one.history] for one in (trainer, expected)]
    assert rows[0] == rows[1]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == list(trainer.history)


def test_a_callback_may_add_records_of_any_numbers(tmp_path):
    class Adds(Callback):
        def on_epoch(self, trainer):
            trainer.history.append({"step": trainer.step, "half": np.float32(0.5), "third": torch.tensor(3.0)})

    trainer = run("shuffled", tmp_path, [Adds()])
    again = run("shuffled", tmp_path, [Adds()], max_steps=11)
    assert again.history["half"][1] == trainer.history["half"][1] == [0.5] * trainer.epoch
    assert again.history["third"][0] == trainer.history["third"][0]


def test_the_plain_loop_is_the_same_thing():
    model, data = build(), samples()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model[3].p = 0.0
    for _ in range(2):
        for begin in range(0, 50, 8):
            optimizer.zero_grad()
            x, y = data[begin : begin + 8]
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    other = build()
    other[3].p = 0.0
    optimizer = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    Trainer(other, optimizer, nn.CrossEntropyLoss(), TrainConfig(epochs=2)).fit(DataLoader(data, 8))
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_a_sum_is_not_averaged():
    weights = []
    for loss in (nn.MSELoss(reduction="sum"), lambda y, t: (y - t).square().mean()):
        model = nn.Linear(24, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        x = samples(16).tensors[0].double()
        rate = 0.001 / 16 if isinstance(loss, nn.MSELoss) else 0.001
        config = TrainConfig(gradient_accumulation_steps=2)
        trainer = Trainer(model, lambda p, rate=rate: torch.optim.SGD(p, rate), loss, config)
        trainer.fit(DataLoader(TensorDataset(x, x[:, :1]), 8))
        weights.append(model.weight.detach())
    assert torch.allclose(*weights, rtol=1e-10)


def test_metrics_are_means_over_samples():
    x, y = samples(20).tensors
    model = build().eval()
    metrics = {"accuracy": lambda output, target: (output.argmax(1) == target).double().mean()}
    trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), metrics=metrics)
    found = trainer.evaluate(DataLoader(samples(20), 7))
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(x), y)
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert found["accuracy"] == (model(x).argmax(1) == y).double().mean().item()


class Own(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(24, 3)

    def forward(self, x, labels):
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_models_that_return_their_loss_take_mappings():
    data = [{"x": x, "labels": y} for x, y in samples()]
    history = Trainer(Own(), config=TrainConfig(epochs=3, learning_rate=0.05)).fit(DataLoader(data, 10))
    assert history.last["loss"] < 1.2
    assert history.last["step"] == 15


def test_a_compressed_model_is_fine_tuned_by_the_defaults_and_keeps_what_it_knows():
    """The target is the original's output. Trained scales turned an error of 0.003 into 0.6, without a warning."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(512, 64)
    y = original(x).detach()

    def error(model):
        with torch.no_grad():
            return ((model(x) - y).norm() / y.norm()).item()

    for forms in ("int8", "int4+low_rank"):
        model = copy.deepcopy(original)
        compress(model, 0.6, [*x.split(64)], forms=forms, group_size=32, allow_slower=True, measure_speed=False, seed=0)
        for train_scales in (False, True):
            tuned = copy.deepcopy(model)
            for layer in tuned if train_scales else ():
                if isinstance(layer, QuantizedLinear):
                    layer.train_scales_()
            Trainer(tuned, None, nn.MSELoss(), TrainConfig(epochs=3, batch_size=32)).fit(TensorDataset(x, y))
            assert error(tuned) < 0.01


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns(precision, tmp_path):
    config = TrainConfig(epochs=8, mixed_precision=precision, learning_rate=0.02, checkpoint_dir=str(tmp_path))
    trainer = Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=config)
    history = trainer.fit(DataLoader(samples(), 10, shuffle=True))
    assert history["loss"][1][-1] < history["loss"][1][0]
    assert all(p.dtype is torch.float32 for p in trainer.model.parameters())
    again = Trainer(build(3), loss_fn=nn.CrossEntropyLoss(), config=config)
    again.fit(DataLoader(samples(), 10, shuffle=True))
    assert again.step == trainer.step
    if precision == "fp16":
        assert again._engine.scaler.state_dict() == trainer._engine.scaler.state_dict() != {}


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_clipping_looks_at_what_the_optimizer_trains(precision):
    """Gradients of other parameters are neither unscaled nor cleared."""
    trained = []
    for frozen in (False, True):
        model = nn.Sequential(nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 3))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        model[0].requires_grad_(not frozen)
        config = TrainConfig(
            epochs=2, learning_rate=0.1, gradient_clipping=0.05, mixed_precision=precision, log_every_n_steps=1
        )
        optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
        history = Trainer(model, optimizer, nn.CrossEntropyLoss(), config).fit(DataLoader(samples(), 10))
        trained.append((history["gradient_norm"], history["loss"]))
    assert trained[0] == trained[1]
    assert min(trained[0][0][1]) > 0.05


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputed_activations_change_nothing(kind):
    def trained(kind):
        config = TrainConfig(epochs=1, activation_checkpointing=kind)
        trainer = Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=config)
        trainer.fit(DataLoader(samples(), 10))
        return [p.detach() for p in trainer.model.parameters()]

    assert all(map(torch.equal, trained(kind), trained("none")))


def test_recomputed_layers_are_saved_under_their_own_names(tmp_path):
    """A run continues without recomputing, and its export fits the plain model."""
    config = TrainConfig(max_steps=2, activation_checkpointing="full", checkpoint_dir=str(tmp_path / "run"))
    Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=config).fit(DataLoader(samples(), 10))
    config = dataclasses.replace(config, activation_checkpointing="none", max_steps=3)
    trainer = Trainer(build(5), loss_fn=nn.CrossEntropyLoss(), config=config)
    assert trainer.fit(DataLoader(samples(), 10)).last["step"] == 3
    config = TrainConfig(max_steps=1, activation_checkpointing="selective")
    again = Trainer(build(6), loss_fn=nn.CrossEntropyLoss(), config=config)
    again.fit(DataLoader(samples(), 10))
    again.export(str(tmp_path / "export"))
    loaded = load_compressed(tmp_path / "export", build(7))
    for name, parameter in again.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name.replace("_checkpoint_wrapped_module.", "")), parameter)


def poisoned():
    x, y = samples().tensors
    x = x.clone()
    x[13] = float("nan")
    return DataLoader(TensorDataset(x, y), 10)


def test_a_loss_that_is_not_finite_stops_before_the_parameters_change(tmp_path):
    model = nn.Linear(24, 3)
    trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), config=TrainConfig(checkpoint_dir=str(tmp_path)))
    with pytest.raises(TrainingError) as caught:
        trainer.fit(poisoned())
    assert str(caught.value).startswith(
        "step 2 is not finite: the loss is nan on rank 0, on the samples 10, 11, 12, 13, 14, 15, 16, 17, 18, 19; the"
    )
    assert all(p.isfinite().all() for p in model.parameters())


class Steep(nn.Module):
    """Its loss is finite and its gradient is not, once a step was taken so often."""

    def __init__(self, at):
        super().__init__()
        self.layer, self.calls, self.at = nn.Linear(24, 3), 0, at

    def forward(self, x):
        self.calls += 1
        output = self.layer(x)
        return output + (output * 0).sum().abs().sqrt() if self.calls == self.at else output


@pytest.mark.parametrize(
    ("settings", "at"), [({"epochs": 2, "checkpoint_every_n_epochs": 1}, 5), ({"max_steps": 3}, 3), ({"epochs": 1}, 5)]
)
def test_a_gradient_that_is_not_finite_is_in_no_checkpoint(tmp_path, settings, at):
    model = Steep(at)
    config = TrainConfig(checkpoint_dir=str(tmp_path), log_every_n_steps=100, **settings)
    with pytest.raises(TrainingError, match=f"step {at} is not finite: the norm of the gradient is not finite"):
        Trainer(model, loss_fn=nn.CrossEntropyLoss(), config=config).fit(DataLoader(samples(), 10))
    assert checkpoint.checkpoints(tmp_path) == []
    assert all(p.isfinite().all() for p in model.parameters())


class Signals(Callback):
    def __init__(self, number, step):
        self.number, self.at = number, step

    def on_step(self, trainer, loss):
        if trainer.step == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_saves_and_ends_and_the_same_call_continues(tmp_path, number, caplog):
    expected = run("shuffled")
    previous_handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        run("shuffled", tmp_path, [Signals(number, 5)])
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) is previous_handler
    assert f"stopped by {number.name} after step 6: a checkpoint is in {tmp_path}" in caplog.text
    with caplog.at_level("INFO", "panther.train"):
        trainer = run("shuffled", tmp_path, seed=3)
    assert f"resuming from step 6 of {tmp_path / 'step-00000006'}" in caplog.text
    assert all(map(torch.equal, trainer.model.state_dict().values(), expected.model.state_dict().values()))


class Stops(Callback):
    """A signal to the whole group, as a scheduler sends it."""

    def on_step(self, trainer, loss):
        if trainer.step == 3:
            os.killpg(0, signal.SIGTERM)


class Forks(Callback):
    """A process that a callback forks, and that lives on when the run has ended, as a tracker's."""

    def on_step(self, trainer, loss):
        if trainer.step == 2:
            reader, self.writer = os.pipe()
            if not os.fork():
                os.close(self.writer)
                os.kill(os.getpid(), signal.SIGUSR1)  # it has the Trainer's handler, and must not stop the Trainer
                os.read(reader, 1)  # until the end of the parent
                os._exit(0)
            os.close(reader)


@pytest.mark.distributed
@pytest.mark.parametrize("processes", ["workers of a loader", "a callback's"])
def test_processes_that_live_on_do_not_delay_the_end_of_a_run(processes):
    """They inherit the pipe by which signals are counted; fit never returned with persistent workers."""

    def work():
        settings = {"num_workers": 1, "persistent_workers": True} if processes == "workers of a loader" else {}
        loader = DataLoader(samples(), 5, **settings)
        callbacks = [Forks()] if not settings else []
        trainer = Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=TrainConfig(epochs=2), callbacks=callbacks)
        trainer.fit(loader)
        return trainer.epoch

    assert on_ranks(work, 1, fresh=True) == [2]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["samples", "stream"])
def test_a_signal_to_all_leaves_the_workers_of_loaders_to_the_step(tmp_path, kind):
    def work():
        os.setpgid(0, 0)
        data = samples() if kind == "samples" else Stream()
        loader = DataLoader(data, 5, num_workers=2)
        trainer = Trainer(
            build(),
            loss_fn=nn.CrossEntropyLoss(),
            config=TrainConfig(checkpoint_dir=str(tmp_path)),
            callbacks=[Stops()],
        )
        with pytest.raises(SystemExit) as caught:
            trainer.fit(loader)
        return caught.value.code

    assert on_ranks(work, 1, fresh=True) == [143]
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000004"]


def test_workers_of_loaders_end_with_a_run_whose_exception_is_kept():
    with pytest.raises(BrokenError) as kept:
        run("drawn by workers", callbacks=[Breaks(2)])
    assert multiprocessing.active_children() == []
    assert kept.value is not None


def test_samples_a_second_are_those_of_training():
    rates = []

    class Rates(Callback):
        def on_record(self, trainer, record):
            rates.append(record.get("samples_per_s"))

    config = TrainConfig(epochs=1, log_every_n_steps=100)
    Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=config, callbacks=[Rates()]).fit(
        DataLoader(samples(), 10), DataLoader(samples(), 10)
    )
    assert [rate > 0 for rate in rates if rate is not None] == [True]


def test_a_history_with_numbers_that_are_not_finite_is_resumed(tmp_path):
    def trained(max_steps):
        config = TrainConfig(max_steps=max_steps, log_every_n_steps=1, checkpoint_dir=str(tmp_path))
        metrics = {"odd": lambda output, target: torch.tensor(float("inf"))}
        trainer = Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=config, metrics=metrics)
        return list(trainer.fit(DataLoader(samples(), 10), DataLoader(samples(), 10)))

    first, both = trained(2), trained(3)
    assert both[: len(first)] == first
    assert first[-1]["validation_odd"] == float("inf")
    assert [type(row["step"]) for row in both] == [int] * len(both)


def test_two_runs_in_one_directory(tmp_path):
    class Second(Callback):
        def on_step(self, trainer, loss):
            pid = os.fork()
            if pid == 0:
                try:
                    run("shuffled", tmp_path)
                except TrainingError as error:
                    os._exit(7 if str(error).startswith(f"another run writes to {tmp_path} (process ") else 8)
                os._exit(9)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            trainer.stop = True

    assert run("shuffled", tmp_path, [Second()]).step == 1
    assert run("shuffled", tmp_path).step == 10


def test_the_latest_sound_checkpoint_is_taken(tmp_path):
    expected = run("shuffled", tmp_path / "a", checkpoint_every_n_steps=3)
    with pytest.raises(BrokenError):
        run("shuffled", tmp_path / "b", [Breaks(8)], checkpoint_every_n_steps=3)
    for path in checkpoint.checkpoints(tmp_path / "b")[-1].glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=r"step-00000006 is skipped: .*not a valid safetensors file"):
        trainer = run("shuffled", tmp_path / "b", seed=4)
    assert all(map(torch.equal, trainer.model.state_dict().values(), expected.model.state_dict().values()))


def test_a_run_whose_checkpoints_are_all_damaged_stops_and_removes_none(tmp_path):
    with pytest.raises(BrokenError):
        run("shuffled", tmp_path, [Breaks(8)], checkpoint_every_n_steps=3)
    folders = checkpoint.checkpoints(tmp_path)
    last = folders[-1] / "rank-00000.safetensors"
    content = last.read_bytes()
    for folder in folders:
        file = folder / "rank-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-20])
    with (
        pytest.warns(UserWarning, match="is skipped"),
        pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged, and none was removed; of the latest"),
    ):
        run("shuffled", tmp_path)
    assert checkpoint.checkpoints(tmp_path) == folders
    last.write_bytes(content)
    # The damaged ones are neither removed nor counted among those that are kept.
    assert run("shuffled", tmp_path, checkpoint_every_n_steps=3, keep_checkpoints=1).step == 10
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        *(p.name for p in folders[:-1]),
        "step-00000010",
    ]


def test_where_a_run_begins(tmp_path):
    run("shuffled", tmp_path / "a", max_steps=4, schedule="constant")
    with pytest.raises(ConfigError, match=r"resume='never', but .* has checkpoints"):
        run("shuffled", tmp_path / "a", resume="never")
    path = str(checkpoint.latest(tmp_path / "a"))
    assert run("shuffled", tmp_path / "b", resume=path).history["loss"][0] == [3, 4, 6, 9, 10]
    with pytest.raises(CheckpointError, match=r"does not fit the model: missing head\.bias"):
        Trainer(Own(), config=TrainConfig(checkpoint_dir=str(tmp_path / "a"))).fit(DataLoader([{}], 1))


def test_a_disk_that_is_full_stops_with_the_last_checkpoint_intact(tmp_path, monkeypatch):
    class Full(Callback):
        def on_step(self, trainer, loss):
            if trainer.step == 4:

                def full(*args, **kwargs):
                    raise OSError(28, "No space left on device")

                monkeypatch.setattr("panther.distributed.checkpoint.storage.write_file", full)

    with pytest.raises(CheckpointError, match=r"step 4 is not written: .* No space left on device: make room"):
        run("shuffled", tmp_path, [Full()], checkpoint_every_n_steps=2, checkpoint_asynchronously=False)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000002"]
    with pytest.raises(CheckpointError, match="cannot be written to"):
        run("shuffled", "/proc/nothing")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("epochs", "'epochs' is not an argument of Trainer{}: pass config=TrainConfig(epochs=...) to Trainer"),
        ("lr", "'lr' is not an argument of Trainer{}, nor a setting of TrainConfig: did you mean 'learning_rate'?"),
        ("num_gpus", "nor a setting of TrainConfig: the launcher decides it, in panther launch --nproc-per-node"),
        ("criterion", "nor a setting of TrainConfig: pass it to Trainer as loss_fn"),
        ("train_loader", "nor a setting of TrainConfig: pass it to fit"),
    ],
)
def test_settings_of_other_trainers_are_told_their_place(name, hint):
    with pytest.raises(ConfigError, match=re.escape(hint.format(""))):
        Trainer(build(), **{name: 1})
    with pytest.raises(ConfigError, match=re.escape(hint.format(".fit"))):
        Trainer(build()).fit([], **{name: 1})


def test_what_cannot_be_trained_is_said():
    def message(model, data, config=None, error=ConfigError, **more):
        with pytest.raises(error) as caught:
            Trainer(model, config=config, **more).fit(data)
        return str(caught.value)

    for data, kind in (
        (samples().tensors, "tuple"), ((one for one in samples()), "generator"), ({1, 2}, "set"), (3, "int"),
        ({"x": 1}, "dict"),
    ):  # fmt: skip
        expected = (
            f"a DataLoader, a Dataset or a list of samples, not a {kind}: pass TensorDataset(inputs, targets) for"
        )
        assert expected in message(nn.Linear(2, 2), data)
    assert "a TensorDataset needs batch_size" in message(nn.Linear(2, 2), samples())
    assert "a list needs batch_size" in message(nn.Linear(2, 2), [1])
    sized = TrainConfig(batch_size=4)
    assert message(build(), samples(0), sized, loss_fn=nn.MSELoss()) == "the training data is empty"
    assert message(build(), [], sized, loss_fn=nn.MSELoss()) == "the training data is empty"
    assert message(build(), samples(), sized, optimizer=lambda parameters: 3) == (
        "the function of parameters returned a int: it must return an optimizer"
    )
    with pytest.raises(ConfigError, match="export needs the name of a folder"):
        Trainer(build()).export("")
    assert message(build(), build(), sized).startswith("the data is a module, Sequential: pass the model to Trainer")
    with pytest.raises(TypeError) as caught:
        Trainer(build(), config=sized).fit(samples())
    assert caught.value.__notes__[0].startswith("Without loss_fn, forward takes all entries of a batch: pass")
    assert message(build(), [x for x, _ in samples()], sized).endswith(
        "the loss has shape (4, 3) and must be a scalar: without loss_fn the model's output is the loss, so pass "
        "loss_fn"
    )
    with pytest.raises(ConfigError, match="the validation data is empty"):
        Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=sized).fit(samples(), samples(0))
    assert "the training data is empty" in message(build(), DataLoader(samples(0), 2), loss_fn=nn.MSELoss())
    assert "a batch must be (input, target), and is a list of 1" in message(
        build(), DataLoader(TensorDataset(torch.ones(4, 24)), 2), loss_fn=nn.MSELoss()
    )
    assert "the model returned a dict without a loss" in message(
        _Dicts(), DataLoader(TensorDataset(torch.ones(4, 24)), 2)
    )
    assert "the loss has shape (8, 3) and must be a scalar" in message(
        build(), DataLoader(samples(), 8), loss_fn=lambda output, target: output
    )
    assert message(build(), DataLoader(samples(), 8), TrainConfig(data_parallel_size=2), loss_fn=nn.MSELoss()) == (
        "data_parallel_size=2 must divide the number of processes (1): start a multiple of 2, or change or leave out "
        "the size"
    )
    with pytest.raises(ConfigError, match="metric 'size' returned a str, not one number"):
        Trainer(build(), loss_fn=nn.CrossEntropyLoss(), metrics={"size": lambda output, target: "large"}).evaluate(
            DataLoader(samples(), 8)
        )
    stream = DataLoader(Stream(), 8)
    assert "needs to know the last step" in message(
        build(), stream, TrainConfig(epochs=1, schedule="linear"), loss_fn=nn.CrossEntropyLoss()
    )
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert "that are not the model's" in message(build(), stream, optimizer=other, loss_fn=nn.CrossEntropyLoss())


class _Dicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(24, 2)

    def forward(self, x):
        return {"logits": self.layer(x)}


class Wrapper(nn.Module):
    """Names that look as if DistributedDataParallel had made them."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(24, 3)
        self.weight, self.bias = nn.Parameter(torch.ones(24)), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.module(x * self.weight) + self.bias


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(24, 3)

    def forward(self, x, y):
        return self.layer(x) + "text"


def test_an_error_in_a_forward_that_takes_the_batch_is_its_own():
    with pytest.raises(TypeError, match="unsupported operand"):
        Trainer(Raises()).fit(DataLoader(samples(), 8))


class ByNumber:
    """Samples by number, as datasets.Dataset has them, without a class of torch."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize("kind", [list, ByNumber])
def test_data_without_a_class_of_torch(kind):
    found = []
    for data in (samples(), kind(list(samples()))):
        trainer = Trainer(build(), torch.optim.SGD, nn.CrossEntropyLoss(), TrainConfig(batch_size=8, epochs=2))
        trainer.fit(data, data)
        found.append(trainer.model.state_dict())
    assert all(map(torch.equal, found[0].values(), found[1].values()))


@pytest.mark.parametrize("every", [1, 3, 4, 7])
def test_the_recorded_epoch_does_not_depend_on_the_log_interval(every):
    config = TrainConfig(batch_size=10, epochs=2, log_every_n_steps=every)
    history = Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=config).fit(samples(30), samples(30))
    assert [(row["step"], row["epoch"]) for row in history if row["step"] in (3, 6)] == [
        *([(3, 1)] * (1 + (3 % every == 0))), (6, 2), (6, 2),
    ]  # fmt: skip


def test_time_goes_on_where_a_run_stopped(tmp_path):
    def fit(epochs):
        config = TrainConfig(batch_size=10, epochs=epochs, checkpoint_dir=str(tmp_path), log_every_n_steps=2)
        return Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=config).fit(samples(30), samples(30))

    first, second = fit(1), fit(3)
    times = second["elapsed_s"][1]
    assert times == sorted(times)
    assert 0 < first.total_time < second.total_time
    assert times[: len(first)] == first["elapsed_s"][1]


def test_settings_of_the_loss_scaler(tmp_path):
    more = {"scaler_init_scale": 256.0, "scaler_growth_interval": 2}
    config = TrainConfig(batch_size=10, mixed_precision="fp16", **more)
    trainer = Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=config)
    trainer.fit(samples(30))
    assert trainer._engine.scaler.get_scale() == 512.0  # doubled after the second of three steps
    default = torch.amp.GradScaler("cpu").state_dict()
    config = TrainConfig(batch_size=30, mixed_precision="fp16")
    trainer = Trainer(build(), loss_fn=nn.CrossEntropyLoss(), config=config)
    trainer.fit(samples(30))
    assert trainer._engine.scaler.state_dict() == default | {"_growth_tracker": 1}


def test_every_parameter_is_trained_whatever_it_is_called():
    model = Wrapper()
    first_values = {name: p.clone() for name, p in model.named_parameters()}
    Trainer(model, loss_fn=nn.CrossEntropyLoss()).fit(DataLoader(samples(), 8))
    assert all(not torch.equal(p, first_values[name]) for name, p in model.named_parameters())


def test_a_partial_of_a_sum_is_a_sum():
    losses = [nn.CrossEntropyLoss(reduction="sum"), partial(nn.functional.cross_entropy, reduction="sum")]
    weights = []
    for loss in losses:
        torch.manual_seed(0)
        model = nn.Linear(24, 3)
        Trainer(model, lambda p: torch.optim.SGD(p, 0.01), loss, TrainConfig(gradient_accumulation_steps=2)).fit(
            DataLoader(samples(), 8)
        )
        weights.append(model.weight)
    assert torch.equal(*weights)


class Epochs(Callback):
    def __init__(self):
        self.seen = []

    def on_epoch(self, trainer):
        self.seen.append(trainer.epoch)


def test_a_signal_between_the_last_step_and_the_end_of_its_epoch(tmp_path):
    expected = run("shuffled", max_steps=8)  # four steps an epoch
    with pytest.raises(SystemExit):
        run("shuffled", tmp_path, [Signals(signal.SIGTERM, 7)], max_steps=8)
    epochs = Epochs()
    trainer = run("shuffled", tmp_path, [epochs], max_steps=8)
    assert (trainer.epoch, epochs.seen) == (2, [2])
    assert trainer.history.last["epoch"] == expected.history.last["epoch"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_fn": nn.CrossEntropyLoss}, r"loss_fn is the class CrossEntropyLoss: pass an object"),
        ({"loss_fn": "cross_entropy"}, "loss_fn must be a function of output and target, not a str"),
        ({"optimizer": "adam"}, r"optimizer must be an optimizer, or a function of parameters .* not a str"),
        ({"config": {"epochs": 2}}, "config must be a TrainConfig, not a dict"),
        ({"callbacks": Callback()}, "callbacks must be a list"),
        ({"metrics": [len]}, "metrics must be a mapping"),
        ({"metrics": {"loss": len}}, "a metric must not be named 'loss'"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "there is nothing to train"),
        ({"loss_fn": lambda y, t: (y.sum(), 1)}, "loss_fn returned a tuple: it must return one tensor"),
        ({"loss_fn": lambda y, t: y.sum().item()}, "loss_fn returned a float"),
        ({"loss_fn": lambda y, t: y.sum().detach()}, "the loss depends on no trainable parameter"),
    ],
)
def test_arguments_of_another_kind_are_said(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(arguments.pop("model", build()), **arguments).fit(DataLoader(samples(), 8))


class Frozen(nn.BatchNorm1d):
    """A BatchNorm that its own method keeps in evaluation mode, as detection models have it."""

    calls = 0

    def train(self, mode=True):
        self.calls += 1
        return super().train(False)


def modes_of(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("frozen", [nn.BatchNorm1d, Frozen])
def test_a_model_is_trained_in_training_mode(is_whole, frozen, caplog):
    """from_pretrained returns models in evaluation mode, which were trained without dropout and without a word."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), frozen(8), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8)), nn.Linear(8, 3)
    )
    if is_whole:
        model.eval()
    else:
        model.train()
        model[2].eval()
        model[1].training = False
    data = DataLoader(TensorDataset(torch.randn(12, 4), torch.randint(3, (12,))), 4)
    trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), config=TrainConfig(epochs=1))
    with caplog.at_level("INFO", "panther.train"):
        trainer.fit(data, data)
    norm_trains = is_whole and frozen is nn.BatchNorm1d
    assert modes_of(model) == [True, True, norm_trains, *[is_whole] * 3, True]
    assert bool(model[1].num_batches_tracked) == norm_trains
    assert bool(model[2][1].num_batches_tracked) == is_whole
    names = ["1"] * (not norm_trains) + ["2", "2.0", "2.1"] * (not is_whole)
    assert ("stay in evaluation mode: " + ", ".join(names) in caplog.text) == bool(names)
    model.eval()
    trainer.fit(data)  # again, on the same Trainer
    assert modes_of(model) == [True, True, frozen is nn.BatchNorm1d, True, True, True, True]


@pytest.mark.distributed
@pytest.mark.parametrize("settings", [{}, {"strategy": "fsdp"}, {"pipeline_parallel_size": 2}], ids=str)
def test_a_model_in_evaluation_mode_is_trained_on_several_ranks(settings):
    def work():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
        data = DataLoader(TensorDataset(torch.randn(16, 4), torch.randint(3, (16,))), 4)
        trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), config=TrainConfig(epochs=1, **settings))
        trainer.fit(data)
        parts = trainer.model if isinstance(trainer.model, list) else [trainer.model]
        return all(module.training for part in parts for module in part.modules())

    assert on_ranks(work, 2) == [True, True]


class Draws(Dataset):
    """Samples with random transforms of every library."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]), torch.zeros(1)


@pytest.mark.distributed
@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_transforms_differ_between_ranks(num_workers):
    """Without workers, numpy and Python drew the same numbers on all ranks, which augmented alike."""

    def work():
        draws = []
        layer = nn.Linear(3, 1)
        layer.register_forward_pre_hook(lambda module, inputs: draws.append(inputs[0]))
        trainer = Trainer(layer, loss_fn=nn.MSELoss(), config=TrainConfig(epochs=1))
        trainer.fit(DataLoader(Draws(), 2, num_workers=num_workers))
        return torch.cat(draws).tolist()

    first, second = (torch.tensor(each) for each in on_ranks(work, 2))
    assert first.shape == second.shape == (4, 3)
    assert (first != second).all()
    assert (first != first[:1]).any(0).all()
