r"""Sparse sketches: a few random signs in every column, or in every row.

With entries along the short axis, and d no larger than m, this is the sparse Johnson-Lindenstrauss transform (D. M.
Kane and J. Nelson, "Sparser Johnson-Lindenstrauss transforms", J. ACM 61, 2014, doi:10.1145/2559902), and CountSketch
for one entry a column (M. Charikar, K. Chen and M. Farach-Colton, 2004, doi:10.1016/S0304-3975(03)00400-6; K. L.
Clarkson and D. P. Woodruff, J. ACM 63, 2017, doi:10.1145/3019134). Short and long axis are RandBLAS's terms.

Each of the k equal parts of a vector of length n has one entry, and one random number shifts all entries cyclically.
The positions are distinct by construction, and all positions are equally likely. With the words w of row v of the
stream, where v is the number of the vector, and with integer division,

.. math:: s = w_0 n / 2^{32}, \qquad p_i = (\ell_i + (w_{i+1} / 2)(\ell_{i+1} - \ell_i) / 2^{31} + s) \bmod n,
   \qquad \ell_i = i n / k,

and entry :math:`p_i` is negative if :math:`w_{i+1}` is odd.
"""

__all__ = ["Axis", "SparseSketch"]

import math
from enum import StrEnum

import torch
from torch import Tensor

from panther._torch import number_of_entries, stored_entries
from panther.errors import ShapeError, check_size
from panther.kernels import csr_matmul, word_block
from panther.kernels.reference import csr_tensor
from panther.kernels.selection import use_triton
from panther.sketch.operator import SketchingOperator
from panther.sketch.streams import Kind, tag

# Default number of entries per vector. Twice as many reduce the distortion little (see "Choosing a sketch").
_VEC_NNZ = 4
# Number of words that are drawn at once.
_SLAB = 1 << 20
# Columns of a part of S. The same number of rows of A stays in a CPU's cache during the product (1.2 to 5 times
# faster).
_PART = 4096


class Axis(StrEnum):
    """The axis of the matrix along which every vector has ``vec_nnz`` entries."""

    Short = "short"
    """The shorter one: columns where d <= m, rows otherwise."""
    Long = "long"
    """The longer one: rows where d <= m, columns otherwise."""


class SparseSketch(SketchingOperator):
    r"""``vec_nnz`` random signs in each column (each row, along the long axis), scaled to an isometry in expectation.

    The entries are :math:`\pm 1/\sqrt{\mathrm{vec\_nnz}}` where columns have ``vec_nnz`` entries,
    :math:`\pm\sqrt{m / (d\,\mathrm{vec\_nnz})}` where rows have (:math:`\pm 1` with ``scale=False``). Along the short
    axis the sketch keeps the geometry of any subspace of dimension well below d; along the long axis it samples, which
    is cheaper, but accurate only if no few rows of A matter more than the rest. For d > m the axes change places. The
    references are D. M. Kane and J. Nelson, 2014, doi:10.1145/2559902, and for one entry in each column M. Charikar, K.
    Chen and M. Farach-Colton (CountSketch), 2004, doi:10.1016/S0304-3975(03)00400-6.

    Args:
        vec_nnz: Entries a column or row, at least 1; None is 4, or their length if that is less.
        axis: ``Axis.Short`` or ``Axis.Long``, or their names in lower case.

    Raises:
        ShapeError: If a size is negative or above 2^31 - 1, or ``vec_nnz`` is below 1 or exceeds the length of the
            vectors.
        TypeError: If a size, ``vec_nnz``, the seed or the stream is not an integer.
        ValueError: If ``seed`` or ``stream`` is outside its range, or ``axis`` is neither.

    Cost: with ``nnz = vec_nnz m`` (``vec_nnz d`` along the long axis), ``(vec_nnz + 1) / 4`` Philox calls a column or
    row, rounded up, and a sort to draw, ``2 nnz n`` flops to apply to an (m, n) matrix, where a dense sketch takes
    ``2 d m n``; ``vec_nnz nnz(A)`` if A is sparse. On a CPU ``A @ S.T`` is slower than ``S @ A`` by
    transposing A; on a GPU :func:`~panther.kernels.csr_matmul` takes both, with the same result every time.

    Example:
        >>> S = SparseSketch(100, 10_000, seed=0)
        >>> (S @ torch.ones(10_000, 3)).shape
        torch.Size([100, 3])
        >>> (SparseSketch(3, 8, vec_nnz=1, seed=0).dense() != 0).sum(dim=0)
        tensor([1, 1, 1, 1, 1, 1, 1, 1])
    """

    _options = ("vec_nnz", "axis")

    def __init__(
        self,
        d: int,
        m: int,
        vec_nnz: int | None = None,
        axis: Axis | str = Axis.Short,
        *,
        seed: int | None = None,
        stream: int = 0,
        scale: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d, m, seed=seed, stream=stream, scale=scale, dtype=dtype, device=device)
        try:
            self.axis = Axis(axis)
        except ValueError:
            raise ValueError(f"axis={axis!r} must be 'short' or 'long': use Axis.Short or Axis.Long") from None
        self._by_column = (self.axis is Axis.Short) == (self.shape[0] <= self.shape[1])
        self._length = self.shape[0] if self._by_column else self.shape[1]
        default = min(_VEC_NNZ, self._length)
        self.vec_nnz = default if vec_nnz is None else check_size("vec_nnz", vec_nnz, least=1)
        if not self._length:
            self.vec_nnz = 0
        if self.vec_nnz > self._length:
            vectors = "columns" if self._by_column else "rows"
            raise ShapeError(
                f"vec_nnz={self.vec_nnz} must be at most {self._length}, the length of the {vectors} of a "
                f"{self.shape[0]} x {self.shape[1]} sketch: use vec_nnz={default}"
            )

    @property
    def nnz(self) -> int:
        """Number of entries that are not zero."""
        return self.vec_nnz * (self.shape[1] if self._by_column else self.shape[0])

    def _block(self, rows: range, cols: range) -> Tensor:
        vectors, window = (cols, rows) if self._by_column else (rows, cols)
        out = torch.zeros(len(vectors), len(window), dtype=self.dtype, device=self.device)
        if out.numel():
            position, value = self._entries(vectors)
            value = value * self._value()
            position = position - window.start
            outside = (position < 0) | (position >= len(window))
            # Entries of a vector are distinct, so adding a zero in place of one outside disturbs no other.
            out.scatter_add_(1, position.masked_fill(outside, 0), value.to(self.dtype).masked_fill(outside, 0))
        return out.mT if self._by_column else out

    def to_sparse(self) -> Tensor:
        """Return the matrix as a coalesced COO tensor of shape (d, m)."""
        coo: Tensor = self._csr().to_sparse_coo()
        return coo.to(self.dtype).coalesce()

    def _entries(self, vectors: range) -> tuple[Tensor, Tensor]:  # both (len(vectors), vec_nnz)
        """Return positions and signs, the latter in float32 or float64."""
        n, k = self._length, self.vec_nnz
        kind = tag(Kind.SPARSE, self.version)
        edges = torch.arange(k + 1, device=self.device) * n // max(k, 1)
        position = torch.empty(len(vectors), k, dtype=torch.int64, device=self.device)
        sign = torch.empty(len(vectors), k, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        slab = max(1, _SLAB // (k + 1))
        for start in range(0, len(vectors), slab):
            part = slice(start, start + slab)
            words = word_block(self.seed, self.stream, kind, vectors[part], range(k + 1), device=self.device)
            shift, word = words[:, :1] * n >> 32, words[:, 1:]
            position[part] = (edges[:-1] + ((word >> 1) * edges.diff() >> 31) + shift) % max(n, 1)
            sign[part] = 1 - 2 * (word & 1)
        return position, sign

    def _value(self) -> float:
        if not self.scale or not self.nnz:
            return 1.0
        return math.sqrt(1 / self.vec_nnz) if self._by_column else math.sqrt(self.shape[1] / self.nnz)

    def _csr(self, transposed: bool = False) -> Tensor:
        """Return S or its transpose in CSR, whose products are fastest, in float32 at least."""
        return self._keep(f"csr {transposed}", lambda: csr_tensor(*self._draw_csr(self._vectors(), transposed)))

    def _gathered(self, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the CSR form with 32-bit indices, because with few columns reading them is the cost."""

        def draw() -> tuple[Tensor, Tensor, Tensor]:
            starts, index, value, _ = self._draw_csr(self._vectors(), transposed)
            return starts, index.to(torch.int32), value

        return self._keep(f"gathered {transposed}", draw)

    def _vectors(self) -> range:
        return range(self.shape[1] if self._by_column else self.shape[0])

    def _parts(self) -> tuple[Tensor, ...]:
        """Return S, in groups of columns if every column has ``vec_nnz`` entries, so that a product reads A once."""
        m = self.shape[1]
        width = max(_PART, self.shape[0])
        if not self._by_column or m <= width:
            return (self._csr(),)
        groups = [range(start, min(start + width, m)) for start in range(0, m, width)]
        return self._keep("parts", lambda: tuple(csr_tensor(*self._draw_csr(group, False)) for group in groups))

    def _draw_csr(self, vectors: range, transposed: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
        """Return starts, index, value and shape."""
        if "scattered" in self._kept:
            position, value = (part[:, vectors.start : vectors.stop].mT for part in self._scattered())
        else:
            position, value = self._entries(vectors)
            value = value * self._value()
        position, order = position.sort(dim=1)
        value = value.gather(1, order).flatten()
        position = position.flatten()
        if transposed == self._by_column:  # The vectors are the rows of the result.
            shape = (len(vectors), self._length)
            starts = torch.arange(len(vectors) + 1, device=self.device) * self.vec_nnz
            index = position
        else:
            shape = (self._length, len(vectors))
            ordered, order = position.to(torch.int32).sort(stable=True)
            starts = torch.searchsorted(ordered, torch.arange(self._length + 1, dtype=torch.int32, device=self.device))
            index, value = order // max(self.vec_nnz, 1), value[order]
        return starts, index, value, shape

    def _apply(self, A: Tensor) -> Tensor:
        return self._product(A, False)

    def _apply_transposed(self, A: Tensor) -> Tensor:
        return self._product(A, True)

    def _product(self, A: Tensor, transposed: bool) -> Tensor:
        if not (self.nnz and A.numel()):
            return A.new_zeros(*A.shape[:-2], self.shape[transposed], A.shape[-1])
        if _gathers(A.device):
            return csr_matmul(*self._gathered(transposed), A)
        return _csr_product((self._csr(True),) if transposed else self._parts(), A)

    def _apply_to_sparse(self, A: Tensor) -> Tensor:
        return self._sparse_product(A, False)

    def _apply_transposed_to_sparse(self, A: Tensor) -> Tensor:
        return self._sparse_product(A, True)

    def _sparse_product(self, A: Tensor, transposed: bool) -> Tensor:
        """Return S or its transpose times A, dense."""
        rows, n = self.shape[transposed], A.shape[1]
        if not self.nnz or not number_of_entries(A):
            return torch.zeros(rows, n, dtype=A.dtype, device=A.device)
        if transposed == self._by_column or A.requires_grad or A.device.type != "cpu":
            # On a GPU, where sums of scattered numbers have no fixed order, and where the vectors are rows.
            product: Tensor = torch.sparse.mm(self._csr(transposed).to_sparse_coo().to(A.dtype), A.coalesce())
            return product.to_dense()
        (row, column), values = stored_entries(A)
        out = torch.zeros(n * rows, dtype=A.dtype)
        column = column * rows
        for position, value in zip(*self._scattered(), strict=True):
            out.scatter_add_(0, column + position[row], values * value.to(A.dtype)[row])
        return out.view(n, rows).mT

    def _scattered(self) -> tuple[Tensor, Tensor]:  # both (vec_nnz, vectors)
        """Return the positions and the values of the vectors, the first entries of all of them first."""

        def draw() -> tuple[Tensor, Tensor]:
            position, value = self._entries(self._vectors())
            return position.mT.contiguous(), value.mT.mul(self._value())

        return self._keep("scattered", draw)


def _gathers(device: torch.device) -> bool:
    """Return whether the kernel computes products on the device. In compiled code the operator decides at run time."""
    return device.type == "cuda" if torch.compiler.is_compiling() else use_triton("SparseSketch", device)


def _csr_product(parts: tuple[Tensor, ...], A: Tensor) -> Tensor:
    """Return ``[parts] @ A`` for A of shape (*batch, columns, n), as products of matrices."""
    n, batch, rows = A.shape[-1], A.shape[:-2], parts[0].shape[0]
    columns = A.movedim(-2, 0).reshape(A.shape[-2], -1).to(parts[0].dtype)
    first, *slabs = torch.split(columns, [part.shape[1] for part in parts])
    out = parts[0] @ first
    for part, slab in zip(parts[1:], slabs, strict=True):
        out.addmm_(part, slab)
    return out.reshape(rows, *batch, n).movedim(0, -2).to(A.dtype)
