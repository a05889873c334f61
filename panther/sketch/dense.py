r"""Dense sketches, whose entries are independent.

:class:`SignSketch`, entries :math:`\pm 1/\sqrt d`: D. Achlioptas, "Database-friendly random projections", JCSS 66
(2003), doi:10.1016/S0022-0000(03)00025-4.
"""

__all__ = ["SignSketch", "scaled_sign_sketch"]

import math

import torch
from torch import Tensor

from panther.errors import ShapeError
from panther.sketch.operator import SketchingOperator
from panther.sketch.streams import signs


class SignSketch(SketchingOperator):
    r"""Independent random signs, :math:`S_{ij} = \pm 1/\sqrt d` (:math:`\pm 1` with ``scale=False``).

    Arguments and errors are those of :class:`~panther.sketch.SketchingOperator`.

    Cost: ``d m / 128`` Philox calls to draw, ``2 d m n`` flops to apply to an (m, n) matrix.

    Example:
        >>> import torch
        >>> S = SignSketch(4, 1000, seed=0)
        >>> (S @ torch.ones(1000, 3)).shape
        torch.Size([4, 3])
        >>> torch.equal(S.block(slice(1, 3), slice(500, 700)), S.dense()[1:3, 500:700])
        True
    """

    def block(self, rows: slice | range, cols: slice | range) -> Tensor:
        """The entries at ``rows`` and ``cols``, drawn without the others.

        Args:
            rows: Contiguous slice or range of rows, step 1.
            cols: The same for columns.

        Raises:
            ShapeError: If a step is not 1, or a range leaves the matrix.
        """
        ranges = [_as_range(part, size) for part, size in zip((rows, cols), self.shape, strict=True)]
        block = signs(self.seed, self.stream, *ranges, dtype=self.dtype, device=self.device)
        return block.div_(math.sqrt(self.shape[0])) if self.scale and self.shape[0] else block


def _as_range(part: slice | range, size: int) -> range:
    if not isinstance(part, slice | range):
        raise TypeError(
            f"rows and cols of a block must be slices or ranges, not {type(part).__name__}: use slice(i, i + 1)"
        )
    result = range(*part.indices(size)) if isinstance(part, slice) else part
    if len(result) and (result.step != 1 or result.start < 0 or result.stop > size):
        raise ShapeError(f"{part} must have step 1 and lie in [0, {size}): draw the block around it and index that")
    return result if len(result) else range(0)


def scaled_sign_sketch(
    m: int,
    n: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    seed: int | None = None,
) -> Tensor:  # (m, n)
    r"""A random sign matrix of shape (m, n), entries :math:`\pm 1/\sqrt m`, as a tensor.

    Args:
        m: Number of rows, the sketch size.
        n: Number of columns.
        device: None is torch's default.
        dtype: Floating dtype; None is torch's default.
        seed: None draws one from torch's default CPU generator.

    Example:
        >>> scaled_sign_sketch(4, 3, seed=0).abs().unique()
        tensor([0.5000])
    """
    return SignSketch(m, n, seed=seed, device=device, dtype=dtype).dense()
