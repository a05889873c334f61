"""Sketched convolutions from dense ones."""

import numpy as np
import pytest
import torch
from covering import all_pairs
from tolerances import assert_close
from torch import nn

from panther.nn import SKConv1d, SKConv2d, SKConv3d
from panther.nn.factors import lstsq_by_groups
from panther.sketch import signs

pytestmark = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")


def conv(in_channels=16, out_channels=24, kernel_size=3, dtype=torch.float64, cls=nn.Conv2d, **kwargs):
    torch.manual_seed(in_channels + out_channels)
    return cls(in_channels, out_channels, kernel_size, dtype=dtype, **kwargs)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_lstsq_is_numpys_least_squares_solution_of_least_norm(rows):
    A = torch.randn(2, 12, 18, dtype=torch.float64)
    U = signs(4, 0, range(2 * rows), range(12), dtype=torch.float64).unflatten(0, (2, rows))
    S = lstsq_by_groups(A, U)
    for group in range(2):
        expected = np.linalg.lstsq(U[group].mT.numpy(), A[group].numpy(), rcond=None)[0]
        assert torch.allclose(S[group], torch.from_numpy(expected), atol=1e-9)


def test_lstsq_beats_random_and_leaves_what_the_sketch_cannot_reach():
    dense = conv()
    layer = SKConv2d.from_conv(dense, 1, 4, init="lstsq", seed=8)
    P = torch.linalg.pinv(layer.U) @ layer.U
    A = dense.weight.flatten(1)
    assert torch.allclose(layer.weight.flatten(1), P @ A, atol=1e-10)
    assert layer.seed == 8


@pytest.mark.parametrize("groups", [1, 2])
def test_random_is_unbiased(groups):
    """The mean over n seeds of an unbiased estimator leaves the kernel by 6 standard errors with probability < 1e-7."""
    dense = conv(4, 6, groups=groups)
    draws = torch.stack([SKConv2d.from_conv(dense, 2, 2, init="random", seed=s).weight.detach() for s in range(200)])
    z = (draws.mean(0) - dense.weight) / (draws.std(0) / len(draws) ** 0.5)
    assert z.abs().max() < 6
    assert z.square().mean() < 1.5


@pytest.mark.parametrize(
    ("init", "dtype", "bias"),
    all_pairs(["lstsq", "random"], [torch.float16, torch.bfloat16, torch.float32], [True, False]),
)
def test_from_conv_keeps_everything_else(init, dtype, bias):
    sizes = {"stride": (2, 1), "padding": (0, 2), "dilation": (2, 1), "groups": 2, "padding_mode": "circular"}
    dense = conv(dtype=dtype, kernel_size=(3, 2), bias=bias, **sizes).eval().to(memory_format=torch.channels_last)
    first_weight = dense.weight.detach().clone()
    layer = SKConv2d.from_conv(dense, 1, 4, init=init)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    assert (layer.bias is not None) == bias
    assert not layer.training
    assert torch.equal(dense.weight, first_weight)
    for twin in (layer, layer.to_conv()):
        assert all(getattr(twin, name) == getattr(dense, name) for name in sizes)
        assert twin.kernel_size == (3, 2)
    x = torch.ones(3, 16, 9, 9, dtype=dtype)
    assert layer(x).stride() == dense(x).stride()
    assert layer(x).isfinite().all()
    assert layer.to_conv().weight.data_ptr() != dense.weight.data_ptr()


@pytest.mark.parametrize(("cls", "dense_class"), [(SKConv1d, nn.Conv1d), (SKConv3d, nn.Conv3d)])
def test_different_dimensions_at_full_rank_are_exact(cls, dense_class):
    dense = conv(4, 6, cls=dense_class, padding="same")
    layer = cls.from_conv(dense, 1, 16, seed=0)  # 32 rows of signs span the 6 outputs
    x = torch.randn(2, 4, *[5] * cls.dim, dtype=torch.float64)
    assert_close(layer(x), dense(x))
    assert isinstance(layer.to_conv(), dense_class)


def test_default_size_is_the_constructors():
    assert SKConv2d.from_conv(nn.Conv2d(64, 128, 3)).low_rank == SKConv2d(64, 128).low_rank


def test_bad_input():
    with pytest.raises(ValueError, match="init='qr' is unknown: use one of 'lstsq', 'random'"):
        SKConv2d.from_conv(conv(), init="qr")
    for wrong in (nn.Conv1d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1), nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=rf"from_conv takes an nn\.Conv2d, not {type(wrong).__name__}"):
            SKConv2d.from_conv(wrong)
