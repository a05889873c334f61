"""Matrices of known spectrum, and what every truncated factorisation must satisfy."""

import warnings

import numpy as np
import pandas
import torch
from hypothesis import strategies as st
from tolerances import factorisation

DTYPES = [torch.float32, torch.float64]
SIZES = [(1, 1), (1, 7), (7, 1), (40, 40), (130, 90), (90, 130), (301, 187), (187, 301), (2, 3, 90, 80), (0, 30, 20)]


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthogonal(n, k, seed=0):
    return torch.linalg.qr(gaussian(n, k, seed=seed))[0]


def with_spectrum(m, n, sigma, dtype=torch.float64, seed=0):
    """A matrix with the given singular values, computed in float64 and rounded."""
    sigma = torch.as_tensor(sigma, dtype=torch.float64)
    return ((orthogonal(m, len(sigma), seed) * sigma) @ orthogonal(n, len(sigma), seed + 1).mT).to(dtype)


def symmetric(n, values, dtype=torch.float64, seed=0):
    V = orthogonal(n, len(values), seed)
    A = (V * torch.as_tensor(values, dtype=torch.float64)) @ V.mT
    return ((A + A.mT) / 2).to(dtype)


def assert_orthonormal(Q):
    bound, Q = factorisation(Q.dtype), Q.double()  # the float32 product would measure its own rounding
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype)
    assert Q.numel() == 0 or (Q.mT @ Q - eye).abs().max() <= bound


def frobenius(A):
    return torch.linalg.vector_norm(A.double(), dim=(-2, -1))


def assert_positive_peaks(Q):
    if Q.numel():
        peaks = Q.gather(-2, Q.abs().argmax(-2, keepdim=True))
        assert bool((peaks > 0).all())


def assert_qb(A, result, rank):
    Q, B = result
    assert Q.shape == (*A.shape[:-1], rank)
    assert B.shape == (*A.shape[:-2], rank, A.shape[-1])
    assert not Q.requires_grad
    assert not B.requires_grad
    assert_orthonormal(Q)
    error = frobenius(Q.mT.double() @ A.double() - B.double())
    assert bool((error <= factorisation(Q.dtype) * frobenius(A)).all())


def assert_truncated_svd(A, result, k, excess=1.1):
    """Shapes, orthonormality, order, signs, and an error near the least one."""
    U, S, V = result
    *batch, m, n = A.shape
    assert U.shape == (*batch, m, k)
    assert S.shape == (*batch, k)
    assert V.shape == (*batch, n, k)
    assert not any(part.requires_grad for part in result)
    assert_orthonormal(U)
    assert_orthonormal(V)
    assert_positive_peaks(U)
    assert bool((S >= 0).all())
    assert bool((S.diff(dim=-1) <= 0).all())
    sigma = torch.linalg.svdvals(A.double())
    error = frobenius(A.double() - (U.double() * S.double()[..., None, :]) @ V.mT.double())
    optimal_error = torch.linalg.vector_norm(sigma[..., k:], dim=-1)
    floor = 3 * factorisation(U.dtype) * torch.linalg.vector_norm(sigma, dim=-1)
    assert bool((error <= excess * optimal_error + floor).all())


def assert_eigenpairs(A, values, vectors, k, excess):
    """Shapes, orthonormality, order, signs, and an error near the least one."""
    assert values.shape == (*A.shape[:-2], k)
    assert vectors.shape == (*A.shape[:-1], k)
    assert not values.requires_grad
    assert not vectors.requires_grad
    assert_orthonormal(vectors)
    assert_positive_peaks(vectors)
    assert bool((values.abs().diff(dim=-1) <= 0).all())
    sizes = torch.linalg.svdvals(A.double())
    error = frobenius(A.double() - (vectors.double() * values.double()[..., None, :]) @ vectors.mT.double())
    optimal_error = torch.linalg.vector_norm(sizes[..., k:], dim=-1)
    floor = 3 * factorisation(vectors.dtype) * torch.linalg.vector_norm(sizes, dim=-1)
    assert bool((error <= excess * optimal_error + floor).all())


class MatrixFree:
    """A matrix known by its products."""

    def __init__(self, A, transposed=True):
        self.A, self.shape, self.dtype = A, A.shape, A.dtype
        if transposed:
            self.T = MatrixFree(A.mT, False)

    def __matmul__(self, X):
        return self.A @ X


def _twice(A):
    A = A.to_sparse_coo()
    return torch.sparse_coo_tensor(
        torch.cat((A.indices(),) * 2, 1), torch.cat((A.values() / 2,) * 2), A.shape, check_invariants=True
    )


def _compressed(convert):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse [CB]S[RC] tensor support is in beta", UserWarning)
        return convert()


# Ways to hold a matrix that a dense tensor holds.
LAYOUTS = {
    "non-contiguous": lambda A: A.mT.contiguous().mT,
    "strided": lambda A: torch.stack((A, A), -1)[..., 0],
    "requires_grad": lambda A: A.clone().requires_grad_(),
    "numpy": lambda A: A.numpy(),
    "numpy, fortran": lambda A: np.asfortranarray(A.numpy()),
    "numpy, read-only": lambda A: np.frombuffer(A.numpy().tobytes(), A.numpy().dtype).reshape(A.shape),
    "numpy, backwards": lambda A: np.ascontiguousarray(A.numpy()[:, ::-1])[:, ::-1],
    "pandas": lambda A: pandas.DataFrame(A.numpy()),
    "coo": lambda A: A.to_sparse_coo(),
    "coo, uncoalesced": _twice,
    "csr": lambda A: _compressed(A.to_sparse_csr),
    "csc": lambda A: _compressed(A.to_sparse_csc),
    "bsr": lambda A: _compressed(lambda: A.to_sparse_bsr((1, 1))),
    "bsc": lambda A: _compressed(lambda: A.to_sparse_bsc((1, 1))),
    "matrix-free": lambda A: MatrixFree(A),
}


@st.composite
def operands(draw, square=False):
    """Anything a user may pass: shapes, dtypes, strides, spectra, scales, NaN and infinity."""
    m = draw(st.integers(0, 200))
    n = m if square else draw(st.integers(0, 200))
    batch = draw(st.sampled_from([(), (), (), (2,), (0,), (2, 1)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, dtype]))
    kind = draw(st.sampled_from(["gaussian", "low rank", "decay", "zero", "ones", "identity"]))
    seed = draw(st.integers(0, 100))
    if kind == "gaussian":
        A = gaussian(*batch, m, n, seed=seed)
    elif kind == "low rank":
        A = gaussian(*batch, m, 3, seed=seed) @ gaussian(3, n, seed=seed + 1)
    elif kind == "decay":
        A = gaussian(*batch, m, n, seed=seed) * 0.5 ** torch.arange(n, dtype=torch.float64)
    elif kind == "zero":
        A = torch.zeros(*batch, m, n, dtype=torch.float64)
    elif kind == "ones":
        A = torch.ones(*batch, m, n, dtype=torch.float64)
    else:
        A = torch.eye(m, n, dtype=torch.float64).expand(*batch, m, n)
    A = A.clone() if not square else (A + A.mT) / 2
    if draw(st.integers(0, 3)) == 0:
        A = A * draw(st.sampled_from([1e-30, 1e-20, 1e15, 1e30]))
    if dtype == torch.int64:
        A = A.nan_to_num().clamp(-100, 100)
    A = A.to(dtype)
    bad = draw(st.sampled_from([None] * 6 + [float("nan"), float("inf")]))
    if bad is not None and A.numel() and dtype.is_floating_point:
        A[..., draw(st.integers(0, m - 1)), draw(st.integers(0, n - 1))] = bad
    layout = draw(st.sampled_from(["plain", "plain", "transposed", "strided", "one dimension"]))
    if layout == "transposed":
        A = A.mT.contiguous().mT
    elif layout == "strided":
        A = torch.stack((A, A), -1)[..., 0]
    elif layout == "one dimension":
        A = A.flatten()
    return A


sizes = st.one_of(
    st.integers(0, 30), st.integers(0, 30), st.sampled_from([-1, 100, 200, 10**6, 10**30, 2.0, None, "3"])
)
tolerances = st.one_of(
    st.none(), st.none(), st.sampled_from([0.0, 1e-3, 0.1, 0.5, 1e-14, 1.0, -1.0, float("nan"), float("inf"), "1", 1])
)


def is_finite(A):
    return A.is_floating_point() and bool(A.isfinite().all())
