"""The sketched product and its two halves: both orders against float64 and each other, in every transform."""

import pytest
import torch
from covering import half_of
from panther.kernels import reference, sketched_inner, sketched_matmul, sketched_outer
from panther.kernels.cpu.sketched import InnerProduct, JoinedProduct
from panther.kernels.ops._crossover import using_path
from tolerances import KERNEL_RMS, assert_close, rms_error
from torch.func import grad, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

R, N_IN, N_OUT = 3, 11, 9
ROWS = {"chain": 4 * R - 1, "joined": 4 * R}


def operands(rows, dtype=torch.float64, fitted=False, sizes=(N_IN, N_OUT, R), device="cpu"):
    """x, S1, U1, S2, U2, bias; sketches are signs, which need a gradient only if fitted."""
    generator = torch.Generator().manual_seed(rows)
    n_in, n_out, rank = sizes

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    def sign(*shape):
        return draw(*shape).detach().sign().requires_grad_(fitted)

    return draw(rows, n_in), draw(n_in, rank), sign(rank, n_out), draw(rank, n_out), sign(n_in, rank), draw(n_out)


def whole(*args, scale=0.25):
    return sketched_matmul(*args, scale)


def halves(x, S1, U1, S2, U2, bias, scale=0.25):
    return sketched_outer(sketched_inner(x, S1, U2, scale), U1, S2, bias)


def dense(x, S1, U1, S2, U2, bias, scale=0.25):
    return scale * (x @ S1 @ U1 + x @ U2 @ S2) + (0 if bias is None else bias)


both_forms = pytest.mark.parametrize("product", [whole, halves])
both_orders = pytest.mark.parametrize("rows", ROWS.values())


@both_forms
@pytest.mark.parametrize("rows", [0, 1, *ROWS.values(), 50])
@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(product, rows, fitted, bias):
    args = list(operands(rows, fitted=fitted))
    if not bias:
        args[5] = None
    out, expected = product(*args), dense(*args)
    assert_close(out, expected)
    wanted = [a for a in args if a is not None and a.requires_grad]
    at_output = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(y, wanted, at_output) for y in (out, expected))
    for gradient, exact in zip(ours, theirs, strict=True):
        assert_close(gradient, exact)


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, *ROWS.values()])
@pytest.mark.parametrize("bias", [False, True])
def test_low_precision_against_float64(product, dtype, rows, bias):
    args = list(operands(rows, dtype, sizes=(130, 70, R)))
    if not bias:
        args[5] = None
    exact = dense(*(a if a is None else a.detach().double() for a in args))
    assert_close(product(*args), exact)
    with torch.no_grad():
        assert_close(product(*args), exact)


@both_orders
def test_float16_is_scaled_before_it_is_rounded(rows):
    x, S1, _, _, U2, _ = operands(rows, torch.float16)
    large = torch.full_like(x, 30000.0)
    assert sketched_inner(large, S1.sign(), U2.abs(), 1 / 64).isfinite().all()


def test_the_orders_take_turns_at_four_rows_a_rank(monkeypatch):
    def refuse(*args):
        raise AssertionError("wrong order")

    few, many = operands(ROWS["chain"]), operands(ROWS["joined"])
    with monkeypatch.context() as patch:
        patch.setattr(reference, "sketched_matmul", refuse)
        whole(*many)
        with pytest.raises(AssertionError, match="wrong order"):
            whole(*few)
    monkeypatch.setattr(JoinedProduct, "forward", refuse)
    whole(*few)
    monkeypatch.setattr(InnerProduct, "forward", refuse)
    halves(*few)
    with pytest.raises(AssertionError, match="wrong order"):
        halves(*many)


@both_forms
@both_orders
def test_no_product_is_spent_on_fixed_sketches(product, rows):
    """4 R (in + out) flops a row forward, 1.5 times that backward; all of it in products that are counted."""
    forward = 4 * R * (N_IN + N_OUT) * rows
    with FlopCounterMode(display=False) as counter:
        out = product(*operands(rows))
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == forward * 3 // 2


@both_forms
@both_orders
@pytest.mark.parametrize("fitted", [False, True])
def test_gradcheck_of_every_order(product, rows, fitted):
    args = operands(rows, fitted=fitted)
    leaves = [a for a in args if a.requires_grad]

    def function(*values):
        it = iter(values)
        return product(*(next(it) if a.requires_grad else a for a in args))

    checks = {"check_forward_ad": True, "check_batched_grad": True} if product is whole else {}
    assert torch.autograd.gradcheck(function, leaves, **checks)
    assert torch.autograd.gradgradcheck(function, leaves)


@both_orders
def test_stride_zero_gradient(rows):
    args = operands(rows)
    whole(*args).sum().backward()
    weight = (args[1] @ args[2] + args[4] @ args[3]) * 0.25
    assert_close(args[0].grad, torch.ones(rows, N_OUT, dtype=torch.float64) @ weight.T)


@both_orders
def test_only_what_is_asked_for_gets_a_gradient(rows):
    x, S1, U1, S2, U2, bias = operands(rows)
    whole(x.detach(), S1, U1, S2.detach(), U2, bias.detach()).sum().backward()
    assert S1.grad is not None
    assert x.grad is None
    assert S2.grad is None


@both_orders
def test_transforms_of_torch_func(rows):
    x, *rest = (a.detach() for a in operands(rows))
    assert_close(vmap(lambda row: halves(row[None], *rest)[0])(x), dense(x, *rest))
    theirs = grad(lambda y: dense(y, *rest).sin().sum())(x)
    assert_close(grad(lambda y: halves(y, *rest).sin().sum())(x), theirs)
    assert_close(jvp(lambda y: halves(y, *rest), (x,), (x,))[1], dense(x, *rest[:-1], None))


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
def test_triton(device, shape, dtype, poison):
    rows, sizes = shape
    args = operands(rows, dtype, sizes=sizes, device=device)
    x, S1, U1, S2, U2, bias = args
    with using_path("pair"):
        out = halves(*args)
        gradients = torch.autograd.grad(out, (x, S1, S2, bias), torch.ones_like(out))
        plain = sketched_outer(sketched_inner(x, S1, U2, 0.25), U1, S2)
    exact = [a.detach().double().requires_grad_() for a in args]
    expected = dense(*exact)
    assert rms_error(out, expected) < KERNEL_RMS[dtype]
    assert rms_error(plain, expected - exact[5]) < KERNEL_RMS[dtype]
    theirs = torch.autograd.grad(expected, [exact[i] for i in (0, 1, 3, 5)], torch.ones_like(expected))
    for ours, gradient in zip(gradients, theirs, strict=True):
        assert rms_error(ours, gradient) < KERNEL_RMS[dtype]
    inner = sketched_inner(x, S1, U2, 0.25).detach()
    strided = torch.cat((inner, inner), 1)[:, : inner.shape[1]]  # as of one layer of several
    assert rms_error(sketched_outer(strided, U1, S2, bias), expected) < KERNEL_RMS[dtype]
