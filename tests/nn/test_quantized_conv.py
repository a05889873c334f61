"""QuantizedConv2d: what it computes, its fit, bytes and refusals; what QuantizedLinear has too is tested there."""

import copy

import pytest
import torch
from covering import all_pairs
from tolerances import assert_close
from torch import nn

from panther.errors import DTypeError, ShapeError
from panther.nn import QuantizedConv2d, QuantizedLinear
from panther.nn.quantized import stored_bytes
from panther.nn.sketch_record import plain_state

FORMS = [*({"bits": bits} for bits in (2, 3, 4, 8)), {"bits": 4, "low_rank": 3}, {"bits": None, "low_rank": 3}]
# in, out, kernel, stride, padding, dilation, groups, bias, padding_mode
GEOMETRIES = [
    (3, 8, 3),
    (1, 1, 1),
    (8, 12, 1, 1, 0, 1, 1, False),
    (8, 12, (3, 2), 1, "same", (1, 2), 1, True, "reflect"),
    (8, 8, 3, 2, 1, 1, 8, False),
    (8, 12, 5, (1, 2), (2, 1), 1, 4, True, "circular"),
    (6, 4, (1, 5), 1, "same", 1, 2, True, "zeros"),
    (6, 4, 2, 1, "valid", 2, 1, True, "replicate"),
]


def dense_of(geometry, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Conv2d(*geometry, dtype=dtype)


def smaller(form, dense):
    """Return a form with a rank that the weight can have."""
    return form | {"low_rank": min(form.get("low_rank", 0), *dense.weight.flatten(1).shape)}


@pytest.mark.parametrize(
    ("form", "group_size", "geometry", "dtype"),
    all_pairs(FORMS, [None, 1, 7, 128], GEOMETRIES, [torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_forward_is_a_convolution_by_the_weight(form, group_size, geometry, dtype):
    dense = dense_of(geometry, dtype)
    layer = QuantizedConv2d.from_conv(dense, **smaller(form, dense), group_size=group_size)
    exact = copy.deepcopy(layer).double().to_conv()
    assert exact.padding == dense.padding
    for x in (torch.randn(3, dense.in_channels, 9, 8, dtype=dtype), torch.randn(dense.in_channels, 9, 8, dtype=dtype)):
        expected = exact(x.double())
        for output in (layer(x), torch.no_grad()(layer)(x), layer.to_conv()(x)):
            assert output.dtype is dtype
            assert_close(output, expected, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group_size", [None, 16])
def test_the_weight_is_that_of_a_linear_layer_unfolded(form, group_size):
    dense = dense_of((8, 12, 3, 1, 0, 1, 2))
    linear = nn.Linear(36, 12)
    linear.weight = nn.Parameter(dense.weight.detach().flatten(1))
    ours = QuantizedConv2d.from_conv(dense, **form, group_size=group_size)
    theirs = QuantizedLinear.from_linear(linear, **form, group_size=group_size)
    assert torch.equal(ours.weight.flatten(1), theirs.weight)
    assert ours.weight.shape == dense.weight.shape


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_bytes_at_rest(form, geometry):
    dense = dense_of(geometry)
    out, columns = dense.weight.flatten(1).shape
    form = smaller(form, dense)
    layer = QuantizedConv2d.from_conv(dense, **form, group_size=7)
    stored = sum(tensor.nbytes for name, tensor in plain_state(layer).items() if name != "bias")
    assert stored == stored_bytes(columns, out, **form, group_size=7, conv=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_new_layer_has_the_variance_of_a_dense_one(form):
    torch.manual_seed(0)
    layer = QuantizedConv2d(64, 128, 3, groups=2, **form)
    assert layer.weight.std().item() == pytest.approx((1 / (3 * 32 * 9)) ** 0.5, rel=0.25)


def test_mode_and_subclass_are_kept():
    class Own(QuantizedConv2d):
        pass

    layer = Own.from_conv(dense_of((3, 4, 3)).eval())
    assert type(layer) is Own
    assert not layer.training
    assert not layer.to_conv().training


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0, 3, 1), {}, ShapeError, "in_channels=0 must be at least 1"),
        ((3, 4, 1), {"groups": 2}, ShapeError, "in_channels=3 must be divisible by groups=2"),
        ((3, 3, 0), {}, ShapeError, "kernel_size=0 must be at least 1"),
        ((3, 3, (1, 2, 3)), {}, ShapeError, r"kernel_size=\(1, 2, 3\) must be one integer or 2 of them"),
        ((3, 3, 3), {"padding": "full"}, ValueError, "padding='full' is unknown"),
        ((3, 3, 3, 2), {"padding": "same"}, ShapeError, "padding='same' keeps the size"),
        ((3, 3, 3), {"padding_mode": "mirror"}, ValueError, "padding_mode='mirror' is unknown"),
        ((3, 3, 3), {"bits": 9}, ShapeError, "bits=9 must be 2 to 8"),
        ((3, 3, 3), {"bits": None}, ValueError, "bits=None leaves low rank alone"),
        ((3, 3, 3), {"group_size": 0}, ShapeError, "group_size=0 must be at least 1"),
        ((3, 3, 3), {"dtype": torch.int8}, DTypeError, "must be a floating dtype"),
    ],
)
def test_bad_arguments(arguments, options, error, match):
    with pytest.raises(error, match=match):
        QuantizedConv2d(*arguments, **options)


def test_bad_layers_are_refused():
    with pytest.raises(TypeError, match=r"from_conv takes an nn\.Conv2d, not Conv1d"):
        QuantizedConv2d.from_conv(nn.Conv1d(3, 3, 1))
