"""Up to 16 rows times a quantized weight in one kernel: Triton's interpreter against float64, and the operator."""

import pytest
import torch
from panther.kernels import QuantizedCodes, QuantizedFactors, QuantizedOperands, quantized_matmul
from panther.kernels._triton import _launch
from quantized_operands import exact, operands
from tolerances import KERNEL_RMS, rms_error

OPERATOR = torch.ops.panther.quantized_matmul_few_rows.default

# rows, in, out, group size, rank: size one, odd sizes, several tiles each way, groups of all kinds, and columns whose
# tiles are whole parts of bytes.
SHAPES = [
    (1, 1, 1, 1, 1),
    (3, 70, 130, 32, 0),
    (16, 33, 5, 7, 3),
    (1, 300, 66, 300, 17),
    (4, 256, 40, 64, 32),
    (1, 301, 3, 64, 0),
    (1, 1024, 17, 1024, 2),
]


def by_kernel(args):
    pytest.importorskip("triton")
    from panther.kernels._triton.quantized_few_rows import few_rows_plan

    return few_rows_plan(*args)(*args[:2], *args[3:5], *args[6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", range(2, 9))
def test_kernel_against_float64(bits, dtype):
    for shape in SHAPES:
        args, numbers = operands(*shape, bits, dtype, bias=shape[0] != 4)
        tolerance = 2e-2 if dtype is torch.bfloat16 else KERNEL_RMS[dtype]  # the interpreter truncates
        y = by_kernel(args)
        assert y.dtype is dtype
        assert rms_error(y, exact(args, numbers)) < tolerance


@pytest.mark.parametrize("rows", [1, 6])
def test_operands_that_are_not_contiguous(rows):
    args, numbers = operands(rows, 300, 20, 64, 4, 4, torch.float32)
    x = torch.randn(300, 2 * rows, generator=torch.Generator().manual_seed(1)).mT[::2]
    left, right, factor_scales, bias = args[6:]
    strided = left.mT.contiguous().mT, right.mT.contiguous().mT, factor_scales.repeat_interleave(2)[::2]
    args = x, *args[1:6], *strided, bias.repeat_interleave(3)[::3]
    assert rms_error(by_kernel(args), exact(args, numbers)) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bits", [3, 4])
def test_memory_around_the_operands_is_not_read(rows, bits, monkeypatch):
    """Numbers that are not finite surround x, scales, factor scales and bias, and fill the output before."""
    args, numbers = operands(rows, 45, 21, 16, 3, bits, torch.float32)

    def surrounded(t):
        memory = torch.full((t.numel() + 8192,), torch.nan, dtype=t.dtype)
        memory[4096 : 4096 + t.numel()] = t.flatten()
        return memory[4096 : 4096 + t.numel()].view(t.shape)

    poisoned = [surrounded(t) if torch.is_tensor(t) and t.is_floating_point() else t for t in args]
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))
    assert rms_error(by_kernel(poisoned), exact(args, numbers)) < KERNEL_RMS[torch.float32]


def test_one_launch_computes_codes_correction_and_bias(device, monkeypatch):
    names = []
    call = _launch.Launch.__call__

    def recorded(launch, *tensors):
        names.append(launch._kernel.fn.__name__)
        call(launch, *tensors)

    monkeypatch.setattr(_launch.Launch, "__call__", recorded)
    for rows, rank, kernel in ((1, 5, "_few_rows_kernel"), (16, 0, "_few_rows_kernel"), (17, 5, "_quantized_kernel")):
        args, numbers = operands(rows, 70, 13, 32, rank, 4, torch.float32)
        codes = QuantizedCodes(*(t.to(device) if torch.is_tensor(t) else t for t in args[1:6]))
        factors = QuantizedFactors(*(t.to(device) for t in args[6:9])) if rank else None
        weight = QuantizedOperands(70, codes, factors)
        y = quantized_matmul(args[0][None].to(device), weight, args[9].to(device))
        assert y.shape == (1, rows, 13)
        assert rms_error(y[0].cpu(), exact(args, numbers)) < KERNEL_RMS[torch.float32]
        assert names == [kernel]
        names.clear()


def test_no_rows_and_no_outputs(device):
    args, _ = operands(2, 70, 13, 32, 2, 3, torch.float32)
    args = [t.to(device) if torch.is_tensor(t) else t for t in args]
    assert OPERATOR(args[0][:0], *args[1:]).shape == (0, 13)
    codes, scales, zeros, left, bias = (args[index][:0] for index in (1, 3, 4, 6, 9))
    assert OPERATOR(args[0], codes, 3, scales, zeros, 32, left, *args[7:9], bias).shape == (2, 0)


def test_the_operator_takes_the_reference_on_a_cpu_and_has_a_fake():
    args, numbers = operands(3, 70, 13, 32, 2, 3, torch.float64)
    torch.testing.assert_close(OPERATOR(*args), exact(args, numbers), rtol=1e-6, atol=1e-6)
    torch.library.opcheck(OPERATOR, args, test_utils=("test_schema", "test_faketensor"))


def test_demanded_triton_refuses_other_operands(device):
    for rows, rank, dtype, message in (
        (3, 2, torch.float64, "takes float32, float16 and bfloat16, not"),
        (17, 2, torch.float32, "takes up to 16 rows"),
        (3, 33, torch.float32, "correction of rank up to 32"),
    ):
        args, _ = operands(rows, 70, 13, 32, rank, 3, dtype)
        args = [t.to(device) if torch.is_tensor(t) else t for t in args]
        with pytest.raises(RuntimeError, match=message):
            OPERATOR(*args)
