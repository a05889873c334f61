r"""Dense sketches, whose entries are independent, of mean 0 and variance 1/d.

:class:`GaussianSketch`: W. B. Johnson and J. Lindenstrauss, "Extensions of Lipschitz mappings into a Hilbert space",
1984, doi:10.1090/conm/026/737400. :class:`SignSketch`, entries :math:`\pm 1/\sqrt d`: D. Achlioptas,
"Database-friendly random projections", JCSS 66 (2003), doi:10.1016/S0022-0000(03)00025-4; the argument holds for
:class:`UniformSketch` too.
"""

__all__ = ["GaussianSketch", "SignSketch", "UniformSketch"]

import math
from abc import abstractmethod

import torch
from torch import Tensor

from panther.kernels import normal_block, sign_block, uniform_block
from panther.sketch.operator import SketchingOperator
from panther.sketch.streams import Kind, tag


class _DenseSketch(SketchingOperator):
    @abstractmethod
    def _draw(self, rows: range, cols: range, scale: float) -> Tensor:
        """Return entries of standard form times ``scale``."""

    def _block(self, rows: range, cols: range) -> Tensor:
        d = self.shape[0]
        return self._draw(rows, cols, 1 / math.sqrt(d) if self.scale and d else 1.0)

    def _apply(self, A: Tensor) -> Tensor:
        first_columns, *later_columns = self._panels()
        out = self._panel(first_columns) @ A[..., first_columns.start : first_columns.stop, :]
        if not later_columns:
            return out
        out = out.to(torch.promote_types(A.dtype, torch.float32))
        for cols in later_columns:
            out += self._panel(cols) @ A[..., cols.start : cols.stop, :]
        return out.to(A.dtype)

    def _apply_transposed(self, A: Tensor) -> Tensor:
        return torch.cat([self._panel(cols).mT @ A for cols in self._panels()], dim=-2)


class GaussianSketch(_DenseSketch):
    r"""Independent normal entries of variance :math:`1/d` (1 with ``scale=False``).

    Entries are computed in float64 and rounded; two devices may differ by one unit in the last place. The reference is
    W. B. Johnson and J. Lindenstrauss, 1984, doi:10.1090/conm/026/737400.

    Cost: ``d m / 4`` Philox calls to draw, ``2 d m n`` flops to apply to an (m, n) matrix.

    Example:
        >>> S = GaussianSketch(4, 1000, seed=0)
        >>> (S @ torch.ones(1000, 3)).shape
        torch.Size([4, 3])
    """

    def _draw(self, rows: range, cols: range, scale: float) -> Tensor:
        kind = tag(Kind.GAUSSIAN, self.version)
        return normal_block(self.seed, self.stream, kind, rows, cols, scale=scale, dtype=self.dtype, device=self.device)


class UniformSketch(_DenseSketch):
    r"""Independent entries, uniform in :math:`\pm\sqrt{3/d}` (in :math:`\pm 1` with ``scale=False``).

    The argument of D. Achlioptas, 2003, doi:10.1016/S0022-0000(03)00025-4, holds for these entries too.

    Cost: ``d m / 4`` Philox calls to draw, ``2 d m n`` flops to apply to an (m, n) matrix.

    Example:
        >>> bool(UniformSketch(3, 1000, seed=0).dense().abs().max() < 1)
        True
    """

    def _draw(self, rows: range, cols: range, scale: float) -> Tensor:
        kind = tag(Kind.UNIFORM, self.version)
        scale = scale * math.sqrt(3) if self.scale else scale
        return uniform_block(
            self.seed, self.stream, kind, rows, cols, scale=scale, dtype=self.dtype, device=self.device
        )


class SignSketch(_DenseSketch):
    r"""Independent random signs, :math:`S_{ij} = \pm 1/\sqrt d` (:math:`\pm 1` with ``scale=False``).

    The reference is D. Achlioptas, "Database-friendly random projections", 2003, doi:10.1016/S0022-0000(03)00025-4.

    Cost: ``d m / 128`` Philox calls to draw, ``2 d m n`` flops to apply to an (m, n) matrix.

    Example:
        >>> S = SignSketch(4, 1000, seed=0)
        >>> torch.equal(
        ...     S.block(slice(1, 3), slice(500, 700)), S.dense()[1:3, 500:700]
        ... )
        True
    """

    def _draw(self, rows: range, cols: range, scale: float) -> Tensor:
        kind = tag(Kind.SIGN, self.version)
        block = sign_block(self.seed, self.stream, kind, rows, cols, dtype=self.dtype, device=self.device)
        return block if scale == 1 else block.mul_(scale)
