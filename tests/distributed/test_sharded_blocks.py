"""A block of attention and a gated feed-forward on ranks, and the kernels that its layers call."""

import pytest
import torch
from blocks import block
from compressed_layers import with_stored_sketches
from panther.kernels import sketched_inner, sketched_outer
from ranks import gradients_of, on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from panther.distributed import CommunicationCounter, make_mesh, tensor_parallel
from panther.distributed.tensor import _linear
from panther.nn import SKLinear

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
WIDTH, R = 24, 3


def sketched(n, m):
    return SKLinear(n, m, R)


def fitted(n, m):
    return with_stored_sketches(SKLinear(n, m, R))


def run(model):
    """Output, gradients of the input and of parameters, and the calls of backward."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 7, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    out = model(x)
    with CommunicationCounter() as traffic:
        out.square().mean().backward()
    return out.detach(), [x.grad], gradients_of(model), traffic.calls


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

    def rank():
        model = block(make, heads=6, inner=37).double()
        tensor_parallel(model, make_mesh(tp=3)["tp"])
        return run(model)

    expected = run(block(make, heads=6, inner=37).double())
    for found in on_ranks(rank, 3):
        same(found, expected)
        assert found[3] == 5  # q, k, v, gate and up


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


@pytest.mark.parametrize("rows", [4 * R - 1, 4 * R])
def test_a_sharded_layer_uses_the_kernels_of_a_plain_one(rows, monkeypatch):
    """No array of the sketches' size is made, but for joined factors where the plain layer joins them too."""

    def rank():
        called = []
        for kernel in (sketched_inner, sketched_outer):
            name = kernel.__name__

            def recorded(*args, name=name, kernel=kernel):
                called.append(name)
                return kernel(*args)

            setattr(_linear, name, recorded)
        model = nn.Sequential(SKLinear(40, 50, R), nn.Tanh(), SKLinear(50, 30, R))
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
        assert len(products) == (4 if rows >= 4 * R else 8)
