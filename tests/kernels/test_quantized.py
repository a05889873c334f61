"""The product with a quantized weight: the Triton kernel in the interpreter against float64, and the operator."""

import pytest
import quantized_operands
import torch
from covering import half_of
from panther.kernels import reference
from tolerances import KERNEL_RMS, rms_error

from panther.nn import QuantizedLinear

OPERATOR = torch.ops.panther.quantized_matmul.default

# rows, in, out, group size, rank: size one, odd sizes, several tiles each way, split columns, groups of all kinds, and
# columns whose tiles are whole parts of bytes.
SHAPES = [
    (1, 1, 1, 1, 1),
    (3, 70, 130, 32, 0),
    (65, 33, 5, 7, 3),
    (2, 700, 66, 700, 17),
    (17, 256, 65, 128, 20),
    (20, 1024, 33, 128, 3),
    (1, 601, 3, 64, 0),
]


def operands(rows, columns, outputs, group_size, rank, bits, dtype):
    """The kernel takes the product of x and the right factor."""
    args, numbers = quantized_operands.operands(rows, columns, outputs, group_size, rank, bits, dtype, bias=rank > 0)
    x, left, right, factor_scales, bias = args[0], *args[6:]
    inner = None if left is None else (x.double() @ right.double().mT * factor_scales).to(dtype)
    return (*args[:6], inner, left, bias), numbers


def exact(args, numbers):
    *of_codes, inner, left, bias = args
    y = quantized_operands.exact((*of_codes, None, None, None, bias), numbers)
    return y if inner is None else y + inner.double() @ left.double().mT


def by_kernel(*args):
    pytest.importorskip("triton")
    from panther.kernels._triton.quantized import quantized_plan

    return quantized_plan(*args)(*args[:2], *args[3:5], *args[6:])


@pytest.mark.parametrize(("shape", "bits"), half_of(SHAPES, (2, 3, 4, 5, 6, 7, 8)))
def test_kernel_and_reference_against_float64(shape, bits, monkeypatch):
    for dtype in (torch.float32, torch.bfloat16 if bits // 2 % 2 else torch.float16):
        args, codes = operands(*shape, bits, dtype)
        expected = exact(args, codes)
        tolerance = 2e-2 if dtype is torch.bfloat16 else KERNEL_RMS[dtype]  # the interpreter truncates
        for product in (by_kernel, reference.quantized_matmul):
            y = product(*args)
            assert y.dtype is dtype
            assert rms_error(y, expected) < tolerance


def test_strided_input_and_no_rows():
    args, codes = operands(40, 300, 20, 64, 4, 4, torch.float32)
    x = torch.randn(300, 80).mT[::2]
    args = (x, *args[1:])
    assert rms_error(by_kernel(*args), exact(args, codes)) < KERNEL_RMS[torch.float32]
    assert OPERATOR(x[:0], *args[1:6], None, None, None).shape == (0, 20)


def test_the_operator_takes_the_reference_on_a_cpu_and_has_a_fake():
    args, codes = operands(3, 70, 13, 32, 2, 3, torch.float64)
    torch.testing.assert_close(OPERATOR(*args), exact(args, codes))
    torch.library.opcheck(OPERATOR, args, test_utils=("test_schema", "test_faketensor"))


def test_demanded_triton_refuses_float64(device):
    args, _ = operands(3, 70, 13, 32, 2, 3, torch.float64)
    with pytest.raises(RuntimeError, match="takes float32, float16 and bfloat16, not"):
        OPERATOR(*(t.to(device) if torch.is_tensor(t) else t for t in args))


@pytest.mark.parametrize("rows", [3, 17])
@pytest.mark.parametrize("low_rank", [0, 3])
def test_the_kernel_multiplies_by_trained_scales(device, rows, low_rank, monkeypatch):
    """A layer whose scales were trained once multiplied by the scales from before training, on this path alone."""
    from panther.kernels._triton import quantized, quantized_few_rows

    module, name = (quantized_few_rows, "few_rows_plan") if rows == 3 else (quantized, "quantized_plan")
    products = []
    make_plan = getattr(module, name)

    def recording_plan(*args):
        plan = make_plan(*args)
        return lambda *operands: products.append(plan(*operands)) or products[-1]

    monkeypatch.setattr(module, name, recording_plan)
    generator = torch.Generator().manual_seed(4)
    layer = QuantizedLinear(70, 13, 4, group_size=32, low_rank=low_rank).train_scales_()
    with torch.no_grad():
        for logs in (layer.scale_logs, layer.factor_scale_logs):
            if logs is not None:
                logs.copy_(torch.rand(logs.shape, generator=generator))
        layer.to(device)
        x = torch.randn(1, rows, 70, generator=generator).to(device)
        y = layer(x)
    assert len(products) == 1
    assert rms_error(y, x.double() @ layer.weight.double().mT + layer.bias.double()) < KERNEL_RMS[torch.float32]
