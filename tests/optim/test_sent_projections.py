"""``comm_hook="projected"``: the gradients that SketchedAdamW(update="projected") needs, and nothing else of them."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

import panther as pr
from panther.distributed import CommunicationCounter, data_parallel, make_mesh
from panther.distributed.data.comm_hooks.projected import Projection
from panther.errors import ConfigError, DistributedError

pytestmark = pytest.mark.distributed

STEPS = 6


def build():
    """Return a model with a tall, a wide and a square matrix, whose sides are not multiples of the ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 31), nn.Tanh(), nn.Linear(31, 13), nn.Tanh(), nn.Linear(13, 13)).double()


def made(model, **settings):
    return pr.optim.SketchedAdamW(
        model.named_parameters(), 1e-2, rank=3, period=2, update="projected", seed=5, **settings
    )


def trained(model, rank, ranks, clip=None):
    optimizer = made(model)
    for step in range(STEPS):
        x = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.view(ranks, -1, 12)[rank]).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def test_ddp_takes_the_steps_of_one_process_and_sends_projections():
    def run():
        with CommunicationCounter() as traffic:
            parameters = trained(data_parallel(build(), comm_hook="projected"), dist.get_rank(), 2)
        return parameters, traffic.bytes_by_operation["allreduce_"]

    expected = trained(build(), 0, 1)
    for parameters, sent in on_ranks(run, 2):
        for parameter, value in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter, value, rtol=1e-9, atol=1e-11)
        assert sent == STEPS * 8 * (3 * (31 + 31 + 13) + 31 + 13 + 13)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_replicas_take_the_steps_of_one_process(sizes):
    """On two shards, the 13 rows of the wide matrix are 7 and 6: its shorter side is sharded, and so is P."""
    replicas, shards = sizes

    def run():
        mesh = make_mesh(dp=shards, replicate=replicas)["replicate", "dp"]
        model = data_parallel(build(), mesh, "fsdp", comm_hook="projected")
        return trained(model, dist.get_rank(), replicas * shards)

    expected = trained(build(), 0, 1)
    for parameters in on_ranks(run, replicas * shards):
        for parameter, value in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter, value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_trainer_that_is_given_the_optimizer_of_the_model_that_it_shards(strategy):
    """Sharding exchanges the parameters of the optimizer, which was made for the whole model, before init()."""
    model = build()
    optimizer = made(model)  # the ranks get copies

    def sent(hook):
        sizes = {"data_parallel_replicate_size": 2} if strategy == "fsdp" else {}
        settings = {"max_steps": 4, "batch_size": 3, "strategy": strategy, "comm_hook": hook, "progress": False}
        trainer = pr.train.Trainer(model, optimizer, nn.MSELoss(), pr.train.TrainConfig(**settings, **sizes))
        x = torch.randn(48, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
        with CommunicationCounter() as traffic:
            trainer.fit(torch.utils.data.TensorDataset(x, x[:, :1].expand(-1, 13).contiguous()))
        return traffic.bytes

    whole, projected = (on_ranks(lambda hook=hook: sent(hook), 2)[0] for hook in ("bf16", "projected"))
    numbers = 12 * 31 + 31 * 13 + 13 * 13
    rest = 31 + 13 + 13
    assert whole - projected == pytest.approx(4 * (2 * (numbers + rest) - 8 * (3 * (31 + 31 + 13) + rest)), rel=0.1)


def test_the_norm_is_that_of_the_projection():
    def run():
        model = data_parallel(nn.Linear(12, 31, bias=False).double(), comm_hook="projected")
        optimizer = made(model)
        model(torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).sum().backward()
        ranks = torch.linalg.matrix_rank(model.module.weight.grad)
        before = model.module.weight.grad.clone()
        optimizer.step()
        return int(ranks), before

    whole = nn.Linear(12, 31, bias=False).double()
    whole(torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).sum().backward()
    for rank, projected in on_ranks(run, 2):
        assert rank <= 3
        assert projected.norm() < whole.weight.grad.norm()
        # A projection is orthogonal to what it leaves out.
        assert abs(((whole.weight.grad - projected) * projected).sum()) < 1e-9 * projected.square().sum()


def test_without_its_optimizer_it_is_refused():
    def run():
        messages = []
        model = data_parallel(nn.Linear(12, 31), comm_hook="projected")
        with pytest.raises(ConfigError) as caught:
            model(torch.ones(2, 12)).sum().backward()
        messages.append(str(caught.value))
        return messages

    for (message,) in on_ranks(run, 2):
        assert "no such optimizer has a matrix of the model" in message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rank", "would send 93 and 124 numbers of one bucket"),
        ("seed", r"would add up different projections, the first one on this rank from weight, seed [23], period 200"),
        ("period", "would add up different projections"),
    ],
)
def test_optimizers_that_differ_between_ranks_are_refused_on_every_rank(setting, message):
    def run():
        model = data_parallel(nn.Linear(12, 31), comm_hook="projected")
        settings = {"rank": 2, "update": "projected", "seed": 0} | {setting: 2 + dist.get_rank()}
        optimizer = pr.optim.SketchedAdamW(model.named_parameters(), **settings)
        with pytest.raises(DistributedError, match=message):
            model(torch.ones(2, 12)).sum().backward()
        return len(optimizer.state)

    assert on_ranks(run, 2) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_signs_that_are_equal_are_decoded(dtype):
    """Of four rows of eight signs, two are equal or opposite in one of a hundred periods, and Cholesky's method ended
    the run."""
    G = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=dtype)
    signs = torch.tensor([[1, 1, -1, 1, 1, -1, 1, 1], [1, -1, -1, 1, 1, 1, 1, -1], [-1, -1, 1, -1, -1, 1, -1, -1]])
    projection = Projection(signs.to(dtype) * 3**-0.5, False, "weight")
    sketch = projection.apply(G)
    decoded = torch.empty_like(G)
    projection.decode(sketch, decoded)
    expected = G @ torch.linalg.pinv(projection.P.double()).to(dtype) @ projection.P
    tolerance = 10 * torch.finfo(dtype).eps
    torch.testing.assert_close(decoded, expected, rtol=0, atol=tolerance * G.abs().max().item())
