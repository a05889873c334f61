"""Sketched layers from dense ones."""

import numpy as np
import pytest
import torch
from covering import all_pairs
from tolerances import assert_close
from torch import nn

from panther.nn import SKLinear
from panther.nn.factors import lstsq_factors
from panther.sketch import signs

pytestmark = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
SHAPES = [(20, 30), (30, 20), (1, 7), (7, 1), (1, 1), (16, 16)]


def linear(n_in, n_out, dtype=torch.float64, bias=True):
    torch.manual_seed(n_in + n_out)
    return nn.Linear(n_in, n_out, bias=bias, dtype=dtype)


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


@pytest.mark.parametrize("sketch", ["sparse", "signs"])
def test_lstsq_residual_is_what_the_sketches_cannot_reach(sketch):
    dense = linear(50, 40)
    layer = SKLinear.from_linear(dense, 2, 3, init="lstsq", sketch=sketch, seed=8)
    W = dense.weight.T
    P1 = torch.linalg.pinv(layer.U1) @ layer.U1
    P2 = layer.U2 @ torch.linalg.pinv(layer.U2)
    eye = torch.eye(50, dtype=torch.float64), torch.eye(40, dtype=torch.float64)
    residual = (eye[0] - P2) @ W @ (eye[1] - P1)
    assert torch.allclose(W - layer.weight.T, residual, atol=1e-10)
    assert layer.seed == 8


@pytest.mark.parametrize("sketch", ["sparse", "signs"])
def test_random_is_unbiased(sketch):
    """The mean over n seeds of an unbiased estimator leaves the weight by 6 standard errors with probability < 1e-7."""
    dense = linear(12, 10)
    layers = (SKLinear.from_linear(dense, 2, 2, init="random", sketch=sketch, seed=seed) for seed in range(200))
    draws = torch.stack([layer.weight.detach() for layer in layers])
    z = (draws.mean(0) - dense.weight) / (draws.std(0) / len(draws) ** 0.5)
    assert z.abs().max() < 6
    assert z.square().mean() < 1.5


@pytest.mark.parametrize(("sketch", "factor"), [("sparse", 4 * 2), ("signs", 1)])
def test_random_is_the_stated_estimator(sketch, factor):
    dense = linear(12, 10)
    layer = SKLinear.from_linear(dense, 2, 3, init="random", sketch=sketch, seed=0)
    for i in range(2):
        assert_close(layer.S1s[i], factor * dense.weight.T @ layer.U1s[i].T)
        assert_close(layer.S2s[i], factor * layer.U2s[i].T @ dense.weight.T)


@pytest.mark.parametrize(
    ("init", "dtype", "bias"),
    all_pairs(["lstsq", "random"], [torch.float16, torch.bfloat16, torch.float32], [True, False]),
)
def test_from_linear_keeps_dtype_bias_and_training(init, dtype, bias):
    dense = linear(30, 20, dtype, bias).eval()
    first_weight = dense.weight.detach().clone()
    layer = SKLinear.from_linear(dense, 1, 2, init=init)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    assert (layer.bias is not None) == bias
    assert not layer.training
    assert torch.equal(dense.weight, first_weight)
    assert layer(torch.ones(3, 30, dtype=dtype)).isfinite().all()


def test_bad_input():
    with pytest.raises(ValueError, match="init='qr' is unknown: use one of 'lstsq', 'random'"):
        SKLinear.from_linear(linear(8, 8), 1, 1, init="qr")
    with pytest.raises(ValueError, match=r'init="svd" makes no sketched layer: use LowRankLinear.from_linear'):
        SKLinear.from_linear(linear(8, 8), 1, 1, init="svd")
    with pytest.raises(TypeError, match="not Conv1d"):
        SKLinear.from_linear(nn.Conv1d(1, 1, 1), 1, 1)
