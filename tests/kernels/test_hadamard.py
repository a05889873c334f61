"""The Walsh-Hadamard transform by Triton kernels against float64, and its derivatives wherever it runs."""

import pytest
import torch
from panther.kernels import hadamard_transform, reference
from tolerances import assert_close

from panther.sketch import SRHT

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def check(x, seed=0):
    """Values and gradient against the reference in float64, the result contiguous and of x's dtype."""
    x = x.detach().requires_grad_()
    y = hadamard_transform(x)
    assert y.dtype == x.dtype
    assert y.device == x.device
    assert y.is_contiguous()
    assert_close(y.cpu(), reference.hadamard_transform(x.detach().cpu().double()))
    grad = draw(*y.shape, dtype=x.dtype, device=x.device, seed=1)
    (dx,) = torch.autograd.grad(y, x, grad)
    assert_close(dx.cpu(), reference.hadamard_transform(grad.cpu().double()))


@pytest.fixture
def poisoned(monkeypatch):
    """``torch.empty`` gives NaN, so that an entry that is never written shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 1 KB, so that a few hundred rows take several passes, and tiles to match."""
    hadamard = pytest.importorskip("panther.kernels._triton.hadamard")
    monkeypatch.setattr(hadamard, "_MOST", 1024)
    return hadamard


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(14))
def test_every_length_in_one_block(device, poisoned, bits, dtype):
    check(draw(1 << bits, 1, dtype=dtype, device=device))
    if bits <= 10:
        check(draw(2, 1 << bits, 3, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "n"), [(10, 1), (10, 20), (12, 3), (13, 1)])
def test_several_passes(device, poisoned, small_blocks, bits, n, dtype):
    assert len(small_blocks.passes(1 << bits, n, dtype.itemsize)) in (2, 3)
    check(draw(2, 1 << bits, n, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_passes_of_full_blocks(device, dtype):
    check(draw(1 << 15, 1, dtype=dtype, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "n"), [(1 << 20, 1), (1 << 20, 5), (1 << 18, 65), (1 << 22, 1)])
def test_long_transforms_on_cuda(N, n, dtype):
    check(draw(N, n, dtype=dtype, device="cuda"))


def test_integers_are_transformed_exactly(device):
    """Every entry of the matrix: the transform of the identity, by the definition of the signs."""
    N = 256
    i = torch.arange(N)
    shared = (i[:, None] & i[None, :]).tolist()
    H = torch.tensor([[(-1.0) ** entry.bit_count() for entry in row] for row in shared])
    for dtype in DTYPES:
        assert torch.equal(hadamard_transform(torch.eye(N, dtype=dtype, device=device)).cpu(), H.to(dtype))


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64, 1000])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_passes_are_few_and_fit(n, itemsize):
    hadamard = pytest.importorskip("panther.kernels._triton.hadamard")
    for bits in range(25):
        plan = hadamard.passes(1 << bits, n, itemsize)
        assert sum(plan) == bits
        assert all(plan)
        assert len(plan) <= (0 if not bits else 1 if bits <= 10 else 2 if bits <= 20 else 3)
        columns = n
        for part in plan:
            sector = min(32, (1 << (columns - 1).bit_length()) * itemsize)
            assert sector << part <= hadamard._MOST
            columns <<= part


@pytest.mark.parametrize("shape", [(8, 1), (5, 8, 1), (2, 3, 4, 8, 5), (0, 8, 3), (2, 8, 0), (3, 0, 1, 2), (4, 1, 7)])
def test_batches(device, shape):
    check(draw(*shape, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 9])
def test_strides(device, small_blocks, bits, dtype):
    N = 1 << bits
    check(draw(2, 5, N, dtype=dtype, device=device).mT)
    check(draw(2, 2 * N, 12, dtype=dtype, device=device)[:, ::2, 1::3])
    check(draw(N, 2, 3, dtype=dtype, device=device).transpose(0, 1))
    check(draw(1, N, 1, dtype=dtype, device=device).expand(3, N, 4))
    check(draw(2, 1, N, 2, dtype=dtype, device=device).expand(2, 3, N, 2))
    check(draw(N, dtype=dtype, device=device)[:, None])


def test_offsets_of_64_bits(device, monkeypatch):
    """The form that only a tensor of more than 2^31 entries needs, on a small one."""
    hadamard = pytest.importorskip("panther.kernels._triton.hadamard")
    kernel = hadamard._hadamard_kernel
    widened = Launches(lambda grid, *args, **kwargs: kernel[grid](*args, **{**kwargs, "WIDE": True}))
    monkeypatch.setattr(hadamard, "_hadamard_kernel", widened)
    check(draw(2, 64, 3, device=device))
    assert widened.forms == [False, False]


@pytest.mark.parametrize(("shape", "wide"), [((16, 1 << 26), False), ((16, 1 << 28), True), ((1 << 28, 4, 4), False)])
def test_wide_offsets_are_used_where_needed(monkeypatch, shape, wide):
    hadamard = pytest.importorskip("panther.kernels._triton.hadamard")
    launches = Launches(lambda *args, **kwargs: None)
    monkeypatch.setattr(hadamard, "_hadamard_kernel", launches)
    hadamard.hadamard_transform(torch.empty(*shape, device="meta"))
    assert launches.forms == [wide]


class Launches:
    """In place of a kernel: what it was launched with, and something else to call."""

    def __init__(self, call):
        self.call, self.forms = call, []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.forms.append(kwargs["WIDE"])
            self.call(grid, *args, **kwargs)

        return launch


def polynomial(x, transform):
    return (transform(x) ** 3).sum()


def second_derivative(x, transform):
    (dx,) = torch.autograd.grad(polynomial(x, transform), x, create_graph=True)
    return torch.autograd.grad((dx**2).sum(), x)[0]


def test_double_backward(device):
    x = draw(2, 16, 3).mul(0.1)
    exact = second_derivative(x.double().requires_grad_(), hadamard_transform_in_float64)
    assert_close(second_derivative(x.to(device).requires_grad_(), hadamard_transform).cpu(), exact)


def hadamard_transform_in_float64(x):
    return reference.hadamard_transform(torch.eye(x.shape[-2], dtype=x.dtype)) @ x


def test_derivatives_in_torch():
    x = draw(2, 8, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(hadamard_transform, x)
    assert torch.autograd.gradgradcheck(hadamard_transform, x)
    assert_close(hadamard_transform(x), hadamard_transform_in_float64(x))
    y = hadamard_transform(x.detach().int())
    assert y.dtype == torch.int32


def test_stride_zero_gradient(device):
    x = draw(8, 3, device=device).requires_grad_()
    hadamard_transform(x).sum().backward()
    expected = torch.zeros(8, 3)
    expected[0] = 8
    assert torch.equal(x.grad.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operator_passes_opcheck(device, dtype):
    for x in (draw(8, 3, dtype=dtype, device=device), draw(2, 3, 16, dtype=dtype, device=device).mT):
        torch.library.opcheck(torch.ops.panther.hadamard_transform.default, (x.detach().requires_grad_(),))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(device, dynamic, backend):
    def function(x):
        return hadamard_transform(x * 2) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for N, n in [(16, 3), (32, 5)]:
        x = draw(2, N, n, device=device).requires_grad_()
        y, z = function(x), compiled(x)
        assert torch.equal(y, z)
        grad = torch.randn_like(y)
        assert torch.equal(torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(z, x, grad)[0])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap(device, dim):
    x = draw(3, 4, 5, device=device)
    stacked = torch.stack([x] * 2, dim=dim)
    with torch.no_grad():
        y = torch.vmap(hadamard_transform, in_dims=dim)(stacked)
    assert torch.equal(y, hadamard_transform(x).expand(2, 3, 4, 5))
    assert_close(torch.vmap(hadamard_transform, in_dims=dim)(stacked).cpu(), y.cpu().double())  # may need a gradient


def test_autocast_leaves_the_dtype(device):
    x = draw(8, 3, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = hadamard_transform(x)
    assert torch.equal(y, hadamard_transform(x))
    assert y.dtype == torch.float32


def test_refusals(device):
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(RuntimeError, match=f"float32, float16 and bfloat16, not {dtype}: use PANTHER_KERNELS"):
            hadamard_transform(torch.ones(4, 1, dtype=dtype, device=device))
    for n in (0, 3, 12):
        with pytest.raises(ValueError, match=f"length {n} of a Hadamard transform must be a power of two"):
            hadamard_transform(torch.ones(n, 1, device=device))
    with pytest.raises(ValueError, match=r"shape \(4,\): use x\[:, None\]"):
        hadamard_transform(torch.ones(4, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "m"), [(5, 100), (64, 60), (40, 7), (1, 1)])
def test_srht_multiplies_like_its_matrix(device, d, m, dtype):
    S = SRHT(d, m, seed=3, dtype=dtype, device=device)
    exact = SRHT(d, m, seed=3, dtype=torch.float64).dense()
    A, B = draw(2, m, 3, dtype=dtype, device=device), draw(2, d, 3, dtype=dtype, device=device)
    assert_close((S @ A).cpu(), exact @ A.cpu().double(), dtype)
    assert_close((A.mT @ S.T).cpu(), A.mT.cpu().double() @ exact.mT, dtype)
    assert_close((S.T @ B).cpu(), exact.mT @ B.cpu().double(), dtype)


def test_forward_derivatives_and_those_of_torch_func(device):
    x, tangent = torch.randn(2, 8, 3, device=device), torch.randn(2, 8, 3, device=device)
    H = reference.hadamard_transform(torch.eye(8, device=device))
    value, derivative = torch.func.jvp(hadamard_transform, (x,), (tangent,))
    torch.testing.assert_close(value, H @ x)
    torch.testing.assert_close(derivative, H @ tangent)
    gradient = torch.func.grad(lambda x: (hadamard_transform(x) * tangent).sum())
    torch.testing.assert_close(gradient(x), H @ tangent)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(lambda x: hadamard_transform(x).square().sum()))(x), 16 * x
    )
