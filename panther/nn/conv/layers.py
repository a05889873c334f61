"""SKConv1d, SKConv2d and SKConv3d, convolutions whose kernel is a sum of sketched low-rank terms."""

__all__ = ["SKConv1d", "SKConv2d", "SKConv3d"]

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther._docstrings import inherit_arguments
from panther.errors import ShapeError
from panther.nn.base import SketchedModule
from panther.nn.conv.geometry import ConvGeometry, take_format_
from panther.nn.conv.product import convolve, dense_kernel
from panther.nn.factors import check_dense, check_init, fittable, lstsq_by_groups
from panther.nn.pairs import ConvPair
from panther.nn.protocol import allow_saving
from panther.nn.sketch_sizes import default_low_rank, divisible, terms_and_rank

torch.fx.wrap("convolve")  # A symbolic trace must not branch on the input's layout.


class _SKConv(ConvGeometry, SketchedModule):
    """Everything except the number of dimensions."""

    factor_names = ("S",)
    sketch_names = ("U",)
    checked_names = ("U", "sketch_seed")
    S: nn.Parameter
    U: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int] = 3,
        stride: int | Sequence[int] = 1,
        padding: Any = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        num_terms: int | None = None,
        low_rank: int | None = None,
        sketch_size: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_geometry(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
        self.fan_in = self.in_channels // self.groups * math.prod(self.kernel_size)
        size = terms_and_rank((), num_terms, low_rank, sketch_size)
        self.num_terms = size.get("num_terms", 1)
        default = default_low_rank(self.fan_in, self.out_channels, self.groups)
        self.low_rank = divisible("low_rank", size.get("low_rank", default), self.groups)
        rows = 2 * self.num_terms * self.low_rank
        factors = {"S": (rows, self.in_channels // self.groups, *self.kernel_size)}
        self._build(factors, self.out_channels, bias=bias, seed=seed, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, in_channels, *size)`` to ``(N, out_channels, *size)``; also without N."""
        self.check_writes()
        U = self.U
        if U.dtype is not self.S.dtype:  # FSDP's mixed precision casts parameters and not buffers.
            U = U.to(self.S.dtype)
        return convolve(
            input, self.S, U, self.bias, self.stride, self.padding, self.dilation, self.groups, self.scale,
            self.padding_mode,
        )  # fmt: skip

    @property
    def weight(self) -> Tensor:  # (out, in / groups, *kernel)
        """The dense effective kernel, for inspection: differentiable, made anew at each access."""
        self.check_writes()
        return dense_kernel(self.S, self.U, self.groups, self.scale)

    @property
    def S1s(self) -> Tensor:  # (2 L K, in / groups, *kernel)
        """S by terms: rows ``i K`` to ``(i + 1) K`` are term i. A view, except with groups."""
        return self._by_terms(self.S.detach())

    @property
    def U1s(self) -> Tensor:  # (2 L, K, out)
        """U by terms, scaled as in the layer's formula. With groups it is block-diagonal."""
        U = self.U.detach() * (2 * self.num_terms * self.scale)
        block_diagonal = torch.block_diag(*U.unflatten(0, (self.groups, -1)))  # (2 L K, out), rows by groups
        stacked: Tensor = self._by_terms(block_diagonal).unflatten(0, (2 * self.num_terms, self.low_rank))
        return stacked

    def _by_terms(self, rows: Tensor) -> Tensor:
        """Reorder rows from (group, term, rank) to (term, group, rank)."""
        reordered: Tensor = rows.unflatten(0, (self.groups, 2 * self.num_terms, -1)).transpose(0, 1).flatten(0, 2)
        return reordered

    def _by_groups(self, rows: Tensor) -> Tensor:
        """Undo :meth:`_by_terms`."""
        reordered: Tensor = rows.unflatten(0, (2 * self.num_terms, self.groups, -1)).transpose(0, 1).flatten(0, 2)
        return reordered

    @classmethod
    def from_conv(
        cls,
        conv: nn.Conv1d | nn.Conv2d | nn.Conv3d,
        *sizes: int,  # sketch_size alone, or num_terms and low_rank
        num_terms: int | None = None,
        low_rank: int | None = None,
        sketch_size: int | None = None,
        init: str = "lstsq",
        seed: int | None = None,
    ) -> Self:
        r"""Return a sketched approximation of a dense convolution, on its device and in its dtype.

        The kernel of each group, unfolded to (out / groups, in / groups * kernel), is approximated by 2 L K / groups
        rows.

        Args:
            conv: The layer to approximate, with the same number of dimensions. It is not changed.
            *sizes: ``sketch_size``, or ``num_terms`` and ``low_rank``, by position.
            num_terms: As in the constructor.
            low_rank: As in the constructor.
            sketch_size: As in the constructor.
            init: ``"lstsq"``: the best S for the seed's sketch, of least norm.
                ``"random"``: the unbiased estimator. Its error exceeds the kernel itself while the rows are fewer than
                the outputs, so it is for studies, not for keeping a model.
                The best approximation of this rank, by SVD, is :meth:`LowRankConv2d.from_conv`.
            seed: As in the constructor.

        Raises:
            ValueError: If ``init`` is unknown, or the kernel has no values, or NaN or infinite ones.
            TypeError: If ``conv`` is not a convolution with the same number of dimensions.

        Cost: a product for each group.

        Example:
            >>> import torch
            >>> dense = torch.nn.Conv2d(32, 64, 3, padding=1)
            >>> SKConv2d.from_conv(dense, num_terms=1, low_rank=8).S.shape
            torch.Size([16, 32, 3, 3])
        """
        check_dense(conv, cls.dense_class, "from_conv")
        check_init(init)
        weight = conv.weight.detach()
        A = fittable(weight).flatten(1).unflatten(0, (conv.groups, -1))  # (groups, out / groups, in / groups * kernel)
        layer = cls.in_place_of(conv, **terms_and_rank(sizes, num_terms, low_rank, sketch_size), seed=seed)
        rows = layer.U.shape[0] // conv.groups
        U = layer.U.to(A.dtype).unflatten(0, (conv.groups, rows))
        # The mean of U^T S over sketches is A / scale.
        S = lstsq_by_groups(A / layer.scale, U) if init == "lstsq" else U @ (A / layer.scale) / rows
        with torch.no_grad():
            layer.S.copy_(S.reshape(layer.S.shape))
        take_format_(layer, weight)
        return layer._with_bias_of(conv)

    @torch.no_grad()
    def plain(self) -> ConvPair:
        """Return the convolution to 2 L K channels and one of width 1."""
        # The power of two next to the root of the scale, which is 1 for the scale of a fitted layer.
        power = 2.0 ** round(math.log2(self.scale) / 2)
        return self.pair_of(self.S * (self.scale / power), self.U * power, self._is_trained)

    def extra_repr(self) -> str:
        """Return sizes and mode, as shown by print."""
        return f"{super().extra_repr()}, {'fitted' if self.is_fitted else f'seed={self.seed}'}"

    def sketch_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape of the sketch, by name."""
        return {"U": (self.S.shape[0], self.out_channels // self.groups)}

    def unstack(self, stacked: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return S and U from S1s and U1s."""
        S1s, U1s = stacked["S1s"], stacked["U1s"]
        blocks = self._by_groups(U1s.flatten(0, 1)).unflatten(1, (self.groups, -1))
        blocks = blocks.unflatten(0, (self.groups, -1)).transpose(1, 2)  # (group, group of outputs, rows, out / groups)
        same_group = torch.eye(self.groups, dtype=torch.bool, device=blocks.device)
        if blocks[~same_group].any():
            raise ShapeError(f"U1s that mixes groups: it must be block-diagonal for groups={self.groups}")
        return {"S": self._by_groups(S1s), "U": blocks[same_group].flatten(0, 1)}


class SKConv1d(_SKConv):
    """A drop-in for :class:`torch.nn.Conv1d` whose kernel is a sum of sketched low-rank terms."""

    dense_class = nn.Conv1d
    dim = 1


class SKConv2d(_SKConv):
    """A drop-in for :class:`torch.nn.Conv2d` whose kernel is a sum of sketched low-rank terms."""

    dense_class = nn.Conv2d
    dim = 2


class SKConv3d(_SKConv):
    """A drop-in for :class:`torch.nn.Conv3d` whose kernel is a sum of sketched low-rank terms."""

    dense_class = nn.Conv3d
    dim = 3


# The documentation of the three layers after their first lines; ``nd``, ``size`` and ``example`` differ.
_DOCUMENTATION = r"""

.. math:: y = \frac{{1}}{{2L}} \sum_{{i=1}}^{{2L}} U_i^T (x * S_i) + b

with trained :math:`S_i`, kernels to K channels, and fixed random signs :math:`U_i = \pm 1/\sqrt K` (K, out) (S. P.
Kasiviswanathan, N. Narodytska and H. Jin, "Deep neural network approximation using tensor sketching", 2017,
arXiv:1710.07850): a convolution to ``2 num_terms low_rank`` channels, whose kernel is ``S``, and a mixing of these
into ``out_channels`` by ``U``. At a fixed product, ``num_terms`` changes only the scale of the sum.

A new layer is *seeded*: U is fixed and saved as one number. Compare :class:`LowRankConv2d`, which trains all numbers of
both factors. Loading a checkpoint with a sketch of its own, as of panther-ml, makes the layer *fitted*, with U as a
trained parameter, which is saved like S; make the optimizer after that.

Args:
    groups: Number of groups; U is then block-diagonal.
    num_terms: Number L; there are 2 L terms.
    low_rank: Rank K of a term, divisible by ``groups``.
    sketch_size: Short for ``num_terms=1, low_rank=sketch_size``. Without any size it is the largest sketch that
        costs at most half of the dense kernel, ``2 K (in / groups * kernel + out / groups) <= in / groups * kernel
        * out / 2``, rounded down to a multiple of ``8 groups`` if that leaves any; at least ``groups``.
    seed: Seed of the sketch, in ``[0, 2^63)``; None draws one from torch's default CPU generator.

Shape:
    Input ``(N, in_channels, {size})`` or ``(in_channels, {size})``, output as nn.Conv{nd}'s; channels_last is kept.

Attributes:
    S: Trained kernel ``(2 L K, in / groups, *kernel)``, drawn so that the dense kernel has nn.Conv{nd}'s variance.
        With groups, the rows of a group are adjacent, as torch's convolutions need them.
    U: Sketch ``(2 L K, out / groups)``: a buffer of exactly +-1 when seeded, a Parameter when fitted.
    bias: A Parameter (out,), or None.
    scale: The number that multiplies U^T S: 1/(2 L sqrt(K)) when seeded, 1 when fitted.
    seed: Python int, None when fitted.

Raises:
    ShapeError: If a size is out of range, or channels or ``low_rank`` are not divisible by ``groups``.

Warns:
    PerformanceWarning: If the dense layer would cost no more; with few channels in each group even at the default
        size.

Cost: ``4 L K (in / groups * kernel + out / groups)`` flops for each output position, against ``2 in / groups *
kernel * out`` dense. Where that saves no time, the layer forms the dense kernel and convolves with it; see
:func:`~panther.nn.functional.sketched_conv`.

Example:
    >>> import torch
{example}"""
_SIZES = {SKConv1d: "L", SKConv2d: "H, W", SKConv3d: "D, H, W"}
_EXAMPLES = {
    SKConv1d: """
    >>> SKConv1d(64, 128, 5, padding="same")(torch.randn(8, 64, 100)).shape
    torch.Size([8, 128, 100])
""",
    SKConv2d: """
    >>> layer = SKConv2d(64, 128, kernel_size=3, padding=1, low_rank=8)
    >>> layer(torch.randn(8, 64, 32, 32)).shape
    torch.Size([8, 128, 32, 32])
    >>> sum(p.numel() for p in layer.parameters())
    9344
""",
    SKConv3d: """
    >>> SKConv3d(16, 32, 3, padding=1)(torch.randn(2, 16, 4, 8, 8)).shape
    torch.Size([2, 32, 4, 8, 8])
""",
}
for _layer, _example in _EXAMPLES.items():
    if _layer.__doc__ is not None:  # Python's option -OO removes docstrings.
        _layer.__doc__ += _DOCUMENTATION.format(nd=f"{_layer.dim}d", size=_SIZES[_layer], example=_example[1:])
        inherit_arguments(ConvGeometry)(_layer)

allow_saving(SKConv1d, SKConv2d, SKConv3d)
