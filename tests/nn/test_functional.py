import pytest
import torch
from tolerances import assert_close

from panther.errors import DTypeError, ShapeError
from panther.nn import SKLinear
from panther.nn.functional import sketched_linear


def operands(dtype=torch.float32):
    torch.manual_seed(0)
    S1, U2 = torch.randn(2, 6, 3).to(dtype)
    U1, S2 = torch.randn(2, 3, 5).to(dtype)
    return S1, U1, S2, U2


@pytest.mark.parametrize("shape", [(6,), (4, 6), (1, 6), (0, 6), (2, 3, 6), (2, 0, 3, 6), (50, 6)])
def test_any_batch_shape(shape):
    S1, U1, S2, U2 = operands()
    x, bias = torch.randn(shape), torch.arange(5.0)
    exact = x.double() @ (S1 @ U1 + U2 @ S2).double() / 2
    assert_close(sketched_linear(x, S1, U1, S2, U2, scale=0.5), exact)
    assert_close(sketched_linear(x, S1, U1, S2, U2, bias, scale=0.5), exact + bias.double())


def test_autocast_leaves_float64_alone():
    S1, U1, S2, U2 = operands(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert sketched_linear(torch.randn(2, 6).double(), S1, U1, S2, U2).dtype == torch.float64


@pytest.mark.parametrize("rows", [4, 64])  # The factors are joined from four rows for each of their 16 columns on.
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("sketch", ["sparse", "signs"])
def test_float16_overflows_no_earlier_than_the_dense_layer(rows, autocast, sketch):
    torch.manual_seed(0)
    layer = SKLinear(8192, 256, 1, 16, sketch=sketch, seed=1)
    x = 400 * torch.randn(rows, 8192)
    exact = layer.double().to_linear()(x.double())
    if autocast:
        with torch.autocast("cpu", torch.float16):
            out = layer.float()(x)
    else:
        out = layer.half()(x.half())
    assert out.dtype == torch.float16
    assert_close(out, exact)


@pytest.mark.parametrize("sketch", ["sparse", "signs"])
def test_float16_keeps_small_inputs_and_large_gradients(sketch):
    torch.manual_seed(0)
    layer = SKLinear(1024, 1024, 2, 64, sketch=sketch, bias=False)
    x = 1e-4 * torch.randn(4, 1024)
    exact = layer.double()(x.half().double())
    assert_close(layer.half()(x.half()), exact)
    layer = SKLinear(256, 8192, 1, 16, sketch=sketch).half()
    x = torch.randn(4, 256).half().requires_grad_()
    grad = 1000 * torch.randn(4, 8192).half()
    (ours,) = torch.autograd.grad(layer(x), x, grad)
    assert_close(ours, grad.double() @ layer.double().weight.detach(), torch.float16)


def test_bad_input_says_the_rule_the_values_and_the_fix():
    S1, U1, S2, U2 = operands()
    with pytest.raises(ShapeError, match=r"last dimension of the input, \(2, 7\), must be in_features=6"):
        sketched_linear(torch.ones(2, 7), S1, U1, S2, U2)
    with pytest.raises(ShapeError, match=r"input, \(\), must be"):
        sketched_linear(torch.tensor(1.0), S1, U1, S2, U2)
    with pytest.raises(DTypeError, match=r"the input is torch.float64 and the layer torch.float32: cast the input"):
        sketched_linear(torch.ones(2, 6, dtype=torch.float64), S1, U1, S2, U2)
    with pytest.raises(DTypeError, match=r"x.to\(torch.float32\)$"):
        sketched_linear(torch.ones(2, 6, dtype=torch.int64), S1, U1, S2, U2)
    with pytest.raises(TypeError, match=r"the input must be a tensor, not list: use torch.as_tensor"):
        sketched_linear([1.0], S1, U1, S2, U2)
    with pytest.raises(ShapeError, match=r"S1 and U2 must be \(in, R\)"):
        sketched_linear(torch.ones(2, 6), S1, U1, S2, U1)
    for wrong in ((S1, U1.double(), S2, U2), (S1, U1, S2.double(), U2), (S1, U1, S2, U2, torch.ones(5).double())):
        with pytest.raises(DTypeError, match="must share a dtype"):
            sketched_linear(torch.ones(2, 6), *wrong)
    for wrong in (S1[:, 0], S1[None]):
        with pytest.raises(ShapeError, match="factors must have two dimensions"):
            sketched_linear(torch.ones(2, 6), wrong, U1, S2, U2)
    with pytest.raises(ShapeError, match=r"bias must have shape \(5,\), not \(6,\)"):
        sketched_linear(torch.ones(2, 6), S1, U1, S2, U2, torch.ones(6))
