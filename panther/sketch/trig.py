"""The subsampled randomised Hadamard transform."""

__all__ = ["SRHT"]

import math

import torch
from torch import Tensor

from panther.kernels import hadamard_transform, sign_block, word_block
from panther.sketch.operator import SketchingOperator
from panther.sketch.streams import Kind, tag


class SRHT(SketchingOperator):
    r"""A subsampled randomized Walsh-Hadamard transform, which keeps d random rows.

    .. math:: S = \frac{1}{\sqrt d}\, R\, H\, D,

    with D random signs, H the Walsh-Hadamard matrix of entries :math:`(-1)^{\mathrm{popcount}(i \,\&\, j)}`, of as many
    rows N as the least power of two no smaller than d and m (A is padded by zero rows), and R a choice of d of its rows
    without replacement (N. Ailon and B. Chazelle, "The fast Johnson-Lindenstrauss transform and approximate nearest
    neighbors", SIAM J. Comput. 39, 2009, doi:10.1137/060673096; J. A. Tropp, "Improved analysis of the subsampled
    randomized Hadamard transform", 2011, doi:10.1142/S1793536911000787). Entries are :math:`\pm 1/\sqrt d`
    (:math:`\pm 1` with ``scale=False``); for d = N the sketch is an isometry. Some sets of n columns, such as the first
    n columns of the identity, need d of the order of n log n.

    Cost: N / 2 Philox calls and a sort of N numbers to draw the rows; to apply to an (m, n) matrix, ``8 N log2(N) n``
    flops in products with small Hadamard matrices, and three times N n numbers of memory. Half precision is computed in
    float32.

    Example:
        >>> S = SRHT(100, 1000, seed=0)
        >>> (S @ torch.ones(1000, 3)).shape
        torch.Size([100, 3])
        >>> x = torch.randn(1000)
        >>> torch.allclose((SRHT(1024, 1000, seed=0) @ x).norm(), x.norm())
        True
    """

    def _padded(self) -> int:
        return 1 << max(0, max(self.shape) - 1).bit_length()

    def _kept_rows(self) -> Tensor:  # (d,), ascending
        def draw() -> Tensor:
            kind, N = tag(Kind.SRHT, self.version), self._padded()
            words = word_block(self.seed, self.stream, kind, range(1, 2), range(2 * N), device=self.device)[0]
            keys = (words[0::2] << 31) + (words[1::2] >> 1)
            return keys.argsort(stable=True)[: self.shape[0]].sort().values

        return self._keep("rows", draw)

    def _signs(self, cols: range, dtype: torch.dtype) -> Tensor:  # (len(cols),)
        kind = tag(Kind.SRHT, self.version)
        return sign_block(self.seed, self.stream, kind, range(1), cols, dtype=dtype, device=self.device)[0]

    def _value(self) -> float:
        return 1 / math.sqrt(self.shape[0]) if self.scale and self.shape[0] else 1.0

    def _block(self, rows: range, cols: range) -> Tensor:
        column = torch.arange(cols.start, cols.stop, device=self.device)
        common = self._kept_rows()[rows.start : rows.stop, None] & column
        for shift in (32, 16, 8, 4, 2, 1):
            common = common ^ (common >> shift)
        return (1 - 2 * (common & 1)).to(self.dtype) * self._signs(cols, self.dtype) * self._value()

    def _apply(self, A: Tensor) -> Tensor:
        padded = self._zeros(A)
        torch.mul(A, self._weight(), out=padded[..., : self.shape[1], :])
        return hadamard_transform(padded).index_select(-2, self._kept_rows()).to(A.dtype)

    def _apply_transposed(self, A: Tensor) -> Tensor:
        padded = self._zeros(A)
        padded.index_copy_(-2, self._kept_rows(), A.to(padded.dtype))
        return (hadamard_transform(padded)[..., : self.shape[1], :] * self._weight()).to(A.dtype)

    def _zeros(self, A: Tensor) -> Tensor:  # (*batch, N, n)
        dtype = torch.promote_types(A.dtype, torch.float32)
        return torch.zeros(*A.shape[:-2], self._padded(), A.shape[-1], dtype=dtype, device=A.device)

    def _weight(self) -> Tensor:  # (m, 1)
        dtype = torch.promote_types(self.dtype, torch.float32)
        signs = self._keep("signs", lambda: self._signs(range(self.shape[1]), dtype))
        return (signs * self._value())[:, None]
