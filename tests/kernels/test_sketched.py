"""Both orders of the sketched product, against float64 and against each other, in every transform."""

import pytest
import torch
from panther.kernels import reference, sketched_matmul
from panther.kernels.cpu.sketched import JoinedProduct
from tolerances import assert_close
from torch.utils.flop_counter import FlopCounterMode

R = 3
ROWS = {"chain": 4 * R - 1, "joined": 4 * R}


def operands(rows, dtype=torch.float64, fitted=False, n_in=11, n_out=9):
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape, grad=True):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    return (
        draw(rows, n_in),
        draw(n_in, R),
        draw(R, n_out, grad=fitted),
        draw(R, n_out),
        draw(n_in, R, grad=fitted),
        draw(n_out),
        0.25,
    )


def dense(x, S1, U1, S2, U2, bias, scale):
    return x @ (S1 @ U1 + U2 @ S2) * scale + (0 if bias is None else bias)


@pytest.mark.parametrize("rows", [0, 1, *ROWS.values(), 50])
@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(rows, fitted, bias):
    args = list(operands(rows, fitted=fitted))
    if not bias:
        args[5] = None
    out, expected = sketched_matmul(*args), dense(*args)
    assert_close(out, expected)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, wanted, grad), torch.autograd.grad(expected, wanted, grad), strict=True
    ):
        assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, *ROWS.values()])
@pytest.mark.parametrize("bias", [False, True])
def test_low_precision_against_float64(dtype, rows, bias):
    args = list(operands(rows, dtype, n_in=130, n_out=70))
    if not bias:
        args[5] = None
    exact = dense(*(a.detach().double() if isinstance(a, torch.Tensor) else a for a in args))
    assert_close(sketched_matmul(*args), exact)
    with torch.no_grad():
        assert_close(sketched_matmul(*args), exact)


def test_the_orders_take_turns_at_four_rows_a_rank(monkeypatch):
    def refuse(*args):
        raise AssertionError("wrong order")

    monkeypatch.setattr(reference, "sketched_matmul", refuse)
    sketched_matmul(*operands(ROWS["joined"]))
    with pytest.raises(AssertionError, match="wrong order"):
        sketched_matmul(*operands(ROWS["chain"]))
    monkeypatch.undo()
    monkeypatch.setattr(JoinedProduct, "forward", refuse)
    sketched_matmul(*operands(ROWS["chain"]))


@pytest.mark.parametrize("rows", ROWS.values())
def test_no_product_is_spent_on_fixed_sketches(rows):
    """4 R (in + out) flops a row forward, 1.5 times that backward; all of it in products that are counted."""
    args = operands(rows)
    forward = 4 * R * (11 + 9) * rows
    with FlopCounterMode(display=False) as counter:
        out = sketched_matmul(*args)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == forward * 3 // 2


@pytest.mark.parametrize("rows", ROWS.values())
@pytest.mark.parametrize("fitted", [False, True])
def test_gradcheck_of_every_order(rows, fitted):
    x, S1, U1, S2, U2, bias, scale = operands(rows, fitted=fitted)

    def function(*leaves):
        it = iter(leaves)
        picked = [next(it) if t.requires_grad else t for t in (x, S1, U1, S2, U2, bias)]
        return sketched_matmul(*picked, scale)

    leaves = [t for t in (x, S1, U1, S2, U2, bias) if t.requires_grad]
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("rows", ROWS.values())
def test_stride_zero_gradient(rows):
    args = operands(rows)
    sketched_matmul(*args).sum().backward()
    weight = (args[1] @ args[2] + args[4] @ args[3]) * 0.25
    assert_close(args[0].grad, torch.ones(rows, 9, dtype=torch.float64) @ weight.T)


@pytest.mark.parametrize("rows", ROWS.values())
def test_only_what_is_asked_for_gets_a_gradient(rows):
    x, S1, U1, S2, U2, bias, scale = operands(rows)
    out = sketched_matmul(x.detach(), S1, U1, S2.detach(), U2, bias.detach(), scale)
    out.sum().backward()
    assert S1.grad is not None
    assert x.grad is None
    assert S2.grad is None
