r"""Truncated singular value decomposition from a block Krylov space that grows until a further block gains little.

With n the smaller dimension of A, an orthonormal P spans :math:`[A^T\Omega, (A^T A) A^T\Omega, \dots]`, and the Gram
matrix :math:`G = (A P)^T A P` has all the information: its eigenpairs give the singular values and vectors of
:math:`A P P^T`, and, because in a Krylov space G is block tridiagonal, also the rate at which they still change.

Only the products with A are in A's dtype. All small matrices are in float64, in which G resolves the singular values
of a float32 matrix to its rounding error. C. Musco and C. Musco (2015), arXiv:1504.05477; R. M. Larsen, "Lanczos
bidiagonalization with partial reorthogonalization", 1998, doi:10.7146/dpb.v27i537.7070.
"""

__all__ = ["KrylovSpace", "grow", "iterate", "whole_space"]

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from panther.linalg._ranks import ALONE, Ranks
from panther.linalg.operand import Operand, frobenius_norm, power_of_two
from panther.linalg.orthogonal import add_to_basis, core_svd, near_qr

# n_iter="auto" takes at least three blocks, because the estimate compares the last two, and at most nine.
_LEAST_BLOCKS, _MOST_BLOCKS = 3, 9
# A space is large enough if further blocks would reduce the squared error by at most the fraction _WORTH (a tenth of it
# for k = 10, where torch.svd_lowrank with 10 columns more gains as much), and if the next block would increase the last
# squared singular value by at most the fraction _LAST_WORTH.
_WORTH, _WORTH_FROM = 0.015, 100
_LAST_WORTH = 0.3
# The squared error of a sparse matrix is mostly outside of any k triplets, so the space must be large enough for their
# squared singular values too, which further blocks may increase by this fraction. Products cost little there.
_SPARSE_WORTH = 3e-5
# Eigenvalues of a Gram matrix are wrong by some eps of the largest, so singular values below this fraction of the
# largest one would have less than three digits. They are computed by QR of A P instead.
_GRAM_REACH = 1e-6
# Condition of A P up to which the rounding of G, which grows with its square, is not much above the dtype's rounding.
_CLEAN = {torch.float32: 5e3, torch.float64: 4.0}


@dataclass(frozen=True)
class KrylovSpace:
    """An orthonormal basis of directions, the image of A on it, and the eigenpairs of their Gram matrix.

    Attributes:
        P: ``(*batch, n, d)``, float64; None for the identity.
        Y: ``A P / scale``, ``(*batch, m, d)``, float64.
        scale: A power of two near the size of A, ``(*batch, 1, 1)``, so that squares do not overflow.
        eigenpairs: Eigenvalues of Y^T Y, descending, ``(*batch, d)``, and eigenvectors, ``(*batch, d, d)``; None if
            Y itself is to be decomposed.
        blocks: The number of blocks.
        ranks: The ranks over which the rows of Y are sharded.
    """

    P: Tensor | None
    Y: Tensor
    scale: Tensor
    eigenpairs: tuple[Tensor, Tensor] | None
    blocks: int
    ranks: Ranks = ALONE

    def triplets(self, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the k leading singular triplets of ``Y P^T`` in float64, orthonormal to the rounding of ``dtype``."""
        if self.eigenpairs is None:
            return self.triplets_by_qr(lambda _: k)
        values, W = (part[..., :k] for part in self.eigenpairs)
        if bool((values <= _GRAM_REACH**2 * values[..., :1]).any()):
            return self.triplets_by_qr(lambda _: k)
        S = values.sqrt()
        U = _rotated(self.Y, W) / S[..., None, :]
        if values.numel() and float((S[..., 0] / S[..., -1]).max()) > _CLEAN[dtype]:  # U has the rounding of G.
            Q, T, R = near_qr(U, None, self.ranks)
            left, S, right = core_svd(R * S[..., None, :])
            return Q @ (T @ left), S, self.onto(W @ right.mT)
        return U, S, self.onto(W)

    def triplets_by_qr(self, rank: Callable[[Tensor], int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first ``rank(S)`` triplets, with accurate small singular values too."""
        if self.P is None and self.ranks.size == 1:
            U, S, Vh = torch.linalg.svd(self.Y, full_matrices=False)
            k = rank(S)
            return U[..., :k], S[..., :k], Vh[..., :k, :].mT
        Q, T, R = near_qr(self.Y, None, self.ranks)
        left, S, right = core_svd(R)
        k = rank(S)
        return Q @ (T @ left[..., :k]), S[..., :k], self.onto(right[..., :k, :].mT)

    def onto(self, W: Tensor) -> Tensor:  # (*batch, d, k) -> (*batch, n, k)
        """Return ``P W``."""
        return W if self.P is None else _rotated(self.P, W)


def whole_space(operand: Operand) -> KrylovSpace:
    """Return the space of all directions."""
    return _space(operand, None, operand.matmul(operand.eye()) if operand.dense is None else operand.dense)


def iterate(operand: Operand, start: Tensor, iterations: int) -> KrylovSpace:  # start (*batch, m, width)
    """Return the range of ``(A^T A)^iterations A^T start`` by subspace iteration."""
    P = operand.rmatmul(start)
    for _ in range(iterations):  # between products only the range counts, which Householder's Q has in any dtype
        P = operand.rmatmul(torch.linalg.qr(operand.matmul(torch.linalg.qr(P).Q)).Q)
    basis = torch.linalg.qr(P.double()).Q
    return _space(operand, basis, operand.matmul(basis.to(operand.dtype)))


def _space(operand: Operand, P: Tensor | None, Y: Tensor) -> KrylovSpace:
    """Return the space of one block P, None for the identity, with image Y."""
    operand.check_finite(Y)
    ranks, scale = operand.ranks, power_of_two(Y, operand.ranks).double()
    Y = Y.double() / scale
    # If Y is about square, its SVD is as fast as an eigendecomposition of G, and small singular values are accurate.
    direct = (
        P is None and operand.dtype == torch.float64 and operand.shape[-1] > operand.shape[-2] / 4 and ranks.size == 1
    )
    return KrylovSpace(P, Y, scale, None if direct else _descending(ranks.sum(Y.mT @ Y)), 1, ranks)


def grow(operand: Operand, start: Tensor, k: int, blocks: int | None) -> KrylovSpace:  # start (*batch, m, b)
    """Return a space of ``blocks`` blocks. If it is None, add blocks until k triplets gain little from another one."""
    ranks, X = operand.ranks, operand.rmatmul(start)
    operand.check_finite(X)
    *batch, n, b = X.shape
    most = blocks or min(_MOST_BLOCKS, n // b)
    norm = None if blocks or operand.values is None else frobenius_norm(operand.values)
    # Column-major, so that the basis so far is contiguous. Pages that are never written take no memory.
    P = X.new_empty(*batch, b * most, n, dtype=torch.float64).mT
    Y = X.new_empty(*batch, b * most, start.shape[-2], dtype=torch.float64).mT
    G = X.new_zeros(*batch, b * most, b * most, dtype=torch.float64)
    scale = X.new_ones(*batch, 1, 1, dtype=torch.float64)
    eigenpairs = None
    for d in range(b, b * most + 1, b):
        new = slice(d - b, d)
        P[..., new] = add_to_basis(X.double(), P[..., : d - b])
        Z = operand.matmul(P[..., new].to(operand.dtype))
        operand.check_finite(Z)
        scale = power_of_two(Z, ranks).double() if d == b else scale
        torch.div(Z, scale, out=Y[..., new])
        inner = ranks.sum(Y[..., :d].mT @ Y[..., new])
        G[..., :d, new], G[..., new, :d] = inner, inner.mT
        if blocks is None and d >= max(k, _LEAST_BLOCKS * b):
            eigenpairs = _descending(G[..., :d, :d])
            if _is_enough(operand, k, b, norm, G[..., :d, :d], eigenpairs, scale):
                break
        if d < b * most:
            X = operand.rmatmul(near_qr(Y[..., new], None, ranks)[0].to(operand.dtype))
    return KrylovSpace(P[..., :d], Y[..., :d], scale, eigenpairs or _descending(G[..., :d, :d]), d // b, ranks)


def _is_enough(
    operand: Operand, k: int, b: int, norm: Tensor | None, G: Tensor, eigenpairs: tuple[Tensor, Tensor], scale: Tensor
) -> bool:
    r"""Return whether a further block of width b would bring k triplets hardly closer to the best ones.

    Block Lanczos coefficients change slowly. The estimate therefore couples the next block to an eigenvector v as
    strongly as the last block: by :math:`r = \|G_{-2b:-b, -b:}\, v_{-b:}\|`. In the span of v and one more direction,
    whose Rayleigh quotient is the mean :math:`\rho` of the last block's quotients, the eigenvalue :math:`\theta`
    rises by :math:`\sqrt{h^2 + r^2} - h` with :math:`h = (\theta - \rho) / 2`. Later blocks add less, by about the
    rate t at which the mean has fallen. In total they add :math:`t^2 / (4/3 - t)` times the gain of the next block,
    which fits the remaining error on 19 spectra.
    """
    values, vectors = eigenpairs
    eps = torch.finfo(operand.dtype).eps
    if k == 0:
        return True
    values = values.clamp_min(0)
    theta, rest = values[..., :k], values[..., k:].sum(-1)
    captured = theta.sum(-1)
    diagonal = G.diagonal(dim1=-2, dim2=-1)
    rho, previous_rho = diagonal[..., -b:].mean(-1), diagonal[..., -2 * b : -b].mean(-1)
    rate = torch.where(previous_rho > 0, rho / previous_rho, 0.0).clamp(0, 1)
    coupling = (G[..., -2 * b : -b, -b:] @ vectors[..., -b:, :k]).square().sum(-2)
    half = (theta - rho[..., None]) / 2
    gains = torch.hypot(half, coupling.sqrt()) - half
    remaining = gains.sum(-1) * rate**2 / (4 / 3 - rate)
    # The squared norm of A outside the k triplets. The difference counts only if it exceeds its rounding error.
    tail = rest
    if norm is not None:
        total = (norm / scale[..., 0, 0]).square()
        is_tail_resolved = total.isfinite() & (total - captured > 100 * eps * total)
        tail = torch.where(is_tail_resolved, torch.maximum(total - captured, rest), rest)
    # The rounding errors of the products, in A's dtype, and of the eigenvalues of G, in float64.
    rounding = max((30 * eps) ** 2, 1e-14) * captured
    last = theta[..., -1]
    enough = remaining <= _WORTH * min(1.0, k / _WORTH_FROM) * tail + rounding
    if operand.has_entries and operand.dense is None:
        enough &= remaining <= _SPARSE_WORTH * captured + rounding
    enough &= gains[..., -1] <= _LAST_WORTH * last + rounding
    # A larger tail contains a singular value above the last one: a multiple one, which a block finds only b times.
    enough &= tail <= 1.01 * (min(operand.shape[-2:]) - k) * last + rounding
    return bool(enough.all())


def _descending(G: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(G)
    return values.flip(-1), vectors.flip(-1)


def _rotated(Y: Tensor, W: Tensor) -> Tensor:  # (*batch, m, d), (*batch, d, k) -> (*batch, m, k)
    """Return ``Y W``, computed as rows: see :meth:`Operand.matmul`."""
    return (W.mT @ Y.mT).mT
