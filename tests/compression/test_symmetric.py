"""Quantized weights whose middle code stands for zero in every group."""

import pytest
import torch
from torch import nn

import panther as pr
from panther.nn.quantized.matrix import quantization_grid, quantize
from tests.support.compressing import batches_of, quick


class Reader(nn.Module):
    """An embedding, whose weight a head shares, and a convolution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.body, self.head = nn.Embedding(90, 32), nn.Linear(32, 32), nn.Linear(32, 90, bias=False)
        self.mix = nn.Conv2d(1, 40, (1, 33))
        self.head.weight = self.words.weight

    def forward(self, ids):
        states = torch.tanh(self.body(self.words(ids)))
        padded = nn.functional.pad(states, (0, 32))[:, None]
        return self.head(states + self.mix(padded).mean(1))


@pytest.mark.parametrize("method", ["two_sided", "svd"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_zero_point_is_the_middle_code(bits, method, tmp_path):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(90, (16, 7), generator=generator) for _ in range(8)]
    options = {"forms": f"int{bits}", "group_size": 16, "method": method, **quick}
    model = Reader()
    report = pr.compress(model, budget=1.0, calibration=batches, symmetric=True, **options)
    layers = [module for module in model.modules() if hasattr(module, "zeros")]
    assert {type(layer).__name__ for layer in layers} >= {"QuantizedLinear", "QuantizedEmbedding", "QuantizedConv2d"}
    for layer in layers:
        assert (layer.zeros == 2 ** (bits - 1)).all()
    free = pr.compress(Reader(), budget=1.0, calibration=batches, **options)
    assert free.bytes_after == report.bytes_after
    assert report.measured_error < 3 * free.measured_error
    folder = pr.save_compressed(model, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(pr.load_compressed(folder, Reader()).eval()(batches[0]), model.eval()(batches[0]))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
def test_the_grid_reaches_both_ends(bits, shift):
    torch.manual_seed(0)
    weight = torch.randn(7, 50, dtype=torch.float64) + shift
    weight[2] = 0
    scales, zeros = quantization_grid(weight, bits, 16, candidates=1, symmetric=True)
    assert (zeros == 2 ** (bits - 1)).all()
    codes = quantize(weight, scales, zeros, 16, bits)
    steps = scales.double().repeat_interleave(16, 1)[:, :50]
    error = steps * (codes.double() - 2 ** (bits - 1)) - weight
    assert (error.abs() <= steps * (0.5 + 2.0 ** (bits - 9)) + 1e-12).all()  # scales are rounded to bfloat16
    assert not error[2].any()


def test_bad_arguments():
    with pytest.raises(TypeError, match="symmetric must be True or False"):
        pr.compress(nn.Sequential(nn.Linear(48, 48)), bits=5.0, calibration=batches_of(), symmetric="yes")
