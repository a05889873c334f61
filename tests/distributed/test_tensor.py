"""Layers cut over ranks against the same layers in one piece: outputs, gradients, training, state, bytes."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from compressed_layers import with_stored_sketches
from ranks import assert_near, gradients_of, on_ranks, take_steps, weights_of, whole
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from panther.distributed import (
    ColwiseSKParallel,
    RowwiseSKParallel,
    TensorParallelModel,
    TensorParallelSKLinear,
    make_mesh,
    tensor_parallel,
)
from panther.distributed.tensor.unshard import unshard_module
from panther.errors import ShapeError
from panther.nn import SKLinear

pytestmark = pytest.mark.distributed


def pair(seed, mode="signs", dtype=torch.float64, sizes=(40, 50, 30), bias=True):
    torch.manual_seed(seed)
    sketch = "sparse" if mode == "sparse" else "signs"
    layers = [SKLinear(n, m, 3, bias=bias, sketch=sketch) for n, m in pairwise(sizes)]
    if mode == "fitted":
        layers = [with_stored_sketches(layer) for layer in layers]
    return nn.Sequential(layers[0], nn.GELU(), layers[1]).to(dtype)


PLAN = {"0": ColwiseSKParallel(), "2": RowwiseSKParallel()}


def data(dtype=torch.float64, n=7, width=40, out=30):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 2, width, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randn(n, 2, out, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("n", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
@pytest.mark.parametrize("mode", ["signs", "sparse", "fitted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_pair_is_the_layer_unsharded(n, mode, dtype, bias):
    """50 outputs over 3 and 4 ranks are uneven. Ranks start from other weights and seeds; the first one's are taken."""
    x, y = data(dtype)

    def rank():
        mesh = make_mesh(tp=n)["tp"]
        model = parallelize_module(pair(100 + dist.get_rank(), mode, dtype, bias=bias), mesh, PLAN)
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        nn.functional.mse_loss(out, y).backward()
        parts = {name: p.to_local().shape for name, p in model.named_parameters()}
        weights = [layer.weight for layer in model if isinstance(layer, SKLinear)]
        return out.detach(), leaf.grad, gradients_of(model), parts, weights

    single = pair(100, mode, dtype, bias=bias)
    leaf = x.clone().requires_grad_()
    expected = single(leaf)
    nn.functional.mse_loss(expected, y).backward()
    results = on_ranks(rank, n)
    for out, dx, gradients, _, weights in results:
        assert set(gradients) == {name for name, _ in single.named_parameters()}
        assert_near((out, dx, gradients), (expected.detach(), leaf.grad, gradients_of(single)), dtype)
        assert_near([weight.detach() for weight in weights], [single[i].weight.detach() for i in (0, 2)], dtype)
    parts = [parts for *_, parts, _ in results]
    assert [part["0.S2"][1] for part in parts] == [len(chunk) for chunk in torch.arange(50).chunk(n)]
    assert sum(part["2.S1"][0] for part in parts) == 50
    assert all(part["0.S1"] == (40, 3) for part in parts)


@pytest.mark.parametrize("mode", ["signs", "sparse", "fitted"])
def test_ten_steps_of_training(mode):
    x, y = data()

    def train(model):
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        losses, _ = take_steps(optimizer, lambda: nn.functional.mse_loss(model(x), y), clip=0.1)
        return losses, weights_of(model)

    def rank():
        return train(parallelize_module(pair(100 + dist.get_rank(), mode), make_mesh(tp=3)["tp"], PLAN))

    losses, weights = train(pair(100, mode))
    for their_losses, theirs in on_ranks(rank, 3):
        assert their_losses == pytest.approx(losses, rel=1e-9)
        assert all(torch.allclose(theirs[name], weights[name], rtol=1e-8, atol=1e-10) for name in weights)


@pytest.mark.parametrize("mode", ["signs", "sparse"])
def test_a_rank_draws_only_its_part_of_the_sketches(mode):
    def rank():
        model = parallelize_module(pair(0, mode), make_mesh(tp=2)["tp"], PLAN)
        return [model[0].U1, model[0].U2, model[2].U1, model[2].U2], model[0].seed

    first, second = on_ranks(rank)
    single = pair(0, mode)
    (U1, U2, V1, V2), seed = first
    assert seed == single[0].seed
    assert torch.equal(torch.cat((U1, second[0][0]), 1), single[0].U1)
    assert torch.equal(torch.cat((V2, second[0][3])), single[2].U2)
    assert torch.equal(U2, single[0].U2)
    assert torch.equal(V1, single[2].U1)


@pytest.mark.parametrize("mode", ["signs", "sparse"])
def test_state_dict_round_trip_and_unshard(mode):
    def rank():
        mesh = make_mesh(tp=2)["tp"]
        model = parallelize_module(pair(3, mode), mesh, PLAN)
        state = {key: copy.deepcopy(value) for key, value in model.state_dict().items()}
        other = parallelize_module(pair(4), mesh, PLAN)  # It takes the kind of the state.
        other.load_state_dict(state)
        plain = [unshard_module(layer) for layer in (other[0], other[2])]
        x, _ = data()
        return torch.equal(model(x), other(x)), {key: tuple(value.shape) for key, value in state.items()}, plain

    single = pair(3, mode)
    for same, shapes, plain in on_ranks(rank):
        assert same
        assert shapes == {key: tuple(value.shape) for key, value in single.state_dict().items()}
        for layer, theirs in zip(plain, (single[0], single[2]), strict=True):
            assert type(layer) is SKLinear
            assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("gather", [True, False])
def test_the_guide_s_layer(gather):
    def rank():
        torch.manual_seed(7)
        layer = TensorParallelSKLinear(20, 33, 2, dist.group.WORLD, gather_output=gather).double()
        x = data(width=20)[0].requires_grad_()
        out = layer(x)
        (out if gather else out.square().sum() + 0 * out).sum().backward()
        return out.detach(), x.grad, layer.local_out_features

    torch.manual_seed(7)
    single, x = SKLinear(20, 33, 2).double(), data(width=20)[0].requires_grad_()
    expected = single(x)
    results = on_ranks(rank)
    assert [size for *_, size in results] == [17, 16]
    if gather:
        expected.sum().backward()
        for out, gradient, _ in results:
            assert_near((out, gradient), (expected.detach(), x.grad))
    else:
        assert_near([torch.cat([out for out, *_ in results], -1)], [expected.detach()])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_guide_s_model(count):
    widths = [24, 31, 18, 9][: count + 1]
    configs = [{"in_features": n, "out_features": m, "sketch_size": 2} for n, m in pairwise(widths)]

    def rank():
        torch.manual_seed(7)
        model = TensorParallelModel(configs, dist.group.WORLD).double()
        x = data(width=24)[0].requires_grad_()
        out = model(x)
        out.sin().sum().backward()
        return out.detach(), x.grad

    torch.manual_seed(7)
    layers = [SKLinear(*config.values()).double() for config in configs]
    x = data(width=24)[0].requires_grad_()
    expected = x
    for index, layer in enumerate(layers):
        expected = layer(expected if index == 0 else expected.relu())
    expected.sin().sum().backward()
    for out, gradient in on_ranks(rank):
        assert_near((out, gradient), (expected.detach(), x.grad))


@pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
def test_what_is_refused():
    def rank():
        mesh = make_mesh(tp=2)["tp"]
        messages = []
        for call in (
            lambda: parallelize_module(nn.ReLU(), mesh, ColwiseSKParallel()),
            lambda: parallelize_module(SKLinear(40, 1, 2), mesh, ColwiseSKParallel()),
            lambda: TensorParallelModel([], mesh),
            lambda: TensorParallelModel([{"in_features": 3}], mesh),
            lambda: TensorParallelModel(
                [{"in_features": n, "out_features": 4, "sketch_size": 1} for n in (3, 5)], mesh
            ),
            lambda: TensorParallelModel(
                [{"in_features": 3, "out_features": 4, "sketch_size": 1, "activation": "relu"}], mesh
            ),
            lambda: TensorParallelModel({"in_features": 3}, mesh),
            lambda: TensorParallelModel([3], mesh),
            lambda: TensorParallelSKLinear(8, 4, 1, None),
            lambda: TensorParallelSKLinear(8, 4, 1, "tp"),
        ):  # fmt: skip
            with pytest.raises((ShapeError, TypeError)) as caught:
                call()
            messages.append(str(caught.value))
        return messages

    messages = on_ranks(rank)[0]
    kinds = "SKLinear or LowRankLinear or MonarchLinear or Linear"
    assert messages[0] == f"ColwiseSKParallel shards {kinds}, not a ReLU: name its layers"
    assert messages[1].startswith("a dimension of 1 cannot be split into 2 chunks")
    listed = "layer_configs must be a list of mappings, one for each layer, and at least one"
    keys = "and must have in_features, out_features, sketch_size"
    assert messages[2] == listed
    assert messages[3] == f"layer_configs[0] has the keys in_features, {keys}"
    assert messages[4].startswith("layer_configs[0] gives 4 features and layer_configs[1] takes 5")
    assert messages[5:] == [
        f"layer_configs[0] has the keys in_features, out_features, sketch_size, activation, {keys}",
        listed,
        listed,
        "tensor_parallel_group is None: pass a process group, such as torch.distributed.group.WORLD",
        "a group must be a process group, such as mesh['dp'].get_group(), or None, not str",
    ]


def test_second_derivatives_are_those_of_one_process():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(SKLinear(12, 20, 2), nn.Tanh(), SKLinear(20, 6, 2), nn.Linear(6, 3)).double()

    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def penalised(model):
        a = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(a).square().sum(), a, create_graph=True)
        first.square().sum().backward()
        return {name: whole(p.grad).detach() for name, p in model.named_parameters() if p.grad is not None}

    def rank():
        model = build()
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        return penalised(model)

    expected = penalised(build())
    for found in on_ranks(rank):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
