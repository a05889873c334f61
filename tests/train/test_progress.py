"""What a newcomer sees of a run without a terminal, and the callbacks that would never be called."""

import io
import logging
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from panther._logs import logs_shown
from panther.errors import ConfigError
from panther.train import Callback, TrainConfig, Trainer


def data(n=24):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x[:, :2])


def train(folder=None, loader=None, **settings):
    torch.manual_seed(0)
    settings = {"max_steps": 12, "log_every_n_steps": 4, **settings}
    config = TrainConfig(checkpoint_dir=folder, **settings)
    trainer = Trainer(nn.Linear(8, 2), None, nn.MSELoss(), config)
    trainer.fit(loader if loader is not None else DataLoader(data(), 4, shuffle=True), DataLoader(data(8), 4))
    return trainer


PANTHERS = logging.getLogger("panther")


def set_up_logging(monkeypatch, *handlers, level=logging.NOTSET):
    """Logging as in a script with these handlers, in place of pytest's, which come when a test begins."""
    monkeypatch.setattr(logging.getLogger(), "handlers", list(handlers))
    monkeypatch.setattr(PANTHERS, "level", level)
    PANTHERS.manager._clear_cache()


def test_lines_of_records_and_of_resuming_are_shown(tmp_path, monkeypatch, capsys):
    set_up_logging(monkeypatch)
    train(str(tmp_path), checkpoint_every_n_steps=8, max_steps=8)
    first = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"step 4 of 8: loss [\d.]+, [\d,.e+]+ samples a second, \d:\d\d:\d\d left", first[0])
    assert re.fullmatch(r"step 6 of 8: validation_loss [\d.]+, \d:\d\d:\d\d left", first[1])  # at the end of an epoch
    assert re.fullmatch(r"step 8 of 8: loss [\d.]+, [\d,.e+]+ samples a second", first[2])
    assert re.fullmatch(r"finished after \d:\d\d:\d\d: [\d.e-]+ device-hours", first[-1])
    train(str(tmp_path), max_steps=12)
    second = capsys.readouterr().err.splitlines()
    assert second[0].startswith(f"resuming from step 8 of {tmp_path}/step-00000008")
    assert second[1].startswith("step 12 of 12: loss ")
    assert PANTHERS.handlers == []
    assert PANTHERS.level == logging.NOTSET


def test_a_run_of_many_records_shows_ten_lines_and_the_last(monkeypatch, capsys):
    set_up_logging(monkeypatch)
    trainer = train(max_steps=205, log_every_n_steps=1)
    lines = capsys.readouterr().err.splitlines()
    losses = [int(line.split()[1]) for line in lines if "loss" in line and "validation" not in line]
    assert losses == [*range(1, 205, 21), 205]
    assert 1 < sum("validation_loss" in line for line in lines) <= 11
    assert len(trainer.history["loss"][0]) == 205  # records are not thinned


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(data(80)))


def test_a_stream_has_no_end_to_wait_for(monkeypatch, capsys):
    set_up_logging(monkeypatch)
    train(loader=DataLoader(Stream(), 4), max_steps=None, epochs=1, validate_every_n_steps=100)
    assert re.match(r"step 4: loss [\d.]+, [\d,.e+]+ samples a second\n", capsys.readouterr().err)


@pytest.mark.parametrize("by", ["setting", "level", "handler"])
def test_lines_are_silenced_by_a_setting_a_level_or_the_program_s_own_logging(by, capsys, monkeypatch):
    stream = io.StringIO()
    handlers = [logging.StreamHandler(stream)] if by == "handler" else []  # with the root logger's level, WARNING
    set_up_logging(monkeypatch, *handlers, level=logging.WARNING if by == "level" else logging.NOTSET)
    train(progress=by != "setting")
    assert capsys.readouterr().err == stream.getvalue() == ""


def test_a_program_with_logging_of_its_own_gets_the_lines_once(monkeypatch, capsys):
    stream = io.StringIO()
    set_up_logging(monkeypatch, logging.StreamHandler(stream), level=logging.INFO)
    train(max_steps=4)
    assert capsys.readouterr().err == ""
    assert len(re.findall("^step 4 of 4: loss", stream.getvalue(), re.MULTILINE)) == 1


def test_the_command_line_shows_logs_beside_a_program_s_own(capsys):
    with logs_shown("panther: %(message)s", always=True), logs_shown():
        logging.getLogger("panther.train").info("once")
    assert capsys.readouterr().err == "panther: once\n"


def test_records_have_the_cost_of_the_run_so_far(tmp_path):
    class Clock(Callback):
        def on_step(self, trainer, loss):
            trainer._meter.counted_until -= 3600.0  # a step takes an hour

    def run(steps):
        config = TrainConfig(checkpoint_dir=str(tmp_path), max_steps=steps, log_every_n_steps=1)
        trainer = Trainer(nn.Linear(8, 2), None, nn.MSELoss(), config, [Clock()])
        return trainer.fit(DataLoader(data(), 4))

    history = run(3)
    assert history["device_hours"][1] == pytest.approx([1.0, 2.0, 3.0], rel=0.01)
    history = run(5)  # the same run, continued
    assert history.device_hours == pytest.approx(5.0, rel=0.01)


def callback(**methods):
    return type("Mine", (Callback,), methods)()


def step(self, trainer, loss):
    pass


FOREIGN = {
    "on_step_end": "use on_step",  # transformers
    "on_train_batch_end": "use on_step",  # Lightning, Keras
    "on_batch_end": "use on_step",  # Keras
    "on_epoch_end": "use on_epoch",
    "on_train_epoch_end": "use on_epoch",
    "on_train_start": "use on_start",
    "on_train_begin": "use on_start",
    "on_fit_start": "use on_start",
    "on_validation_end": "use on_record",
    "on_evaluate": "use on_record",
    "on_log": "use on_record",
    "on_save": "use on_checkpoint",
    "on_save_checkpoint": "use on_checkpoint",
    "on_load_checkpoint": "use load_state_dict",
    "on_train_end": "write what follows training after fit",
    "on_exception": "put try and except around fit",
    "on_stpe": "did you mean on_step?",
    "on_Step": "did you mean on_step?",
    "onstep": "did you mean on_step?",
    "on_records": "did you mean on_record?",
    "on_chekpoint": "did you mean on_checkpoint?",
    "on_before_zero_grad": "use some of on_start, on_step, on_skip, on_record, on_epoch, on_checkpoint",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_hook_that_does_not_exist_is_refused_with_the_right_name(name):
    message = f"Mine.{name} would never be called, because a Callback has no such hook: {re.escape(FOREIGN[name])}$"
    with pytest.raises(ConfigError, match=message):
        Trainer(nn.Linear(2, 2), callbacks=[callback(), callback(**{name: step})])


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"on_step": lambda self, trainer: None}, r"write on_step\(self, trainer, loss\)$"),
        ({"on_epoch": lambda self, epoch, logs: None}, r"write on_epoch\(self, trainer\)$"),
        ({"state_dict": lambda self: {}}, "has state_dict and no load_state_dict, so its state would not be saved"),
        ({"load_state_dict": lambda self, state: None}, "has load_state_dict and no state_dict"),
    ],
)
def test_a_hook_with_other_arguments_or_half_a_state_is_refused(methods, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(nn.Linear(2, 2), callbacks=[callback(**methods)])


def test_what_a_callback_may_have_beside_its_hooks():
    mine = callback(
        on_step=lambda self, *args: None, on_epoch=lambda self, trainer, more=None: None, record=step, online=True,
        checkpoint=step, _on_step=step, only=step,
    )  # fmt: skip
    mine.on_improvement = print  # a function of its user
    Trainer(nn.Linear(2, 2), callbacks=[mine])


def test_an_error_of_the_loss_says_the_step_and_the_samples():
    """A label that is out of range was torch's IndexError, without a word on where it is."""
    x, labels = torch.randn(24, 8), torch.zeros(24, dtype=torch.int64)
    labels[13] = 7
    trainer = Trainer(nn.Linear(8, 2), None, nn.CrossEntropyLoss(), TrainConfig(epochs=1, seed=0))
    with pytest.raises(IndexError, match="Target 7 is out of bounds") as caught:
        trainer.fit(DataLoader(TensorDataset(x, labels), 4))
    assert caught.value.__notes__ == ["This was in step 4, on the samples 12, 13, 14, 15 of rank 0."]
