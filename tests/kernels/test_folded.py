"""The sketched product with sparse sketches against dense matrices in float64."""

import pytest
import torch
from covering import all_pairs
from folded_operands import exact, operands
from panther.kernels import sketched_inner, sketched_matmul, sketched_outer
from panther.kernels.ops import folded
from panther.kernels.reference import dense_sketch
from tolerances import KERNEL_RMS, assert_close, rms_error

# R that divides both sides, neither, one of them; R equal to a side and above both; one input, output and rank.
SIZES = [(48, 32, 16), (50, 33, 7), (12, 20, 4), (5, 9, 9), (3, 4, 11), (1, 1, 1), (8, 6, 1)]


@pytest.mark.parametrize(
    ("sizes", "dtype", "rows", "bias"),
    all_pairs(SIZES, [torch.float64, torch.float32, torch.float16, torch.bfloat16], [0, 1, 33], [True, False]),
)
def test_the_product_its_halves_and_its_gradients(sizes, dtype, rows, bias):
    args = operands(sizes, dtype, rows, bias, requires_grad=True)
    twins = [None if arg is None else arg.detach().double().requires_grad_(arg.requires_grad) for arg in args]
    expected = exact(*twins, 0.25)
    out = sketched_matmul(*args, 0.25)
    assert_close(out, expected)
    with torch.no_grad():
        assert_close(sketched_matmul(*args, 0.25), expected)
        inner = sketched_inner(args[0], args[1], args[4], 0.25)
        assert_close(sketched_outer(inner, args[2], args[3], args[5]), expected)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    leaves = [arg for arg in args if arg is not None and arg.requires_grad]
    twin_leaves = [twin for twin in twins if twin is not None and twin.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, twin_leaves, grad.double()), strict=True
    ):
        assert ours.dtype is dtype
        assert_close(ours, theirs)


@pytest.mark.parametrize("sizes", SIZES)
def test_sketches_as_matrices(sizes):
    n_in, _, rank = sizes
    signs = operands(sizes)[4]
    whole = dense_sketch(signs, rank)
    assert torch.equal(whole.square().sum(1), torch.ones(n_in, dtype=torch.float64))
    start = n_in // 2
    assert torch.equal(dense_sketch(signs[start:], rank, start), whole[start:])


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (3,), (5,), (0, 1), (1, 3), (0, 3), (0, 1, 3)])
def test_first_and_second_derivatives_with_frozen_operands(frozen):
    args = list(operands((6, 10, 4), rows=3, requires_grad=True))
    for i in frozen:
        args[i] = args[i].detach()
    leaves = [arg for arg in args if arg.requires_grad]

    def product(*values):
        rest = iter(values)
        return sketched_matmul(*(next(rest) if arg.requires_grad else arg for arg in args), 0.25)

    assert torch.autograd.gradcheck(product, leaves)
    assert torch.autograd.gradgradcheck(product, leaves)


def test_transforms_and_forward_mode():
    x, S1, U1, S2, U2, bias = operands((6, 10, 4), rows=3)
    expected = exact(x, S1, U1, S2, U2, bias, 0.25)

    def product(x, S2=S2):
        return sketched_matmul(x, S1, U1, S2, U2, bias, 0.25)

    assert_close(torch.func.vmap(product)(torch.stack([x, x]))[1], expected)
    assert_close(torch.func.vmap(product, (None, 0))(x, torch.stack([S2, S2]))[1], expected)
    assert_close(torch.func.jvp(product, (x,), (x,))[1], expected - bias)
    jacobian = torch.func.jacrev(lambda row: product(row[None])[0])(x[0])
    assert_close(jacobian, torch.autograd.functional.jacobian(lambda row: product(row[None])[0], x[0]))


def test_backward_keeps_the_input_and_r_numbers_a_row():
    kept = []

    def keep(tensor):
        kept.append(tensor.shape)
        return tensor

    args = operands((64, 96, 8), torch.float32, rows=32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sketched_matmul(*args, 0.25)
    by_rows = [shape for shape in kept if len(shape) == 2 and shape[0] == 32]
    assert sorted(by_rows) == [(32, 8), (32, 64)]


@pytest.mark.parametrize("native", [False, True])
def test_half_precision_with_and_without_products_in_it(native, monkeypatch):
    monkeypatch.setattr(folded, "multiplies_by_instruction", lambda dtype: native)
    for dtype in (torch.bfloat16, torch.float16):
        args = operands((50, 33, 7), dtype, rows=20)
        assert rms_error(sketched_matmul(*args, 0.25), exact(*args, 0.25)) < KERNEL_RMS[dtype]
    # The sum of the inputs that share a place is above the largest number of float16, the output is not.
    x, signs = torch.full((1, 64), 6e4, dtype=torch.float16), torch.ones(64, dtype=torch.float16)
    factor = torch.zeros(64, 32, dtype=torch.float16)
    out = sketched_matmul(x, factor, torch.ones(4).half(), torch.ones(32, 4).half() / 64, signs, None, 0.25)
    assert_close(out, torch.full((1, 4), 6e4 * 64 / 64 / 4, dtype=torch.float64), torch.float16)
