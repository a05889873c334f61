"""The gradients of the factors and the bias by one Triton kernel, against float64."""

import pytest
import torch
from panther.kernels import pack_signs, sketched_matmul
from panther.kernels.ops._crossover import using_path
from tolerances import KERNEL_RMS, kernel_rms, rms_error

# rows, in, out, R: size one, odd sizes, several tiles each way, a rank of several tiles.
SHAPES = [(1, 1, 1, 1), (3, 70, 130, 3), (70, 33, 129, 33), (7, 40, 20, 100)]


def operands(rows, n_in, n_out, R, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(rows + n_in)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw(rows, n_in), draw(rows, n_out), draw(rows, 2 * R), draw(rows, 2 * R)


def exact(x, grad, inner, d_left):
    R = inner.shape[1] // 2
    x, grad, inner, d_left = (t.double() for t in (x, grad, inner, d_left))
    return x.mT @ d_left[:, -R:], inner[:, R:].mT @ grad, grad.sum(0)


def factor_gradients(x, grad, inner, d_left, need_bias):
    from panther.kernels._triton.sketched_gradients import gradients_plan

    plan = gradients_plan(x, grad, inner, d_left.shape[1] == inner.shape[1], need_bias)
    return plan(x, grad, inner, d_left)


@pytest.mark.parametrize("need_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(device, shape, need_bias, poison):
    args = operands(*shape, device=device)
    gradients = factor_gradients(*args, need_bias)
    assert (gradients[2] is not None) == need_bias
    for computed, expected in zip(gradients, exact(*args), strict=True):
        if computed is not None:
            assert computed.shape == expected.shape
            assert rms_error(computed, expected) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    args = operands(70, 80, 48, 20, dtype, device)
    for computed, expected in zip(factor_gradients(*args, True), exact(*args), strict=True):
        assert computed.dtype is dtype
        assert rms_error(computed, expected) < kernel_rms(dtype, device)


def test_any_strides(device):
    x, grad, inner, d_left = operands(6, 10, 12, 5, device=device)
    strided = x.mT.contiguous().mT, grad[:1].expand(6, -1), inner, d_left[:, 5:].contiguous()
    for computed, expected in zip(factor_gradients(*strided, True), exact(*strided), strict=True):
        assert rms_error(computed, expected) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("form", ["dense", "words"])
@pytest.mark.parametrize("path", ["pair", "joined"])
def test_backward_takes_the_kernel(device, monkeypatch, path, form, needs_x):
    """The first layer of a model needs no gradient of its input, and packed signs are unpacked for it."""
    n_in, n_out, R = 33, 40, 3
    x, upstream, *_ = operands(4, n_in, n_out, R, device=device)
    _, _, S1, S2 = operands(n_in, 1, 1, R, device=device)
    S1, S2 = S1[:, :R].contiguous(), torch.randn(R, n_out).to(device)
    bias, U1, U2 = torch.randn(n_out).to(device), torch.randn(R, n_out).sign(), torch.randn(n_in, R).sign()
    U1, U2 = U1.to(device), U2.to(device)
    leaves = [t.requires_grad_() for t in ((x, S1, S2, bias) if needs_x else (S1, S2, bias))]
    signs = (pack_signs(U1), pack_signs(U2.mT)) if form == "words" else (U1, U2)
    from panther.kernels._triton import sketched_gradients as kernel

    calls, make_plan = [], kernel.gradients_plan
    monkeypatch.setattr(kernel, "gradients_plan", lambda *args: calls.append(1) or make_plan(*args))
    with using_path(path):
        computed = torch.autograd.grad(sketched_matmul(x, S1, signs[0], S2, signs[1], bias, 0.5), leaves, upstream)
    dense = [t.double() for t in (x, S1, U1, S2, U2, bias)]
    output = 0.5 * (dense[0] @ dense[1] @ dense[2] + dense[0] @ dense[4] @ dense[3]) + dense[5]
    assert calls == [1]
    for mine, expected in zip(computed, torch.autograd.grad(output, leaves, upstream.double()), strict=True):
        assert rms_error(mine, expected) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize(
    ("rows", "width", "R", "is_taken"),
    [(1, 256, 512, True), (64, 64, 512, True), (65, 8192, 65, False), (512, 64, 64, True), (513, 64, 64, False),
     (8192, 8192, 64, True), (8192, 3136, 16, False)],
)  # fmt: skip
def test_many_rows_take_the_kernel_if_the_features_fill_the_device(rows, width, R, is_taken):
    pytest.importorskip("triton")
    from panther.kernels._triton.sketched_gradients import gradients_plan

    x, inner = torch.empty(rows, width, device="meta"), torch.empty(rows, 2 * R, device="meta")
    assert (gradients_plan(x, x, inner, True, True) is not None) == is_taken
