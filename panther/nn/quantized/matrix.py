"""The weight of a quantized layer: its form and bytes, its codes and correction, and their fit to a dense weight.

The grid of the codes has a scale and a zero point for each group, with searched clipping; factors are rounded to int8.
"""

__all__ = ["MAXIMUM_CODE", "QuantizedMatrix", "quantization_grid", "quantize", "round_factors", "stored_bytes"]

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther.errors import DTypeError, ShapeError, check_device, check_flag, check_floating, check_size
from panther.kernels import QuantizedCodes, QuantizedFactors, QuantizedOperands, code_bytes, pack_codes, unpack_codes
from panther.kernels.ops.quantized_operands import dense_weight, wide_factors
from panther.kernels.reference.codes import spread
from panther.nn.factors import check_shapes, fittable, leading_factors
from panther.nn.pairs import LinearPair
from panther.nn.quantized.state import STORED_SCALES, QuantizedState

# Rounds of a fit with a correction. The second round reduces the error by 1 %, and the fourth by 0.1 %.
_ROUNDS = 4
_RECORD_BYTES, _KERNEL_BYTES = 12, 12

MAXIMUM_CODE = 127  # The codes of factors are symmetric about zero.
_SMALLEST_STEP = 1e-38  # about the least normal number of bfloat16
_CANDIDATES = 24
# The zero point of a group of zeros in 8 bits. Kernels read codes minus this number, which are then zeros.
_MIDDLE = 128
_BLOCK = 1 << 20  # Weights per block, so that the temporaries of a candidate stay in the caches.


class QuantizedMatrix(QuantizedState):
    """Base of a layer whose weight, as a matrix (rows, columns), is ``Q + L diag(c) R``; see QuantizedLinear.

    Args:
        bits: Width of a code, 2 to 8; None for only low rank.
        group_size: Columns that share a scale and a zero point; None, or more than there are: the whole row. The last
            group may be smaller.
        low_rank: Rank r of the correction.
        bias: Whether to add a bias.
        device: None is torch's default.
        dtype: Floating dtype of input, output and bias; None is torch's default.

    Raises:
        ShapeError: If a size is out of range.
        TypeError: If an argument has the wrong type.
        DTypeError: If ``dtype`` is not floating.
    """

    size_arguments: tuple[str, ...] = ("bits", "group_size", "low_rank")
    sizes_may_be_none = True
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
        self.bits, self.group_size, self.low_rank = bits, group_size, low_rank = _checked_form(
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
                with torch.inference_mode(False):  # Inference tensors do not count writes.
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
        if not self.record.is_meta:  # Without values, torch would still run each operation, in Python.
            self.reset_parameters()

    @property
    def _groups(self) -> int:
        """The number of groups in a row."""
        return 0 if self.group_size is None else -(-self._columns // self.group_size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw codes, factors and bias from torch's generator, with nn.Linear's variance; a correction starts at 0."""
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
        self._write_record()

    @property
    def is_symmetric(self) -> bool:
        """Whether every zero point is the middle code, so that files need not hold the zero points."""
        return self.bits is not None and bool((self.zeros == 2 ** (self.bits - 1)).all())

    def implied_tensors(self, device: torch.device | str) -> dict[str, Tensor]:
        """Return the zero points of a symmetric grid, uint8 (rows, groups); the layer may be on the meta device.

        Raises:
            ShapeError: If the layer has no codes.
        """
        if self.bits is None:
            raise ShapeError("this layer only has a correction (bits=None) and no zero points")
        return {"zeros": torch.full_like(self.zeros, 2 ** (self.bits - 1), device=device)}

    def _operands(self) -> QuantizedOperands:
        """Return the weight as the kernels take it, with trained scales."""
        codes = None if self.bits is None else self._codes_of(lambda tensor: tensor)
        factors = None
        if self.low_rank:
            factors = QuantizedFactors(self.left, self.right, self._effective("factor_scales"))
        return QuantizedOperands(self._columns, codes, factors)

    def _codes_of(self, rows_of: Callable[[Tensor], Tensor]) -> QuantizedCodes:
        """Return the codes of some rows of a layer with codes; ``rows_of`` selects them from a tensor (rows, n)."""
        assert self.bits is not None
        assert self.group_size is not None  # because bits is not None
        scales = self._effective("scales", rows_of)
        return QuantizedCodes(rows_of(self.codes), self.bits, scales, rows_of(self.zeros), self.group_size)

    @torch.no_grad()
    def grid_numbers(self) -> tuple[Tensor, Tensor, Tensor]:  # (rows, columns), (rows, groups), (rows, groups)
        """Return the codes in uint8, the scales with trained factors, and the zero points in uint8.

        Raises:
            ShapeError: If the layer has no codes.
        """
        codes = self._operands().codes
        if codes is None:
            raise ShapeError("this layer only has a correction (bits=None) and no codes")
        return unpack_codes(codes.packed, codes.bits, self._columns), codes.scales, codes.zeros

    def wide_factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # (out, r), (r, in)
        """Return two matrices whose product is the correction, or the weight of a layer without codes."""
        factors = self._operands().factors
        assert factors is not None  # callers ask for `low_rank` first
        return wide_factors(factors, dtype)

    def factors(self) -> tuple[Tensor, Tensor] | None:  # (out, r), (r, in)
        """Return the factors of a layer without codes, in its dtype; None of a layer with codes."""
        return None if self.bits is not None else self.wide_factors(self.dtype)

    @property
    def inner_rank(self) -> int | None:
        """The rank of a layer without codes; None of a layer with codes."""
        return None if self.bits is not None else self.low_rank

    @torch.no_grad()
    def plain(self) -> nn.Module:
        """Return the dense layer of the weight, or the pair of both factors of a layer without codes."""
        if (factors := self.factors()) is None:
            return super().plain()
        return LinearPair.of_factors(*factors, self.bias, self._is_trained)

    @classmethod
    def describe_form(cls, arguments: Mapping[str, Any], mode: str = "quantized") -> str:
        """Return the width of the codes and the rank of the correction."""
        bits, rank = arguments["bits"], arguments.get("low_rank")
        parts = [] if bits is None else [f"int{bits}"]
        return " + ".join(parts + ([f"low rank {rank}"] if rank else []))

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The dense effective weight, for inspection: differentiable, made anew at each access."""
        if self._checked is not None:  # transformers asks for it while it loads the values.
            self.check_writes()
        return dense_weight(self._operands(), self.dtype)

    @classmethod
    def _fitted_to(cls, dense: Any, **form: Any) -> Self:
        """Return a layer of this form, fitted to the weight of a dense layer, with its bias and training mode."""
        A = fittable(dense.weight.detach()).flatten(1)
        layer = cls.in_place_of(dense, **form)
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
        check_shapes(codes=(codes, shape), scales=(scales, groups), zeros=(zeros, groups))
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
        self._write_record()
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
        check_shapes(
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
        self._write_record()
        return self


def stored_bytes(
    in_features: int,
    out_features: int,
    bits: int | None = 4,
    *,
    group_size: int | None = 128,
    low_rank: int = 0,
    conv: bool = False,
) -> int:
    """Return the size of a :class:`QuantizedLinear` of this form in a file, in bytes, without its bias.

    With ``conv`` return the size of a :class:`QuantizedConv2d`, whose ``in_features`` are in / groups * kernel.
    """
    columns = check_size("in_features", in_features, least=1)
    rows = check_size("out_features", out_features, least=1)
    bits, group_size, low_rank = _checked_form(columns, bits, group_size, low_rank)
    size = _RECORD_BYTES + conv * _KERNEL_BYTES + low_rank * (rows + columns + 2)
    if bits is not None and group_size is not None:
        size += rows * (code_bytes(columns, bits) + 3 * -(-columns // group_size))
    return size


def _checked_form(
    columns: int, bits: int | None, group_size: int | None, low_rank: int
) -> tuple[int | None, int | None, int]:
    """Return bits, group size and rank as a layer stores them."""
    low_rank = check_size("low_rank", low_rank, least=0)
    size = columns if group_size is None else check_size("group_size", group_size, least=1)
    if bits is None:
        if not low_rank:
            raise ValueError("bits=None leaves low rank alone, and low_rank=0 none of it: give one of them")
        return None, None, low_rank
    bits = check_size("bits", bits, least=2)
    if bits > 8:
        raise ShapeError(f"bits={bits} must be 2 to 8, or None for low rank alone")
    return bits, min(size, columns), low_rank


def _check_finite(name: str, scales: Tensor) -> None:
    if not scales.to(torch.bfloat16).isfinite().all():
        raise ValueError(f"{name} must be finite in bfloat16: they hold NaN, infinite or too large numbers")


def quantize(
    weight: Tensor, scales: Tensor, zeros: Tensor, group_size: int | None, bits: int
) -> Tensor:  # (out, in), uint8
    """Return the nearest code of each weight on the grid ``scales * (codes - zeros)``."""
    columns = weight.shape[1]
    steps = spread(scales.to(weight.dtype), group_size, columns)
    codes = (weight / steps).round_().add_(spread(zeros, group_size, columns))
    return codes.clamp_(0, 2**bits - 1).to(torch.uint8)


def quantization_grid(
    weight: Tensor,  # (out, in)
    bits: int,
    group_size: int | None = None,
    *,
    importance: Tensor | None = None,  # (in,)
    candidates: int = _CANDIDATES,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor]:  # (out, groups) bfloat16, (out, groups) uint8
    r"""Return scales and zero points of least squared error when each weight goes to its nearest code.

    For each group, the search shrinks the range from the least to the largest weight (and zero) by ``candidates``
    factors, down to the best factor for a normal distribution at this width; 1 takes the whole range. The scale is
    rounded to bfloat16 before the error is computed, as in the stored grid. ``importance`` weighs the squared error of
    each column. With ``symmetric`` every zero point is the middle code ``2^(bits - 1)``, as kernels for signed codes
    need it. Raise ValueError for entries that are NaN, infinite or too large for bfloat16.
    """
    A = fittable(weight.detach())
    rows, columns = A.shape
    size = min(group_size or columns, columns)
    groups = -(-columns // size)
    if groups * size > columns:  # Padding zeros cause no error, because every grid represents zero.
        A = torch.nn.functional.pad(A, (0, groups * size - columns))
    counts = None
    if importance is not None:
        counts = torch.nn.functional.pad(importance.detach().to(A), (0, groups * size - columns)).reshape(groups, size)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16, device=A.device)
    zeros = torch.empty(rows, groups, dtype=torch.uint8, device=A.device)
    step = max(1, _BLOCK // max(1, groups * size))
    for start in range(0, rows, step):
        block = slice(start, start + step)
        scales[block], zeros[block] = _searched(
            A[block].unflatten(1, (groups, size)), bits, counts, candidates, symmetric=symmetric
        )
    if not scales.isfinite().all():
        raise ValueError("the weight has entries too large for bfloat16 (3.4e38), which holds the scales: scale it")
    return scales, zeros


def _searched(
    A: Tensor,  # (rows, groups, group_size)
    bits: int,
    counts: Tensor | None,  # (groups, group_size)
    candidates: int,
    *,
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    low, high = A.amin(-1).clamp_max(0), A.amax(-1).clamp_min(0)
    if symmetric:  # the range that has both ends and the middle code at zero
        step = torch.maximum(-low / middle, high / max(middle - 1, 1))
        low, high = -step * middle, step * (top - middle)
    # For a normal distribution, the best range at 2, 3, 4 and 8 bits is 0.5, 0.7, 0.85 and 1 of the range of a long
    # group.
    least = max(0.3, 1.0 - 2.0 ** (1 - bits)) if bits > 1 else 0.2
    best_error = best_scale = best_zero = None
    for index in range(candidates):
        shrink = 1.0 - (1.0 - least) * index / max(1, candidates - 1)
        # Each end is divided, because their difference may overflow.
        scale = (high / top - low / top).mul_(shrink).to(torch.bfloat16)
        is_empty = scale <= _SMALLEST_STEP  # a group that is zero, or nearly
        scale = torch.where(is_empty, 1.0, scale)
        s = scale.to(A.dtype)
        zero = torch.full_like(s, middle) if symmetric else (-low * shrink / s).round_().clamp_(0, top)
        if bits == 8:
            zero = torch.where(is_empty, _MIDDLE, zero)
        codes = (A / s[..., None]).round_().add_(zero[..., None]).clamp_(0, top)
        error = codes.sub_(zero[..., None]).mul_(s[..., None]).sub_(A).square_()
        total = (error if counts is None else error.mul_(counts)).sum(-1)
        if best_error is None:
            best_error, best_scale, best_zero = total, scale, zero
            continue
        better = total < best_error
        best_error = torch.where(better, total, best_error)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)  # type: ignore[arg-type]
    return best_scale, best_zero.to(torch.uint8)  # type: ignore[return-value, union-attr]


def round_factors(
    left: Tensor,  # (out, r)
    right: Tensor,  # (r, in)
) -> tuple[Tensor, Tensor, Tensor]:  # (out, r) int8, (r, in) int8, (r,) bfloat16
    """Return ``left @ right`` as ``L diag(c) R`` with integers in L and R and one scale for each rank-one term.

    The largest entry of a column of L and of a row of R is 127, up to the rounding of c to bfloat16, which L
    compensates.
    """
    left, right = fittable(left.detach()), fittable(right.detach())
    a, b = left.abs().amax(0) / MAXIMUM_CODE, right.abs().amax(1) / MAXIMUM_CODE
    c = (a * b).to(torch.bfloat16)
    c = torch.where(c.to(a.dtype) < a * b, torch.nextafter(c, c.new_tensor(torch.inf)), c)
    c = torch.where(c > _SMALLEST_STEP, c, 1.0)
    b = torch.where(b > 0, b, 1.0)
    L = (left / (c.to(a.dtype) / b)).round_().clamp_(-MAXIMUM_CODE, MAXIMUM_CODE)
    R = (right / b[:, None]).round_().clamp_(-MAXIMUM_CODE, MAXIMUM_CODE)
    return L.to(torch.int8), R.to(torch.int8), c
