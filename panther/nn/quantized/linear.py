"""QuantizedLinear, a linear layer with a weight of 2 to 8 bits an entry, a low-rank correction in int8, or both."""

__all__ = ["ACTIVATIONS", "QuantizedLinear", "check_activations"]

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther._docstrings import inherit_arguments
from panther._torch import buffers_of, parameters_of
from panther.kernels import PackedCodes, QuantizedCodes, quantized_matmul, why_not_packed
from panther.kernels.ops.library import autocast, is_plain_call
from panther.kernels.ops.quantized import prepared_product
from panther.nn.factors import check_dense
from panther.nn.protocol import LinearGeometry, allow_saving, check_linear_input
from panther.nn.quantized.matrix import QuantizedMatrix

ACTIVATIONS = (None, "int8")


@inherit_arguments(QuantizedMatrix, LinearGeometry)
class QuantizedLinear(LinearGeometry, QuantizedMatrix):
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
        activations: ``"int8"`` rounds each row of the input to 8 bits, with one step per row, so that integers can be
            multiplied. A weight with more than one group in a row is rounded again, to 8 bits with one step per row,
            except for up to 16 rows, or 128 in bfloat16, on the compiled kernel, which reads the stored codes. The
            error of the output is about 1 %. None does not round the input.

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
        ValueError: If ``bits`` is None and ``low_rank`` 0, which leaves no weight, or ``activations`` is unknown.

    Cost: the dense product, the expansion of the codes, and ``2 r (in + out)`` flops for each row. On a CPU with a C++
    compiler a kernel multiplies up to 16 rows by codes and correction, without gradients, in less time than nn.Linear
    for one row; in bfloat16 on a processor with AMX it multiplies any number of rows. Without a compiler the expansion
    makes small batches slower than nn.Linear; for bfloat16 see :meth:`hold_packed_`. More rows are multiplied by blocks
    of the weight, and with gradients all of it is expanded. If
    the scales are not trained, the gradient of the input expands the weight again and does not keep it. On CUDA a
    Triton kernel, which no GPU has run yet, multiplies up to 256 rows. With ``activations="int8"`` integers are
    multiplied, without gradients, on a CPU with instructions for it (VNNI); elsewhere the same rounded numbers are
    multiplied in floating point, which saves nothing. Derivatives ignore the rounding.

    Example:
        >>> import torch
        >>> from panther.nn.quantized import stored_bytes
        >>> layer = QuantizedLinear(
        ...     1024, 1024, bits=4, group_size=128, low_rank=16
        ... )
        >>> layer(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
        >>> 8 * stored_bytes(
        ...     1024, 1024, bits=4, group_size=128, low_rank=16
        ... ) / 1024**2
        4.437835693359375

    Reference: a low-rank correction of a quantized weight: Z. Yao et al., "ZeroQuant-V2", 2023, arXiv:2303.08302.
    """

    packed_copy = False
    _packed: PackedCodes | None = None
    _product: tuple[Callable[[Tensor], Tensor | None], list[int]] | None = None  # with the addresses of its tensors

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
        self._set_sizes(in_features, out_features)
        self._allocate(self.out_features, self.in_features, bits, group_size, low_rank, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``."""
        is_eager = not torch.compiler.is_compiling()
        if is_eager and self._product is not None and (output := self._by_product(input)) is not None:
            return output
        check_linear_input(input, self.in_features, self.dtype)
        self.check_writes()
        x, bias = autocast(input.device, input, self.bias)
        weight, is_trained = self._operands(), self.trains_scales
        may_prepare = is_eager and self._product is None and x is input and not (is_trained or self.activations)
        may_prepare = may_prepare and bias is parameters_of(self).get("bias")  # not computed from other tensors
        if may_prepare and (product := prepared_product(x, weight, bias)) is not None:
            self._product = product, self._addresses()
        # The packed copy is not for layers in training, because each change of scales would need a new copy.
        packed_codes = self._packed_codes if self.packed_copy and not is_trained else None
        rounds_input = self.activations is not None
        return quantized_matmul(x, weight, bias, rounds_input=rounds_input, packed_codes=packed_codes)

    def _by_product(self, x: Tensor) -> Tensor | None:
        """Return the output by the prepared product, or None if x or its context needs more, or tensors changed."""
        if torch.is_grad_enabled() or not is_plain_call() or type(x) is not Tensor or not x.is_cpu:
            return None
        if x.is_nested or x.layout is not torch.strided or torch.is_autocast_enabled("cpu") or self.activations:
            return None
        assert self._product is not None  # callers ask for it
        product, addresses = self._product
        if self._writes() != self._checked or addresses != self._addresses():
            self._product = None
            return None
        return product(x)

    def _addresses(self) -> list[int]:
        tensors = *buffers_of(self).values(), *parameters_of(self).values()
        return [tensor.data_ptr() for tensor in tensors if tensor is not None]

    def hold_packed_(self, hold: bool = True) -> Self:
        """Keep a second copy of codes of 4 bits, for torch's kernel for few rows in bfloat16 without gradients.

        The copy is for use without a C++ compiler: the compiled kernel needs no copy and comes first. With up to 32
        rows in bfloat16 on a CPU the layer then does not expand its weight. From 4096 to 4096 features it takes a tenth
        of the time for one row and 0.7 of it for 32 rows, and less time than nn.Linear up to 8 rows. The copy has the
        size of the codes. It is made in the first such call, and again after the tensors changed. It is not saved, and
        a copy of the layer makes another one. Writes to ``codes.data`` cannot be noticed: call this method again after
        them.

        Raises:
            ValueError: If the kernel does not take the layer: bits other than 4, groups other than 32, 64, 128 or 256
                columns, a last group that is smaller, or outputs that are not a multiple of 16.

        Example:
            >>> import torch
            >>> layer = QuantizedLinear(
            ...     256, 128, dtype=torch.bfloat16
            ... ).hold_packed_()
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
        return why_not_packed(self._operands().codes, self.in_features)

    def _packed_codes(self, codes: QuantizedCodes) -> PackedCodes:
        packed = self._packed
        if packed is None or not packed.is_copy_of(codes):
            with torch.inference_mode(False), torch.no_grad():
                packed = self._packed = PackedCodes(codes)
        return packed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Drop the packed copy, which does not move with the layer, and the addresses of tensors."""
        self._packed = self._product = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what depends on the processor and on addresses."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_packed", "_product")}

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
            >>> bool(
            ...     (layer.weight - dense.weight).norm() < 0.1 * dense.weight.norm()
            ... )
            True
        """
        check_dense(linear, nn.Linear, "from_linear")
        return cls._fitted_to(linear, bits=bits, group_size=group_size, low_rank=low_rank, activations=activations)

    def follow_record_(self, record: Mapping[str, Any]) -> None:
        """Make the scales trainable, and round inputs, as the recorded layer did."""
        super().follow_record_(record)
        self.activations = check_activations(record.get("activations"))

    def extra_repr(self) -> str:
        """Return sizes and form, as shown by print."""
        return super().extra_repr() + ("" if self.activations is None else f", activations={self.activations!r}")


allow_saving(QuantizedLinear)


def check_activations(activations: str | None) -> str | None:
    """Return the argument, or raise ValueError if it is unknown."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations={activations!r} must be None, which does not round inputs, or 'int8'")
    return activations
