"""pcg, nystrom_preconditioner and rp_cholesky: residuals, steps, the papers' kernels, and what is refused."""

import math

import numpy as np
import pytest
import scipy.sparse
import torch
from matrices import DTYPES, LAYOUTS, MatrixFree, gaussian, symmetric
from sklearn.datasets import load_breast_cancer, load_digits

from panther.errors import DTypeError, NumericalWarning, ShapeError
from panther.linalg import RPCholeskyResult, nystrom, nystrom_preconditioner, pcg, rp_cholesky

DECAY = torch.arange(1, 301.0, dtype=torch.float64) ** -2


def radial(X, Y, length):
    """A Gaussian kernel, from differences: distances by products would be wrong by the root of eps."""
    return torch.exp(-(torch.cdist(X, Y, compute_mode="donot_use_mm_for_euclid_dist") ** 2) / (2 * length**2))


def smile(n=600):
    """A large eye, and few points on the other eye, the face and the mouth, after Chen et al. (2025)."""
    angle = torch.linspace(0, 6.2, 40, dtype=torch.float64)
    mouth = torch.linspace(-4, 4, 10, dtype=torch.float64)
    left, right = gaussian(n - 60, 2) / 5, gaussian(10, 2, seed=1) / 5
    eyes = torch.cat((left + torch.tensor([-4.0, 4.0]), right + torch.tensor([4.0, 4.0])))
    curves = torch.stack((10 * angle.cos(), 10 * angle.sin()), 1), torch.stack((mouth, mouth**2 / 16 - 5), 1)
    return torch.cat((eyes, *curves))


def uniform_error(K, rank, seed):
    """Trace error of a Nystroem approximation from uniformly drawn columns."""
    J = torch.randperm(len(K), generator=torch.Generator().manual_seed(seed))[:rank]
    return (K.trace() - (torch.linalg.pinv(K[J][:, J], rtol=1e-12) * (K[J] @ K[:, J])).sum()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [None, 1, 5])
def test_solutions_and_residuals(dtype, columns):
    A, shape = symmetric(300, DECAY, dtype), (300,) if columns is None else (300, columns)
    b = gaussian(*shape, dtype=dtype) * (1e-20 if columns == 5 else 1.0)
    shifted = A.double() + 0.01 * torch.eye(300)
    for M in (None, nystrom_preconditioner(A, 30, 0.01, seed=0), torch.linalg.inv(shifted).to(dtype)):
        x, residual_norm, iterations = pcg(A, b, M, shift=0.01, tol=1e-5)
        assert x.shape == b.shape
        assert residual_norm.shape == shape[1:]
        exact = (b.double() - shifted @ x.double()).norm(dim=0)
        assert bool((residual_norm <= 1e-5 * b.norm(dim=0)).all())
        assert torch.allclose(residual_norm.double(), exact, rtol=0.2, atol=float(1e-6 * b.double().norm()))
        assert iterations <= (60 if M is None else 12 if not isinstance(M, torch.Tensor) else 3)


@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12])
def test_ill_conditioned_systems_take_few_steps(condition):
    A = symmetric(300, DECAY)
    b, shift = gaussian(300, 2), 1 / condition
    M = nystrom_preconditioner(A, 299, shift, seed=0)
    x, _, iterations = pcg(A, b, M, shift=shift, tol=1e-3)
    assert iterations <= 30
    assert bool(((b - A @ x - shift * x).norm(dim=0) <= 1.01e-3 * b.norm(dim=0)).all())


def test_a_kernel_takes_a_third_of_the_steps():
    K = radial(torch.tensor(load_digits().data[:500]), torch.tensor(load_digits().data[:500]), 20.0)
    b = gaussian(500)
    plain = pcg(K, b, shift=1e-3, tol=1e-8).iterations
    for M in (nystrom_preconditioner(K, 150, 1e-3, seed=0), rp_cholesky(K, 150, seed=0)):
        P = nystrom_preconditioner(M, 150, 1e-3) if isinstance(M, RPCholeskyResult) else M
        assert pcg(K, b, P, shift=1e-3, tol=1e-8).iterations < plain / 2


def test_clustered_spectra_take_a_step_for_each_value():
    A = symmetric(200, [1.0] * 80 + [2.0] * 80 + [100.0] * 40)
    assert pcg(A, gaussian(200), tol=1e-10).iterations == 3


def test_the_recursion_is_corrected():
    """In float32 the recursive residual of plain conjugate gradients falls below the true one, which restarts mend."""
    A = symmetric(200, torch.logspace(0, -3, 200), torch.float32)
    x = pcg(A, A @ torch.ones(200), tol=3e-7).x
    exact = (A.double() @ (x.double() - 1)).norm()
    assert exact < 1e-6 * (A @ torch.ones(200)).norm()
    with pytest.warns(NumericalWarning, match=r"after \d+ steps the residual is \d.\de-\d+ of b, and tol=1.0e-12"):
        pcg(A, gaussian(200, dtype=torch.float32), tol=1e-12)


def test_a_preconditioner_is_the_inverse_of_what_it_says():
    A = symmetric(90, 0.8 ** torch.arange(90.0))
    M = nystrom_preconditioner(A, 20, 1e-2, seed=0)
    P, eye = M.power(1.0, torch.eye(90, dtype=A.dtype)), torch.eye(90, dtype=A.dtype)
    assert torch.allclose(M @ P, eye, atol=1e-10)
    assert torch.allclose(M.power(-0.5, M.power(-0.5, P)), eye, atol=1e-10)
    assert torch.allclose(torch.logdet(P), torch.tensor(M.logdet(), dtype=A.dtype))
    U, L = nystrom(A, 25, oversample=0, n_iter=0, seed=0)
    again = nystrom_preconditioner(nystrom(A, 25, oversample=0, n_iter=0, seed=0), 20, 1e-2)
    assert torch.equal(again.U, U[:, :20])
    assert again.tail == L[19]


@pytest.mark.parametrize("hold", LAYOUTS)
def test_every_way_to_hold_a_matrix(hold):
    A = symmetric(60, 0.8 ** torch.arange(60.0)) + torch.eye(60)
    b = gaussian(60, 2)
    M = nystrom_preconditioner(LAYOUTS[hold](A), 10, seed=0)
    assert torch.allclose(pcg(LAYOUTS[hold](A), b, M).x, torch.linalg.solve(A, b), atol=1e-5)


def test_sparse_and_matrix_free_systems():
    second = scipy.sparse.diags_array([2.0, -1.0, -1.0], offsets=[0, 1, -1], shape=(15, 15))
    A = scipy.sparse.kronsum(second, second, format="csr")
    b = np.ones((225, 2))
    expected = torch.as_tensor(np.linalg.solve(A.toarray(), b))
    dense = torch.as_tensor(A.toarray())
    for held in (A, dense.to_sparse_coo(), MatrixFree(dense, transposed=False)):
        assert torch.allclose(torch.as_tensor(pcg(held, torch.as_tensor(b), tol=1e-10).x), expected)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_small_sizes(n):
    A = torch.diag(torch.arange(1.0, n + 1))
    for p in (0, 1, 2):
        result = pcg(A, torch.ones(n, p))
        assert torch.allclose(A @ result.x, torch.ones(n, p), atol=1e-5)
    zero = pcg(torch.eye(4), torch.zeros(4, 2))
    assert (zero.iterations, zero.x.abs().sum(), zero.residual_norm.sum()) == (0, 0, 0)
    assert rp_cholesky(A, n, seed=0).F.shape == (n, n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_factors(dtype):
    A = symmetric(120, 0.8 ** torch.arange(120.0), dtype)
    for seed in range(5):
        for rank in (0, 1, 7, 40):
            F, pivots, trace_error = result = rp_cholesky(A, rank, seed=seed)
            assert F.shape == (120, rank)
            assert len(set(pivots.tolist())) == rank
            assert F.dtype == trace_error.dtype == dtype
            rest = A.double() - F.double() @ F.double().mT
            bound = 100 * torch.finfo(dtype).eps
            assert bool((rest[:, pivots].abs() <= bound).all())
            assert trace_error == pytest.approx(rest.trace().item(), abs=10 * bound)
            assert torch.linalg.eigvalsh(rest)[0] >= -bound
            assert torch.allclose(result @ torch.eye(120, dtype=dtype), F @ F.mT)
        best = torch.linalg.eigvalsh(A.double())[:-40].sum()
        assert trace_error <= 20 * best + 1e-4


def test_the_tolerance_and_the_rank_of_a_matrix_stop():
    A = symmetric(120, torch.ones(9) * 3)
    F, pivots, trace_error = rp_cholesky(A, 60, seed=0)
    assert len(pivots) == 9
    assert trace_error < 1e-12
    K = symmetric(120, 0.8 ** torch.arange(120.0))
    F, _, trace_error = rp_cholesky(K, 120, tol=0.05, seed=0)
    assert 0.01 * K.trace() < trace_error <= 0.05 * K.trace()
    assert F.shape[1] < 60
    assert rp_cholesky(torch.zeros(5, 5), 3, seed=0).F.shape == (5, 0)


def test_pivots_find_what_uniform_columns_miss():
    """The paper's smile, where one cluster has 90 % of the points, and measurements with outliers (breast cancer)."""
    K = radial(smile(), smile(), 2.0)
    errors = [rp_cholesky(K, 50, seed=seed).trace_error.item() for seed in range(5)]
    assert max(errors) < 1e-2 * min(uniform_error(K, 50, seed) for seed in range(5))
    X = load_breast_cancer().data
    X = torch.tensor((X - X.mean(0)) / X.std(0))
    K = radial(X, X, torch.pdist(X).median())
    errors = [rp_cholesky(K, 150, seed=seed).trace_error.item() for seed in range(3)]
    assert max(errors) < 0.7 * min(uniform_error(K, 150, seed) for seed in range(3))


def test_the_first_pivots_are_drawn_by_the_diagonal():
    """Over 400 seeds, the frequency is within 4.4 standard deviations of its expectation (failure 1e-5)."""
    A = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    first = torch.stack([rp_cholesky(A, 2, seed=seed).pivots for seed in range(400)])
    second_after_first = (first == torch.tensor([0, 1])).all(1).double().mean().item()
    for frequency, probability in ((first[:, 0].eq(0).double().mean().item(), 0.4), (second_after_first, 0.4 * 0.5)):
        assert abs(frequency - probability) < 4.4 * math.sqrt(probability * (1 - probability) / 400)


def test_blocks_keep_the_distribution():
    """Pivots in blocks of 10 and one by one have the same mean error, to 4.4 standard errors of 60 seeds each."""
    X = torch.cat((gaussian(150, 2), gaussian(10, 2, seed=1) + 9))
    K = radial(X, X, 1.0)

    def errors(rank, first):  # blocks of rank / 10
        rows = [rp_cholesky(K, rank, seed=seed) for seed in range(first, first + 60)]
        return torch.stack([K.trace() - row.F[:, :9].square().sum() for row in rows])

    one, block = errors(9, 0), errors(100, 100)
    deviation = (one.var() / 60 + block.var() / 60).sqrt()
    assert abs(one.mean() - block.mean()) < 4.4 * deviation


def test_a_function_of_columns_reads_few():
    X = gaussian(400, 3)
    count = []

    def columns(indices):
        count.append(len(indices))
        return radial(X, X[indices], 1.0)

    result = rp_cholesky(columns, 40, diagonal=torch.ones(400, dtype=torch.float64), seed=0)
    expected = rp_cholesky(radial(X, X, 1.0), 40, seed=0)
    assert torch.equal(result.pivots, expected.pivots)
    assert torch.allclose(result.F, expected.F, atol=1e-7)
    assert 40 <= sum(count) <= 80


def test_half_precision_is_computed_in_float32():
    A = symmetric(50, [4.0, 2.0, 1.0]).bfloat16()
    result = rp_cholesky(A, 3, seed=0)
    assert result.F.dtype == torch.float32
    assert result.trace_error < 0.1
    assert pcg(A, torch.ones(50).bfloat16(), shift=1.0).x.dtype == torch.float32


def test_arrays_are_not_written():
    A = symmetric(50, [4.0, 2.0, 1.0])
    array = A.numpy().copy()
    assert np.array_equal(rp_cholesky(array, 3, seed=0).pivots, rp_cholesky(A, 3, seed=0).pivots)
    M = nystrom_preconditioner(rp_cholesky(array, 3, seed=0), 3, 0.1)
    assert isinstance(pcg(array, np.ones(50), M, shift=0.1).x, np.ndarray)
    assert np.array_equal(array, A.numpy())


EYE = torch.eye(9)
INDEFINITE = symmetric(40, [2.0, 1.0, -0.5], torch.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pcg(torch.ones(3, 4), torch.ones(3)), ShapeError, r"A, of shape \(3, 4\), must be square"),
        (lambda: pcg(EYE, torch.ones(8)), ShapeError, r"b, of shape \(8,\), must have the shape \(9,\) or \(9, p\)"),
        (lambda: pcg(EYE, torch.ones(9).double()), DTypeError, "b is torch.float64 and A is computed in torch.float32"),
        (lambda: pcg(EYE, torch.ones(9), torch.eye(8)), RuntimeError, "shapes cannot be multiplied"),
        (lambda: pcg(EYE, torch.ones(9), torch.ones(8, 9)), ShapeError, r"preconditioner @ X must have the shape of X"),
        (lambda: pcg(EYE, torch.ones(9), -EYE), ValueError, "preconditioner must be positive definite"),
        (lambda: pcg(-EYE, torch.ones(9)), ValueError, r"A \+ shift I must be positive definite and has x\^T M x = -"),
        (lambda: pcg(INDEFINITE, gaussian(40).float()), ValueError, r"A \+ shift I must be positive definite"),
        (lambda: pcg(EYE, torch.ones(9), tol=0.0), ValueError, "tol=0.0 must be positive and below 1"),
        (lambda: pcg(EYE, torch.ones(9), shift="1"), TypeError, "shift must be a number, not str"),
        (lambda: pcg(EYE, torch.ones(9), max_iter=-1), ShapeError, "max_iter=-1 must be at least 0"),
        (lambda: pcg(EYE * math.nan, torch.ones(9)), ValueError, "A must be finite and has NaN"),
        (lambda: pcg(torch.eye(9, dtype=torch.complex64), torch.ones(9)), DTypeError, "complex64 and must be real"),
        (lambda: nystrom_preconditioner(EYE, 0), ShapeError, "rank=0 must be at least 1"),
        (lambda: nystrom_preconditioner(EYE, 10), ShapeError, "k=10 must be at most"),
        (lambda: nystrom_preconditioner(EYE * 0, 3), ValueError, "eigenvalue 3 of A is 0: use a shift above 0.0"),
        (lambda: nystrom_preconditioner(torch.eye(3).expand(2, 3, 3), 1), ShapeError, "pass one matrix at a time"),
        (lambda: nystrom_preconditioner(INDEFINITE, 9, 1.0), ValueError, "A must be positive semidefinite"),
        (lambda: rp_cholesky(torch.ones(3, 4), 2), ShapeError, r"A, of shape \(3, 4\), must be square"),
        (lambda: rp_cholesky(EYE, 10), ShapeError, "rank=10 must be at most n = 9: use rank=9"),
        (lambda: rp_cholesky(EYE, -1), ShapeError, "rank=-1 must be at least 0"),
        (lambda: rp_cholesky(EYE, 2, tol=1.0), ValueError, "tol"),
        (lambda: rp_cholesky(lambda i: EYE[:, i], 2), TypeError, "diagonal must be given where A is a function"),
        (
            lambda: rp_cholesky(lambda i: EYE[i], 2, diagonal=torch.ones(9), seed=0),
            ShapeError,
            r"A\(1 indices\) must have the shape \(9, 1\)",
        ),
        (lambda: rp_cholesky(EYE.to_sparse(), 2), TypeError, "A must be a dense tensor or a NumPy array"),
        (lambda: rp_cholesky(EYE * math.nan, 2), ValueError, "A must be finite and has NaN"),
        (lambda: rp_cholesky(EYE.long(), 2), DTypeError, "must be a floating dtype"),
        (lambda: rp_cholesky(-EYE, 2), ValueError, "A must be positive semidefinite and has the diagonal entry -1"),
        (lambda: rp_cholesky(INDEFINITE, 9, seed=0), ValueError, "A must be positive semidefinite"),
        (
            lambda: rp_cholesky(torch.eye(40) + torch.ones(40, 40).triu(1), 40, seed=0),
            ValueError,
            "A must be symmetric|A must be positive semidefinite",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
