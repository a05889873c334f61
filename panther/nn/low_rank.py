"""LowRankLinear and LowRankConv2d, layers whose weight is the product of two trained factors."""

__all__ = ["FactoredModule", "LowRankConv2d", "LowRankLinear"]

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther._docstrings import inherit_arguments
from panther._torch import parameters_of
from panther.errors import check_device, check_flag, check_floating, check_size
from panther.nn.conv.geometry import ConvGeometry, take_format_
from panther.nn.conv.product import convolve, dense_kernel
from panther.nn.factors import check_dense, check_shapes, fittable, leading_factors, learnable_factors
from panther.nn.pairs import ConvPair, LinearPair
from panther.nn.protocol import CompressedModule, LinearGeometry, allow_saving, check_linear_input
from panther.nn.sketch_sizes import divisible, warn_unless_smaller

torch.fx.wrap("_product")  # A symbolic trace must not branch on the input.
torch.fx.wrap("convolve")


class FactoredModule(CompressedModule):
    """Base of layers of two trained factors: everything except the shapes of the factors and the product."""

    size_arguments: tuple[str, ...] = ("rank",)
    saved_buffer_names = ()
    factor_names = ("down", "up")
    down: nn.Parameter
    up: nn.Parameter
    bias: nn.Parameter | None
    rank: int
    fan_in: int
    """Number of inputs that an output is a sum over."""
    groups: int = 1

    def _build(
        self,
        down: tuple[int, ...],
        up: tuple[int, ...],
        outputs: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Check the arguments that both constructors have, make factors of these shapes, and draw them."""
        check_flag("bias", bias)
        check_device(device)
        check_floating("dtype", dtype)
        self.down = nn.Parameter(torch.empty(down, dtype=dtype, device=device))
        self.up = nn.Parameter(torch.empty(up, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
        warn_unless_smaller(
            type(self).__name__, f"nn.{self.dense_class.__name__}", f"rank={self.rank}",
            math.prod(down) + math.prod(up), self.fan_in, outputs,
            stacklevel=4,  # the caller of the class, whose __init__ is decorated
        )  # fmt: skip
        self.reset_parameters()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of input, output and parameters."""
        return self.down.dtype

    @property
    def inner_rank(self) -> int | None:
        """The rank r."""
        return self.rank

    @property
    def _is_trained(self) -> bool:
        return self.down.requires_grad

    @classmethod
    def describe_form(cls, arguments: Mapping[str, Any], mode: str = "stored") -> str:
        """Return the rank in words."""
        return f"low rank {arguments['rank']}"

    def reset_parameters(self) -> None:
        """Draw both factors and the bias from torch's generator; the weight has the variance of torch's default."""
        # An entry of the weight is a sum of rank / groups products, so its variance is 1 / (3 fan_in).
        bound = 1 / math.sqrt(self.fan_in)
        bound_of_up = math.sqrt(3 * self.groups / self.rank)
        nn.init.uniform_(self.down, -bound, bound)
        nn.init.uniform_(self.up, -bound_of_up, bound_of_up)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def stored_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that the weight is computed from."""
        return self.factor_names

    def check_record(self) -> None:
        """Do nothing: the factors are all that the layer stores."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load everything or nothing."""
        state = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        expected = {name: tensor.shape for name, tensor in parameters_of(self).items() if tensor is not None}
        if self._fits(state, expected, prefix, *args):
            super()._load_from_state_dict(state_dict, prefix, *args)


@inherit_arguments(LinearGeometry)
class LowRankLinear(LinearGeometry, FactoredModule):
    r"""A drop-in for :class:`torch.nn.Linear` whose weight is a product of two trained factors.

    .. math:: y = x\,A\,B + b

    with A (in, r) and B (r, out). It is the simplest layer that is smaller than a dense one, and what
    :func:`panther.compress` makes of a weight of low rank: :meth:`from_linear` gives the truncated SVD, the best
    approximation of this rank (C. Eckart and G. Young, 1936, doi:10.1007/BF02288367). Compare :class:`SKLinear`, which
    trains the same number of parameters for twice the rank, because half of its factors are fixed.

    Args:
        rank: Rank r of the weight.

    Shape:
        Input ``(*, in_features)``, output ``(*, out_features)``.

    Attributes:
        down: The factor A (in, r).
        up: The factor B (r, out).
        bias: A Parameter (out,), or None.

    Warns:
        PerformanceWarning: If the dense layer would not be larger.

    Cost: ``2 r (in + out)`` flops for each row forward and twice that backward; dense, ``2 in out`` and twice that.

    Example:
        >>> import torch
        >>> layer = LowRankLinear(1024, 1024, rank=16)
        >>> layer(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
        >>> sum(p.numel() for p in layer.parameters())
        33792
    """

    sharded_dims: ClassVar[Mapping[int, Mapping[str, int]]] = {0: {"up": 1, "bias": 0}, 1: {"down": 0}}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_sizes(in_features, out_features)
        self.fan_in = self.in_features
        self.rank = check_size("rank", rank, least=1)
        shapes = (self.in_features, self.rank), (self.rank, self.out_features)
        self._build(*shapes, self.out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``."""
        return _product(input, self.down, self.up, self.bias)

    def factors(self) -> tuple[Tensor, Tensor]:  # (out, r), (r, in)
        """Return two factors whose product is the weight: views."""
        return self.up.mT, self.down.mT

    def plain(self) -> LinearPair:
        """Return the pair of both factors."""
        return LinearPair.of_factors(*self.factors(), self.bias, self._is_trained)

    @torch.no_grad()
    def plus_product(self, left: Tensor, right: Tensor) -> "LowRankLinear | None":  # (out, r'), (r', in)
        """Return the layer of rank r + r', or None if it would not be smaller than the dense layer."""
        if (self.rank + len(right)) * (self.in_features + self.out_features) >= self.in_features * self.out_features:
            return None
        down = torch.cat((self.down, right.mT.to(self.dtype)), 1)
        up = torch.cat((self.up, left.mT.to(self.dtype)))
        return LowRankLinear.from_factors(down, up, None if self.bias is None else self.bias.clone())

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The dense effective weight, for inspection: differentiable, made anew at each access in 2 r in out flops."""
        return (self.down @ self.up).mT

    @torch.no_grad()
    def set_factors_(
        self,
        left: Tensor,  # (out, r)
        right: Tensor,  # (r, in)
        seed: int = 0,
    ) -> Self:
        """Make ``left @ right`` the weight.

        A component that is zero in both factors would get no gradient. Its column of ``left`` is replaced by random
        signs, and its row of ``right`` by zeros, which leaves the weight as it is and lets the component learn.

        Args:
            left: Factor on the output side.
            right: Factor on the input side.
            seed: Seed of the signs.

        Raises:
            ShapeError: If a shape differs.

        Example:
            >>> import torch
            >>> left, right = torch.randn(48, 5), torch.randn(5, 64)
            >>> layer = LowRankLinear(64, 48, 5).set_factors_(left, right)
            >>> torch.allclose(layer.weight, left @ right, atol=1e-4)
            True
        """
        outer, inner = (self.out_features, self.rank), (self.rank, self.in_features)
        check_shapes(left=(left, outer), right=(right, inner))
        left, right = learnable_factors(left, right, seed)
        self.down.copy_(right.mT)
        self.up.copy_(left.mT)
        return self

    @classmethod
    def from_factors(
        cls,
        down: Tensor,  # (in, r)
        up: Tensor,  # (r, out)
        bias: Tensor | None = None,  # (out,)
    ) -> Self:
        """Return the layer with these factors and this bias, which are not copied.

        Example:
            >>> import torch
            >>> layer = LowRankLinear.from_factors(
            ...     torch.ones(64, 2), torch.ones(2, 48)
            ... )
            >>> layer
            LowRankLinear(in_features=64, out_features=48, rank=2, bias=False)
        """
        # On the meta device, because values would be drawn only to be replaced.
        layer = cls(len(down), up.shape[1], len(up), bias is not None, device="meta", dtype=down.dtype)
        layer.down, layer.up = nn.Parameter(down), nn.Parameter(up)
        if bias is not None:
            layer.bias = nn.Parameter(bias)
        return layer

    @classmethod
    def from_linear(cls, linear: nn.Linear, rank: int, *, seed: int = 0) -> Self:
        """Return the layer with the truncated SVD of a dense weight, on its device and in its dtype.

        The dense layer is not changed. Only the weight determines the fit, while :func:`panther.compress` also weighs
        errors by the data. Singular values are split evenly between the factors.

        Args:
            linear: The layer to approximate.
            rank: As in the constructor.
            seed: Seed of the randomized SVD and of unused components.

        Raises:
            ValueError: If the weight has no values, or NaN or infinite ones.
            TypeError: If ``linear`` is not an nn.Linear.

        Cost: O(r in out), by :func:`~panther.linalg.randomized_svd`, if both sizes are 256 or more and r is at most an
        eighth of both, else O(in out min(in, out)).

        Example:
            >>> import torch
            >>> dense = torch.nn.Linear(64, 48)
            >>> layer = LowRankLinear.from_linear(dense, rank=20)
            >>> bool((layer.weight - dense.weight).norm() < dense.weight.norm())
            True
        """
        check_dense(linear, nn.Linear, "from_linear")
        A = fittable(linear.weight.detach())
        layer = cls.in_place_of(linear, rank=rank)
        layer.set_factors_(*leading_factors(A, layer.rank, seed), seed)
        return layer._with_bias_of(linear)


@inherit_arguments(ConvGeometry)
class LowRankConv2d(ConvGeometry, FactoredModule):
    r"""A drop-in for :class:`torch.nn.Conv2d` whose kernel is a product of two trained factors.

    A convolution to ``rank`` channels, and a mixing of these into the output channels at every position: the truncated
    SVD of the unfolded kernel (X. Zhang et al., "Accelerating very deep convolutional networks", 2015,
    arXiv:1505.06798). :func:`panther.compress` makes this layer of a convolution of low rank.

    Args:
        groups: Number of groups of channels. A group has factors of rank ``rank / groups``.
        rank: Channels between the two factors, divisible by ``groups``.

    Shape:
        Input ``(N, in_channels, H, W)`` or ``(in_channels, H, W)``, output as nn.Conv2d's; channels_last is kept.

    Attributes:
        down: Kernel ``(rank, in / groups, *kernel)``; with groups, the rows of a group are adjacent.
        up: Mixing factor ``(rank, out / groups)``.
        bias: A Parameter (out,), or None.

    Raises:
        ShapeError: If a size is out of range, or channels or ``rank`` are not divisible by ``groups``.

    Warns:
        PerformanceWarning: If the dense layer would cost no more.

    Cost: ``2 rank (in / groups * kernel + out / groups)`` flops for each output position, against ``2 in / groups *
    kernel * out`` dense. Where that saves no time, the layer forms the dense kernel and convolves with it; see
    :func:`~panther.nn.functional.sketched_conv`.

    Example:
        >>> import torch
        >>> layer = LowRankConv2d(64, 128, kernel_size=3, padding=1, rank=16)
        >>> layer(torch.randn(8, 64, 32, 32)).shape
        torch.Size([8, 128, 32, 32])
        >>> sum(p.numel() for p in layer.parameters())
        11392
    """

    dense_class = nn.Conv2d
    dim = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Any = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        rank: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_geometry(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
        self.fan_in = self.in_channels // self.groups * math.prod(self.kernel_size)
        self.rank = divisible("rank", rank, self.groups)
        down = (self.rank, self.in_channels // self.groups, *self.kernel_size)
        self._build(down, (self.rank, self.out_channels // self.groups), self.out_channels, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, in_channels, H, W)`` to ``(N, out_channels, H', W')``; also without N."""
        return convolve(
            input, self.down, self.up, self.bias, self.stride, self.padding, self.dilation, self.groups, 1.0,
            self.padding_mode,
        )  # fmt: skip

    @property
    def weight(self) -> Tensor:  # (out, in / groups, *kernel)
        """The dense effective kernel, for inspection: differentiable, made anew at each access."""
        return dense_kernel(self.down, self.up, self.groups, 1.0)

    @torch.no_grad()
    @inherit_arguments(LowRankLinear.set_factors_)
    def set_factors_(
        self,
        left: Tensor,  # (groups, out / groups, rank / groups)
        right: Tensor,  # (groups, rank / groups, in / groups * kernel)
        seed: int = 0,
    ) -> Self:
        """Make ``left @ right`` the unfolded kernel of each group; see :meth:`LowRankLinear.set_factors_`."""
        per_group = self.groups, self.rank // self.groups
        outer = self.groups, self.out_channels // self.groups, per_group[1]
        check_shapes(left=(left, outer), right=(right, (*per_group, self.fan_in)))
        left, right = learnable_factors(left, right, seed)
        self.down.copy_(right.reshape(self.down.shape))
        self.up.copy_(left.mT.flatten(0, 1))
        return self

    @classmethod
    @inherit_arguments(LowRankLinear.from_linear)
    def from_conv(cls, conv: nn.Conv2d, rank: int, *, seed: int = 0) -> Self:
        """Return the layer with the truncated SVD of a dense convolution, on its device and in its dtype.

        The dense layer is not changed. The kernel of each group, unfolded to (out / groups, in / groups * kernel), is
        approximated in rank ``rank / groups``.

        Args:
            conv: The layer to approximate.

        Raises:
            TypeError: If ``conv`` is not an nn.Conv2d.

        Cost: an SVD for each group, see :meth:`LowRankLinear.from_linear`.

        Example:
            >>> import torch
            >>> dense = torch.nn.Conv2d(32, 64, 3, padding=1)
            >>> LowRankConv2d.from_conv(dense, rank=16).down.shape
            torch.Size([16, 32, 3, 3])
        """
        check_dense(conv, nn.Conv2d, "from_conv")
        A = fittable(conv.weight.detach()).flatten(1).unflatten(0, (conv.groups, -1))
        layer = cls.in_place_of(conv, rank=rank)
        pairs = [leading_factors(group, layer.rank // layer.groups, seed) for group in A]
        left, right = (torch.stack(factors) for factors in zip(*pairs, strict=True))
        layer.set_factors_(left, right, seed)
        take_format_(layer, conv.weight)
        return layer._with_bias_of(conv)

    def plain(self) -> ConvPair:
        """Return a convolution to ``rank`` channels and one of width 1."""
        return self.pair_of(self.down, self.up, self._is_trained)


def _product(
    x: Tensor,  # (*, in)
    down: Tensor,  # (in, r)
    up: Tensor,  # (r, out)
    bias: Tensor | None,  # (out,)
) -> Tensor:  # (*, out)
    check_linear_input(x, down.shape[0], down.dtype)
    # The factors are stored in the orientation in which MKL multiplies few rows fastest: 16 rows of width 2048 took a
    # third of the time that they take with the transposed factors (Xeon, float32, one thread).
    if x.dim() != 2 or x.is_nested:
        return F.linear(F.linear(x, down.mT), up.mT, bias)
    h = torch.mm(x, down)  # F.linear and its views take several microseconds more.
    return torch.mm(h, up) if bias is None else torch.addmm(bias, h, up)


allow_saving(LowRankLinear, LowRankConv2d)
