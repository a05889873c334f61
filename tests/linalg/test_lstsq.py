"""sketch_lstsq against direct solvers, by backward error, forward error and residual."""

import math
import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from fuzzing import fuzz, is_a_sentence
from hypothesis import given
from hypothesis import strategies as st

import panther.linalg._lstsq as module
from panther.errors import DTypeError, NumericalWarning, ShapeError
from panther.linalg import sketch_lstsq
from panther.linalg._preconditioner import Preconditioner, from_columns
from panther.linalg._refinement import System, smallest_singular_value


@pytest.fixture(autouse=True, scope="module")
def _small_problems():
    """Sketch where it only costs time too; and use one thread, since two would spend it waiting for each other."""
    threads, cost = torch.get_num_threads(), module._PASS
    torch.set_num_threads(1)
    module._PASS = 0
    yield
    module._PASS = cost
    torch.set_num_threads(threads)


CONDITIONS = {torch.float64: [1, 1e4, 1e8, 1e12, 1e14], torch.float32: [1, 1e2, 1e4, 1e5]}
CASES = [(dtype, condition) for dtype in CONDITIONS for condition in CONDITIONS[dtype]]


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def problem(m, n, condition, residual, p=1, dtype=torch.float64, seed=0):
    """A of norm one and given condition, b whose least residual norm is known, x of norm one."""
    U = torch.linalg.qr(gaussian(m, n, seed=seed)).Q
    V = torch.linalg.qr(gaussian(n, n, seed=seed + 1)).Q
    A = U * torch.logspace(0, -math.log10(condition), n, dtype=torch.float64) @ V.mT
    x = torch.nn.functional.normalize(gaussian(n, p, seed=seed + 2), dim=0)
    r = gaussian(m, p, seed=seed + 3)
    for _ in range(2):
        r = r - U @ (U.mT @ r)
    return A.to(dtype), (A @ x + residual * r / r.norm(dim=0)).to(dtype), x


def backward_error(A, b, x, ridge=0.0):
    """The estimate of Karlson and Walden, relative to the Frobenius norm, each column; all in float64."""
    A, b, x = A.double(), b.double(), x.double()
    if ridge:
        A = torch.cat((A, math.sqrt(ridge) * torch.eye(A.shape[1], dtype=A.dtype)))
        b = torch.cat((b, b.new_zeros(A.shape[1], b.shape[1])))
    _, s, Vh = torch.linalg.svd(A, full_matrices=False)
    r = b - A @ x
    theta = r.norm(dim=0) / x.norm(dim=0)
    gradient = Vh @ (A.mT @ r)
    return (gradient / (s[:, None] ** 2 + theta**2).sqrt()).norm(dim=0) / x.norm(dim=0) / A.norm()


def direct(A, b, ridge=0.0):
    """Householder QR in the precision of A."""
    if ridge:
        A = torch.cat((A, math.sqrt(ridge) * torch.eye(A.shape[1], dtype=A.dtype)))
        b = torch.cat((b, b.new_zeros(A.shape[1], b.shape[1])))
    return torch.linalg.lstsq(A, b, driver="gels").solution


@pytest.mark.parametrize(("dtype", "condition"), CASES)
def test_it_is_as_accurate_as_a_direct_solver(dtype, condition):
    for residual in [1e-8, 1e-3, 1.0, 1e3]:
        A, b, x = problem(3000, 60, condition, residual, dtype=dtype)
        result = sketch_lstsq(A, b, seed=1)
        exact = direct(A, b)
        assert result.iterations or residual < torch.finfo(dtype).eps
        eps = torch.finfo(dtype).eps
        assert backward_error(A, b, result.x).max() <= max(4 * backward_error(A, b, exact).max(), eps)
        # Forward errors of two stable solvers differ by chance; both are within Wedin's bound.
        bound = eps * condition * (1 + condition * residual)
        assert (result.x - x).norm() <= 10 * max((exact - x).norm(), bound)
        excess = result.residual_norm.double() - (b.double() - A.double() @ direct(A.double(), b.double())).norm(dim=0)
        assert excess.abs() <= 100 * eps * max(residual, 1) + (10 * eps * condition) ** 2 * residual


def test_it_sketches_where_that_is_faster(monkeypatch):
    for shape, p, tol, sketched in [
        ((200_000, 1000), 1, 0.0, True),
        ((20_000, 1000), 1, 0.0, True),
        ((5000, 1000), 1, 0.0, False),
        ((20_000, 100), 1, 0.0, False),
        ((20_000, 200), 1, 1e-3, True),
        ((200_000, 1000), 100, 0.0, False),
        ((100, 2000), 1, 0.0, False),
    ]:
        monkeypatch.setattr(module, "_PASS", 9)
        operand = module.Operand(torch.empty(shape, device="meta"), torch.float64, torch.device("meta"))
        assert module._is_worth_sketching(operand, p, tol) is sketched


def test_a_small_problem_as_users_have_it(monkeypatch):
    monkeypatch.setattr(module, "_PASS", 9)
    A, b, _ = problem(2000, 40, 1e6, 1.0)
    result, error = sketch_lstsq(A, b, seed=0, return_error=True)
    assert result.iterations == 0
    assert backward_error(A, b, result.x).max() <= 1e-15
    assert (error.confidence, error.probes) == (1.0, 0)
    assert (A @ (result.x - direct(A, b))).norm() <= 2 * error.upper


@pytest.mark.parametrize("condition", [1.0, 1e6, 1e12])
def test_several_right_hand_sides_of_unlike_size(condition):
    A, b, _ = problem(2000, 40, condition, 1e-3, p=5)
    b = torch.cat((b, 1e9 * gaussian(2000, 2, seed=9), 1e-9 * b[:, :1], 0 * b[:, :1]), dim=1)
    x, residual_norm, _ = sketch_lstsq(A, b, seed=0)
    assert x.shape == (40, 9)
    assert residual_norm.shape == (9,)
    rounding = 1e-15 * (x.norm(dim=0) + b.norm(dim=0))
    assert ((residual_norm - (A @ x - b).norm(dim=0)).abs() <= 10 * rounding).all()
    assert backward_error(A, b[:, :8], x[:, :8]).max() <= torch.finfo(torch.float64).eps * 1.5
    assert torch.equal(x[:, 8], torch.zeros(40, dtype=torch.float64))
    alone = sketch_lstsq(A, b[:, 0], seed=0)
    assert alone.x.shape == (40,)
    assert alone.residual_norm.shape == ()
    assert (A @ (alone.x - x[:, 0])).norm() <= 1e-13 + 1e-17 * condition


@pytest.mark.parametrize("p", [1, 8, 33])
@pytest.mark.parametrize("condition", [1e2, 1e10])
def test_a_direct_solver_reads_the_norms_off_its_factors(p, condition, monkeypatch):
    """As those of the passes that return_error takes, and every column as if it were alone."""
    monkeypatch.setattr(module, "_PASS", 9)
    A, b, _ = problem(900, 40, condition, 1e-3, p=p)
    b[:, :1] *= 1e-9
    direct, _ = sketch_lstsq(A, b, return_error=True, seed=0)
    result = sketch_lstsq(A, b, seed=0)
    assert result.iterations == 0
    assert torch.equal(result.x, direct.x)
    torch.testing.assert_close(result.residual_norm, direct.residual_norm, rtol=1e-9, atol=0)
    assert backward_error(A, b, result.x).max() <= 4 * torch.finfo(torch.float64).eps
    alone = sketch_lstsq(A, b[:, -1], seed=0)
    torch.testing.assert_close(A @ alone.x, A @ result.x[:, -1], rtol=0, atol=1e-13)
    b[:, 0] = 0
    x, residual_norm, _ = sketch_lstsq(A, b, seed=0)
    assert x[:, 0].norm() == residual_norm[0] == 0


@pytest.mark.parametrize("shape", [(2000, 40), (300, 40), (40, 40), (20, 50)])
def test_ridge(shape):
    for ridge in [1e-20, 1e-6, 1.0, 1e8]:
        A, b, _ = problem(2000, 50, 1e5, 1.0, p=2)
        A, b = A[: shape[0], : shape[1]], b[: shape[0]]
        result, error = sketch_lstsq(A, b, ridge=ridge, seed=0, return_error=True)
        U, s, Vh = torch.linalg.svd(A, full_matrices=False)
        exact = Vh.mT @ ((s / (s**2 + ridge))[:, None] * (U.mT @ b))
        scale = (b.norm() / (s + ridge / s)).max()
        assert (result.x - exact).norm() <= 1e-8 * scale
        assert backward_error(A, b, result.x, ridge).max() <= 1e-15 or shape[0] < shape[1]
        difference = result.x - exact
        distance = ((A @ difference).square().sum(0) + ridge * difference.square().sum(0)).sqrt()
        assert (distance <= error.upper + 1e-14).all()


def doubled(A):
    half = (A / 2).to_sparse_coo()
    index, values = torch.cat((half.indices(), half.indices()), dim=1), torch.cat((half.values(), half.values()))
    return torch.sparse_coo_tensor(index, values, A.shape, check_invariants=False)


def doubled_coo(A):
    """Return a matrix of scipy that stores halves of the entries twice, in no order."""
    half = scipy.sparse.coo_array(A.numpy() / 2)
    order = np.random.default_rng(0).permutation(2 * half.nnz)
    row, column = (np.tile(index, 2)[order] for index in half.coords)
    return scipy.sparse.coo_array((np.tile(half.data, 2)[order], (row, column)), shape=half.shape)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "scipy", "scipy csc", "scipy doubled", "uncoalesced"])
@pytest.mark.parametrize("shape", [(3000, 50), (100, 50), (30, 50)])
def test_sparse(layout, shape):
    keep = gaussian(*shape, seed=1).abs() > 1.3
    A = torch.where(keep, gaussian(*shape, seed=2), 0.0)
    b = gaussian(shape[0], 2, seed=3)
    with warnings.catch_warnings():  # torch's own, that its CSR layout is in beta state
        warnings.simplefilter("ignore")
        sparse = {
            "coo": A.to_sparse_coo,
            "csr": A.to_sparse_csr,
            "csc": A.to_sparse_csc,
            "scipy": lambda: scipy.sparse.csr_matrix(A.numpy()),
            "scipy csc": lambda: scipy.sparse.csc_array(A.numpy()),
            "scipy doubled": lambda: doubled_coo(A),
            "uncoalesced": lambda: doubled(A),
        }[layout]()
    result = sketch_lstsq(sparse, b, seed=0)
    exact = torch.linalg.lstsq(A, b, driver="gelsd").solution
    assert (result.x - exact).norm() <= 1e-11 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e9])
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_sparse_matrices_of_any_condition(dtype, condition, ridge, monkeypatch):
    """Few columns are squared, unless they depend on each other too much; badly scaled columns are no obstacle."""
    mixed = torch.eye(30, dtype=torch.float64)
    mixed[0, 1] = condition
    A = torch.where(gaussian(4000, 30, seed=1).abs() > 1.2, gaussian(4000, 30, seed=2), 0.0) @ mixed
    A = (A * torch.logspace(0, 4, 30, dtype=torch.float64)).to(dtype)
    b = gaussian(4000, 3, seed=3).to(dtype)
    roads = []
    squared = module.from_gram
    monkeypatch.setattr(module, "from_gram", lambda *args: roads.append(squared(*args)) or roads[-1])
    result = sketch_lstsq(A.to_sparse_coo(), b, ridge=ridge, seed=0)
    if condition == 1.0:
        assert roads[0] is not None
    elif condition == 1e9 and not ridge:
        assert not any(roads)
    assert backward_error(A, b, result.x, ridge).max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("column", [0.0, 1.0])
def test_sparse_columns_that_depend_on_each_other_have_the_least_norm(column):
    A = torch.where(gaussian(4000, 20, seed=1).abs() > 1.2, gaussian(4000, 20, seed=2), 0.0)
    A[:, 7] = column * A[:, 3]
    b = gaussian(4000, seed=3)
    x, exact = sketch_lstsq(A.to_sparse_coo(), b, seed=0).x, torch.linalg.pinv(A) @ b
    assert (x - exact).norm() <= 1e-10 * exact.norm()


def test_matrices_of_scipy_are_scaled_and_stay_as_they_are():
    A = torch.where(gaussian(500, 20).abs() > 1, gaussian(500, 20), 0.0)
    b, huge = gaussian(500), scipy.sparse.csr_array(A.numpy() * 2.0**600)
    original = huge.copy()
    x = sketch_lstsq(huge, b, seed=0).x
    torch.testing.assert_close(x * 2.0**600, sketch_lstsq(A, b, seed=0).x)
    assert (huge != original).nnz == 0
    assert np.array_equal(huge.indices, original.indices)


def test_sparse_in_float32_and_with_no_entries():
    A = torch.where(gaussian(2000, 20).abs() > 1, gaussian(2000, 20), 0.0).float()
    b = gaussian(2000, dtype=torch.float32)
    dense, sparse = sketch_lstsq(A, b, seed=0).x, sketch_lstsq(A.to_sparse_coo(), b, seed=0).x
    assert (dense - sparse).norm() <= 1e-6
    nothing = sketch_lstsq(torch.zeros(500, 3).to_sparse_coo(), torch.ones(500))
    assert torch.equal(nothing.x, torch.zeros(3))


class Product:
    """A matrix that only multiplies."""

    def __init__(self, A):
        self._A = A
        self.shape = A.shape
        self.dtype = A.dtype

    def __matmul__(self, X):
        return self._A @ X

    @property
    def T(self):
        return Product(self._A.T)


@pytest.mark.parametrize("shape", [(3000, 40), (60, 40), (20, 40)])
def test_matrix_free(shape):
    A = gaussian(*shape)
    b = gaussian(shape[0], seed=1)
    result = sketch_lstsq(Product(A), b, seed=0)
    exact = torch.linalg.lstsq(A, b[:, None], driver="gelsd").solution[:, 0]
    assert (result.x - exact).norm() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_deficient_matrix_gives_the_solution_of_least_norm(dtype):
    for shape in [(2000, 40), (100, 40), (40, 40), (30, 90), (2000, 1)]:
        m, n = shape
        rank = max(1, min(m, n) // 2)
        A = (gaussian(m, rank, seed=1) @ gaussian(rank, n, seed=2)).to(dtype)
        b = gaussian(m, 2, seed=3, dtype=dtype)
        x = sketch_lstsq(A, b, seed=0).x
        pinv = torch.linalg.pinv(A.double(), rtol=1e-5 if dtype == torch.float32 else 1e-11)
        assert (x.double() - pinv @ b.double()).norm() <= 1e3 * torch.finfo(dtype).eps * (pinv @ b.double()).norm()


def test_exactly_repeated_and_zero_columns():
    A = gaussian(1000, 10)
    A = torch.cat((A, A, 0 * A), dim=1)
    b = gaussian(1000, seed=1)
    exact = torch.linalg.lstsq(A[:, :10], b[:, None]).solution[:, 0]
    x = sketch_lstsq(A, b, seed=0).x
    assert (x - torch.cat((exact / 2, exact / 2, 0 * exact))).norm() <= 1e-14
    assert torch.equal(sketch_lstsq(0 * A, b).x, torch.zeros(30, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    A, b = gaussian(2000, 20, dtype=dtype), gaussian(2000, seed=1, dtype=dtype)
    x, residual_norm, _ = sketch_lstsq(A, b, seed=0)
    assert x.dtype == residual_norm.dtype == torch.float32
    assert torch.equal(x, sketch_lstsq(A.float(), b.float(), seed=0).x)


def test_strides_gradients_autocast_and_numpy_change_nothing():
    A, b = gaussian(2000, 20), gaussian(2000, 3, seed=1)
    expected = sketch_lstsq(A, b, seed=0)
    assert np.array_equal(sketch_lstsq(A.numpy(), b.numpy(), seed=0).x, expected.x.numpy())
    assert torch.equal(sketch_lstsq(A.requires_grad_(), b, seed=0).x, expected.x)
    A = A.detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sketch_lstsq(A, b, seed=0).x, expected.x)
    strided = torch.zeros(4000, 60, dtype=torch.float64)[::2, ::3].copy_(A)
    for other in (strided, A.mT.contiguous().mT, A.flip(0).flip(0)):
        assert (sketch_lstsq(other, b.mT.contiguous().mT, seed=0).x - expected.x).norm() <= 1e-14
    assert expected.x.is_contiguous()
    assert not expected.x.requires_grad


def test_one_seed_gives_one_result():
    A, b = gaussian(2000, 20), gaussian(2000, seed=1)
    assert torch.equal(sketch_lstsq(A, b, seed=3).x, sketch_lstsq(A, b, seed=3).x)
    torch.manual_seed(0)
    first = sketch_lstsq(A, b)
    torch.manual_seed(0)
    assert torch.equal(sketch_lstsq(A, b).x, first.x)


def test_tiny_empty_and_wide():
    for p in [None, 0, 1, 3]:
        for shape in [(0, 3), (3, 0), (0, 0), (1, 1), (2, 1), (1, 2), (5, 5), (7, 200), (200, 1)]:
            m, n = shape
            A, b = gaussian(m, n), gaussian(m, *(() if p is None else (p,)), seed=1)
            result, error = sketch_lstsq(A, b, return_error=True, seed=0)
            assert result.x.shape == (n, *b.shape[1:])
            assert result.residual_norm.shape == error.upper.shape == error.frobenius.shape == b.shape[1:]
            expected = torch.linalg.pinv(A) @ b
            assert torch.allclose(result.x, expected, rtol=1e-12, atol=1e-12)
            assert torch.allclose(result.residual_norm, (A @ expected - b).norm(dim=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("condition", [1.0, 1e8])
def test_tol_bounds_the_distance_and_saves_iterations(condition):
    for tol in [1e-2, 1e-4, 1e-6]:
        A, b, _ = problem(3000, 60, condition, 1.0, p=3)
        exact = direct(A, b)
        result = sketch_lstsq(A, b, tol=tol, seed=0)
        smallest_residual = (A @ exact - b).norm(dim=0)
        assert ((A @ (result.x - exact)).norm(dim=0) <= 1.5 * tol * smallest_residual).all()
        assert (result.residual_norm / smallest_residual - 1 <= 1.5 * tol**2).all()
        assert result.iterations < sketch_lstsq(A, b, seed=0).iterations
        assert sketch_lstsq(A, b, tol=1e300, seed=0).iterations == 0


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e150, 1e300])
def test_extreme_scales(scale):
    for shape in [(2000, 20), (40, 20), (10, 20)]:
        A, b = gaussian(*shape), gaussian(shape[0], seed=1)
        expected = sketch_lstsq(A, b, seed=0)
        for scale_b in (1.0, scale):
            result, error = sketch_lstsq(A * scale, b * scale_b, ridge=0.0, seed=0, return_error=True)
            assert (result.x * (scale / scale_b) - expected.x).norm() <= 1e-12
            assert (result.residual_norm / scale_b - expected.residual_norm).abs() <= 1e-12 * b.norm()
            assert (error.upper / scale_b).isfinite().all()
        ridged = sketch_lstsq(A, b, ridge=1e300, seed=0).x
        torch.testing.assert_close(ridged * 1e300, A.mT @ b, rtol=1e-12, atol=0)


def test_a_solution_that_overflows_is_named():
    with pytest.raises(ValueError, match="the solution overflows"):
        sketch_lstsq(1e-200 * gaussian(100, 2), 1e200 * torch.ones(100, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["flat", "spiky", "identity", "one heavy row"])
def test_the_error_estimate_bounds_the_distance(kind):
    A = gaussian(3000, 40)
    if kind == "spiky":
        A[40:] *= 1e-4
    if kind == "identity":
        A = torch.eye(3000, 40, dtype=torch.float64)
    if kind == "one heavy row":
        A[7] *= 1e6
    b = gaussian(3000, 2, seed=1)
    exact = direct(A, b)
    for tol in (1e-1, 1e-3, None):
        result, error = sketch_lstsq(A, b, tol=tol, seed=0, return_error=True)
        distance = (A @ (result.x - exact)).norm(dim=0)
        assert (distance <= error.upper).all()
        assert (error.upper <= 3 * error.frobenius + (1e-6 if kind == "one heavy row" else 1e-10)).all()
        assert error.confidence == 0.999
        assert error.probes == 1


def test_the_least_singular_value_is_missed_no_more_often_than_stated():
    """With a failure probability of 0.2, more than 22 of 60 bounds fail with a probability below 1e-3."""
    n = 200
    s = torch.linspace(1.0, 2.0, n, dtype=torch.float64)
    s[0] = 0.5  # one small value, the hardest to find
    A = torch.diag(s)
    identity = Preconditioner(torch.eye(n, dtype=torch.float64), 1.0, 1.0)
    system = System(module.as_operand(A), torch.zeros(n, 1, dtype=torch.float64), 0.0)
    bounds = [smallest_singular_value(system, identity, seed, 0.2) for seed in range(60)]
    assert sum(bound > 0.5 * (1 + 1e-12) for bound in bounds) <= 22
    assert min(bounds) > 0.1


def test_a_sketch_that_embeds_badly_costs_iterations_and_no_accuracy(monkeypatch):
    monkeypatch.setattr(module, "SparseSketch", lambda d, m, **kwargs: SparseOnce(d, m, vec_nnz=1, **kwargs))
    from panther.sketch import SparseSketch as SparseOnce

    A = gaussian(3000, 40) * 1e-3
    A[:40] += torch.eye(40)
    A[:40] *= torch.logspace(0, 3, 40)[:, None]
    b = gaussian(3000, 1, seed=1)
    result = sketch_lstsq(A, b, seed=0)
    assert backward_error(A, b, result.x).max() <= 5e-16


def test_it_warns_when_the_iteration_fails(monkeypatch):
    """A preconditioner for another matrix leaves it to the limit of steps."""
    A, b, _ = problem(3000, 60, 1e8, 1.0)

    def other(SA, Sb, root, seed):
        return from_columns(torch.eye(60, dtype=torch.float64), Sb[:60], root, seed)

    monkeypatch.setattr(module, "from_columns", other)
    with pytest.warns(
        NumericalWarning, match=r"after \d+ iterations the backward error is .* use another seed"
    ) as seen:
        result = sketch_lstsq(A, b, seed=0)
    assert seen[0].filename == __file__
    assert result.iterations == 1000


def test_it_warns_when_the_sketch_misses_a_direction(monkeypatch):
    A, b, _ = problem(3000, 60, 10, 1.0)

    def blind(operand, b, seed):
        lost = torch.linalg.qr(gaussian(60, 60)).Q[:, :1]
        return A - A @ lost @ lost.mT, b

    monkeypatch.setattr(module, "_sketch", blind)
    with pytest.warns(NumericalWarning, match="use another seed"):
        sketch_lstsq(A, b, seed=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_on_cuda_as_on_the_cpu(dtype):
    A, b, _ = problem(3000, 60, 1e3, 1e-3, p=2, dtype=dtype)
    eps = torch.finfo(dtype).eps
    expected = sketch_lstsq(A, b, seed=0)
    for matrix in (A.cuda(), A.to_sparse_coo().cuda(), A[:200].cuda()):
        result, error = sketch_lstsq(matrix, b[: len(matrix)].cuda(), seed=0, return_error=True)
        assert result.x.device.type == error.upper.device.type == "cuda"
        assert backward_error(A[: len(matrix)], b[: len(matrix)], result.x.cpu()).max() <= 4 * eps
        if len(matrix) == len(A):
            assert (A @ (result.x.cpu() - expected.x)).norm() <= 1e4 * eps


A, B = torch.ones(30, 3), torch.ones(30)
NAN, INF = torch.full((30,), math.nan), torch.full((30,), math.inf)
HUGE = torch.sparse_coo_tensor(
    torch.zeros(2, 1, dtype=torch.long), torch.ones(1), (10**5, 10**5), check_invariants=False
)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.ones(2, 30, 3), B), {}, ShapeError, "A, of shape .2, 30, 3., must have two dimensions"),
        ((B, B), {}, ShapeError, "must have two dimensions"),
        ((A, torch.ones(29)), {}, ShapeError, r"b, of shape \(29,\), must have the shape \(30,\) or \(30, p\)"),
        ((A, torch.ones(3, 30)), {}, ShapeError, "reshape or transpose it"),
        ((A, torch.ones(30, 1, 1)), {}, ShapeError, "must have the shape"),
        ((A, torch.ones(())), {}, ShapeError, "must have the shape"),
        ((A, B.double()), {}, DTypeError, r"b is torch.float64 and A is computed in torch.float32: use b.to"),
        ((A, B.long()), {}, DTypeError, "b is torch.int64"),
        ((A.long(), B), {}, DTypeError, "real and floating"),
        ((A.cfloat(), B), {}, DTypeError, "real and floating"),
        ((A, B.cfloat()), {}, DTypeError, "b is torch.complex64"),
        ((A, B.to("meta")), {}, ValueError, "b has a shape and no entries"),
        ((A, [1.0] * 30), {}, TypeError, "b must be a dense tensor or a NumPy array, not list"),
        ((A, B.to_sparse_coo()), {}, TypeError, "pass its dense form"),
        (([[1.0]], B), {}, TypeError, "A must be a tensor"),
        ((A, NAN), {}, ValueError, "b must be finite and has NaN"),
        ((A, INF), {}, ValueError, "b must be finite and has infinity"),
        ((NAN[:, None], B), {}, ValueError, "A must be finite and has NaN"),
        ((INF[:, None], B), {}, ValueError, "A must be finite and has infinity"),
        ((torch.full((500, 2), math.nan), torch.ones(500)), {}, ValueError, "A must be finite and has NaN"),
        ((A, B), {"ridge": -1}, ValueError, "ridge=-1 must be 0 or more and finite: use 0"),
        ((A, B), {"ridge": math.nan}, ValueError, "ridge=nan"),
        ((A, B), {"ridge": math.inf}, ValueError, "ridge=inf"),
        ((A, B), {"ridge": "1"}, TypeError, "ridge must be a number, not str"),
        ((A, B), {"tol": 0.0}, ValueError, "tol=0.0 must be positive and finite: use None"),
        ((A, B), {"tol": -1e-3}, ValueError, "tol=-0.001"),
        ((A, B), {"tol": math.nan}, ValueError, "tol=nan"),
        ((A, B), {"tol": True}, TypeError, "tol must be a number, not bool"),
        ((A, B), {"seed": -1}, ValueError, "seed"),
        ((HUGE, torch.ones(10**5)), {}, ShapeError, "must be small enough: .* use scipy.sparse.linalg.lsmr"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message) as raised:
        sketch_lstsq(*arguments, **options)
    is_a_sentence(raised.value)


sizes = st.integers(0, 200)
poison = st.sampled_from([None, None, None, None, math.nan, math.inf, 1e300, 1e-300, 1e-40, 1e30])
numbers = st.sampled_from([0.0, 0.0, 0.0, 1.0, 1e-3, 1e-30, 1e30, 1e300, -1.0, math.nan, math.inf])


@fuzz
@given(
    st.tuples(st.one_of(sizes, st.integers(500, 3000)), sizes, st.one_of(st.none(), st.integers(0, 5))),
    st.sampled_from([torch.float64, torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]),
    st.sampled_from(["dense", "dense", "transposed", "strided", "expanded", "coo", "scipy", "free"]),
    poison,
    poison,
    numbers,
    numbers,
    st.integers(0, 200),
    st.integers(0, 2**31),
    st.sampled_from([0, 9]),
)
def test_any_input_meets_the_contract_or_a_typed_error(shape, dtype, kind, bad_a, bad_b, ridge, tol, rank, seed, cost):
    m, n, p = shape
    A = gaussian(m, min(rank, n), seed=seed) @ gaussian(min(rank, n), n, seed=seed + 1)
    b = gaussian(m, *(() if p is None else (p,)), seed=seed + 2)
    for matrix, bad in ((A, bad_a), (b, bad_b)):
        if bad is not None and matrix.numel() and dtype.is_floating_point:
            matrix.view(-1)[seed % matrix.numel()] = bad
    A, b = A.to(dtype), b.to(dtype)
    operand = {
        "dense": lambda: A,
        "transposed": lambda: A.mT.contiguous().mT,
        "strided": lambda: torch.zeros(2 * m, 3 * n, dtype=dtype)[::2, ::3].copy_(A),
        "expanded": lambda: A[:, :1].expand(m, n),
        "coo": A.to_sparse_coo,
        "scipy": lambda: scipy.sparse.coo_array(A.double().numpy()) if dtype == torch.float64 else A,
        "free": lambda: Product(A) if A.dtype in (torch.float32, torch.float64) else A,
    }[kind]()
    A = operand if kind == "expanded" else A
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        try:
            module._PASS = cost
            result, error = sketch_lstsq(
                operand, b, ridge=ridge, tol=None if tol == 0 else tol, seed=seed, return_error=True
            )
        except (ValueError, TypeError) as raised:
            is_a_sentence(raised)
            reasons = [ridge, tol, *(bad for bad in (bad_a, bad_b) if bad is not None)]
            assert not dtype.is_floating_point or any(value not in (0.0, 1.0, 1e-3) for value in reasons)
            return
        finally:
            module._PASS = 0
    assert ridge >= 0
    assert result.x.shape == (n, *b.shape[1:])
    assert result.residual_norm.shape == error.upper.shape == b.shape[1:]
    assert result.x.isfinite().all()
    check_optimal(A, b, result, ridge, tol)


def check_optimal(A, b, result, ridge, tol):
    """The gradient at x is as small as the backward error of a direct solver makes it."""
    A, b, x = A.double(), b.double(), result.x.double()
    scale_a = A.abs().max().item() if A.numel() else 1.0
    scale_b = b.abs().max().item() if b.numel() else 1.0
    if not (1e-100 < scale_a < 1e100 and 1e-100 < scale_b < 1e100) or tol or ridge > 1e100:
        return
    r = b - A @ x
    eps = torch.finfo(result.x.dtype).eps
    rounding = 10 * math.sqrt(max(A.shape)) * eps
    # Subnormal numbers are rounded to multiples of one number, however small they are.
    subnormal = torch.finfo(result.x.dtype).smallest_normal * eps * math.sqrt(x.numel())
    far = (r.norm(dim=0) - result.residual_norm).abs()
    assert (far <= rounding * (A.norm() * x.norm() + b.norm()) + subnormal * (1 + A.norm())).all()
    frobenius = A.norm() + math.sqrt(ridge)
    norm = frobenius * (torch.hypot(r.norm(), math.sqrt(ridge) * x.norm()) + frobenius * x.norm())
    assert (A.mT @ r - ridge * x).norm() <= 10 * rounding * norm + subnormal * frobenius**2


@pytest.mark.parametrize("case", ["plain", "graded", "ridge", "duplicates", "pair", "zero", "float32", "tol"])
def test_a_sparse_matrix_is_solved_by_conjugate_gradients_where_it_can_be(case, monkeypatch):
    """With scaled columns, and never where columns depend on each other, where x would not have least norm."""
    monkeypatch.setattr(module, "_DIGITS", math.inf)
    monkeypatch.setattr(module, "_STEP", 1e-9)
    dense = gaussian(900, 40) * (gaussian(900, 40, seed=1) > 1)
    b, ridge, tol = gaussian(900, 2, seed=2), 0.0, None
    if case == "graded":
        dense = dense * torch.logspace(0, -8, 40, dtype=torch.float64)
    if case == "ridge":
        ridge = 3.0
    if case == "duplicates":
        dense = torch.cat((dense, 3 * dense[:, :4]), 1)
    if case == "pair":
        dense = torch.cat((dense, 2 * dense[:, :1]), 1)
    if case == "zero":
        dense[:, 7] = 0
    if case == "tol":
        tol = 1e-3
    solved = []
    original = module.solve_quickly
    monkeypatch.setattr(module, "solve_quickly", lambda *args: solved.append(original(*args)) or solved[-1])
    A = dense.float() if case == "float32" else dense
    eps = torch.finfo(A.dtype).eps
    result, estimate = sketch_lstsq(A.to_sparse(), b.to(A.dtype), ridge=ridge, tol=tol, seed=0, return_error=True)
    x = result.x.double()
    stacked = torch.cat((A.double(), ridge**0.5 * torch.eye(A.shape[1], dtype=torch.float64)))
    target = torch.cat((b.to(A.dtype).double(), torch.zeros(A.shape[1], 2, dtype=torch.float64)))
    expected = torch.linalg.lstsq(stacked, target, driver="gelsd").solution
    optimum = (stacked @ expected - target).norm(dim=0)
    distance = (stacked @ (x - expected)).norm(dim=0)
    assert (distance <= (1e-3 if tol else 1e4 * eps) * optimum).all()
    assert (distance <= estimate.upper.double()).all()
    if case in ("duplicates", "pair", "zero"):
        torch.testing.assert_close(x, expected, atol=1e-9, rtol=0)
    is_quick = bool(solved) and solved[0] is not None
    assert is_quick == (case not in ("duplicates", "pair", "zero"))
    if is_quick:
        assert 0 < result.iterations < 40
