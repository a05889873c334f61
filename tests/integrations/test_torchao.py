"""What torchao does with compressed layers: refused in a sentence, and quantized as plain linears."""

import pytest
import torch
from torch import nn

import panther as pr


def layers():
    torch.manual_seed(0)
    dense, conv = nn.Linear(64, 64), nn.Conv2d(16, 16, 3)
    return [
        pr.nn.LowRankLinear.from_linear(dense, 16),
        pr.nn.SKLinear(64, 64, low_rank=4, seed=1),
        pr.nn.SKConv2d(16, 16, 3, low_rank=4, seed=1),
        pr.nn.QuantizedLinear.from_linear(dense, bits=8),
        pr.nn.LowRankConv2d.from_conv(conv, 8),
    ]


@pytest.mark.parametrize("layer", layers(), ids=lambda layer: type(layer).__name__)
def test_a_computed_weight_cannot_be_registered(layer):
    first_state = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(AttributeError, match=r"cannot be set: .* pr\.to_linears_\(model\)"):
        layer.register_parameter("weight", nn.Parameter(torch.zeros(2, 2)))
    after = layer.state_dict()
    assert list(after) == list(first_state)
    assert all(torch.equal(after[name], first_state[name]) for name in first_state)


@pytest.fixture
def torchao():
    """The quantization of torchao, with the adapter."""
    quantization = pytest.importorskip("torchao.quantization")
    import panther.integrations.torchao as adapter

    quantization.quantize_sketched_ = adapter.quantize_
    return quantization


@pytest.mark.engine
def test_every_linear_layer_is_quantized_or_reported(torchao):
    torch.manual_seed(0)
    model = nn.Sequential(
        pr.nn.SKLinear(256, 128, 8, seed=1),
        pr.nn.InterpolativeLinear(128, 128, 32),
        nn.Linear(128, 128),
        nn.Linear(128, 64, bias=False),
        pr.nn.QuantizedLinear.from_linear(nn.Linear(64, 64), bits=4),
        pr.nn.QuantizedLinear.from_linear(nn.Linear(64, 64), bits=None, low_rank=8),
        nn.Unflatten(1, (1, 8, 8)),
        pr.nn.SKConv2d(1, 40, 3, low_rank=2, seed=0),
    ).eval()
    x = torch.randn(40, 256)
    expected = model(x)
    report = torchao.quantize_sketched_(model, torchao.Int8WeightOnlyConfig(), lambda layer, name: name != "3")
    assert [layer.name for layer in report.replaced] == ["0.0", "0.1", "1.0", "1.1", "2", "5.0", "5.1"]
    assert report.skipped == (("3", "filter_fn is false"), ("4", "codes of 4 bits already"))
    assert all(layer.bytes_after < 0.6 * layer.bytes_before for layer in report.replaced)
    assert type(model[7]) is pr.nn.SKConv2d
    error = (model(x) - expected).norm() / expected.norm()
    assert 0 < error < 0.08  # 1.4 % was measured


@pytest.mark.engine
@pytest.mark.parametrize("dynamic", [False, True])
def test_both_halves_of_a_seeded_layer_keep_their_digits(torchao, dynamic):
    model = nn.Sequential(pr.nn.SKLinear(256, 128, 16, seed=1))
    x = torch.randn(200, 256)
    expected = model(x)
    config = torchao.Int8DynamicActivationInt8WeightConfig() if dynamic else torchao.Int8WeightOnlyConfig()
    torchao.quantize_sketched_(model, config)
    error = (model(x) - expected).norm() / expected.norm()
    assert 0 < error < 0.05  # 0.7 % and 1.2 % were measured; 6 % and 15 % without the balance of to_linears_


@pytest.mark.engine
def test_bad_input(torchao):
    with pytest.raises(TypeError, match=r"config must be an instance .* not Int8WeightOnlyConfig"):
        torchao.quantize_sketched_(nn.Sequential(nn.Linear(2, 2)), torchao.Int8WeightOnlyConfig)
    with pytest.raises(ValueError, match=r"nn\.Sequential\(layer\)"):
        torchao.quantize_sketched_(pr.nn.SKLinear(64, 64, 4), torchao.Int8WeightOnlyConfig())


@pytest.mark.engine
def test_torchao_refuses_a_sketched_layer_and_quantizes_plain_linears():
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(layers()[0])
    x = torch.randn(5, 64)
    expected = model(x)
    config = quantization.Int8WeightOnlyConfig()
    with pytest.raises(AttributeError, match="cannot be set"):
        quantization.quantize_(model, config, filter_fn=lambda module, name: isinstance(module, pr.nn.LowRankLinear))
    assert torch.equal(model(x), expected)
    pr.to_linears_(model)
    quantization.quantize_(model, config)
    assert all(type(linear.weight).__name__ == "Int8Tensor" for linear in model[0])
    error = (model(x) - expected).norm() / expected.norm()
    assert 0 < error < 0.03  # 0.7 % was measured
