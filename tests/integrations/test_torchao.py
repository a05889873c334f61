"""What torchao does with compressed layers: refused in a sentence, and quantized as plain linears."""

import pytest
import torch
from torch import nn

import panther as pr


def layers():
    torch.manual_seed(0)
    dense, conv = nn.Linear(64, 64), nn.Conv2d(16, 16, 3)
    return [
        pr.nn.SKLinear.from_linear(dense, low_rank=8),
        pr.nn.SKLinear(64, 64, low_rank=4, seed=1),
        pr.nn.SKConv2d(16, 16, 3, low_rank=4, seed=1),
        pr.nn.QuantizedLinear.from_linear(dense, bits=8),
        pr.nn.SKConv2d.from_conv(conv, low_rank=4),
    ]


@pytest.mark.parametrize("layer", layers(), ids=lambda layer: type(layer).__name__)
def test_a_computed_weight_cannot_be_registered(layer):
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(AttributeError, match=r"cannot be set: .* pr\.to_linears_\(model\)"):
        layer.register_parameter("weight", nn.Parameter(torch.zeros(2, 2)))
    after = layer.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.extra
def test_torchao_refuses_a_sketched_layer_and_quantizes_plain_linears():
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(layers()[0])
    x = torch.randn(5, 64)
    expected = model(x)
    config = quantization.Int8WeightOnlyConfig()
    with pytest.raises(AttributeError, match="cannot be set"):
        quantization.quantize_(model, config, filter_fn=lambda module, name: isinstance(module, pr.nn.SKLinear))
    assert torch.equal(model(x), expected)
    pr.to_linears_(model)
    quantization.quantize_(model, config)
    assert all(type(linear.weight).__name__ == "Int8Tensor" for linear in model[0])
    error = (model(x) - expected).norm() / expected.norm()
    assert 0 < error < 0.03  # 0.7 % was measured
