"""What every step sends beside its gradients."""

import gc
import re
import signal
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from panther.distributed import data_parallel, get_rank
from panther.errors import CheckpointError, ConfigError
from panther.train import Callback, TrainConfig, Trainer
from panther.train.coordination import StepExchange

pytestmark = pytest.mark.distributed


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_step(self, trainer, loss):
        self.losses.append(loss)


def trained(dtype=torch.float32, samples=24, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)
    data = TensorDataset(torch.randn(samples, 6).to(dtype), torch.randn(samples, 2).to(dtype))
    noted = Losses()
    config = TrainConfig(epochs=2, learning_rate=0.01, **settings)
    trainer = Trainer(model, torch.optim.SGD, nn.MSELoss(), config, [noted])
    trainer.fit(DataLoader(data, 4))
    return trainer, noted.losses


def messages(dtype, settings):
    """Return the steps, the sizes of messages from Python, and the losses."""
    sent = []

    def noted(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return whole(tensor, *args, **kwargs)

    whole = dist.all_reduce
    with patch.object(dist, "all_reduce", noted):
        trainer, losses = trained(dtype, **settings)
    return trainer.step, sent, losses


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"strategy": "ddp"}),
        (torch.bfloat16, {"strategy": "ddp"}),
        (torch.float32, {"strategy": "ddp", "find_unused_parameters": True}),
        (torch.float32, {"strategy": "ddp", "comm_hook": "bf16"}),
        (torch.float32, {"strategy": "fsdp"}),
    ],
)
def test_a_step_sends_its_numbers_in_one_message(dtype, settings, accumulated):
    settings = settings | {"gradient_accumulation_steps": accumulated}
    (steps, sent, losses), other = on_ranks(lambda: messages(dtype, settings), 2)
    assert steps == (6 if accumulated == 1 else 2)
    assert [count for count in sent if count == 9] == [9] * steps
    assert losses == other[2]
    _, expected = trained(dtype, gradient_accumulation_steps=2 * accumulated)
    is_exact = dtype == torch.float32 and "comm_hook" not in settings
    assert losses == pytest.approx(expected, rel=1e-5 if is_exact else 0.03)


def test_a_parameter_without_a_gradient_is_named():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.left = nn.Linear(6, 2), nn.Linear(6, 2)
            self.frozen = nn.Linear(6, 2).requires_grad_(False)

        def forward(self, x):
            return self.used(x)

    def run():
        outcomes = []
        for settings in ({}, {"find_unused_parameters": True}):
            config = TrainConfig(max_steps=2, batch_size=4, strategy="ddp", **settings)
            trainer = Trainer(Partial(), torch.optim.SGD, nn.MSELoss(), config)
            try:
                trainer.fit(TensorDataset(torch.randn(24, 6), torch.randn(24, 2)))
            except ConfigError as error:
                outcomes.append(str(error))
            outcomes.append(trainer.step)
        return outcomes

    (told, *steps), other = on_ranks(run, 2)
    assert other == [told, *steps]
    assert "does not depend on the parameters left.weight, left.bias, and DDP waits" in told
    assert "set find_unused_parameters=True" in told
    assert steps == [0, 2]


def test_gloo_s_thread_never_frees_the_group_last():
    """It would wait for itself, and the process would abort: the last future of a step is freed on that thread."""

    def run():
        model = data_parallel(nn.Linear(3, 2), comm_hook="bf16")
        group = weakref.ref(model.process_group)
        del model
        dist.destroy_process_group()
        gc.collect()
        return group() is not None

    assert on_ranks(run, 2, fresh=True) == [True, True]


def test_a_folder_that_is_not_shared_is_found_before_the_first_step(tmp_path):
    def run(shared):
        folder = tmp_path / ("all" if shared else f"node-{get_rank()}")
        try:
            _, losses = trained(strategy="ddp", checkpoint_dir=str(folder))
        except CheckpointError as error:
            return str(error)
        return len(losses)

    assert on_ranks(lambda: run(True), 3) == [4, 4, 4]
    assert not list((tmp_path / "all").glob(".shared*"))
    (told,) = set(on_ranks(lambda: run(False), 3))
    assert re.search(r"one folder for all ranks, and rank 1 \(.*node-1\), rank 2 \(.*cannot see what rank 0 \(", told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "node-0"]  # with the file of its lock


@pytest.mark.parametrize("loss", [2.5, float("nan"), float("-inf")])
@pytest.mark.parametrize("reports", [True, False])
def test_a_loss_on_a_gpu_gives_the_numbers_of_one_on_the_cpu(monkeypatch, loss, reports):
    found = []
    for value in (loss, torch.tensor(loss, dtype=torch.float64)):  # a tensor is what a GPU gives
        monkeypatch.setattr("panther.train.coordination.get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_reduce", lambda row, async_op: found.append(row.tolist()))
        exchange = StepExchange()
        exchange.received.append(signal.SIGINT)
        exchange.start(value, 7, reports)
    finite = loss == 2.5
    samples, loss_sent = 7.0 * reports, loss * reports if finite else 0.0
    numbers = [1.0, 2.0, float(not finite), loss_sent, samples, samples, 0.0, 0.0, 0.0]
    assert found[0] == found[1] == numbers
