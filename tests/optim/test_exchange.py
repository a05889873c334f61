"""What sharded matrices send, what ranks must agree on, and real models: FSDP2, tensor parallelism, checkpoints."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, weights_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import panther as pr
from panther.distributed import CommunicationCounter, checkpoint, data_parallel, make_mesh, tensor_parallel
from panther.errors import DistributedError, ShapeError
from panther.optim import MuonAdamW, SketchedAdamW, sketched_param_groups

pytestmark = pytest.mark.distributed

AGREEMENT = 16  # bytes of a rank in each step


SENT = {
    "square": ((32, 32), Shard(0), torch.float32, 2 / 4 * 32 * 32 * 4),
    "tall": ((128, 32), Shard(0), torch.float32, 2 / 4 * 128 * 32 * 4),
    "wide": ((32, 128), Shard(1), torch.float32, 2 / 4 * 128 * 32 * 4),
    "tall, along the short side": ((128, 32), Shard(1), torch.float32, 2 / 4 * 128 * 32 * 4),
    "iterated in bfloat16": ((512, 64), Shard(0), torch.float32, 2 / 4 * 512 * 64 * 2),
    "tall in half precision": ((128, 32), Shard(0), torch.bfloat16, 2 / 4 * 128 * 32 * 4),
    "one row": ((1, 32), Shard(0), torch.float32, 0),
    "experts": ((8, 32, 32), Shard(0), torch.float32, 0),
    "experts along rows": ((4, 32, 32), Shard(1), torch.float32, 4 * 2 / 4 * 32 * 32 * 4),
    "replicated": ((32, 32), Replicate(), torch.float32, 0),
}
"""Shape, placement, dtype, and the bytes of a matrix that all other ranks together send for each rank."""


def test_ranks_send_what_the_formulas_say():
    def rank():
        sent = {}
        mesh = make_mesh(dp=4)
        for name, (shape, placement, dtype, _) in SENT.items():
            parameters = [
                nn.Parameter(distribute_tensor(torch.randn(shape).to(dtype), mesh, [placement])) for _ in "01234567"
            ]
            optimizer = MuonAdamW(parameters, lr=0.1, orthogonalize=True, precision="bfloat16")
            for p in parameters:
                p.grad = torch.ones_like(p)
            with CommunicationCounter() as traffic:
                optimizer.step()
            sent[name] = traffic.bytes, traffic.calls
        return sent

    results = on_ranks(rank, 4)
    for name, (_, _, _, expected) in SENT.items():
        totals = [result[name][0] for result in results]
        is_sharded = name not in ("experts", "replicated")
        assert sum(totals) == 8 * 3 * expected + 4 * AGREEMENT * is_sharded, name
        if expected:
            assert {result[name][1] for result in results} == {3}  # agreement, to the owners, and back
            # The owners are spread evenly.
            assert max(totals) == min(totals)


def test_a_gradient_that_some_ranks_lack_is_refused_by_name():
    def rank():
        mesh = make_mesh(dp=2)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        data_parallel(model, mesh, "fsdp")
        parameters = [(name, p) for name, p in model.named_parameters() if p.dim() == 2]
        optimizer = MuonAdamW(parameters, lr=0.1, orthogonalize=True)
        for _, p in parameters:
            p.grad = torch.ones_like(p)
        if dist.get_rank() == 1:
            parameters[1][1].grad = None
        first_weights = weights_of(model)
        with pytest.raises(DistributedError) as error:
            optimizer.step()
        assert not optimizer.state
        assert all(torch.equal(first_weights[name], value) for name, value in weights_of(model).items())
        for _, p in parameters:
            p.grad = None
        optimizer.step()  # no rank has a gradient: nothing happens
        assert not optimizer.state
        parameters[0][1].grad = torch.ones_like(parameters[0][1])
        optimizer.step()
        return str(error.value), len(optimizer.state)

    for message, states in on_ranks(rank, 2):
        assert "1.weight is present on rank 0 and missing on rank 1: " in message
        assert states == 1


@pytest.mark.parametrize("name", ["MuonAdamW", "SketchedAdamW"])
def test_gradients_of_matrices_of_equal_names_are_compared_apart(name):
    """Two models in one optimizer, as a generator and a discriminator, have equal names. gloo aborted the process."""

    def rank():
        mesh = make_mesh(dp=2)
        pair = [nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])) for _ in range(2)]
        settings = {"MuonAdamW": {"orthogonalize": True}, "SketchedAdamW": {"rank": 2}}
        groups = [{"params": [("weight", p)]} | settings[name] for p in pair]
        optimizer = getattr(pr.optim, name)(groups)
        for p in pair:
            p.grad = torch.ones_like(p)
        optimizer.step()
        if dist.get_rank() == 1:
            pair[0].grad = None
        with pytest.raises(DistributedError) as error:
            optimizer.step()
        return str(error.value)

    for message in on_ranks(rank, 2):
        assert "weight is present and present on rank 0 and missing and present on rank 1" in message


def test_a_matrix_with_nan_stays_alone():
    """Matrices of a batch are computed together, and do not mix."""

    def rank():
        mesh = make_mesh(dp=2)
        ends = {}
        for name, shape in {"square": (8, 8), "tall": (32, 4)}.items():
            parameters = [nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])) for _ in range(3)]
            optimizer = MuonAdamW(parameters, lr=0.1, orthogonalize=True)
            for number, p in enumerate(parameters):
                gradient = torch.randn(shape, generator=torch.Generator().manual_seed(number))
                if number == 1:
                    gradient[0, 0] = float("nan")
                p.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            optimizer.step()
            ends[name] = [p.detach().full_tensor().isfinite().tolist() for p in parameters]
        return ends

    for ends in on_ranks(rank, 2):
        for first, second, third in ends.values():
            assert all(map(all, first))
            assert not any(map(any, second))
            assert all(map(all, third))


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 12), nn.Tanh(), nn.Linear(12, 12)).double()


def muon(model):
    model = getattr(model, "module", model)
    matrices = [model[number].weight for number in (0, 2)]
    rest = [model[0].bias, model[2].bias, *model[4].parameters()]
    return MuonAdamW([{"params": matrices, "orthogonalize": True}, {"params": rest}], lr=0.02)


def sketched(model):
    groups = sketched_param_groups(getattr(model, "module", model), rank=3)
    return SketchedAdamW(groups, lr=0.02, rank=3, period=3, seed=7)


each_optimizer = pytest.mark.parametrize("optimizer_of", [muon, sketched])


def laid_out(model, layout):
    if layout in ("tp", "fsdp and tp"):
        mesh = make_mesh(dp=2, tp=2) if layout == "fsdp and tp" else make_mesh(tp=dist.get_world_size())
        tensor_parallel(model, mesh["tp"])
        if layout == "fsdp and tp":
            model = data_parallel(model, mesh["dp"], "fsdp")
    elif layout == "hybrid":
        model = data_parallel(model, make_mesh(replicate=2, dp=2)["replicate", "dp"], "fsdp")
    elif layout != "one":
        model = data_parallel(model, strategy=layout)
    return model


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return weights_of(model)


def assert_near(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-10, msg=name)


@each_optimizer
@pytest.mark.parametrize("layouts", [("ddp", "fsdp"), ("hybrid", "tp", "fsdp and tp")])
def test_models_train_as_on_one_process(layouts, optimizer_of):
    def rank():
        outcomes = {}
        for layout in layouts:
            model = laid_out(network(0), layout)
            outcomes[layout] = train(model, optimizer_of(model), range(4))
        return outcomes

    model = network(0)
    expected = train(model, optimizer_of(model), range(4))
    for outcomes in on_ranks(rank, 2 if layouts[0] == "ddp" else 4):
        for weights in outcomes.values():
            assert_near(weights, expected)


@each_optimizer
def test_a_checkpoint_of_one_layout_continues_in_others(optimizer_of, tmp_path):
    """Save in one layout, and continue in others; the same layout continues bit for bit."""

    def save():
        model = laid_out(network(0), "fsdp")
        optimizer = optimizer_of(model)
        train(model, optimizer, range(2))
        checkpoint.save(tmp_path, model, optimizer, step=2)
        return train(model, optimizer, range(2, 4))

    def load(layout):
        model = laid_out(network(9), layout)
        optimizer = optimizer_of(model)
        checkpoint.load(tmp_path, model, optimizer)
        return train(model, optimizer, range(2, 4))

    model = network(0)
    expected = train(model, optimizer_of(model), range(4))
    saved = on_ranks(save, 4)
    for weights in [*saved, *on_ranks(load, 4, "fsdp and tp"), *on_ranks(load, 2, "ddp"), load("one")]:
        assert_near(weights, expected)
    for first, second in zip(on_ranks(load, 4, "fsdp"), saved, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_shards_that_are_no_chunks_are_refused_on_all_ranks():
    def rank():
        local = torch.ones(5 - 2 * dist.get_rank(), 6)  # of 4 and 4 rows
        place = {"device_mesh": make_mesh(dp=2), "placements": [Shard(0)], "shape": (8, 6), "stride": (6, 1)}
        p = nn.Parameter(DTensor.from_local(local.clone(), **place))
        p.grad = DTensor.from_local(local, **place)
        with pytest.raises(DistributedError, match=r"shape \(8, 6\) is sharded .* is not the chunk of torch.chunk"):
            MuonAdamW([p], lr=0.1, orthogonalize=True).step()
        return torch.equal(p.to_local(), local)

    assert on_ranks(rank) == [True, True]


def test_states_and_gradients_that_cannot_be():
    table = nn.Embedding(5, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    optimizer = MuonAdamW(table.parameters(), lr=0.1, orthogonalize=True)
    with pytest.raises(ValueError, match="is sparse, and MuonAdamW takes dense gradients"):
        optimizer.step()
    layer = nn.Linear(4, 4, bias=False)
    optimizer = MuonAdamW(layer.parameters(), lr=0.1, orthogonalize=True)
    layer.weight.grad = torch.ones(4, 4)
    optimizer.step()
    layer.weight.data = torch.zeros(2, 4)
    layer.weight.grad = torch.ones(2, 4)
    first = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ShapeError, match=r"momentum_buffer has the shape \(4, 4\), and its parameter now .* \(2, 4\)"):
        optimizer.step()
    assert torch.equal(first["state"][0]["momentum_buffer"], optimizer.state_dict()["state"][0]["momentum_buffer"])


def test_complete_states_of_sharded_matrices_are_refused():
    def rank():
        p = nn.Parameter(distribute_tensor(torch.ones(4, 4), make_mesh(dp=2), [Shard(0)]))
        optimizer = MuonAdamW([p], lr=0.1, orthogonalize=True)
        optimizer.state[p]["momentum_buffer"] = torch.zeros(4, 4)
        p.grad = torch.ones_like(p)
        with pytest.raises(DistributedError, match="is sharded, and its momentum_buffer is a complete tensor"):
            optimizer.step()

    on_ranks(rank, 2)
