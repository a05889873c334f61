"""QuantizedLinear, a linear layer with a weight of 2 to 8 bits an entry, a low-rank correction in int8, or both."""

__all__ = ["QuantizedLinear"]

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther import kernels
from panther.errors import DTypeError, ShapeError, check_size
from panther.kernels._torch import int_mm
from panther.kernels.cpu.integers import integer_matmul, multiplies_integers, rounded_rows
from panther.kernels.cpu.quantized import quantized_matmul
from panther.kernels.ops.library import autocast
from panther.kernels.selection import backend, use_triton
from panther.nn.base import is_autocasting
from panther.nn.quantized.activations import check_activations, rounded_input, rounded_weight
from panther.nn.quantized.frozen import FrozenProduct
from panther.nn.quantized.matrix import _FACTOR_UNIT, QuantizedMatrix
from panther.nn.quantized.packed import PackedCodes, why_not_packed

# The kernel multiplies up to this many rows, and cuBLAS multiplies more rows by the expanded weight (predicted).
_KERNEL_ROWS = 256


class QuantizedLinear(QuantizedMatrix):
    r"""A drop-in for :class:`torch.nn.Linear` whose weight is stored in few bits.

    .. math:: y = x\,(Q + L\,\mathrm{diag}(c)\,R)^T + b, \qquad Q_{ij} = s_{ig}\,(q_{ij} - z_{ig}), \quad
        g = \lfloor j / \mathtt{group\_size} \rfloor

    with codes q of 2 to 8 bits, a scale s and a zero point z for each group of neighbouring columns of a row, and a
    correction of rank ``low_rank`` whose factors L (out, r) and R (r, in) are int8 with one scale c for each rank-one
    term. Either part may be missing: ``low_rank=0`` is plain quantization, and ``bits=None`` low rank in int8.

    Integers and scales are buffers, and the bias is the only parameter: an optimizer made from ``model.parameters()``
    does not change the weight. :meth:`train_scales_` makes the scales trainable, relative to their size. Scales are
    stored in bfloat16, which has the range of float32 in 2 bytes, and casts of the layer (``half()``,
    ``to(torch.float64)``) only change the dtype of the computation and of the bias.

    A new layer has random weights with nn.Linear's variance; :meth:`from_linear` rounds a dense layer.

    Args:
        in_features: Size of each input sample.
        out_features: Size of each output sample.
        bits: Width of a code, 2 to 8; None for only low rank.
        group_size: Columns that share a scale and a zero point; None, or more than there are: the whole row. The last
            group may be smaller.
        low_rank: Rank r of the correction.
        bias: Whether to add a bias.
        activations: ``"int8"`` rounds each row of the input to 8 bits, with one step per row, so that integers can be
            multiplied. A weight with more than one group in a row is rounded again, to 8 bits with one step per row.
            The error of the output is about 1 %. None does not round the input.
        device: None is torch's default.
        dtype: Floating dtype of input, output and bias; None is torch's default.

    Shape:
        Input ``(*, in_features)``, output ``(*, out_features)``.

    Attributes:
        codes: uint8 (out, bytes of a row), see ``pack_codes``; None without Q.
        zeros: uint8 (out, groups); None without Q.
        scales: bfloat16 (out, groups); None without Q.
        left: int8 (out, r); None without correction, as are the next two.
        right: int8 (r, in).
        factor_scales: bfloat16 (r,).
        scale_logs: None, or after :meth:`train_scales_` a Parameter (out, groups), float32: logarithms of the factors
            by which training has changed ``scales``.
        factor_scale_logs: The same for ``factor_scales``.
        bias: A Parameter (out,) in ``dtype``, or None.

    Raises:
        ShapeError: If a size is out of range.
        ValueError: If ``bits`` is None and ``low_rank`` 0, which leaves no weight, or ``activations`` is unknown.
        TypeError: If an argument has the wrong type.
        DTypeError: If ``dtype`` is not floating.

    Cost: the dense product, the expansion of the codes, and ``2 r (in + out)`` flops for each row. The expansion
    matters if the batch is small: on a CPU, most layers with codes are then slower than nn.Linear and only save memory;
    for few rows in bfloat16 see :meth:`hold_packed_`. On a CPU without gradients the weight is expanded block by block,
    otherwise at once. If the scales are not trained, the gradient of the input expands the weight again and does not
    keep it. On CUDA a Triton kernel, which no GPU has run yet, multiplies up to 256 rows. With ``activations="int8"``
    integers are multiplied, without gradients, on a CPU with instructions for it (VNNI); elsewhere the same rounded
    numbers are multiplied in floating point, which saves nothing. Derivatives ignore the rounding.

    Example:
        >>> import torch
        >>> from panther.nn.quantized import stored_bytes
        >>> layer = QuantizedLinear(1024, 1024, bits=4, group_size=128, low_rank=16)
        >>> layer(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
        >>> 8 * stored_bytes(1024, 1024, bits=4, group_size=128, low_rank=16) / 1024**2
        4.437835693359375

    Reference: a low-rank correction of a quantized weight: Z. Yao et al., "ZeroQuant-V2", 2023, arXiv:2303.08302.
    """

    dense_class = nn.Linear
    dense_arguments = ("in_features", "out_features", "bias")
    packed_copy = False
    _packed: PackedCodes | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int | None = 4,
        *,
        group_size: int | None = 128,
        low_rank: int = 0,
        bias: bool = True,
        activations: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activations = check_activations(activations)
        self.in_features = check_size("in_features", in_features, least=1)
        self.out_features = check_size("out_features", out_features, least=1)
        self._allocate(self.out_features, self.in_features, bits, group_size, low_rank, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``."""
        if not isinstance(input, Tensor):
            raise TypeError(f"the input must be a tensor, not {type(input).__name__}: use torch.as_tensor")
        x, bias = autocast(input.device, input, self.bias)
        dtype = x.dtype
        if dtype is not self.dtype and not is_autocasting(x.device.type):
            raise DTypeError(f"the input is {dtype} and the layer {self.dtype}: cast one of them")
        if not (torch.jit.is_tracing() or x.is_nested) and x.shape[-1:] != (self.in_features,):
            features = f"{x.shape[-1]} features" if x.dim() else "no dimension"
            raise ShapeError(f"the input has {features} and the layer takes {self.in_features}")
        if self._is_plain_inference(input):
            return self._without_gradients(x, bias)
        if self.activations is None and self._is_frozen(input):
            product: Tensor = FrozenProduct.apply(x, bias, self)  # type: ignore[no-untyped-call]
            return product
        return self._by_expansion(x, bias)

    def _without_gradients(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output by the fastest method for strided tensors without gradients."""
        if self.activations is not None:
            if multiplies_integers(x):
                return self._by_integers(x, bias)
        elif self._kernel_takes(x):
            return self._by_kernel(x, bias)
        elif x.is_cpu:
            return self._without_expansion(x, bias)
        return self._by_expansion(x, bias)

    def _by_expansion(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output by differentiable operations, which can be traced."""
        dtype = x.dtype
        if self.activations is not None:
            x = rounded_input(x)
        output = None if self.bits is None else F.linear(x, self._multiplied_weight(dtype), bias)
        if self.low_rank:
            left, right = self._factors(dtype)
            correction = F.linear(F.linear(x, right), left, bias if output is None else None)
            output = correction if output is None else output + correction
        assert output is not None  # the constructor refuses a layer without either
        return output

    def _multiplied_weight(self, dtype: torch.dtype) -> Tensor:  # (out, in)
        """Return Q, rounded again if the input is rounded and a row has more than one group."""
        if self.activations is None or self._groups == 1:
            return self._expanded(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        weight, scales = self._expanded(wide), self._effective("scales")
        return rounded_weight(weight, scales, self.zeros, self._code_form()[0]).to(dtype)

    def _kernel_takes(self, x: Tensor) -> bool:
        """Return whether the Triton kernel runs. It expands the weight for every 64 rows, so it takes few rows."""
        if self.bits is None or x.dtype is torch.float64 or x.numel() > _KERNEL_ROWS * self.in_features:
            return False
        return use_triton("quantized_matmul", x.device) if x.is_cuda or backend() == "triton" else False

    def _by_kernel(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output by the kernel that expands the weight in registers."""
        rows = x.reshape(-1, self.in_features)
        inner = left = None
        if self.low_rank:
            left, right = self.left, self.right.to(x.dtype) * _FACTOR_UNIT
            inner = (rows @ right.mT) * (self.factor_scales / _FACTOR_UNIT).to(x.dtype)
        bits, group_size = self._code_form()
        operands = (rows, self.codes, bits, self.scales, self.zeros, group_size, inner, left, bias)
        return kernels.quantized_matmul(*operands).view(*x.shape[:-1], self.out_features)

    def _by_integers(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output by integer products."""
        dtype = x.dtype
        numbers, steps = rounded_rows(x.reshape(math.prod(x.shape[:-1]), self.in_features))
        integers = numbers.to(torch.int8)
        output = None
        if self.bits is not None:
            bits, group_size = self._code_form()
            form = self.codes, bits, self._effective("scales"), self.zeros, group_size
            output = integer_matmul(integers, steps, *form, bias, dtype)
        if self.low_rank:
            inner = int_mm(integers, self.right.mT) * (steps * self._effective("factor_scales"))
            if output is None:
                output = F.linear(inner.to(dtype), self.left.to(dtype), bias)
            else:
                output.addmm_(inner.to(dtype), self.left.to(dtype).mT)
        assert output is not None  # the constructor refuses a layer without either
        return output.view(*x.shape[:-1], self.out_features)

    def _without_expansion(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output without expanding the whole weight."""
        rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), self.in_features)
        # The packed copy is not for layers in training, because each change of scales would need a new copy.
        if self.packed_copy and self.scale_logs is None and PackedCodes.is_best_for(rows, *self._code_tensors()):
            output = self._packed_codes().product(rows, bias)
        elif self.bits is not None:
            bits, group_size = self._code_form()
            output = quantized_matmul(rows, self.codes, bits, self._effective("scales"), self.zeros, group_size, bias)
        if self.low_rank:
            if x.dtype is torch.float16:
                left, right = self._factors(x.dtype)
                inner = rows @ right.mT
            else:  # The scales multiply the small product between the factors.
                left, right = self.left.to(x.dtype), self.right.to(x.dtype)
                inner = (rows @ right.mT).mul_(self._effective("factor_scales"))
            if self.bits is not None:
                output.addmm_(inner, left.mT)
            else:
                output = F.linear(inner, left, bias)
        return output if x.dim() == 2 else output.reshape(*x.shape[:-1], self.out_features)

    def hold_packed_(self, hold: bool = True) -> Self:
        """Keep a second copy of codes of 4 bits, for torch's kernel for few rows in bfloat16 without gradients.

        With up to 32 rows in bfloat16 on a CPU the layer then does not expand its weight. From 4096 to 4096 features it
        takes a tenth of the time for one row and 0.7 of it for 32 rows, and less time than nn.Linear up to 8 rows. The
        copy has the size of the codes. It is made in the first such call, and again after the tensors changed. It is
        not saved, and a copy of the layer makes another one. Writes to ``codes.data`` cannot be noticed: call this
        method again after them.

        Raises:
            ValueError: If the kernel does not take the layer: bits other than 4, groups other than 32, 64, 128 or 256
                columns, a last group that is smaller, or outputs that are not a multiple of 16.

        Example:
            >>> import torch
            >>> layer = QuantizedLinear(256, 128, dtype=torch.bfloat16).hold_packed_()
            >>> x = torch.randn(1, 256, dtype=torch.bfloat16)
            >>> with torch.no_grad():
            ...     torch.allclose(layer(x), layer.to_linear()(x), atol=0.05)
            True
        """
        self._packed = None
        if hold and (reason := self.why_not_packed()):
            raise ValueError(f"torch's kernel does not take this layer: {reason}")
        self.packed_copy = hold
        return self

    def why_not_packed(self) -> str | None:
        """Return why :meth:`hold_packed_` refuses this layer; None if it does not."""
        return why_not_packed(self.codes, self.bits, self.group_size, self.in_features)

    def _code_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.zeros, self.scales

    def _packed_codes(self) -> PackedCodes:
        tensors = self._code_tensors()
        packed = self._packed
        if packed is None or not packed.is_copy_of(*tensors):
            with torch.inference_mode(False), torch.no_grad():
                packed = self._packed = PackedCodes(*tensors, self.group_size or self.in_features)
        return packed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Drop the packed copy, which does not move with the layer."""
        self._packed = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the packed copy: its order depends on the processor."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        bits: int | None = 4,
        *,
        group_size: int | None = 128,
        low_rank: int = 0,
        activations: str | None = None,
    ) -> Self:
        """Return a quantized approximation of a dense layer, on its device and in its dtype.

        Weights are rounded to the nearest code of a grid whose range is searched for the least squared error. Codes and
        correction are fitted alternately, each to the remainder of the weight, and the best round is kept. Only the
        weight determines the fit, while :func:`panther.compress` also weighs errors by the data.

        Args:
            linear: The layer to approximate. It is not changed.
            bits: As in the constructor.
            group_size: As in the constructor.
            low_rank: As in the constructor, at most the smaller size of the weight.
            activations: As in the constructor.

        Raises:
            ValueError: If the weight has no values, or NaN or infinite ones.
            TypeError: If ``linear`` is not an nn.Linear.

        Cost: about 250 passes over the weight; with a correction 1000 passes and four truncated SVDs.

        Example:
            >>> import torch
            >>> dense = torch.nn.Linear(256, 128)
            >>> layer = QuantizedLinear.from_linear(dense, bits=4, group_size=64)
            >>> bool((layer.weight - dense.weight).norm() < 0.1 * dense.weight.norm())
            True
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear takes an nn.Linear, not {type(linear).__name__}")
        return cls._fitted_to(linear, bits=bits, group_size=group_size, low_rank=low_rank, activations=activations)

    def to_linear(self) -> nn.Linear:
        """Return the nn.Linear with this layer's effective weight and bias, copied.

        Example:
            >>> import torch
            >>> layer, x = QuantizedLinear(256, 128), torch.randn(2, 256)
            >>> torch.allclose(layer(x), layer.to_linear()(x), atol=1e-5)
            True
        """
        linear: nn.Linear = self._to_dense()
        return linear

    def extra_repr(self) -> str:
        """Return sizes and form, as shown by print."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, low_rank={self.low_rank}, bias={self.bias is not None}"
            + ("" if self.activations is None else f", activations={self.activations!r}")
        )
