"""What every step sends beside its gradients."""

import gc
import re
import signal
import weakref
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from panther.distributed import data_parallel, get_rank
from panther.errors import CheckpointError, ConfigError
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
    """Return the sizes of messages from Python, and of the buckets in which DDP itself sends gradients."""
    sent = []

    def noted(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return whole(tensor, *args, **kwargs)

    whole = dist.all_reduce
    with patch.object(dist, "all_reduce", noted):
        trainer, losses = trained(dtype, **settings)
    ddp = isinstance(trainer.model, DistributedDataParallel)
    buckets = trainer.model._get_ddp_logging_data().get("rebuilt_bucket_sizes") if ddp else None
    return trainer.step, sent, losses, buckets


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_step_of_ddp_sends_one_message(accumulated):
    settings = {"strategy": "ddp", "gradient_accumulation_steps": accumulated}
    (steps, sent, losses, buckets), other = on_ranks(lambda: messages(torch.float32, settings), 2)
    assert steps == (6 if accumulated == 1 else 2)
    gradients = 6 * 9 + 9 + 9 * 2 + 2
    assert (sent, buckets) == ([], str(4 * (gradients + 10)))
    assert losses == other[2]
    _, expected = trained(gradient_accumulation_steps=2 * accumulated)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"strategy": "ddp", "find_unused_parameters": True}),
        (torch.float32, {"strategy": "ddp", "comm_hook": "bf16"}),
        (torch.float32, {"strategy": "fsdp"}),
    ],
)
def test_where_gradients_are_rounded_or_sharded_the_numbers_go_alone(dtype, settings):
    steps, sent, losses, _ = on_ranks(lambda: messages(dtype, settings), 2)[0]
    assert [count for count in sent if count == 10] == [10] * steps
    _, expected = trained(dtype, gradient_accumulation_steps=2)
    assert losses == pytest.approx(expected, rel=0.03)


def test_numbers_of_half_precision_gradients_are_not_rounded():
    _, sent, losses, buckets = on_ranks(lambda: messages(torch.bfloat16, {"strategy": "ddp"}), 2)[0]
    assert sent == []
    assert sorted(buckets.split(", ")) == sorted([str(2 * (6 * 9 + 9 + 9 * 2 + 2)), str(4 * 10)])
    _, expected = trained(torch.bfloat16, gradient_accumulation_steps=2)
    assert losses == pytest.approx(expected, rel=0.03)


class Named(nn.Module):
    """Returns a mapping, whose first tensor is not the one that is trained on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 2)

    def forward(self, x):
        return {"count": len(x), "hidden": self.first(x), "result": self.second(self.first(x).tanh())}


@pytest.mark.parametrize("mapping", [False, True])
def test_a_model_with_a_carrier_trains_in_another_loop_too(mapping):
    def output(out):
        return out["result"] if mapping else out

    def run():
        torch.manual_seed(0)
        model = Named() if mapping else nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
        trainer = Trainer(
            model,
            torch.optim.SGD,
            lambda out, target: nn.functional.mse_loss(output(out), target),
            TrainConfig(max_steps=2, learning_rate=0.01, strategy="ddp", batch_size=4),
        )
        data = TensorDataset(torch.randn(24, 6), torch.randn(24, 2))
        trainer.fit(data)
        model = trainer.model
        assert not any("number" in name for name in (*model.state_dict(), *dict(model.named_parameters())))
        with torch.no_grad():
            output(model(torch.ones(3, 6)))
        found = []
        for factor in (1.0, 2.0):  # DDP refuses the second pass if the first left a bucket unfinished
            model.zero_grad()
            with model.no_sync():
                output(model(torch.ones(3, 6))).square().sum().backward()
            output(model(torch.full((3, 6), factor + get_rank()))).square().sum().backward()
            found.append([parameter.grad.tolist() for parameter in model.parameters()])
        return found

    first, second = on_ranks(run, 2)
    assert first == second


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


def test_a_carrier_sums_over_any_number_of_buckets_and_ranks():
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.float64) for _ in range(4)))
        # A weight is 0.03 MB.
        parallel, carrier = GradientCarrier.wrap(model, partial(data_parallel, bucket_cap_mb=0.04))
        for _ in range(3):  # DDP makes its buckets anew after the first
            parallel.zero_grad()
            carrier.begin()
            loss = parallel(torch.full((2, 64), 1.0 + get_rank(), dtype=torch.float64)).sum()
            carrier.send([1.0 + get_rank(), 0.1, 0.0, 0.0, 7.0, 7.0, 0.0, 0.0, 0.0, 0.0])
            carrier.backward(loss)
            sums = carrier.receive()
        return sums, [parameter.grad.clone() for parameter in model.parameters()]

    (sums, gradients), _, _ = on_ranks(run, 3)
    assert sums == pytest.approx([6.0, 0.3, 0.0, 0.0, 21.0, 21.0, 0.0, 0.0, 0.0, 0.0])
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
            self.row = torch.as_tensor(row)

    found = []
    for value in (loss, torch.tensor(loss, dtype=torch.float64)):  # a tensor is what a GPU gives
        monkeypatch.setattr("panther.train.coordination.get_world_size", lambda: 2)
        exchange, kept = StepExchange(), Kept()
        exchange.received.append(signal.SIGINT)
        exchange.start(value, 7, reports, kept)
        found.append(kept.row.tolist())
    finite = loss == 2.5
    samples, loss_sent = 7.0 * reports, loss * reports if finite else 0.0
    numbers = [1.0, 2.0, float(not finite), loss_sent, samples, samples, 0.0, 0.0, 0.0, 1.0]
    assert found[0] == found[1] == numbers
