"""QuantizedEmbedding and QuantizedEmbeddingBag: tables of 2 to 8 bits an entry, which expand the rows they read."""

__all__ = ["QuantizedEmbedding", "QuantizedEmbeddingBag"]

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther._docstrings import inherit_arguments
from panther.errors import ShapeError, check_flag, check_size
from panther.kernels import pack_codes
from panther.kernels.ops.quantized_operands import expanded_codes
from panther.nn.factors import check_dense
from panther.nn.protocol import allow_saving
from panther.nn.quantized.linear import QuantizedLinear
from panther.nn.quantized.matrix import QuantizedMatrix

_MODES = ("sum", "mean", "max")


class QuantizedTable(QuantizedMatrix):
    """Base of the layers that look up rows of a quantized weight (num_embeddings, embedding_dim)."""

    size_arguments = ("bits", "group_size")
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    def _allocate_table(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        bits: int,
        group_size: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Check the arguments, and make and fill the tensors."""
        self.num_embeddings = check_size("num_embeddings", num_embeddings, least=1)
        self.embedding_dim = check_size("embedding_dim", embedding_dim, least=1)
        self.padding_idx = _checked_padding(padding_idx, self.num_embeddings)
        check_size("bits", bits, least=2)  # without codes a table would be a correction only
        self._allocate(self.num_embeddings, self.embedding_dim, bits, group_size, 0, False, device, dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw codes from torch's generator, with nn.Embedding's variance of 1; the row of ``padding_idx`` is zero."""
        super().reset_parameters()
        bits = self.bits
        assert bits is not None
        self.scales.fill_((12 / (4**bits - 1)) ** 0.5)
        if self.padding_idx is not None:
            self.codes[self.padding_idx] = pack_codes(self.codes.new_full((1, self._columns), 2 ** (bits - 1)), bits)[0]
            self._write_record()

    def _looked_up(self, indices: Tensor) -> Tensor:  # (n,) -> (n, embedding_dim)
        """Return rows of the weight, differentiable by the scales; only these rows are expanded."""
        self.check_writes()

        def rows_of(table: Tensor) -> Tensor:
            return F.embedding(indices, table, self.padding_idx)  # no gradient for the row of the padding

        return expanded_codes(self._codes_of(rows_of), self._columns, self.dtype)

    @classmethod
    def _from_table(cls, dense: Any, bits: int, group_size: int | None) -> Self:
        check_dense(dense, cls.dense_class, "from_embedding")
        if dense.max_norm is not None:
            raise ValueError(
                f"the {type(dense).__name__} has max_norm={dense.max_norm}, with which each lookup changes rows of the "
                "weight: clip the rows once, and set max_norm to None"
            )
        return cls._fitted_to(dense, bits=bits, group_size=group_size)

    def extra_repr(self) -> str:
        """Return sizes and form, as shown by print."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, bits={self.bits}, group_size={self.group_size}"


@inherit_arguments(QuantizedMatrix)
class QuantizedEmbedding(QuantizedTable):
    r"""A drop-in for :class:`torch.nn.Embedding` whose weight is stored in few bits.

    .. math:: E_{ij} = s_{ig}\,(q_{ij} - z_{ig}), \qquad g = \lfloor j / \mathtt{group\_size} \rfloor

    with codes q of 2 to 8 bits, and a scale s and a zero point z for each group of neighbouring entries of a row. A row
    of zeros is exact. Tensors, casts, files and the training of scales are those of :class:`QuantizedLinear`, so that a
    head and an embedding that are tied can share them. A lookup expands the rows that it reads, and never the table.

    A new layer has random weights with nn.Embedding's variance; :meth:`from_embedding` rounds a dense layer.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Size of each row.
        padding_idx: Index of a row that trained scales do not change, and that is zero in a new layer.
        bits: Width of a code, 2 to 8.
        dtype: Floating dtype of the output; None is torch's default.

    Shape:
        Input ``(*)`` of int32 or int64, output ``(*, embedding_dim)``.

    Raises:
        ShapeError: If a size or ``padding_idx`` is out of range.

    ``max_norm`` does not exist, because it changes the weight in each lookup. ``scale_grad_by_freq`` and ``sparse``
    concern gradients of the weight, which does not have any.

    Cost: a lookup of n indices reads n rows of codes, and writes the n rows of the output once more than nn.Embedding.

    Example:
        >>> import torch
        >>> layer = QuantizedEmbedding(1000, 64, bits=4, group_size=32)
        >>> layer(torch.tensor([[3, 7], [0, 999]])).shape
        torch.Size([2, 2, 64])
        >>> sum(t.nbytes for t in layer.buffers()), 4 * 1000 * 64
        (38012, 256000)
    """

    dense_class = nn.Embedding
    dense_arguments = ("num_embeddings", "embedding_dim", "padding_idx")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._allocate_table(num_embeddings, embedding_dim, padding_idx, bits, group_size, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map indices ``(*)`` to rows ``(*, embedding_dim)``."""
        return self._looked_up(input.reshape(-1)).view(*input.shape, self.embedding_dim)

    @classmethod
    @inherit_arguments(QuantizedLinear.from_linear)
    def from_embedding(cls, embedding: nn.Embedding, bits: int = 4, *, group_size: int | None = 128) -> Self:
        """Return a quantized approximation of a dense embedding, on its device and in its dtype.

        Weights are rounded to the nearest code of a grid whose range is searched for the least squared error.

        Args:
            embedding: The layer to approximate. It is not changed.

        Raises:
            ValueError: If the layer has ``max_norm``, or its weight has no values, or NaN or infinite ones.
            TypeError: If ``embedding`` is not an nn.Embedding.

        Example:
            >>> import torch
            >>> dense = torch.nn.Embedding(100, 64, padding_idx=0)
            >>> layer = QuantizedEmbedding.from_embedding(dense, bits=6)
            >>> (
            ...     bool(
            ...         (layer.weight - dense.weight).norm()
            ...         < 0.03 * dense.weight.norm()
            ...     ),
            ...     bool(layer.weight[0].any()),
            ... )
            (True, False)
        """
        return cls._from_table(embedding, bits, group_size)

    def to_embedding(self) -> nn.Embedding:
        """Return the nn.Embedding with this layer's effective weight, copied.

        Example:
            >>> import torch
            >>> layer, indices = QuantizedEmbedding(20, 8), torch.tensor([4, 19])
            >>> torch.equal(layer(indices), layer.to_embedding()(indices))
            True
        """
        embedding: nn.Embedding = self.to_dense()
        return embedding


@inherit_arguments(QuantizedEmbedding)
class QuantizedEmbeddingBag(QuantizedTable):
    r"""A drop-in for :class:`torch.nn.EmbeddingBag` whose weight is stored in few bits.

    The weight is that of :class:`QuantizedEmbedding`, and a bag is reduced as in nn.EmbeddingBag.

    Args:
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: Whether the last offset is the end of the last bag.
        padding_idx: Index of a row that does not count in bags, and that is zero in a new layer.

    Shape:
        Input ``(N, L)``, or ``(n,)`` with offsets ``(N,)``; output ``(N, embedding_dim)``.

    Raises:
        ValueError: If ``mode`` is unknown.

    Cost: each call expands the row of each index, which nn.EmbeddingBag does not store.

    Example:
        >>> import torch
        >>> layer = QuantizedEmbeddingBag(100, 32, mode="sum", bits=8)
        >>> layer(torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 3])).shape
        torch.Size([2, 32])
    """

    dense_class = nn.EmbeddingBag
    dense_arguments = ("num_embeddings", "embedding_dim", "mode", "include_last_offset", "padding_idx")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r} is unknown: use one of {', '.join(map(repr, _MODES))}")
        check_flag("include_last_offset", include_last_offset)
        self.mode, self.include_last_offset = mode, include_last_offset
        self._allocate_table(num_embeddings, embedding_dim, padding_idx, bits, group_size, device, dtype)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Reduce the rows of each bag of indices; the arguments are those of nn.EmbeddingBag."""
        indices = input.reshape(-1)
        count = indices.shape[0]
        # A further row of zeros, which bags read in the place of padding: its position is the padding index there.
        rows = F.pad(self._looked_up(indices), (0, 0, 0, 1))
        places = torch.arange(count, device=input.device).view_as(input)
        padding = None
        if self.padding_idx is not None:
            places, padding = places.masked_fill(input == self.padding_idx, count), count
        return F.embedding_bag(
            places, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip

    @classmethod
    def from_embedding(cls, embedding: nn.EmbeddingBag, bits: int = 4, *, group_size: int | None = 128) -> Self:
        """Return a quantized approximation of an nn.EmbeddingBag, as :meth:`QuantizedEmbedding.from_embedding`."""
        return cls._from_table(embedding, bits, group_size)

    def to_embedding(self) -> nn.EmbeddingBag:
        """Return the nn.EmbeddingBag with this layer's effective weight, copied."""
        embedding: nn.EmbeddingBag = self.to_dense()
        return embedding

    def extra_repr(self) -> str:
        """Return sizes and form, as shown by print."""
        last = ", include_last_offset=True" if self.include_last_offset else ""
        return f"{super().extra_repr()}, mode={self.mode!r}{last}"


allow_saving(QuantizedEmbedding, QuantizedEmbeddingBag)


def _checked_padding(padding_idx: int | None, num_embeddings: int) -> int | None:
    """Return an index of a row counted from the first row, as torch's layers hold it."""
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise TypeError(f"padding_idx must be an integer or None, not {type(padding_idx).__name__}")
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ShapeError(f"padding_idx={padding_idx} must be within the {num_embeddings} rows")
    return padding_idx % num_embeddings
