"""Dense layers of one input: one collective if they are given one tensor, and right if they are not."""

import copy
from typing import ClassVar

import pytest
import torch
from blocks import Attention, block
from compressed_layers import with_stored_sketches
from panther.kernels import sketched_inner, sketched_outer
from ranks import gradients_of, on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from panther.distributed import CommunicationCounter, data_parallel, make_mesh, tensor_parallel
from panther.distributed.tensor import _linear
from panther.nn import SKLinear

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
WIDTH, R = 24, 3


def sketched(n, m):
    return SKLinear(n, m, R)


def fitted(n, m):
    return with_stored_sketches(SKLinear(n, m, R))


def inputs(count=1, rows=7):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


def sharded(make=nn.Linear, seed=0):
    model = block(make, seed).double()
    tensor_parallel(model, make_mesh(tp=2)["tp"])
    return model


def run(model, *xs, call=None):
    """Output, gradients of inputs and of parameters, and the calls of backward."""
    model.zero_grad()
    leaves = [x.clone().requires_grad_() for x in xs]
    out = (call or model)(*leaves)
    with CommunicationCounter() as traffic:
        out.square().mean().backward()
    return out.detach(), [leaf.grad for leaf in leaves], gradients_of(model), traffic.calls


def same(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-11, atol=1e-12)
    for a, b in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert set(ours[2]) == set(theirs[2])
    for name, gradient in theirs[2].items():
        torch.testing.assert_close(ours[2][name], gradient, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("make", [sketched, fitted, nn.Linear])
def test_a_block_on_three_ranks_of_uneven_shards(make):
    """36 features of the feed-forward block, and 3 of 6 heads' worth; dense and fitted layers too."""
    (x,) = inputs()

    def rank():
        model = block(make, heads=6, inner=37).double()
        tensor_parallel(model, make_mesh(tp=3)["tp"])
        return run(model, x)

    expected = run(block(make, heads=6, inner=37).double(), x)
    for found in on_ranks(rank, 3):
        same(found, expected)
        if torch.__version__ >= "2.13":  # DTensor of 2.11 sends once more for uneven shards
            assert found[3] == (2 if make is nn.Linear else 5)  # q, k, v, gate and up


def test_attention_to_another_sequence():
    x, other = inputs(2)

    def rank():
        model = sharded()
        return [run(model, x, other), run(model, x, other), run(model, x)]

    single = block(nn.Linear).double()
    expected = [run(single, x, other), run(single, x, other), run(single, x)]
    for results in on_ranks(rank):
        for ours, theirs in zip(results, expected, strict=True):
            same(ours, theirs)
        assert [calls for *_, calls in results] == [3, 3, 2]  # one for q, one for k and v, one for gate and up


@pytest.mark.parametrize("change", ["in place", "weights", "backward", "no gradients", "frozen", "replaced"])
def test_what_changes_between_two_calls(change):
    """Results that were computed for a layer are not used for another input, other weights or another graph."""
    (x,) = inputs()

    def work(model):
        attention = model.self_attn
        x_ = x.clone()
        out = [attention.q_proj(x_)]
        if change == "in place":
            x_ += 1
        elif change == "weights":
            with torch.no_grad():
                attention.k_proj.weight.mul_(2)
        elif change == "backward":
            out[0].sum().backward()
        elif change == "frozen":
            attention.v_proj.requires_grad_(False)
        elif change == "replaced":
            attention.k_proj = nn.Identity()
        with torch.set_grad_enabled(change != "no gradients"):
            out += [attention.k_proj(x_), attention.v_proj(x_)]
        outs = [y.detach() for y in out]
        rest = [y for y in (out[1:] if change == "backward" else out) if y.requires_grad]
        if change not in ("in place", "weights"):  # torch refuses a backward pass through what was changed since
            sum(y.square().sum() for y in rest).backward()
        return outs, {n: p.grad for n, p in attention.named_parameters()}

    def rank():
        model = sharded()
        outs, gradients = work(model)
        return outs, {n: None if g is None else g.full_tensor() for n, g in gradients.items()}

    outs, gradients = work(block(nn.Linear).double())
    halves = on_ranks(rank)
    for i, out in enumerate(outs):
        whole = (
            torch.cat([outs_[i] for outs_, _ in halves], -1) if halves[0][0][i].shape != out.shape else halves[0][0][i]
        )
        torch.testing.assert_close(whole, out, rtol=1e-11, atol=1e-12)
    for _, found in halves:
        for name, gradient in gradients.items():
            if gradient is None:  # a layer whose result was not used gets zeros
                assert found[name] is None or not found[name].any()
            else:
                torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_copies_checkpointing_and_fsdp():
    (x,) = inputs()

    def rank():
        mesh = make_mesh(dp=1, tp=2)
        model = sharded()
        found = [run(model, x), run(model, x, call=lambda y: checkpoint(model, y, use_reentrant=False))]
        found.append(run(model, x, call=lambda y: checkpoint(model, y, use_reentrant=True)))
        model.self_attn.q_proj(x.clone().requires_grad_())  # what is kept for k and v must not be copied
        twin = copy.deepcopy(model)
        assert twin.self_attn.k_proj.shared_input is twin.self_attn.q_proj.shared_input
        assert twin.self_attn.k_proj.shared_input._result is None
        found.append(run(twin, x))
        each = sharded()
        for layer in (each.self_attn.q_proj, each.self_attn.v_proj):
            data_parallel(layer, mesh["dp"], "fsdp")
        found.append(run(each, x))
        return found

    expected = run(block(nn.Linear).double(), x)
    for results in on_ranks(rank):
        for found in results:
            same(found, expected)


class Shapes(TorchDispatchMode):
    """Operations by name, with the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.seen.append((func._schema.name, tuple(result.shape)))
        return result


@pytest.mark.parametrize(("sketch", "rows", "count"), [("sparse", 5, 4), ("signs", 4 * R - 1, 8), ("signs", 4 * R, 4)])
def test_a_sharded_layer_uses_the_kernels_of_a_plain_one(sketch, rows, count):
    """No array of the sketches' size is made, but for joined factors where the plain layer joins them too."""

    def rank():
        called = []
        for kernel in (sketched_inner, sketched_outer):
            name = kernel.__name__

            def recorded(*args, name=name, kernel=kernel):
                called.append(name)
                return kernel(*args)

            setattr(_linear, name, recorded)
        model = nn.Sequential(SKLinear(40, 50, R, sketch=sketch), nn.Tanh(), SKLinear(50, 30, R, sketch=sketch))
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        x = torch.randn(rows, 40)
        model(x)
        called.clear()
        with Shapes() as shapes:
            model(x)
        return called, shapes.seen

    for called, seen in on_ranks(rank, fresh=True):
        assert called == ["sketched_inner", "sketched_outer"] * 2
        sketches = {(40, R), (R, 25), (25, R), (R, 30)}
        assert not [entry for entry in seen if entry[1] in sketches]
        products = [name for name, _ in seen if name in ("aten::mm", "aten::addmm")]
        assert len(products) == count


def test_attention_by_itself_has_one_collective_backward():
    (x,) = inputs()

    class Model(nn.Module):
        _tp_plan: ClassVar = {f"self_attn.{name}_proj": "rowwise" if name == "o" else "colwise" for name in "qkvo"}

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.self_attn = Attention(nn.Linear, WIDTH, 4)

        def forward(self, x):
            return self.self_attn(x)

    def rank():
        model = Model().double()
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        leaf = x.clone().requires_grad_()
        with CommunicationCounter() as traffic:
            model(leaf).sum().backward()
        return traffic.calls, traffic.bytes

    assert on_ranks(rank) == [(2, 14 * (WIDTH + WIDTH) * 8)] * 2
