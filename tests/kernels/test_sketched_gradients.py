"""The gradients of the factors and the bias by one Triton kernel, against float64."""

import pytest
import torch
from folded_operands import exact as exact_product
from folded_operands import operands as sparse_operands
from panther.kernels import sketched_matmul
from panther.kernels.ops._crossover import using_path
from tolerances import KERNEL_RMS, rms_error

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


def tolerance(dtype, device):
    # The interpreter truncates to bfloat16 where a GPU rounds.
    return 2e-2 if dtype is torch.bfloat16 and device.type == "cpu" else KERNEL_RMS[dtype]


@pytest.fixture
def poison(monkeypatch):
    """Fill what ``new_empty`` returns with NaN, as memory may be."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))


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
        assert rms_error(computed, expected) < tolerance(dtype, device)


def test_any_strides(device):
    x, grad, inner, d_left = operands(6, 10, 12, 5, device=device)
    strided = x.mT.contiguous().mT, grad[:1].expand(6, -1), inner, d_left[:, 5:].contiguous()
    for computed, expected in zip(factor_gradients(*strided, True), exact(*strided), strict=True):
        assert rms_error(computed, expected) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("path", ["pair", "joined"])
def test_backward_takes_the_kernel(device, monkeypatch, path, needs_x):
    """The first layer of a model needs no gradient of its input."""
    from panther.kernels._triton import sketched_gradients as kernel

    args = [arg.detach().to(device) for arg in sparse_operands((33, 40, 3), torch.float32, 4, True)]
    upstream = torch.randn(4, 40).to(device)
    leaves = [args[i].requires_grad_() for i in ((0, 1, 3, 5) if needs_x else (1, 3, 5))]
    calls, make_plan = [], kernel.gradients_plan
    monkeypatch.setattr(kernel, "gradients_plan", lambda *args: calls.append(1) or make_plan(*args))
    with using_path(path):
        computed = torch.autograd.grad(sketched_matmul(*args, 0.5), leaves, upstream)
    assert calls == [1]
    theirs = torch.autograd.grad(exact_product(*args, 0.5), leaves, upstream.double())
    for mine, expected in zip(computed, theirs, strict=True):
        assert rms_error(mine, expected) < KERNEL_RMS[torch.float32]


def test_wide_strides_are_addressed_in_full():
    """A second index times its stride beyond 32 bits would wrap around in the kernels, so such operands are copied."""
    triton_sketched = pytest.importorskip("panther.kernels._triton.sketched")
    near, far = (torch.empty_strided((1, 70), (1, stride), device="meta") for stride in (30_000_000, 40_000_000))
    assert triton_sketched.is_addressable(near)
    assert not triton_sketched.is_addressable(far)


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
