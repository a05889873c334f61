"""Orthonormal bases: fast where Cholesky's factor exists, right everywhere."""

import pytest
import torch
from fuzzing import fuzz, is_a_sentence
from hypothesis import given
from hypothesis import strategies as st
from matrices import DTYPES, assert_orthonormal, frobenius, gaussian, is_finite, operands, orthogonal, with_spectrum
from tolerances import factorisation

from panther.errors import DTypeError, PantherError, ShapeError
from panther.linalg import cholesky_qr, orthonormalize
from panther.linalg.orthogonal import fix_signs, near_qr


def hard_blocks(dtype):
    """Blocks that CholeskyQR alone fails on, and some it does not."""
    m, n = 90, 12
    zero_column = gaussian(m, n, dtype=dtype)
    zero_column[:, 3] = 0
    return {
        "gaussian": gaussian(m, n, dtype=dtype),
        "badly conditioned": with_spectrum(m, n, torch.logspace(0, -12, n), dtype),
        "on the brink": with_spectrum(m, n, torch.logspace(0, -3.5 if dtype == torch.float32 else -7.8, n), dtype),
        "deficient": with_spectrum(m, n, [1.0] * 5, dtype),
        "ones": torch.ones(m, n, dtype=dtype),
        "zero": torch.zeros(m, n, dtype=dtype),
        "zero column": zero_column,
        "tiny": gaussian(m, n, dtype=dtype) * 1e-30,
        "huge": gaussian(m, n, dtype=dtype) * 1e30,
        "square": gaussian(n, n, dtype=dtype),
        "column": gaussian(m, 1, dtype=dtype),
        "one": torch.ones(1, 1, dtype=dtype),
        "batch": torch.stack((gaussian(m, n, dtype=dtype), torch.zeros(m, n, dtype=dtype))),
        "no columns": torch.zeros(m, 0, dtype=dtype),
        "nothing": torch.zeros(0, 0, dtype=dtype),
        "no batch": torch.zeros(0, m, n, dtype=dtype),
        "transposed": gaussian(n, m, dtype=dtype).mT,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_qr_is_a_qr_factorisation(dtype):
    for name in hard_blocks(torch.float64):
        X = hard_blocks(dtype)[name]
        Q, R = cholesky_qr(X)
        assert Q.shape == X.shape
        assert R.shape == (*X.shape[:-2], X.shape[-1], X.shape[-1])
        assert_orthonormal(Q)
        assert torch.equal(R, R.triu())
        assert ((Q.double() @ R.double() - X.double()).norm() <= factorisation(dtype) * X.double().norm()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_orthonormalize_keeps_clear_of_a_basis_and_spans_the_block(dtype):
    for name in hard_blocks(torch.float64):
        X = hard_blocks(dtype)[name]
        m, n = X.shape[-2:]
        known = min(20, m - n)
        bases = {"random": orthogonal(m, known).to(dtype), "unit": torch.eye(m, known, dtype=dtype)}
        for basis in (basis.expand(*X.shape[:-2], m, known) for basis in bases.values()):
            for block in (
                X,
                X + 1e3 * basis @ gaussian(known, n, dtype=dtype),
                basis @ gaussian(known, n, dtype=dtype),
            ):
                Q = orthonormalize(block, basis)
                assert Q.shape == X.shape
                assert_orthonormal(torch.cat((basis, Q), -1))
                whole = torch.cat((basis, Q), -1).double()
                left = block.double() - whole @ (whole.mT @ block.double())
                assert (left.norm() <= factorisation(dtype) * block.double().norm()).all()
        assert_orthonormal(orthonormalize(X))
        assert_orthonormal(orthonormalize(X, X[..., :0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_room_to_spare(dtype):
    """The basis and the block fill the space; the block lies in the basis."""
    basis = orthogonal(30, 25).to(dtype)
    Q = orthonormalize(basis @ gaussian(25, 5, dtype=dtype), basis)
    assert_orthonormal(torch.cat((basis, Q), -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_near_qr_leaves_to_do(dtype):
    for X in (gaussian(50, 6, dtype=dtype), torch.ones(50, 6, dtype=dtype)):
        Q, T, R = near_qr(X)
        assert_orthonormal(Q @ T)
        assert torch.linalg.cond(Q) <= 3**0.5
        assert torch.allclose(Q @ T @ R, X, atol=1e-5)


def test_the_fast_path_takes_what_it_should(monkeypatch):
    X, basis = gaussian(500, 40, dtype=torch.float32), orthogonal(500, 60).float()
    monkeypatch.setattr(torch.linalg, "qr", None)
    cholesky_qr(X)
    orthonormalize(X, basis)


def test_signs():
    Q = torch.tensor([[1.0, -3.0, 0.0], [-2.0, 3.0, 0.0]])
    assert fix_signs(Q).tolist() == [[-1, -1, 1]]
    assert fix_signs(Q[:0]).tolist() == [[1, 1, 1]]
    assert fix_signs(Q.expand(2, 2, 3)).shape == (2, 1, 3)


def test_too_many_columns():
    with pytest.raises(ShapeError, match="5 columns beside a basis of 0 must be at most the 4 rows"):
        cholesky_qr(torch.ones(4, 5))
    with pytest.raises(ShapeError, match="3 columns beside a basis of 2 must be at most the 4 rows"):
        orthonormalize(torch.ones(4, 3), torch.eye(4, 2))


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        ([[1.0]], TypeError, "X must be a dense tensor or a NumPy array, not list"),
        (
            torch.eye(2).to_sparse(),
            TypeError,
            r"X must be a dense tensor .* torch\.sparse_coo: pass its dense form, X\.to_dense\(\)",
        ),
        (torch.ones(3), ShapeError, r"X, of shape \(3,\), must have two dimensions or more"),
        (torch.ones(3, 2).half(), DTypeError, "X is torch.float16 and must be float32 or float64"),
        (torch.full((3, 2), torch.nan), ValueError, "X must be finite"),
    ],
)
def test_bad_input(X, error, message):
    for function in (cholesky_qr, orthonormalize):
        with pytest.raises(error, match=message):
            function(X)


def test_a_basis_that_does_not_go_with_the_block():
    for basis in (torch.ones(4, 1), torch.ones(1, 3, 1), torch.ones(3, 1).double()):
        with pytest.raises(ShapeError, match=r"basis, torch\.float"):
            orthonormalize(torch.ones(3, 1), basis)


@fuzz
@given(operands(), st.integers(0, 5))
def test_a_contract_or_a_typed_error(X, known):
    basis = None
    if X.ndim > 1 and known <= X.shape[-2]:
        basis = torch.eye(X.shape[-2], known, dtype=X.dtype).expand(*X.shape[:-1], known)
    try:
        Q, R = cholesky_qr(X)
        joint = orthonormalize(X, basis)
    except (PantherError, ValueError, TypeError) as error:
        is_a_sentence(error)
        return
    assert is_finite(X)
    assert_orthonormal(Q)
    assert_orthonormal(joint if basis is None else torch.cat((basis, joint), -1))
    error = Q.double() @ R.double() - X.double()
    assert (frobenius(error) <= 3 * factorisation(X.dtype) * frobenius(X)).all()


@fuzz
@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 50), st.integers(0, 20))
def test_any_rank_is_completed(m, n, dtype, seed, rank):
    n = min(m, n)
    X = gaussian(m, rank, seed=seed, dtype=dtype) @ gaussian(rank, n, seed=seed + 1, dtype=dtype)
    Q, R = cholesky_qr(X)
    assert_orthonormal(Q)
    assert (Q @ R - X).double().norm() <= factorisation(dtype) * X.double().norm()
