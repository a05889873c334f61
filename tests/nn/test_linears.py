"""to_linears_: the same output by plain layers, and a report of what was done."""

import copy
import warnings

import pytest
import torch
from compressed_layers import every_layer, with_stored_sketches
from torch import nn

import panther as pr
from panther.nn import (
    LowRankConv2d,
    QuantizedConv2d,
    QuantizedLinear,
    SKConv2d,
    SKConv3d,
    SKLinear,
)
from panther.nn.linears import LinearPair

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
pytestmark = [
    # Some of these sketches are larger than the dense layers.
    pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning"),
    # A warning of torch about its own convolution, which conv1d becomes.
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
]


every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
# Cases that the table of all layers does not have: no bias, no rows, factors in groups, and factors in channels_last.
MORE = {
    "size one": (lambda dtype: SKLinear(1, 1, 1, bias=False, dtype=dtype), (0, 1)),
    "int8 low rank": (lambda dtype: QuantizedLinear(65, 33, None, low_rank=3, bias=False, dtype=dtype), (65,)),
    "low-rank convolution": (
        lambda dtype: LowRankConv2d.from_conv(
            nn.Conv2d(8, 16, 3, dtype=dtype).to(memory_format=torch.channels_last), 6
        ),
        (2, 8, 9, 9),
    ),
    "convolution in int8 low rank": (
        lambda dtype: QuantizedConv2d(6, 10, 3, 2, bits=None, low_rank=3, bias=False, dtype=dtype),
        (2, 6, 9, 9),
    ),
    "convolution of groups in int8 low rank": (
        lambda dtype: QuantizedConv2d(6, 10, 3, 2, groups=2, bits=None, low_rank=3, dtype=dtype),
        (2, 6, 9, 9),
    ),
    "three dimensions": (lambda dtype: SKConv3d(4, 6, 2, low_rank=2, dilation=2, dtype=dtype), (1, 4, 5, 6, 7)),
}


@every_layer("dense")
@every_dtype
def test_output_is_the_same_up_to_rounding(kind, dtype):
    for batch in kind.batches:
        report = assert_same(kind.layer(dtype=dtype), kind.x(*batch, dtype=dtype))
        assert kind.name != "int4" or "Linear(64, 48)" in str(report)


@pytest.mark.parametrize("name", MORE)
@every_dtype
def test_output_of_rarer_layers_is_the_same_up_to_rounding(name, dtype):
    torch.manual_seed(0)
    make, shape = MORE[name]
    assert_same(make(dtype), torch.randn(shape, dtype=dtype))


def assert_same(layer, x):
    model = nn.Sequential(layer)
    expected = model(x)
    report = pr.to_linears_(model)
    plain = list(model[0].modules())
    assert all(isinstance(module, (*PLAIN, nn.Sequential)) for module in plain)
    assert not list(model.buffers())
    output = model(x)
    assert output.dtype is x.dtype
    assert output.shape == expected.shape
    assert (output - expected).double().norm() <= 8 * torch.finfo(x.dtype).eps * expected.double().norm()
    assert len(report.replaced) == 1
    assert not report.skipped
    return report


def test_signs_of_half_precision_stay_exact():
    # The scale 1/sqrt(5) rounded to bfloat16 would be a common factor of the whole layer, off by up to 0.4 %.
    torch.manual_seed(0)
    layer = SKLinear(256, 256, 5, sketch="signs", bias=False)
    model = nn.Sequential(layer).to(torch.bfloat16)
    weight = model[0].weight.double()
    pr.to_linears_(model)
    ratio = (model[0].weight.double() * weight).sum() / weight.square().sum()
    assert abs(ratio - 1) < 2.5e-4


def test_shared_layers_and_shared_factors_stay_shared():
    torch.manual_seed(0)
    layer = SKLinear(32, 32, 4)
    other = with_stored_sketches(SKLinear(32, 32, 4))
    third = copy.deepcopy(other)
    for name in ("S1", "S2", "U1", "U2"):
        third.register_parameter(name, getattr(other, name))
    model = nn.ModuleDict({"a": layer, "b": layer, "c": other, "d": third})
    report = pr.to_linears_(model)
    assert [entry.name for entry in report.replaced] == ["a", "b", "c", "d"]
    assert model["a"] is model["b"]
    assert model["c"][0].weight is model["d"][0].weight
    assert model["c"][1].weight is model["d"][1].weight
    assert model["c"][1].bias is not model["d"][1].bias


def test_modes_and_flags_are_kept_and_torchs_generator_is_not_touched():
    model = nn.Sequential(SKLinear(16, 16, 2), SKConv2d(4, 4, 3, low_rank=2)).eval()
    model[0].requires_grad_(False)
    state = torch.random.get_rng_state()
    pr.to_linears_(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model[0].parameters())
    assert all(parameter.requires_grad for parameter in model[1].parameters())


@pytest.mark.parametrize("trained", [True, False])
def test_quantized_layers_stay_frozen_or_trained(trained):
    layers = QuantizedLinear(16, 16), QuantizedLinear(16, 16, None, low_rank=2), QuantizedConv2d(4, 4, 3, groups=2)
    model = nn.Sequential(*layers).requires_grad_(trained)
    pr.to_linears_(model)
    assert {parameter.requires_grad for parameter in model.parameters()} == {trained}


def test_an_encoder_layer_of_torch_calls_the_pair_in_evaluation():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    pr.sketch_layers_(encoder, pr.SketchConfig(low_rank=4), exclude="*self_attn*")
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = encoder(x)
        pr.to_linears_(encoder)
        called = []
        encoder.layers[0].linear1[0].register_forward_hook(lambda *_: called.append(1))
        torch.testing.assert_close(encoder(x), expected)
    assert called
    assert isinstance(encoder.layers[0].linear1, LinearPair)


def test_the_pair_looks_like_a_linear_layer_to_models_that_read_its_weight():
    layer = SKLinear(24, 40, 3)
    model = nn.Sequential(layer)
    pr.to_linears_(model)
    torch.testing.assert_close(model[0].weight, layer.weight)
    assert model[0].weight.dtype is torch.float32
    assert (model[0].in_features, model[0].out_features) == (24, 40)
    assert torch.equal(model[0].bias, layer.bias)


def test_what_cannot_be_replaced_is_kept_and_named():
    torch.manual_seed(0)
    model = nn.Sequential(SKLinear(16, 16, 2), SKLinear(16, 16, 2))
    nn.utils.parametrizations.weight_norm(model[0], "S1")
    x = torch.randn(3, 16)
    expected = model(x)
    report = pr.to_linears_(model)
    assert [name for name, _ in report.skipped] == ["0"]
    assert "remove_parametrizations" in str(report)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("model", TypeError, "takes a model, not str"),
        (SKLinear(8, 8, 1), ValueError, "nn.Sequential"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(model, error, message):
    with pytest.raises(error, match=message):
        pr.to_linears_(model)


def test_without_compressed_layers_nothing_happens():
    model = nn.Sequential(nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = pr.to_linears_(model)
    assert str(report) == "replaced 0 layers, skipped 0"


def test_meta_device_and_compiled_output():
    with torch.device("meta"):
        model = nn.Sequential(SKLinear(64, 32, 4))
    pr.to_linears_(model)
    assert model[0][0].weight.is_meta
    assert model(torch.empty(2, 64, device="meta")).shape == (2, 32)
