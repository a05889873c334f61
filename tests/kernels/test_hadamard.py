"""The Walsh-Hadamard transform against float64, and its derivatives."""

import pytest
import torch
from panther.kernels import hadamard_transform, reference
from tolerances import assert_close

from panther.sketch import SRHT

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def check(x, seed=0):
    """Values and gradient against the reference in float64, the result contiguous and of x's dtype."""
    x = x.detach().requires_grad_()
    y = hadamard_transform(x)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    assert_close(y, reference.hadamard_transform(x.detach().double()))
    grad = draw(*y.shape, dtype=x.dtype, seed=1)
    (dx,) = torch.autograd.grad(y, x, grad)
    assert_close(dx, reference.hadamard_transform(grad.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(14))
def test_every_length(bits, dtype):
    check(draw(1 << bits, 1, dtype=dtype))
    if bits <= 10:
        check(draw(2, 1 << bits, 3, dtype=dtype))


def test_integers_are_transformed_exactly():
    """Every entry of the matrix: the transform of the identity, by the definition of the signs."""
    N = 256
    i = torch.arange(N)
    shared = (i[:, None] & i[None, :]).tolist()
    H = torch.tensor([[(-1.0) ** entry.bit_count() for entry in row] for row in shared])
    for dtype in DTYPES:
        assert torch.equal(hadamard_transform(torch.eye(N, dtype=dtype)), H.to(dtype))


@pytest.mark.parametrize("shape", [(8, 1), (5, 8, 1), (2, 3, 4, 8, 5), (0, 8, 3), (2, 8, 0), (3, 0, 1, 2), (4, 1, 7)])
def test_batches(shape):
    check(draw(*shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 9])
def test_strides(bits, dtype):
    N = 1 << bits
    check(draw(2, 5, N, dtype=dtype).mT)
    check(draw(2, 2 * N, 12, dtype=dtype)[:, ::2, 1::3])
    check(draw(N, 2, 3, dtype=dtype).transpose(0, 1))
    check(draw(1, N, 1, dtype=dtype).expand(3, N, 4))
    check(draw(2, 1, N, 2, dtype=dtype).expand(2, 3, N, 2))
    check(draw(N, dtype=dtype)[:, None])


def polynomial(x, transform):
    return (transform(x) ** 3).sum()


def second_derivative(x, transform):
    (dx,) = torch.autograd.grad(polynomial(x, transform), x, create_graph=True)
    return torch.autograd.grad((dx**2).sum(), x)[0]


def test_double_backward():
    x = draw(2, 16, 3).mul(0.1)
    exact = second_derivative(x.double().requires_grad_(), hadamard_transform_in_float64)
    assert_close(second_derivative(x.requires_grad_(), hadamard_transform), exact)


def hadamard_transform_in_float64(x):
    return reference.hadamard_transform(torch.eye(x.shape[-2], dtype=x.dtype)) @ x


def test_derivatives_in_torch():
    x = draw(2, 8, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(hadamard_transform, x)
    assert torch.autograd.gradgradcheck(hadamard_transform, x)
    assert_close(hadamard_transform(x), hadamard_transform_in_float64(x))
    y = hadamard_transform(x.detach().int())
    assert y.dtype == torch.int32


def test_stride_zero_gradient():
    x = draw(8, 3).requires_grad_()
    hadamard_transform(x).sum().backward()
    expected = torch.zeros(8, 3)
    expected[0] = 8
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic, backend):
    def function(x):
        return hadamard_transform(x * 2) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for N, n in [(16, 3), (32, 5)]:
        x = draw(2, N, n).requires_grad_()
        y, z = function(x), compiled(x)
        assert torch.equal(y, z)
        grad = torch.randn_like(y)
        assert torch.equal(torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(z, x, grad)[0])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap(dim):
    x = draw(3, 4, 5)
    stacked = torch.stack([x] * 2, dim=dim)
    with torch.no_grad():
        y = torch.vmap(hadamard_transform, in_dims=dim)(stacked)
    assert torch.equal(y, hadamard_transform(x).expand(2, 3, 4, 5))
    assert_close(torch.vmap(hadamard_transform, in_dims=dim)(stacked), y.double())  # may need a gradient


def test_autocast_leaves_the_dtype():
    x = draw(8, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = hadamard_transform(x)
    assert torch.equal(y, hadamard_transform(x))
    assert y.dtype == torch.float32


def test_refusals():
    for n in (0, 3, 12):
        with pytest.raises(ValueError, match=f"length {n} of a Hadamard transform must be a power of two"):
            hadamard_transform(torch.ones(n, 1))
    with pytest.raises(ValueError, match=r"shape \(4,\): use x\[:, None\]"):
        hadamard_transform(torch.ones(4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "m"), [(5, 100), (64, 60), (40, 7), (1, 1)])
def test_srht_multiplies_like_its_matrix(d, m, dtype):
    S = SRHT(d, m, seed=3, dtype=dtype)
    exact = SRHT(d, m, seed=3, dtype=torch.float64).dense()
    A, B = draw(2, m, 3, dtype=dtype), draw(2, d, 3, dtype=dtype)
    assert_close(S @ A, exact @ A.double(), dtype)
    assert_close(A.mT @ S.T, A.mT.double() @ exact.mT, dtype)
    assert_close(S.T @ B, exact.mT @ B.double(), dtype)


def test_forward_derivatives_and_those_of_torch_func():
    x, tangent = torch.randn(2, 8, 3), torch.randn(2, 8, 3)
    H = reference.hadamard_transform(torch.eye(8))
    value, derivative = torch.func.jvp(hadamard_transform, (x,), (tangent,))
    torch.testing.assert_close(value, H @ x)
    torch.testing.assert_close(derivative, H @ tangent)
    gradient = torch.func.grad(lambda x: (hadamard_transform(x) * tangent).sum())
    torch.testing.assert_close(gradient(x), H @ tangent)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(lambda x: hadamard_transform(x).square().sum()))(x), 16 * x
    )
