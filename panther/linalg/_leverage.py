r"""Leverage scores: how much each row of a matrix matters to its range."""

__all__ = ["leverage_scores"]

from typing import Any

import torch
from torch import Tensor

from panther.linalg._cqrrpt import cqrrpt
from panther.linalg._rangefinder import check_rank
from panther.linalg._svd import randomized_svd
from panther.linalg.operand import as_operand, driver


@driver
def leverage_scores(
    A: Any,  # (*batch, m, n)
    k: int | None = None,
    *,
    seed: int | None = None,
) -> Tensor:  # (*batch, m)
    r"""Compute the leverage scores of the rows, :math:`\ell_i = \|Q_{i,:}\|^2` for an orthonormal basis Q of the range.

    Scores are between 0 and 1 and add up to the rank. A score near 1 means that no combination of other rows gives the
    row, so that a sample of rows must contain it; in regression they are the diagonal of the hat matrix. Use
    ``leverage_scores(A.mT)`` for columns.

    Args:
        A: Matrix or batch, (\*batch, m, n); kinds, dtypes and errors as for :mod:`panther.linalg`.
        k: Compute the scores of the best approximation of rank k, from the k leading left singular vectors; None takes
            the range of A, up to singular values that are zero to rounding.
        seed: The seed of the sketch.

    Cost: :func:`~panther.linalg.cqrrpt` of a dense A, ``3 m n^2`` flops if it is tall; otherwise
    :func:`~panther.linalg.randomized_svd`, with k triplets or all of them, and memory for its U.

    Example:
        >>> A = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> leverage_scores(A, seed=0)
        tensor([1.0000, 0.5000, 0.5000])

    Reference: P. Drineas, M. Magdon-Ismail, M. W. Mahoney and D. P. Woodruff, "Fast approximation of matrix coherence
    and statistical leverage", JMLR 13 (2012), arXiv:1109.3843.
    """
    operand = as_operand(A)
    if k is None and operand.dense is not None and operand.dense.ndim == 2:
        return cqrrpt(operand.dense, seed=seed).Q.square().sum(-1)
    most = min(operand.shape[-2:])
    rank = most if k is None else check_rank(k, operand)
    U, S, _ = map(torch.as_tensor, randomized_svd(A, rank, seed=seed))
    rounding = max(operand.shape[-2:]) * torch.finfo(S.dtype).eps * S[..., :1]
    return (U * (rounding < S)[..., None, :]).square().sum(-1)
