"""Low-rank layers: the truncated SVD of dense layers, components that are zero, and SKLinear as two factors."""

import copy

import numpy as np
import pytest
import torch
from compressed_layers import with_stored_sketches
from covering import all_pairs
from tolerances import KERNEL_RMS, assert_close, factorisation, rms_error
from torch import nn

import panther as pr
from panther.errors import PerformanceWarning, ShapeError
from panther.nn import LowRankConv2d, LowRankLinear, SKLinear, factors

pytestmark = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
SHAPES = [(20, 30), (30, 20), (1, 7), (7, 1), (1, 1), (16, 16)]


def linear(n_in, n_out, dtype=torch.float64):
    torch.manual_seed(n_in + n_out)
    return nn.Linear(n_in, n_out, dtype=dtype)


def conv(in_channels=16, out_channels=24, kernel_size=3, dtype=torch.float64, **options):
    torch.manual_seed(in_channels + out_channels)
    return nn.Conv2d(in_channels, out_channels, kernel_size, dtype=dtype, **options)


@pytest.mark.parametrize(
    ("shape", "rank", "dtype"), all_pairs(SHAPES, [1, 2, 3, 8, 180], [torch.float32, torch.float64])
)
def test_a_linear_layer_is_the_truncated_svd(shape, rank, dtype):
    dense = linear(*shape, dtype)
    layer = LowRankLinear.from_linear(dense, rank)
    r = min(rank, *shape)
    P, sigma, Qt = torch.linalg.svd(dense.weight.double())
    best = (P[:, :r] * sigma[:r]) @ Qt[:r]
    W, size = layer.weight.double(), dense.weight.double().norm()
    assert ((dense.weight - W).norm() - sigma[r:].norm()).abs() < factorisation(dtype) * size
    if dtype is torch.float64:  # close singular values make the approximation itself less accurate than its residual
        assert (W - best).norm() < factorisation(dtype) * size
    assert torch.equal(layer.bias, dense.bias)


@pytest.mark.parametrize(
    ("groups", "rank", "dtype"), all_pairs([1, 2, 8], [16, 64, 240], [torch.float32, torch.float64])
)
def test_a_convolution_is_numpys_truncated_svd_of_the_unfolded_kernel(groups, rank, dtype):
    dense = conv(dtype=dtype, groups=groups)
    layer = LowRankConv2d.from_conv(dense, rank)
    A = dense.weight.detach().double().numpy().reshape(groups, 24 // groups, -1)
    P, sigma, Qt = np.linalg.svd(A, full_matrices=False)
    r = rank // groups
    best = (P[..., :r] * sigma[:, None, :r]) @ Qt[:, :r]
    W, size = layer.weight.detach().double().numpy().reshape(A.shape), np.linalg.norm(A)
    assert abs(np.linalg.norm(A - W) - np.linalg.norm(sigma[:, r:])) < factorisation(dtype) * size
    if dtype is torch.float64:
        assert np.linalg.norm(W - best) < factorisation(dtype) * size
    assert torch.equal(layer.bias, dense.bias)


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_the_randomized_svd_of_a_large_weight_is_as_good(decay, monkeypatch):
    """Within 1e-3 of the least error whatever the spectrum."""
    torch.manual_seed(0)
    P, Q = torch.linalg.qr(torch.randn(300, 300)).Q, torch.linalg.qr(torch.randn(400, 300)).Q
    sigma = torch.arange(1.0, 301.0) ** -decay if decay else torch.linalg.svdvals(torch.randn(400, 300))
    dense = nn.Linear(300, 400, bias=False)
    dense.weight.data = (Q * sigma) @ P.T
    calls = []
    randomized = factors.randomized_svd
    monkeypatch.setattr(factors, "randomized_svd", lambda *a, **k: calls.append(a) or randomized(*a, **k))
    layer = LowRankLinear.from_linear(dense, 32)
    assert len(calls) == 1
    assert (layer.weight - dense.weight).norm() < 1.001 * sigma[32:].norm()
    LowRankLinear.from_linear(dense, 64)
    assert len(calls) == 1


def test_singular_values_are_shared_evenly():
    dense = linear(40, 30)
    layer = LowRankLinear.from_linear(dense, 4)
    root = torch.linalg.svdvals(dense.weight)[:4].sqrt()
    assert_close(layer.down.norm(dim=0), root)
    assert_close(layer.up.norm(dim=1), root)


@pytest.mark.parametrize("is_zero", [False, True])
def test_unused_components_add_nothing_and_still_learn(is_zero):
    dense = linear(6, 4)  # of rank 4
    kernel = conv(2, 6, 1)  # of rank 2
    if is_zero:
        for module in (dense, kernel):
            nn.init.zeros_(module.weight)
    x, image = torch.randn(20, 6, dtype=torch.float64), torch.randn(3, 2, 5, 5, dtype=torch.float64)
    layer = LowRankLinear.from_linear(dense, 10)
    assert_close(layer.weight, dense.weight)
    layer(x).square().sum().backward()
    assert (layer.down.grad.norm(dim=0) > 0).all()
    layer = LowRankConv2d.from_conv(kernel, 8)
    assert_close(layer.weight, kernel.weight)
    layer(image).square().sum().backward()
    assert (layer.down.grad.flatten(1).norm(dim=1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_conversion_keeps_everything_else(dtype):
    sizes = {"stride": (2, 1), "padding": (0, 2), "dilation": (2, 1), "groups": 2, "padding_mode": "circular"}
    dense = conv(dtype=dtype, kernel_size=(3, 2), bias=False, **sizes).eval().to(memory_format=torch.channels_last)
    layer = LowRankConv2d.from_conv(dense, 8)
    for twin in (layer, layer.to_conv()):
        assert all(getattr(twin, name) == getattr(dense, name) for name in sizes)
        assert twin.bias is None
        assert not twin.training
    x = torch.ones(3, 16, 9, 9, dtype=dtype)
    assert layer(x).stride() == dense(x).stride()
    layer = LowRankLinear.from_linear(linear(30, 20, dtype).eval(), 5)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    assert not layer.training


def test_bad_input():
    with pytest.raises(ShapeError, match="rank=3 must be divisible by groups=2"):
        LowRankConv2d(4, 4, 3, groups=2, rank=3)
    with pytest.raises(ShapeError, match=r"left must have shape \(6, 2\) in this layer, not \(6, 3\)"):
        LowRankLinear(8, 6, 2).set_factors_(torch.ones(6, 3), torch.ones(3, 8))


@pytest.mark.parametrize(
    ("sizes", "dtype", "kind", "bias"),
    all_pairs(
        [(64, 48, 3), (33, 65, 1), (1, 1, 1), (300, 130, 40)],
        [torch.float64, torch.float32, torch.float16, torch.bfloat16],
        ["sparse", "signs", "stored"],
        [False, True],
    ),
)
def test_fused_layers_compute_the_same(sizes, dtype, kind, bias):
    torch.manual_seed(0)
    layer = SKLinear(*sizes, bias=bias, sketch="sparse" if kind == "sparse" else "signs", seed=7, dtype=dtype)
    if kind == "stored":
        with_stored_sketches(layer)
    fused = pr.fuse_(layer.eval())
    assert isinstance(fused, LowRankLinear)
    assert not fused.training
    x = torch.randn(5, sizes[0], dtype=dtype)
    exact = layer.double()(x.double())
    assert rms_error(fused(x), exact) < KERNEL_RMS[dtype]


def test_a_fused_layer_does_not_overflow_in_float16():
    layer = SKLinear(4096, 8, 1, sketch="signs", seed=0, dtype=torch.float16, bias=False)
    x = 20 * layer.U2.mT.clone()  # x U2 = 81,920
    expected = layer(x)
    assert expected.isfinite().all()
    torch.testing.assert_close(pr.fuse_(layer)(x), expected)


def test_fused_models_keep_what_was_shared_and_frozen():
    torch.manual_seed(0)
    first = SKLinear(32, 32, 4).requires_grad_(False)
    second = with_stored_sketches(SKLinear(32, 32, 4))
    third = copy.deepcopy(second)
    for name in ("S1", "S2", "U1", "U2"):
        third.register_parameter(name, getattr(second, name))
    model = nn.Sequential(first, first, second, third)
    x = torch.randn(3, 32)
    expected = model(x)
    assert pr.fuse_(model) is model
    assert model[0] is model[1]
    assert not any(parameter.requires_grad for parameter in model[0].parameters())
    assert model[2].down is model[3].down
    assert model[2].down.requires_grad
    torch.testing.assert_close(model(x), expected)


def test_layers_that_cannot_be_fused_are_named():
    model = nn.Sequential(SKLinear(96, 160, 6), SKLinear(160, 96, 6, sketch="signs", packed=True), nn.ReLU())
    with pytest.warns(PerformanceWarning, match=r"did not fuse 1 of 2 SKLinear layers.*'1'.*unpack_"):
        pr.fuse_(model)
    assert isinstance(model[0], LowRankLinear)
    assert isinstance(model[1], SKLinear)
    with pytest.warns(PerformanceWarning, match="found no SKLinear in this ReLU"):
        pr.fuse_(model[2])
    with pytest.raises(TypeError, match="takes a model, not str"):
        pr.fuse_("model")
    hooked, parametrized = SKLinear(96, 160, 6), nn.utils.parametrizations.weight_norm(SKLinear(96, 160, 6), "S1")
    hooked.register_forward_hook(lambda *_: None)
    for layer, reason in ((hooked, "it has hooks"), (parametrized, "remove_parametrizations")):
        with pytest.warns(PerformanceWarning, match=f"did not fuse 1 of 1 .*{reason}"):
            assert pr.fuse_(layer) is layer
