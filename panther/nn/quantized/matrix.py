"""The weight of a quantized layer as a matrix: codes in groups, a correction in int8, and their fit to a dense one."""

__all__ = ["QuantizedMatrix"]

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther.errors import DTypeError, ShapeError, check_device, check_flag, check_floating
from panther.kernels._torch import are_transforms_active, is_differentiated_forward
from panther.kernels.ops.library import is_exporting
from panther.kernels.reference.codes import code_bytes, pack_codes, unpack_codes
from panther.nn.factors import fittable, leading_factors
from panther.nn.quantized.form import checked_form
from panther.nn.quantized.grid import MAXIMUM_CODE, quantization_grid, quantize, round_factors, spread
from panther.nn.quantized.state import STORED_SCALES, QuantizedState

# Rounds of a fit with a correction. The second round reduces the error by 1 %, and the fourth by 0.1 %.
_ROUNDS = 4
_FACTOR_UNIT = 1 / 128  # The product L 128 diag(c) (R / 128) does not overflow float16.


class QuantizedMatrix(QuantizedState):
    """Base of a layer whose weight, as a matrix (rows, columns), is ``Q + L diag(c) R``; see QuantizedLinear."""

    size_arguments = ("bits", "group_size", "low_rank")
    _rows: int
    _columns: int

    def _allocate(
        self,
        rows: int,
        columns: int,
        bits: int | None,
        group_size: int | None,
        low_rank: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Check the form, and make and fill the tensors of a weight of ``rows`` times ``columns``."""
        self.bits, self.group_size, self.low_rank = bits, group_size, low_rank = checked_form(
            columns, bits, group_size, low_rank
        )
        check_flag("bias", bias)
        check_device(device)
        check_floating("dtype", dtype)
        self._rows, self._columns = rows, columns
        self._dtype = dtype or torch.get_default_dtype()

        def buffer(name: str, shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
            if shape is None:
                setattr(self, name, None)  # torch.export miscounts buffers that are None.
            else:
                self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device))

        rank, groups = self.low_rank, self._groups
        buffer("codes", None if bits is None else (rows, code_bytes(columns, bits)), torch.uint8)
        buffer("zeros", None if bits is None else (rows, groups), torch.uint8)
        buffer("left", (rows, rank) if rank else None, torch.int8)
        buffer("right", (rank, columns) if rank else None, torch.int8)
        buffer("record", (len(self._form),), torch.int32)
        buffer("scales", None if bits is None else (rows, groups), STORED_SCALES)
        buffer("factor_scales", (rank,) if rank else None, STORED_SCALES)
        self.register_parameter("scale_logs", None)
        self.register_parameter("factor_scale_logs", None)
        empty_bias = nn.Parameter(torch.empty(rows, dtype=self._dtype, device=device)) if bias else None
        self.register_parameter("bias", empty_bias)
        self.reset_parameters()

    def _code_form(self) -> tuple[int, int]:  # no property, which torch.jit.trace would read without codes
        """Return bits and group size of a layer that has codes."""
        assert self.bits is not None
        assert self.group_size is not None  # because bits is not None
        return self.bits, self.group_size

    @property
    def _groups(self) -> int:
        """The number of groups in a row."""
        return 0 if self.group_size is None else -(-self._columns // self.group_size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw codes, factors and bias from torch's generator, with nn.Linear's variance; a correction starts at 0."""
        self._write_record()
        self._forget_training()
        fan_in = self._columns
        if self.bits is not None:
            levels = 2**self.bits
            codes = torch.randint(levels, (self._rows, fan_in), dtype=torch.uint8, device=self.codes.device)
            self.codes.copy_(pack_codes(codes, self.bits))
            self.zeros.fill_(levels // 2)
            self.scales.fill_(2 / math.sqrt(fan_in * (levels**2 - 1)))
        if self.low_rank:
            self.right.random_(-MAXIMUM_CODE, MAXIMUM_CODE + 1)
            variance = MAXIMUM_CODE * (MAXIMUM_CODE + 1) / 3
            self.factor_scales.fill_(1 / (variance * math.sqrt(3 * fan_in * self.low_rank)))
            if self.bits is None:
                self.left.random_(-MAXIMUM_CODE, MAXIMUM_CODE + 1)
            else:
                self.left.zero_()
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def _expanded(self, dtype: torch.dtype) -> Tensor:  # (out, in)
        """Return Q, differentiable by the scales."""
        # Scales can be as small as 6e-8, the least number of float16. Differences of integers are exact in every dtype.
        work = torch.float32 if dtype is torch.float16 else dtype
        bits, group_size = self._code_form()
        codes = unpack_codes(self.codes, bits, self._columns).to(work)
        held = self._effective("scales")
        if is_exporting():
            scales, zeros = held.to(work), self.zeros.to(work)
            return _by_groups(codes, scales, zeros, group_size, self._columns).to(dtype)
        zeros, scales = (spread(t, group_size, self._columns) for t in (self.zeros.to(work), held.to(work)))
        return ((codes - zeros) * scales).to(dtype)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # (out, r), (r, in)
        """Return L diag(c) and R as numbers, scaled so that products with either do not overflow float16."""
        held = self._effective("factor_scales")
        wide = torch.promote_types(held.dtype, torch.float32)  # float64 if scales are float64
        left = self.left * (held.to(wide) / _FACTOR_UNIT)
        return left.to(dtype), self.right.to(dtype) * _FACTOR_UNIT

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The dense effective weight, for inspection: differentiable, computed at each access.

        Each access gives a new tensor. Writing to it, as ``nn.init`` would, does not change the layer.
        """
        return self._weight(self.dtype)

    def _weight(self, dtype: torch.dtype) -> Tensor:  # (out, in)
        dense = None if self.bits is None else self._expanded(dtype)
        if self.low_rank:
            left, right = self._factors(dtype)
            dense = left @ right if dense is None else dense + left @ right
        assert dense is not None  # the constructor refuses a layer without either
        return dense

    def _is_plain_inference(self, x: Tensor) -> bool:
        """Return whether no gradient is needed, nothing is traced, and the input is a strided tensor."""
        return self._is_plain(x) and not (torch.is_grad_enabled() and (x.requires_grad or self._is_trained()))

    def _is_frozen(self, x: Tensor) -> bool:
        """Return whether only the input needs a gradient, nothing is traced, and the input is strided."""
        return self._is_plain(x) and torch.is_grad_enabled() and x.requires_grad and not self._is_weight_trained()

    def _is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def _is_weight_trained(self) -> bool:
        return any(logs is not None and logs.requires_grad for logs in (self.scale_logs, self.factor_scale_logs))

    @staticmethod
    def _is_plain(x: Tensor) -> bool:
        """Return whether nothing is traced or transformed, and the input is a strided tensor."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or type(x) is not Tensor:
            return False
        if x.is_nested or x.layout is not torch.strided:
            return False
        return not (are_transforms_active() or is_differentiated_forward())

    @classmethod
    def _fitted_to(cls, dense: Any, **form: Any) -> Self:
        """Return a layer of this form, fitted to the weight of a dense layer, with its bias and training mode."""
        A = fittable(dense.weight.detach()).flatten(1)
        layer = cls._in_place_of(dense, **form)
        layer._fit_(A)
        return layer._with_bias_of(dense)

    def _fit_(self, A: Tensor) -> None:
        best, correction = math.inf, torch.zeros_like(A)
        for _ in range(_ROUNDS if self.low_rank and self.bits is not None else 1):
            parts: list[tuple[Tensor, Tensor, Tensor]] = []
            rest = A
            if self.bits is not None:
                size = self.group_size
                grid = quantization_grid(A - correction, self.bits, size)
                codes = quantize(A - correction, *grid, size, self.bits)
                scales, zeros = (spread(part.to(A.dtype), size, self._columns) for part in grid)
                rest = A - scales * (codes.to(A.dtype) - zeros)
                parts.append((codes, *grid))
            if self.low_rank:
                left, right, c = factors = round_factors(*leading_factors(rest, self.low_rank))
                correction = (left.to(A.dtype) * c.to(A.dtype)) @ right.to(A.dtype)
                rest = rest - correction
                parts.append(factors)
            error = rest.square().sum().item()
            if error < best or math.isinf(best):
                best, best_parts = error, parts
        if self.bits is not None:
            self.set_codes_(*best_parts.pop(0))
        if self.low_rank:
            self.set_factors_(*best_parts.pop(0))

    @torch.no_grad()
    def set_codes_(
        self,
        codes: Tensor,  # (out, in) uint8
        scales: Tensor,  # (out, groups)
        zeros: Tensor,  # (out, groups) uint8
    ) -> Self:
        """Fill Q: ``scales * (codes - zeros)`` by groups; scales are rounded to bfloat16.

        Raises:
            ShapeError: If the layer has no Q, or a shape differs.
            DTypeError: If codes or zeros are not uint8.
            ValueError: If a code or zero needs more than ``bits`` bits, or a scale is not finite.
        """
        if self.bits is None:
            raise ShapeError("this layer only has a correction (bits=None) and no codes: use set_factors_")
        groups = (self._rows, self._groups)
        shape = (self._rows, self._columns)
        _check_shapes(codes=(codes, shape), scales=(scales, groups), zeros=(zeros, groups))
        top = 2**self.bits - 1
        for name, tensor in (("codes", codes), ("zeros", zeros)):
            if tensor.dtype is not torch.uint8:
                raise DTypeError(f"{name} must be torch.uint8, not {tensor.dtype}: round and cast them")
            if tensor.max() > top:
                raise ValueError(f"{name} of {self.bits} bits are at most {top}, and one is {tensor.max()}: clamp them")
        _check_finite("scales", scales)
        self.codes.copy_(pack_codes(codes, self.bits))
        self.zeros.copy_(zeros)
        self.scales.copy_(scales)
        self._forget_training("scale_logs")
        return self

    @torch.no_grad()
    def set_factors_(
        self,
        left: Tensor,  # (out, r) int8
        right: Tensor,  # (r, in) int8
        factor_scales: Tensor,  # (r,)
    ) -> Self:
        """Fill the correction ``left diag(factor_scales) right``; scales are rounded to bfloat16.

        Raises:
            ShapeError: If the layer has no correction, or a shape differs.
            DTypeError: If left or right are not int8.
            ValueError: If a scale is not finite.
        """
        if not (rank := self.low_rank):
            raise ShapeError("this layer has no correction (low_rank=0): use set_codes_")
        _check_shapes(
            left=(left, (self._rows, rank)),
            right=(right, (rank, self._columns)),
            factor_scales=(factor_scales, (rank,)),
        )
        for name, tensor in (("left", left), ("right", right)):
            if tensor.dtype is not torch.int8:
                raise DTypeError(f"{name} must be torch.int8, not {tensor.dtype}: round and cast it")
        _check_finite("factor_scales", factor_scales)
        self.left.copy_(left)
        self.right.copy_(right)
        self.factor_scales.copy_(factor_scales)
        self._forget_training("factor_scale_logs")
        return self


def _by_groups(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int, columns: int) -> Tensor:  # (out, in)
    """Return Q without expanding scales to columns, because exporters would store the expanded scales."""
    full_groups = columns // group_size
    runs = codes[:, : full_groups * group_size].unflatten(1, (full_groups, group_size))
    first: Tensor = ((runs - zeros[:, :full_groups, None]) * scales[:, :full_groups, None]).flatten(1)
    if full_groups * group_size == columns:
        return first
    return torch.cat(
        (first, (codes[:, full_groups * group_size :] - zeros[:, full_groups:]) * scales[:, full_groups:]), 1
    )


def _check_shapes(**tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    for name, (tensor, shape) in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.shape != shape:
            raise ShapeError(f"{name} must have shape {shape} in this layer, not {tuple(tensor.shape)}")


def _check_finite(name: str, scales: Tensor) -> None:
    if not scales.to(torch.bfloat16).isfinite().all():
        raise ValueError(f"{name} must be finite in bfloat16: they hold NaN, infinite or too large numbers")
