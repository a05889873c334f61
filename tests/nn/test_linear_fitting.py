"""Sketched layers from dense ones."""

import math

import numpy as np
import pytest
import torch
from covering import all_pairs
from tolerances import assert_close, factorisation
from torch import nn

from panther.nn import SKLinear, factors
from panther.nn.factors import lstsq_factors
from panther.sketch import signs

pytestmark = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
SHAPES = [(20, 30), (30, 20), (1, 7), (7, 1), (1, 1), (16, 16)]


def linear(n_in, n_out, dtype=torch.float64, bias=True):
    torch.manual_seed(n_in + n_out)
    return nn.Linear(n_in, n_out, bias=bias, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "terms_and_rank", "dtype"),
    all_pairs(SHAPES, [(1, 1), (1, 3), (2, 2), (3, 30)], [torch.float32, torch.float64]),
)
def test_svd_is_the_truncated_svd(shape, terms_and_rank, dtype):
    dense = linear(*shape, dtype)
    layer = SKLinear.from_linear(dense, *terms_and_rank, init="svd")
    r = min(2 * terms_and_rank[0] * terms_and_rank[1], *shape)
    P, sigma, Qt = torch.linalg.svd(dense.weight.double())
    best = (P[:, :r] * sigma[:r]) @ Qt[:r]
    W, size = layer.weight.double(), dense.weight.double().norm()
    assert ((dense.weight - W).norm() - sigma[r:].norm()).abs() < factorisation(dtype) * size
    if dtype is torch.float64:  # close singular values make the approximation itself less accurate than its residual
        assert (W - best).norm() < factorisation(dtype) * size
    assert torch.equal(layer.bias, dense.bias)
    assert layer.is_fitted
    assert layer.seed is None


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_svd_of_a_large_weight_is_as_good_as_the_truncated_one(decay, monkeypatch):
    """Randomized here, and within 1e-3 of the least error whatever the spectrum."""
    torch.manual_seed(0)
    P, Q = torch.linalg.qr(torch.randn(300, 300)).Q, torch.linalg.qr(torch.randn(400, 300)).Q
    sigma = torch.arange(1.0, 301.0) ** -decay if decay else torch.linalg.svdvals(torch.randn(400, 300))
    dense = nn.Linear(300, 400, bias=False)
    dense.weight.data = (Q * sigma) @ P.T
    calls = []
    randomized = factors.randomized_svd
    monkeypatch.setattr(factors, "randomized_svd", lambda *a, **k: calls.append(a) or randomized(*a, **k))
    layer = SKLinear.from_linear(dense, 1, 16, seed=0)
    assert len(calls) == 1
    least = sigma[32:].norm()
    assert (layer.weight - dense.weight).norm() < 1.001 * least
    SKLinear.from_linear(dense, 1, 32, seed=0)
    assert len(calls) == 1


def test_svd_shares_the_leading_directions_alternately_and_evenly():
    dense = linear(40, 30)
    layer = SKLinear.from_linear(dense, 1, 2)
    sigma = torch.linalg.svdvals(dense.weight)
    for j, (S, U) in enumerate([(layer.S1.T, layer.U1), (layer.S2, layer.U2.T)]):
        for i in range(2):
            root = sigma[2 * i + j].sqrt()
            assert torch.allclose(S[i].norm(), root)
            assert torch.allclose(U[i].norm(), root)


def test_unused_columns_add_nothing_and_still_learn():
    layer = SKLinear.from_linear(linear(6, 4), 1, 5)  # rank 4 of 2R = 10: 3 unused columns a half
    assert (layer.S1[:, 2:] == 0).all()
    assert (layer.U1[2:].abs() > 0).all()
    layer(torch.randn(20, 6, dtype=torch.float64)).square().sum().backward()
    assert (layer.S1.grad[:, 2:].norm(dim=0) > 0).all()
    assert (layer.S2.grad[2:].norm(dim=1) > 0).all()


def test_a_zero_weight_can_be_fitted_and_learns():
    layer = SKLinear(6, 4, 1, 2, weight_init=torch.zeros(4, 6))
    assert (layer.weight == 0).all()
    layer(torch.randn(20, 6)).square().sum().backward()
    assert (layer.S1.grad.norm(dim=0) > 0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("R", [1, 3, 40])
def test_lstsq_is_the_least_squares_solution_of_least_norm(shape, R):
    """Against a dense minimum-norm solve of the vectorised problem."""
    n_in, n_out = shape
    A = torch.randn(n_in, n_out, dtype=torch.float64)
    U1 = signs(4, 0, range(R), range(n_out), dtype=torch.float64)
    U2 = signs(4, 1, range(n_in), range(R), dtype=torch.float64)
    S1, S2 = lstsq_factors(A, U1, U2)
    # vec by rows: vec(S1 U1) = (I kron U1^T) vec(S1), vec(U2 S2) = (U2 kron I) vec(S2)
    blocks = np.kron(np.eye(n_in), U1.T.numpy()), np.kron(U2.numpy(), np.eye(n_out))
    system = torch.from_numpy(np.concatenate(blocks, 1))
    solution = torch.linalg.lstsq(system, A.reshape(-1, 1), driver="gelsd").solution.flatten()
    assert torch.allclose(torch.cat((S1.flatten(), S2.flatten())), solution, atol=1e-9)


def test_lstsq_residual_is_what_the_sketches_cannot_reach():
    dense = linear(50, 40)
    layer = SKLinear.from_linear(dense, 2, 3, init="lstsq", seed=8)
    W = dense.weight.T
    P1 = torch.linalg.pinv(layer.U1) @ layer.U1
    P2 = layer.U2 @ torch.linalg.pinv(layer.U2)
    eye = torch.eye(50, dtype=torch.float64), torch.eye(40, dtype=torch.float64)
    residual = (eye[0] - P2) @ W @ (eye[1] - P1)
    assert torch.allclose(W - layer.weight.T, residual, atol=1e-10)
    assert layer.seed == 8


def test_random_is_unbiased():
    """The mean over n seeds of an unbiased estimator leaves the weight by 6 standard errors with probability < 1e-7."""
    dense = linear(12, 10)
    draws = torch.stack([SKLinear.from_linear(dense, 2, 2, init="random", seed=s).weight.detach() for s in range(200)])
    z = (draws.mean(0) - dense.weight) / (draws.std(0) / len(draws) ** 0.5)
    assert z.abs().max() < 6
    assert z.square().mean() < 1.5


def test_random_is_the_stated_estimator():
    dense = linear(12, 10)
    layer = SKLinear.from_linear(dense, 2, 3, init="random", seed=0)
    for i in range(2):
        assert_close(layer.S1s[i], dense.weight.T @ layer.U1s[i].T)
        assert_close(layer.S2s[i], layer.U2s[i].T @ dense.weight.T)


@pytest.mark.parametrize(
    ("init", "dtype", "bias"),
    all_pairs(["svd", "lstsq", "random"], [torch.float16, torch.bfloat16, torch.float32], [True, False]),
)
def test_from_linear_keeps_dtype_bias_and_training(init, dtype, bias):
    dense = linear(30, 20, dtype, bias).eval()
    before = dense.weight.detach().clone()
    layer = SKLinear.from_linear(dense, 1, 2, init=init)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    assert (layer.bias is not None) == bias
    assert not layer.training
    assert torch.equal(dense.weight, before)
    assert layer(torch.ones(3, 30, dtype=dtype)).isfinite().all()


def test_weight_init_is_the_svd():
    dense = linear(30, 20, torch.float32)
    layer = SKLinear(30, 20, 1, 3, weight_init=dense.weight)
    assert_close(layer.weight, SKLinear.from_linear(dense, 1, 3).weight)


def test_freezing_and_resetting_a_fitted_layer():
    layer = SKLinear.from_linear(linear(30, 20), 1, 3).freeze_sketches_()
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["S1", "S2", "bias"]
    layer.reset_parameters()
    assert layer.is_fitted
    assert len(layer.U1.unique()) == 2
    seeded = SKLinear(30, 20, 3)
    assert not seeded.freeze_sketches_().is_fitted


@pytest.mark.parametrize("init", ["svd", "lstsq", "random"])
def test_a_weight_without_sound_values_is_named(init):
    dense = linear(8, 8)
    with torch.no_grad():
        dense.weight[3, 3] = math.nan
    with pytest.raises(ValueError, match="the weight has entries that are NaN or infinite"):
        SKLinear.from_linear(dense, 1, 1, init=init)
    with pytest.raises(ValueError, match="the weight is on the meta device and has no values to fit"):
        SKLinear.from_linear(dense.to("meta"), 1, 1, init=init)


def test_bad_input():
    with pytest.raises(ValueError, match="init='qr' is unknown: use one of 'svd', 'lstsq', 'random'"):
        SKLinear.from_linear(linear(8, 8), 1, 1, init="qr")
    with pytest.raises(TypeError, match="not Conv1d"):
        SKLinear.from_linear(nn.Conv1d(1, 1, 1), 1, 1)
