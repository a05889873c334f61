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
from panther.errors import CheckpointError
from panther.train import Callback, TrainConfig, Trainer
from panther.train.coordination import GradientCarrier, StepExchange

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
    sent = []

    def noted(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return whole(tensor, *args, **kwargs)

    whole = dist.all_reduce
    with patch.object(dist, "all_reduce", noted):
        trainer, losses = trained(dtype, **settings)
    return trainer.step, sent, losses


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_step_of_ddp_sends_one_message(accumulated):
    settings = {"strategy": "ddp", "gradient_accumulation_steps": accumulated}
    (steps, sent, losses), other = on_ranks(lambda: messages(torch.float32, settings), 2)
    assert steps == (6 if accumulated == 1 else 2)
    gradients = 6 * 9 + 9 + 9 * 2 + 2
    assert sent == [gradients + 5] * steps
    assert losses == other[2]
    _, expected = trained(gradient_accumulation_steps=2 * accumulated)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.bfloat16, {"strategy": "ddp"}),
        (torch.float32, {"strategy": "ddp", "comm_hook": "bf16"}),
        (torch.float32, {"strategy": "fsdp"}),
    ],
)
def test_where_gradients_are_rounded_or_sharded_the_numbers_go_alone(dtype, settings):
    steps, sent, losses = on_ranks(lambda: messages(dtype, settings), 2)[0]
    assert [count for count in sent if count == 5] == [5] * steps
    _, expected = trained(dtype, gradient_accumulation_steps=2)
    assert losses == pytest.approx(expected, rel=0.03)


def test_a_model_with_a_carrier_trains_in_another_loop_too():
    def run():
        trainer, _ = trained(strategy="ddp")
        model = trainer.model
        found = []
        for factor in (1.0, 2.0):  # DDP refuses the second pass if the first left a bucket unfinished
            model.zero_grad()
            model(torch.full((3, 6), factor + get_rank())).square().sum().backward()
            found.append([parameter.grad.tolist() for parameter in model.parameters()])
        return found

    first, second = on_ranks(run, 2)
    assert first == second


def test_gloo_s_thread_never_frees_the_group_last():
    """It would wait for itself, and the process would abort: the last future of a step is freed on that thread."""

    def run():
        model = data_parallel(nn.Linear(3, 2))
        group = weakref.ref(model.process_group)
        GradientCarrier.of(model)
        del model
        dist.destroy_process_group()
        gc.collect()
        return group() is not None

    assert on_ranks(run, 2, fresh=True) == [True, True]


def test_each_bucket_is_averaged_and_the_last_one_carries():
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.float64) for _ in range(4)))
        parallel = data_parallel(model, bucket_cap_mb=0.04)  # a weight is 0.03 MB
        carrier = GradientCarrier.of(parallel)
        for step in range(3):  # DDP makes its buckets anew after the first
            carrier.send(torch.tensor([1.0 + get_rank(), float("inf") if step == 1 else 0.1]))
            parallel.zero_grad()
            parallel(torch.full((2, 64), 1.0 + get_rank(), dtype=torch.float64)).sum().backward()
            sums = carrier.receive()
        return sums.tolist(), [parameter.grad.clone() for parameter in model.parameters()]

    (sums, gradients), _, _ = on_ranks(run, 3)
    assert sums == pytest.approx([6.0, 0.3])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.float64) for _ in range(4)))
    (sum(model(torch.full((2, 64), 1.0 + rank, dtype=torch.float64)).sum() for rank in range(3)) / 3).backward()
    for found, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-12)


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all"]


@pytest.mark.parametrize("loss", [2.5, float("nan"), float("-inf")])
@pytest.mark.parametrize("reports", [True, False])
def test_a_loss_on_a_gpu_gives_the_numbers_of_one_on_the_cpu(monkeypatch, loss, reports):
    class Kept:
        def send(self, row):
            self.row = row

    found = []
    for value in (loss, torch.tensor(loss, dtype=torch.float64)):  # a tensor is what a GPU gives
        monkeypatch.setattr("panther.train.coordination.get_world_size", lambda: 2)
        exchange, kept = StepExchange(), Kept()
        exchange.received.append(signal.SIGINT)
        exchange.start(value, 7, reports, kept)
        found.append(kept.row.tolist())
    finite = loss == 2.5
    assert found[0] == found[1] == [0.0, 1.0, float(not finite), loss * reports if finite else 0.0, 7.0 * reports]
