"""Nothing waits for a GPU between a batch and its backward pass: seen by torch on a GPU, and by copies without one."""

import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from panther.distributed import data_parallel, get_distributed_info, init, shutdown
from panther.train import coordination
from panther.train.coordination import StepExchange
from panther.train.engines.model_engine import ModelEngine
from panther.train.loading.feed import Batch

SIZES = 6, 9, 2


class NoCopies(TorchDispatchMode):
    """Refuses operations between the CPU and another device."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            raise AssertionError(f"{operation} copies between devices")
        return result


class ReachedError(Exception):
    pass


def model_of(device):
    inside, middle, outside = SIZES
    return nn.Sequential(nn.Linear(inside, middle), nn.Tanh(), nn.Linear(middle, outside)).to(device)


def window(device, samples=(4, 3)):
    """Two batches; one of no samples is a filler."""
    total = max(sum(samples), 1)
    return [
        Batch(
            (torch.ones(4, SIZES[0], device=device), torch.ones(4, SIZES[2], device=device)), count, count / total, []
        )
        for count in samples
    ]


@pytest.mark.parametrize("samples", [(4, 3), (0,)])
@pytest.mark.parametrize("received", [[], [signal.SIGTERM]])
def test_no_number_is_read_from_a_gpu_or_copied_to_it_before_backward(monkeypatch, samples, received):
    """On the meta device, which refuses to read a number, as there are none."""
    sent, device = [], torch.device("meta")
    monkeypatch.setattr(coordination, "get_world_size", lambda: 2)
    monkeypatch.setattr(coordination, "get_distributed_info", lambda: SimpleNamespace(device=device))
    monkeypatch.setattr(dist, "all_reduce", lambda row, async_op: sent.append(row))
    exchange = StepExchange()
    exchange.received.extend(received)
    engine = ModelEngine(model=model_of(device), loss_fn=nn.MSELoss(), device=device, size=2)

    def before_backward(loss_sum):
        exchange.start(loss_sum, 7, True)
        raise ReachedError

    given = window(device, samples)
    with NoCopies(), pytest.raises(ReachedError):
        engine.forward_backward(given, before_backward)
    row = sent[0]
    assert (row.device, row.shape) == (device, (9,))
    with NoCopies(), pytest.raises(AssertionError, match="copies between devices"):
        torch.tensor([1.0]).to(device)
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        row[0].item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", [None, torch.float16])
def test_torch_sees_no_wait_before_backward_on_a_gpu(monkeypatch, precision):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    init()
    try:
        device = get_distributed_info().device
        model = data_parallel(model_of(device))
        scaler = torch.amp.GradScaler("cuda", enabled=precision is not None)
        engine = ModelEngine(
            model=model,
            loss_fn=nn.MSELoss(),
            device=device,
            autocast_dtype=precision,
            scaler=scaler,
        )
        monkeypatch.setattr(coordination, "get_world_size", lambda: 2)  # so that a group of one is sent messages
        exchange = StepExchange()

        def before_backward(loss_sum):
            exchange.start(loss_sum, 7, True)
            torch.cuda.set_sync_debug_mode("default")

        given = window(device)
        for step in range(4):
            model.zero_grad()
            # The first steps make handles of libraries, and DDP forms its buckets in the second.
            torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
            try:
                engine.forward_backward(given, before_backward)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            loss, samples = exchange.finish()
        wanted = nn.functional.mse_loss(engine.model(given[0].data[0]).float(), given[0].data[1]).item()
        assert (loss, samples) == (pytest.approx(wanted, rel=1e-2), 7)
    finally:
        shutdown()
