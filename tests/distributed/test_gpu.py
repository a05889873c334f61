"""Every strategy on one GPU, a world of one on NCCL, against the plain model."""

import copy

import pytest
import torch
import torch.distributed as dist
from compressed_layers import with_stored_sketches
from ranks import take_pipeline_steps, take_steps, weights_of
from torch import nn

from panther.distributed import (
    AdvancedDistributedTrainer,
    CommunicationCounter,
    DistributedMetricsCollector,
    HybridParallelTrainer,
    TensorParallelSKLinear,
    all_gather,
    all_reduce,
    broadcast,
    data_parallel,
    get_distributed_info,
    init,
    make_mesh,
    make_schedule,
    profile_communication_overhead,
    reduce_scatter,
    shutdown,
    split_stages,
    sync_sketches,
    tensor_parallel,
    verify_sketches,
)
from panther.nn import SKLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning"),
]


@pytest.fixture
def device(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    init()
    yield get_distributed_info().device
    shutdown()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(16, 40))
        self.layers = nn.ModuleList(nn.Sequential(SKLinear(40, 40, 2), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(40, 5)

    def forward(self, x):
        h = x + self.position[: x.shape[1]]
        mask = torch.arange(x.shape[1], device=x.device)[:, None] > 1
        for layer in self.layers:
            h = h + layer(h) * mask
        return self.head(h).mean(1)


def network(device, fitted=False):
    torch.manual_seed(0)
    middle = with_stored_sketches(SKLinear(48, 48, 3)) if fitted else SKLinear(48, 48, 3)
    model = nn.Sequential(SKLinear(40, 48, 2), nn.ReLU(), middle, nn.Tanh(), nn.Linear(48, 5))
    return model.to(device, torch.float64)


def data(device, *middle):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, *middle, 40, generator=generator, dtype=torch.float64)
    return x.to(device), torch.randint(5, (12,), generator=generator).to(device)


def plain(model, x, y, steps=5, clip=None):
    """Losses and weights of the model trained by itself."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, _ = take_steps(optimizer, lambda: nn.functional.cross_entropy(model(x), y), steps, clip)
    return losses, weights_of(model)


def compare(found, weights, rtol=1e-7, atol=1e-9):
    for name, weight in found.items():
        torch.testing.assert_close(weight, weights[name], rtol=rtol, atol=atol)


def test_the_group_is_of_nccl(device):
    assert dist.get_backend() == "nccl"
    assert device.type == "cuda"


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate"])
def test_data_parallel(device, strategy, fitted):
    model, (x, y) = network(device, fitted), data(device)
    losses, weights = plain(model, x, y)
    parallel = data_parallel(model, strategy=strategy)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    found, _ = take_steps(optimizer, lambda: nn.functional.cross_entropy(parallel(x), y), 5)
    assert found == pytest.approx(losses, rel=1e-9)
    compare(weights_of(parallel), weights)
    verify_sketches(parallel)


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_gradients_that_travel_in_different_forms(device, hook):
    model, (x, y) = network(device).float(), data(device)
    parallel = data_parallel(model, comm_hook=hook)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    losses, _ = take_steps(optimizer, lambda: nn.functional.cross_entropy(parallel(x.float()), y), 12)
    expected, _ = plain(network(device).float(), x.float(), y, steps=12)
    assert losses == pytest.approx(expected, rel=2e-2)


def test_half_precision(device):
    model, (x, y) = network(device).float(), data(device)
    parallel = data_parallel(model, strategy="fsdp", mixed_precision="bf16")
    loss = nn.functional.cross_entropy(parallel(x.float()), y)
    loss.backward()
    expected = nn.functional.cross_entropy(network(device).float()(x.float()), y)
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)
    assert all(parameter.grad.dtype is torch.float32 for parameter in parallel.parameters())


def test_tensor_parallel(device):
    model, (x, y) = network(device), data(device)
    losses, weights = plain(model, x, y)
    tensor_parallel(model, make_mesh(tp=1)["tp"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found, _ = take_steps(optimizer, lambda: nn.functional.cross_entropy(model(x), y), 5)
    assert found == pytest.approx(losses, rel=1e-9)
    compare(weights_of(model), weights)


def test_a_layer_sharded_over_ranks(device):
    layer = TensorParallelSKLinear(64, 48, 2, dist.group.WORLD).to(device)
    assert layer(torch.ones(3, 64, device=device)).shape == (3, 48)


@pytest.mark.parametrize("cut", [{}, {"layers": "layers"}, {"layers": "layers", "balance": "time"}], ids=str)
@pytest.mark.parametrize(("name", "n"), [("gpipe", 1), ("interleaved", 2), ("zero_bubble", 2)])
def test_pipelines(device, name, n, cut):
    torch.manual_seed(0)
    model = Decoder().to(device, torch.float64) if cut else network(device)
    x, y = data(device, 6) if cut else data(device)
    losses, weights = plain(model, x, y)
    sample = {"sample_input": x[:3]} if cut else {}
    stages = split_stages(model, n, **cut, **sample)
    schedule = make_schedule(name, stages, 4, nn.CrossEntropyLoss())
    found, _ = take_pipeline_steps(torch.optim.SGD(schedule.parameters(), 0.1), schedule, x, y, 5)
    assert found == pytest.approx(losses, rel=1e-9)
    compare(weights_of(*(stage.submod for stage in stages)), weights)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate"])
def test_hybrid(device, strategy):
    model, (x, y) = network(device), data(device)
    losses, weights = plain(model, x, y, clip=0.1)
    trainer = HybridParallelTrainer(model, {"data_parallel": strategy, "gradient_clipping": 0.1})
    optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)
    found = [trainer.train_step((x, y), optimizer, nn.CrossEntropyLoss()) for _ in range(5)]
    assert found == pytest.approx(losses, rel=1e-5)
    compare(weights_of(trainer.model), weights, rtol=1e-5, atol=1e-7)


def test_the_guide_s_trainer(device):
    model, (x, y) = network(device), data(device)
    losses, _ = plain(model, x, y, steps=1)
    trainer = AdvancedDistributedTrainer(model, 0, 1)
    optimizer = torch.optim.SGD(trainer.ddp_model.parameters(), 0.1)
    assert trainer.train_epoch([(x.cpu(), y.cpu())], optimizer, nn.CrossEntropyLoss()) == pytest.approx(losses[0])


def test_collectives_and_their_gradients(device):
    for collective in (all_reduce, all_gather, reduce_scatter, broadcast):
        x = torch.arange(6.0, device=device).requires_grad_()
        with CommunicationCounter() as traffic:
            y = collective(x)
        (y**2).sum().backward()
        assert torch.equal(y, x)
        assert torch.equal(x.grad, 2 * x)
        assert traffic.bytes >= 24


def test_metrics(device):
    collector = DistributedMetricsCollector(0, 1)
    collector.update_metric("loss", torch.tensor(3.0, device=device), weight=2)
    assert collector.compute_global_metrics() == {"loss": 3.0}


def test_sketches_and_bandwidth(device):
    model = network(device, fitted=True)
    sync_sketches(model)
    verify_sketches(model)
    profile = profile_communication_overhead([1024], repetitions=2)
    assert profile.backend == "nccl"
