"""Hooks between the replicas of hybrid sharding, against one process and against hybrid sharding without a hook."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from panther.distributed import CommunicationCounter, data_parallel, make_mesh, no_sync
from panther.distributed.data.comm_hooks import hook_state, load_hook_state
from panther.errors import ConfigError, DistributedError

pytestmark = pytest.mark.distributed


def network(dtype=torch.float64):
    """Return a model whose rows and columns are not multiples of the ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def batch(number, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(5, 7, generator=generator, dtype=torch.float64).to(dtype)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model, number, ranks, accumulate=False):
    model.zero_grad()
    if accumulate:
        with no_sync(model):
            for rank in ranks:
                model(batch(number + 50, rank)).square().mean().backward()
    sum(model(batch(number, rank)).square().mean() for rank in ranks).backward()
    return [full(parameter.grad).clone() for parameter in model.parameters()]


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (2, 1)])
@pytest.mark.parametrize("name", ["topk", "sketch"])
def test_a_hook_that_sends_everything_is_hybrid_sharding(name, sizes):
    replicas, shards = sizes

    def run():
        mesh = make_mesh(dp=shards, replicate=replicas)["replicate", "dp"]
        settings = {"comm_hook": name, f"{name}_fraction": 1.0}
        hooked = data_parallel(network(), mesh, "fsdp", **settings)
        plain = data_parallel(network(), mesh, "fsdp")
        return [
            (
                gradients(hooked, number, [dist.get_rank()], number == 1),
                gradients(plain, number, [dist.get_rank()], number == 1),
            )
            for number in range(3)
        ]

    for steps in on_ranks(run, replicas * shards):
        for hooked, plain in steps:
            for gradient, expected in zip(hooked, plain, strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_a_sketch_does_not_depend_on_the_number_of_replicas():
    """Sketches are linear: the mean over two and over four replicas that see the same samples is equal."""

    def run(replicas):
        mesh = make_mesh(dp=1, replicate=replicas)["replicate", "dp"]
        model = data_parallel(network(), mesh, "fsdp", comm_hook="sketch", sketch_fraction=0.3)
        share = 4 // replicas
        rank = dist.get_rank()
        samples = range(rank * share, (rank + 1) * share)
        return [[gradient / share for gradient in gradients(model, number, samples)] for number in range(6)]

    two, four = (on_ranks(lambda replicas=replicas: run(replicas), replicas)[0] for replicas in (2, 4))
    for first, second in zip(two, four, strict=True):
        for gradient, expected in zip(first, second, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["topk", "sketch"])
def test_what_is_not_sent_arrives_later(name):
    """The mean of all gradients is the mean of those that arrived and of those that wait, on every shard."""

    def run():
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        model = data_parallel(network(), mesh, "fsdp", comm_hook=name, **{f"{name}_fraction": 0.3})
        plain = data_parallel(network(), mesh, "fsdp")
        arrived, expected = 0, 0
        for number in range(5):
            arrived = [
                a + g for a, g in zip(arrived or [0] * 6, gradients(model, number, [dist.get_rank()]), strict=True)
            ]
            expected = [
                a + g for a, g in zip(expected or [0] * 6, gradients(plain, number, [dist.get_rank()]), strict=True)
            ]
        residuals = hook_state(model)[{"topk": "TopK", "sketch": "Sketch"}[name]]["residuals"]
        waiting = []
        for key, parameter in model.named_parameters():
            mean = residuals[key].clone()
            dist.all_reduce(mean, group=mesh.get_group("replicate"))
            like = parameter.detach().clone()
            like.to_local().copy_(mean / 2)
            waiting.append(like.full_tensor())
        return arrived, waiting, expected

    for arrived, waiting, expected in on_ranks(run, 4):
        assert any(residual.any() for residual in waiting)
        for a, w, e in zip(arrived, waiting, expected, strict=True):
            torch.testing.assert_close(a + w, e, rtol=1e-10, atol=1e-12)


def test_only_the_sketch_is_sent_between_replicas():
    def run():
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        model = data_parallel(nn.Linear(40, 30, bias=False), mesh, "fsdp", comm_hook="sketch", sketch_fraction=0.1)
        x = torch.randn(4, 40)
        model(x).sum().backward()
        with CommunicationCounter() as traffic:
            model(x).sum().backward()
        return traffic.bytes_by_operation

    for sent in on_ranks(run, 4):
        assert sent["allreduce_"] == 4 * 60 + 4  # a tenth of a shard, and whether the step before was finite


@pytest.mark.parametrize("name", ["topk", "sketch"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_leaves_every_shard_as_it_was(name, bad):
    def run():
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        model = data_parallel(network(), mesh, "fsdp", comm_hook=name, **{f"{name}_fraction": 0.5})
        for number in range(3):
            gradients(model, number, [dist.get_rank()])
        before = hook_state(model)
        model.zero_grad()
        x = batch(9, dist.get_rank())
        output = model(x)
        if dist.get_rank() == 3:
            output = output * torch.tensor([bad, 1.0, 1.0], dtype=output.dtype)
        output.square().mean().backward()
        after = hook_state(model)
        (state,), (later,) = before.values(), after.values()
        assert len(state["residuals"]) == 6
        return [torch.equal(residual, later["residuals"][key]) for key, residual in state["residuals"].items()]

    assert all(all(equal) for equal in on_ranks(run, 4))


def test_a_state_continues_bit_for_bit():
    def run():
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        first, second = (
            data_parallel(network(), mesh, "fsdp", comm_hook="sketch", sketch_fraction=0.3) for _ in range(2)
        )
        for number in range(3):
            gradients(first, number, [dist.get_rank()])
        load_hook_state(second, hook_state(first))
        pairs = [
            (gradients(first, number, [dist.get_rank()]), gradients(second, number, [dist.get_rank()]))
            for number in (3, 4)
        ]
        return all(all(map(torch.equal, a, b)) for a, b in pairs)

    assert all(on_ranks(run, 4))


def test_what_a_replica_hook_refuses():
    def run():
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        messages = []
        for settings, error in [
            ({"comm_hook": "powersgd"}, ConfigError),
            ({"comm_hook": "sketch", "sketch_fraction": 0}, ValueError),
            ({"comm_hook": "topk", "sketch_fraction": 0.5}, ValueError),
        ]:
            with pytest.raises(error) as caught:
                data_parallel(network(), mesh, "fsdp", **settings)
            messages.append(str(caught.value))
        with pytest.raises(ValueError, match="with a mesh of two axes") as caught:
            data_parallel(network(), mesh["dp"], "fsdp", comm_hook="sketch")

        class Partial(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)

            def forward(self, x):
                return self.a(x)

        model = data_parallel(Partial(), mesh, "fsdp", comm_hook="sketch")
        with pytest.raises(DistributedError, match="got no gradient in this step"):
            model(torch.ones(2, 3)).sum().backward()
        return messages

    for messages in on_ranks(run, 4):
        assert messages[0].startswith("comm_hook='powersgd' is for DistributedDataParallel")
        assert "sketch_fraction=0 must be a number above 0" in messages[1]
        assert "sketch_fraction=0.5 needs comm_hook='sketch', not 'topk': set both" in messages[2]
