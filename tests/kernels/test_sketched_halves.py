"""The two halves of the sketched product: values, gradients and flops in both orders, and the Triton kernels."""

import pytest
import torch
from covering import half_of
from panther.kernels import sketched_inner, sketched_matmul, sketched_outer
from panther.kernels.cpu.sketched import InnerProduct
from panther.kernels.ops._crossover import using_path
from tolerances import KERNEL_RMS, assert_close, rms_error
from torch.func import grad, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

R, N_IN, N_OUT = 3, 11, 9
ORDERS = {"chain": 4 * R - 1, "joined": 4 * R}


def operands(rows, dtype=torch.float64, fitted=False, sizes=(N_IN, N_OUT, R), device="cpu"):
    """x, S1, U1, S2, U2, bias; sketches are signs, which need a gradient only if fitted."""
    generator = torch.Generator().manual_seed(rows)
    n_in, n_out, rank = sizes

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    def sign(*shape):
        return draw(*shape).detach().sign().requires_grad_(fitted)

    return draw(rows, n_in), draw(n_in, rank), sign(rank, n_out), draw(rank, n_out), sign(n_in, rank), draw(n_out)


def both(x, S1, U1, S2, U2, bias, scale=0.25):
    return sketched_outer(sketched_inner(x, S1, U2, scale), U1, S2, bias)


def dense(x, S1, U1, S2, U2, bias, scale=0.25):
    return scale * (x @ S1 @ U1 + x @ U2 @ S2) + (0 if bias is None else bias)


@pytest.mark.parametrize("rows", [0, 1, *ORDERS.values(), 50])
@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(rows, fitted, bias):
    args = list(operands(rows, fitted=fitted))
    if not bias:
        args[5] = None
    out, expected = both(*args), dense(*args)
    assert_close(out, expected)
    wanted = [a for a in args if a is not None and a.requires_grad]
    at_output = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(y, wanted, at_output) for y in (out, expected))
    for gradient, exact in zip(ours, theirs, strict=True):
        assert_close(gradient, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, *ORDERS.values()])
def test_low_precision_against_float64(dtype, rows):
    args = operands(rows, dtype, sizes=(130, 70, R))
    exact = dense(*(a.detach().double() for a in args))
    assert_close(both(*args), exact)
    with torch.no_grad():
        assert_close(both(*args), exact)


@pytest.mark.parametrize("rows", ORDERS.values())
def test_float16_is_scaled_before_it_is_rounded(rows):
    x, S1, _, _, U2, _ = operands(rows, torch.float16)
    large = torch.full_like(x, 30000.0)
    assert sketched_inner(large, S1.sign(), U2.abs(), 1 / 64).isfinite().all()


@pytest.mark.parametrize("rows", ORDERS.values())
def test_as_many_flops_as_the_product_as_a_whole(rows):
    """4 R (in + out) a row forward, 1.5 times that backward: none for fixed sketches."""
    counts = []
    for function in (both, lambda *args: sketched_matmul(*args, 0.25)):
        with FlopCounterMode(display=False) as forward:
            out = function(*operands(rows))
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        counts.append((forward.get_total_flops(), backward.get_total_flops()))
    expected = 4 * R * (N_IN + N_OUT) * rows
    assert counts == [(expected, expected * 3 // 2)] * 2


def test_the_orders_take_turns_where_those_of_the_product_as_a_whole_do(monkeypatch):
    def refuse(*args):
        raise AssertionError("joined")

    monkeypatch.setattr(InnerProduct, "forward", refuse)
    x, S1, _, _, U2, _ = operands(ORDERS["joined"])
    sketched_inner(x[:-1], S1, U2)
    with pytest.raises(AssertionError, match="joined"):
        sketched_inner(x, S1, U2)


@pytest.mark.parametrize("rows", ORDERS.values())
@pytest.mark.parametrize("fitted", [False, True])
def test_first_and_second_derivatives(rows, fitted):
    args = operands(rows, fitted=fitted)
    leaves = [a for a in args if a.requires_grad]

    def function(*given):
        it = iter(given)
        return both(*(next(it) if a.requires_grad else a for a in args))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("rows", ORDERS.values())
def test_transforms_of_torch_func(rows):
    x, *rest = (a.detach() for a in operands(rows))
    assert_close(vmap(lambda row: both(row[None], *rest)[0])(x), dense(x, *rest))
    theirs = grad(lambda y: dense(y, *rest).sin().sum())(x)
    assert_close(grad(lambda y: both(y, *rest).sin().sum())(x), theirs)
    assert_close(jvp(lambda y: both(y, *rest), (x,), (x,))[1], dense(x, *rest[:-1], None))


def test_what_does_not_fit_is_refused(device):
    x, S1, U1, S2, U2, bias = operands(5, torch.float32, device=device)
    with pytest.raises(ValueError, match=r"sketched_inner takes operands .* not x \(5, 10\), S1 \(11, 3\)"):
        sketched_inner(x[:, 1:], S1, U2)
    with pytest.raises(ValueError, match=r"sketched_outer takes operands .* inner \(5, 5\)"):
        sketched_outer(x[:, :5], U1, S2, bias)


SIZES = [(1, 1, 1), (70, 130, 3), (33, 129, 33), (300, 40, 64), (130, 260, 150)]


@pytest.mark.parametrize(
    ("shape", "dtype"), half_of([*zip((1, 3, 65, 7, 2), SIZES, strict=True)], (torch.float16, torch.float32))
)
def test_triton(device, shape, dtype, monkeypatch):
    rows, sizes = shape
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    args = operands(rows, dtype, sizes=sizes, device=device)
    x, S1, U1, S2, U2, bias = args
    with using_path("pair"):
        out = both(*args)
        gradients = torch.autograd.grad(out, (x, S1, S2, bias), torch.ones_like(out))
        plain = sketched_outer(sketched_inner(x, S1, U2, 0.25), U1, S2)
    exact = [a.detach().double().requires_grad_() for a in args]
    expected = dense(*exact)
    assert rms_error(out, expected) < KERNEL_RMS[dtype]
    assert rms_error(plain, expected - exact[5]) < KERNEL_RMS[dtype]
    theirs = torch.autograd.grad(expected, [exact[i] for i in (0, 1, 3, 5)], torch.ones_like(expected))
    for ours, reference in zip(gradients, theirs, strict=True):
        assert rms_error(ours, reference) < KERNEL_RMS[dtype]
    inner = sketched_inner(x, S1, U2, 0.25).detach()
    strided = torch.cat((inner, inner), 1)[:, : inner.shape[1]]  # as of one layer of several
    assert rms_error(sketched_outer(strided, U1, S2, bias), expected) < KERNEL_RMS[dtype]
