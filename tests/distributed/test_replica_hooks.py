"""Hooks between the replicas of hybrid sharding, against one process and against hybrid sharding without a hook."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from panther.distributed import CommunicationCounter, data_parallel, make_mesh, no_sync
from panther.distributed.data.comm_hooks import DEFAULTS, hook_state, load_hook_state, register_replica_hook
from panther.errors import DistributedError

pytestmark = pytest.mark.distributed
COMPRESSED = {
    "sketch": {"sketch_fraction": 0.3},
    "powersgd": {"powersgd_rank": 1, "powersgd_start_step": 2},
}
EVERYTHING = {
    "sketch": {"sketch_fraction": 1.0},
    "powersgd": {"powersgd_rank": 64, "powersgd_start_step": 2},
}


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
@pytest.mark.parametrize("name", EVERYTHING)
def test_a_hook_that_sends_everything_is_hybrid_sharding(name, sizes):
    replicas, shards = sizes

    def run():
        mesh = make_mesh(dp=shards, replicate=replicas)["replicate", "dp"]
        hooked = data_parallel(network(), mesh, "fsdp", comm_hook=name, **EVERYTHING[name])
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


def test_what_is_not_sent_arrives_later():
    """The mean of all gradients is the mean of those that arrived and of those that wait, on every shard."""

    def run():
        torch.manual_seed(3)
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        layer = nn.Linear(7, 13, bias=False).double()  # shards of seven and six rows
        plain = data_parallel(copy.deepcopy(layer), mesh, "fsdp")
        model = data_parallel(layer, mesh, "fsdp", comm_hook="powersgd", **COMPRESSED["powersgd"])
        arrived = expected = 0
        for number in range(6):
            arrived = arrived + gradients(model, number, [dist.get_rank()])[0]
            expected = expected + gradients(plain, number, [dist.get_rank()])[0]
        local = model.weight.to_local()
        waits = hook_state(model)["PowerSGD"]["error_dict"][0][: local.numel()]
        mean = waits.view_as(local).clone()
        dist.all_reduce(mean, group=mesh.get_group("replicate"))
        waiting = model.weight.detach().clone()
        waiting.to_local().copy_(mean / 2)
        return arrived, waiting.full_tensor(), expected

    for arrived, waiting, expected in on_ranks(run, 4):
        assert waiting.any()
        torch.testing.assert_close(arrived + waiting, expected, rtol=1e-10, atol=1e-12)


class Branches(nn.Module):
    """The forward takes one of two branches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(7, 9, bias=False) for _ in range(2))
        self.head = nn.Linear(9, 5, bias=False)
        self.double()

    def forward(self, x, branch):
        return self.head(self.branches[branch](x))


def test_units_without_gradients_keep_error_feedback():
    """The end of a step was the last unit of all. Without it, PowerSGD counted no step and never compressed."""

    def run():
        mesh = make_mesh(dp=1, replicate=2)["replicate", "dp"]
        model = Branches()
        for layer in (*model.branches, model.head):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        register_replica_hook(model, "powersgd", DEFAULTS | COMPRESSED["powersgd"], mesh)
        for number, branch in enumerate([0, 0, 0, 0, 1, 0, 0]):
            model.zero_grad()
            model(batch(number, dist.get_rank()), branch).square().mean().backward()
        return hook_state(model)["PowerSGD"]["iter"]

    assert on_ranks(run, 2) == [7, 7]


def test_a_rank_whose_shards_are_empty_takes_part():
    def run():
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        model = data_parallel(nn.Linear(1, 1, bias=False), mesh, "fsdp", comm_hook="powersgd", powersgd_start_step=2)
        for _ in range(4):
            model(torch.ones(2, 1)).sum().backward()
        return full(model.weight.grad).item()

    assert on_ranks(run, 4) == [8.0] * 4


def test_powersgd_sends_the_factors_of_shards():
    def run():
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        settings = {"powersgd_rank": 2, "powersgd_start_step": 2}
        model = data_parallel(nn.Linear(40, 30, bias=False), mesh, "fsdp", comm_hook="powersgd", **settings)
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(3):
            model(x).square().sum().backward()
        before = hook_state(model)["PowerSGD"]["total_numel_after_compression"]
        model.zero_grad()
        model(x).square().sum().backward()
        local = model.weight.grad.to_local()
        sent = hook_state(model)["PowerSGD"]["total_numel_after_compression"] - before
        return sent, torch.linalg.matrix_rank(local).item(), tuple(local.shape)

    for sent, rank, shape in on_ranks(run, 4):
        assert shape == (15, 40)
        assert sent == 2 * (15 + 40)  # two factors
        assert rank == 2


def test_powersgd_drops_what_waits_for_other_parameters():
    """A position of a step between replicas may hold another unit, after a step in which a unit got no gradients."""
    from types import SimpleNamespace

    from panther.distributed.data.comm_hooks.powersgd import PowerSGD

    def run():
        hook = PowerSGD(dist.group.WORLD, 1, 2)
        parameters = [nn.Parameter(torch.zeros(12, 16, dtype=torch.float64)) for _ in range(2)]

        def arrive(parameter, x):
            buffer = x.flatten().clone()
            bucket = SimpleNamespace(
                index=lambda: 0,
                is_last=lambda: True,
                buffer=lambda: buffer,
                parameters=lambda: [parameter],
                gradients=lambda: [buffer.view(12, 16)],
            )
            return hook.send(bucket).wait().view(12, 16)

        torch.manual_seed(0)
        x = torch.randn(12, 16, dtype=torch.float64)
        for _ in range(4):
            arrive(parameters[0], x)
        for parameter, is_first in ((parameters[1], True), (parameters[1], False), (parameters[0], True)):
            waited = 0 if is_first else hook.state_dict(nn.Linear(1, 1))["error_dict"][0].view(12, 16)
            arrived = arrive(parameter, x)
            waits = hook.state_dict(nn.Linear(1, 1))["error_dict"][0].view(12, 16)
            torch.testing.assert_close(arrived + waits, x + waited, rtol=0, atol=1e-12)

    on_ranks(run, 1)


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
        assert sent["allreduce_"] == 4 * 60  # a tenth of a shard


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_leaves_nothing_behind(bad):
    def run():
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        model = data_parallel(network(), mesh, "fsdp", comm_hook="powersgd", **COMPRESSED["powersgd"])
        for number in range(5):
            gradients(model, number, [dist.get_rank()])
        model.zero_grad()
        output = model(batch(9, dist.get_rank()))
        if dist.get_rank() == 3:
            output = output * torch.tensor([bad, 1.0, 1.0], dtype=output.dtype)
        output.square().mean().backward()
        kept = hook_state(model)["PowerSGD"]["error_dict"].values()
        later = [gradient for number in (5, 6) for gradient in gradients(model, number, [dist.get_rank()])]
        return all(tensor.isfinite().all() for tensor in (*kept, *later))

    assert all(on_ranks(run, 4))


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_state_continues_bit_for_bit(name):
    def run():
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        first, second = (data_parallel(network(), mesh, "fsdp", comm_hook=name, **COMPRESSED[name]) for _ in range(2))
        for number in range(4):
            gradients(first, number, [dist.get_rank()])
        load_hook_state(second, hook_state(first))
        pairs = [
            (gradients(first, number, [dist.get_rank()]), gradients(second, number, [dist.get_rank()]))
            for number in (4, 5)
        ]
        return all(all(map(torch.equal, a, b)) for a, b in pairs)

    assert all(on_ranks(run, 4))


def test_what_a_replica_hook_refuses():
    def run():
        mesh = make_mesh(dp=2, replicate=2)["replicate", "dp"]
        messages = []
        for settings, error in [
            ({"comm_hook": "sketch", "sketch_fraction": 0}, ValueError),
            ({"comm_hook": "powersgd", "sketch_fraction": 0.5}, ValueError),
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
        assert "sketch_fraction=0 must be a number above 0" in messages[0]
        assert "sketch_fraction=0.5 needs comm_hook='sketch', not 'powersgd': set both" in messages[1]
