r"""Moments of the stacked weights of experts: for each expert from its own tokens, and from all where these are few.

A router sends some experts thousands of tokens and some none. The moments of an expert with :math:`t_e` tokens are
therefore mixed with the mean over all tokens of all experts, which counts as k tokens: with :math:`S_e` the sum of the
products of the expert's inputs and :math:`\bar A` the mean,

.. math:: A_e = \frac{S_e + k \bar A}{t_e + k}

and likewise for the gradients. An expert without a token has the mean. The error of the stack is the sum of the errors
of the experts, each as often as the expert is used.

If the moments of all experts together would take gigabytes, one moment of the tokens of all experts takes their place.
It is much better than the diagonals of the experts' own moments. A small Mixtral (8 experts of 48 x 112, trained on
source code), with one weight of its last block in 3 bits, had these relative errors of the logits on other files, in
units of 1e-4:

============  ===  ========  ==========  ========  ==========
weight        own  shared G  diagonal G  shared A  diagonal A
============  ===  ========  ==========  ========  ==========
gate_up_proj    4         6          16         4          12
down_proj       3         3           7         8          31
============  ===  ========  ==========  ========  ==========

Only if a single moment is too large, as that of the 28,672 outputs of ``gate_up_proj`` in Mixtral-8x7B, diagonals are
kept, of each expert, and rows are rounded independently.
"""

__all__ = ["ExpertMoments", "ExpertSums", "stack_bytes"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from panther.compression.calibration.targets import Target
from panther.compression.moments.sums import ShiftedSum, add_squares, is_finite, mirror_, square_zeros

# The mean of all experts counts as this many tokens for each dimension of a moment. In 3 bits and 64 dimensions, the
# output's error of experts with similar inputs falls by 37, 10 and 1 % with 8, 32 and 128 tokens, and the error of
# experts with unrelated inputs rises by 14, 4 and 3 %. With 0.5 in its place the changes are -40, -13 and +1 %, and
# +18, +22 and +14 %.
_SHRINKAGE = 0.05
# Experts count in the loss as if each had this share of the mean number of tokens more, as calibration misses some.
_SMOOTHING = 0.25


@dataclass(frozen=True)
class ExpertMoments:
    """Sums of a stack as moments, in float64, with the experts as groups.

    Attributes:
        A: Second moments of the inputs, (experts, inner, inner); one for all experts, (1, inner, inner); or the
            diagonals alone, (experts, inner).
        mean: Means of the inputs, (experts, inner).
        G: Second moments of the gradients at the outputs, of the same kinds; None without gradients.
        shares: Shares of the experts in the tokens, with which their errors count, (experts,).
        tokens: Number of tokens of each expert.
    """

    A: Tensor
    mean: Tensor
    G: Tensor | None
    shares: Tensor
    tokens: tuple[float, ...]


class ExpertSums:
    """Sums over the tokens of each expert of a stack."""

    def __init__(self, target: Target, gradients: bool, device: torch.device) -> None:
        count, n = target.groups, target.inner

        def zeros(size: int, is_diagonal: bool) -> Tensor:
            if is_diagonal:
                return torch.zeros(count, size, dtype=torch.float64, device=device)
            return square_zeros(1 if target.shares_moment(size) else count, size, device)

        self.A = zeros(n, target.is_wide)
        self.G = zeros(target.outer, target.is_large) if gradients else None
        # Each expert has its own shift, because its inputs can have their own mean.
        self.inputs = [ShiftedSum(1, n, device) for _ in range(count)]
        self.tokens = torch.zeros(count, dtype=torch.float64, device=device)

    def add(
        self, expert: int, x: Tensor, slope: Tensor | None, roots_of: Callable[[Tensor], Tensor], even: float
    ) -> bool:
        """Add the rows of one expert's input, and the gradients at its output, (1, rows, outer).

        ``roots_of`` returns the roots of the rows' weights from the gradients; without gradients all are ``even``.
        Return whether the gradients are finite.
        """
        rows = x.to(torch.promote_types(x.dtype, torch.float32))[None]
        roots = rows.new_full(rows.shape[:2], even) if slope is None else roots_of(slope)
        self.tokens[expert] += rows.shape[1]
        shifted = self.inputs[expert].add(rows, roots)
        _add(self.A, expert, shifted if self.A.dim() > 2 else rows * roots[..., None])
        return slope is None or self.G is None or _add(self.G, expert, slope)

    def moments(self, sum_: Callable[[Sequence[Tensor]], Any]) -> ExpertMoments:
        """Return the moments; ``sum_`` adds tensors over the ranks of a group, in place."""
        if self.A.dim() > 2:
            for expert, inputs in enumerate(self.inputs):
                inputs.undo_shift_(_of_expert(self.A, expert), inputs)
        matrices = [self.A] if self.G is None else [self.A, self.G]
        for matrix in matrices:
            if matrix.dim() > 2:
                mirror_(matrix)
        means = torch.cat([inputs.total() for inputs in self.inputs])
        weights = torch.cat([inputs.weight for inputs in self.inputs])[:, 0]
        sum_([*matrices, means, weights, self.tokens])
        total = self.tokens.sum().clamp_min(1.0)
        # The weight of a token differs from 1; the mean weight turns tokens into weights.
        token_weight = weights.sum() / total if weights.any() else torch.ones_like(total)
        prior = token_weight * _prior_tokens(self.A)
        means = _shrunk(means, weights, prior)
        A = _shrunk(self.A, weights, prior)
        G = None if self.G is None else _shrunk(self.G, self.tokens, _prior_tokens(self.G))
        shares = self.tokens / total + _SMOOTHING / len(self.tokens)
        return ExpertMoments(A, means, G, shares / shares.sum(), tuple(self.tokens.tolist()))


def stack_bytes(target: Target, gradients: bool) -> int:
    """Return the bytes of the moments of a stacked weight."""

    def entries(size: int, is_diagonal: bool) -> int:
        if is_diagonal:
            return target.groups * size
        return size**2 * (1 if target.shares_moment(size) else target.groups)

    inputs, outputs = entries(target.inner, target.is_wide), entries(target.outer, target.is_large)
    return torch.float64.itemsize * (inputs + gradients * outputs)


def _add(total: Tensor, expert: int, rows: Tensor) -> bool:  # (1, rows, n)
    """Add the products of rows to the moment of an expert, or their squares; return whether the rows are finite."""
    if total.dim() > 2:
        return add_squares(_of_expert(total, expert), rows)
    total[expert] += rows.square().sum((0, 1), dtype=torch.float64)
    return is_finite(rows)


def _of_expert(moments: Tensor, expert: int) -> Tensor:  # (1, n, n)
    return moments if len(moments) == 1 else moments[expert : expert + 1]


def _prior_tokens(moments: Tensor) -> float:
    """Return the number of tokens that the mean of all experts counts as; a diagonal needs few tokens."""
    return _SHRINKAGE * moments.shape[-1] if moments.dim() > 2 else 1.0


def _shrunk(sums: Tensor, weights: Tensor, prior: Tensor | float) -> Tensor:
    """Return the means of sums over experts, in place, mixed with the mean over all, which counts as ``prior``."""
    if len(sums) < len(weights):  # the sum over all experts
        return sums.div_(weights.sum().clamp_min(1e-300))
    pooled = sums.sum(0) / weights.sum().clamp_min(1e-300)
    sizes = (weights + prior).view(-1, *[1] * (sums.dim() - 1))
    return sums.add_(pooled, alpha=float(prior)).div_(sizes)
