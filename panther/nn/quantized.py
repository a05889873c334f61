"""QuantizedLinear, a linear layer with a weight of 2 to 8 bits an entry, a low-rank correction in int8, or both."""

__all__ = ["QuantizedLinear", "pack_codes", "stored_bytes", "unpack_codes"]

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from panther.errors import DTypeError, ShapeError, check_device, check_flag, check_floating, check_size
from panther.kernels._cpu.quantized import quantized_matmul
from panther.kernels.ops._library import autocast
from panther.kernels.reference.codes import code_bytes, pack_codes, unpack_codes
from panther.nn._fitting import fittable, leading_factors
from panther.nn._quantization import MAXIMUM_CODE, quantization_grid, quantize, round_factors, spread
from panther.nn._sketch_record import has_values
from panther.nn._sketched import CompressedModule

_RECORD_BYTES = 12
_ROUNDS = 4  # of from_linear with a correction: the error falls by 1 % in the second round and by 0.1 % in the fourth
_FACTOR_UNIT = 1 / 128  # factors are multiplied as L 128 diag(c) (R / 128), within the range of float16


class QuantizedLinear(CompressedModule):
    r"""A drop-in for :class:`torch.nn.Linear` whose weight is stored in few bits.

    .. math:: y = x\,(Q + L\,\mathrm{diag}(c)\,R)^T + b, \qquad Q_{ij} = s_{ig}\,(q_{ij} - z_{ig}), \quad
        g = \lfloor j / \mathtt{group\_size} \rfloor

    with codes q of 2 to 8 bits, a scale s and a zero point z for each group of neighbouring columns of a row, and a
    correction of rank ``low_rank`` whose factors L (out, r) and R (r, in) are int8 with one scale c for each rank-one
    term. Either part may be missing: ``low_rank=0`` is plain quantization, and ``bits=None`` low rank in int8.

    The integers are buffers and never trained. The scales and the bias are parameters, so that a model can be tuned
    after it was quantized; the scales are stored in bfloat16, which has the range of float32 in 2 bytes, and casts of
    the layer (``half()``, ``to(torch.float64)``) change the dtype of the computation and of the bias alone.

    A new layer has random weights with nn.Linear's variance; :meth:`from_linear` rounds a dense layer.

    Args:
        in_features: Size of each input sample.
        out_features: Size of each output sample.
        bits: Width of a code, 2 to 8; None for low rank alone.
        group_size: Columns that share a scale and a zero point; None, or more than there are: the whole row. The last
            group may be smaller.
        low_rank: Rank r of the correction.
        bias: Whether to add a bias.
        device: None is torch's default.
        dtype: Floating dtype of input, output and bias; None is torch's default.

    Shape:
        Input ``(*, in_features)``, output ``(*, out_features)``.

    Attributes:
        codes: uint8 (out, bytes of a row), see ``pack_codes``; None without Q.
        zeros: uint8 (out, groups); None without Q.
        scales: A Parameter (out, groups), bfloat16; None without Q.
        left: int8 (out, r); None without correction, as are the next two.
        right: int8 (r, in).
        factor_scales: A Parameter (r,), bfloat16.
        bias: A Parameter (out,) in ``dtype``, or None.

    Raises:
        ShapeError: If a size is out of range.
        ValueError: If ``bits`` is None and ``low_rank`` 0, which leaves no weight.
        TypeError: If an argument has the wrong type.
        DTypeError: If ``dtype`` is not floating.

    Cost: That of the dense product, the expansion of the codes, and ``2 r (in + out)`` flops for each row. Expansion
    counts where the batch is small: on a CPU, most layers with codes are slower than nn.Linear there and save memory
    alone. On a CPU without gradients the weight is expanded block by block, otherwise as a whole; CUDA is untested.

    Example:
        >>> import torch
        >>> layer = QuantizedLinear(1024, 1024, bits=4, group_size=128, low_rank=16)
        >>> layer(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
        >>> 8 * stored_bytes(1024, 1024, bits=4, group_size=128, low_rank=16) / 1024**2
        4.437835693359375

    Reference: A low-rank correction of a quantized weight: Z. Yao et al., "ZeroQuant-V2", 2023, arXiv:2303.08302.
    """

    dense_class = nn.Linear
    dense_arguments = ("in_features", "out_features", "bias")
    size_arguments = ("bits", "group_size", "low_rank")
    integer_names = ("codes", "zeros", "left", "right", "record")
    # None where the form has none; told so by `bits` and `low_rank`.
    codes: Tensor
    zeros: Tensor
    scales: nn.Parameter
    left: Tensor
    right: Tensor
    factor_scales: nn.Parameter
    bias: nn.Parameter | None
    record: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int | None = 4,
        *,
        group_size: int | None = 128,
        low_rank: int = 0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check_size("in_features", in_features, least=1)
        self.out_features = check_size("out_features", out_features, least=1)
        self.bits, self.group_size, self.low_rank = _checked_form(self.in_features, bits, group_size, low_rank)
        check_flag("bias", bias)
        check_device(device)
        check_floating("dtype", dtype)
        self._dtype = dtype or torch.get_default_dtype()

        def buffer(name: str, shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
            if shape is None:
                setattr(self, name, None)  # torch.export miscounts a buffer that is None
            else:
                self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device))

        def parameter(name: str, shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
            tensor = None if shape is None else nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            self.register_parameter(name, tensor)

        rows, columns, rank = self.out_features, self.in_features, self.low_rank
        bits, groups = self.bits, self._groups
        buffer("codes", None if bits is None else (rows, code_bytes(columns, bits)), torch.uint8)
        buffer("zeros", None if bits is None else (rows, groups), torch.uint8)
        buffer("left", (rows, rank) if rank else None, torch.int8)
        buffer("right", (rank, columns) if rank else None, torch.int8)
        buffer("record", (3,), torch.int32)
        parameter("scales", None if bits is None else (rows, groups), torch.bfloat16)
        parameter("factor_scales", (rank,) if rank else None, torch.bfloat16)
        parameter("bias", (rows,) if bias else None, self._dtype)
        self.reset_parameters()

    @property
    def _groups(self) -> int:
        """Number of groups in a row."""
        return 0 if self.group_size is None else -(-self.in_features // self.group_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of input, output and bias."""
        return self._dtype if self.bias is None else self.bias.dtype

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw codes, factors and bias from torch's generator, with nn.Linear's variance; a correction starts at 0."""
        self._write_record()
        fan_in = self.in_features
        if self.bits is not None:
            levels = 2**self.bits
            codes = torch.randint(levels, (self.out_features, fan_in), dtype=torch.uint8, device=self.codes.device)
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

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``."""
        if not isinstance(input, Tensor):
            raise TypeError(f"the input must be a tensor, not {type(input).__name__}: use torch.as_tensor")
        x, bias = autocast(input.device, input, self.bias)
        dtype = x.dtype
        if dtype is not self.dtype and not _is_autocasting(x.device.type):
            raise DTypeError(f"the input is {dtype} and the layer {self.dtype}: cast one of them")
        if not x.is_nested and x.dim() and x.shape[-1] != self.in_features:
            raise ShapeError(f"the input has {x.shape[-1]} features and the layer takes {self.in_features}")
        if self.bits is not None:
            if self._is_plain_inference(input):
                return self._inferred(x, bias)
            output = F.linear(x, self._expanded(dtype), bias)
            if self.low_rank:
                left, right = self._factors(dtype)
                output = output + F.linear(F.linear(x, right), left)
            return output
        left, right = self._factors(dtype)
        return F.linear(F.linear(x, right), left, bias)

    def _is_plain_inference(self, x: Tensor) -> bool:
        """Return whether no derivative is taken, nothing is traced, and the input is a strided tensor on the CPU."""
        if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_nested or not x.is_cpu:
            return False
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return False
        return not torch.is_grad_enabled() or not (
            x.requires_grad or any(parameter.requires_grad for parameter in self.parameters())
        )

    def _inferred(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output without expanding the whole weight."""
        rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), self.in_features)
        output = quantized_matmul(rows, self.codes, self.bits, self.scales, self.zeros, self.group_size)
        if self.low_rank:
            left, right = self._factors(x.dtype)
            output.addmm_(rows @ right.mT, left.mT)
        if bias is not None:
            output += bias
        return output if x.dim() == 2 else output.reshape(*x.shape[:-1], self.out_features)

    def _expanded(self, dtype: torch.dtype) -> Tensor:  # (out, in)
        """Return Q, differentiable by the scales."""
        # float16 ends at 6e-8, which scales reach; the differences of integers are exact in every dtype.
        work = torch.float32 if dtype is torch.float16 else dtype
        codes = unpack_codes(self.codes, self.bits, self.in_features).to(work)
        zeros, scales = (
            spread(t, self.group_size, self.in_features) for t in (self.zeros.to(work), self.scales.to(work))
        )
        return ((codes - zeros) * scales).to(dtype)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # (out, r), (r, in)
        """Return L diag(c) and R as numbers, scaled so that the products with neither leave the range of float16."""
        left = self.left * (self.factor_scales.float() / _FACTOR_UNIT)
        return left.to(dtype), self.right.to(dtype) * _FACTOR_UNIT

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The dense effective weight, for inspection: differentiable, computed at each access.

        Each access gives a new tensor. Writing to it, as ``nn.init`` would, does not change the layer.
        """
        dense = None if self.bits is None else self._expanded(self.dtype)
        if self.low_rank:
            left, right = self._factors(self.dtype)
            dense = left @ right if dense is None else dense + left @ right
        assert dense is not None  # the constructor refuses a layer without either
        return dense

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        bits: int | None = 4,
        *,
        group_size: int | None = 128,
        low_rank: int = 0,
    ) -> Self:
        """Return a quantized layer near a dense one, on its device and in its dtype; the dense one is left as it is.

        Weights go to the nearest code of a grid whose range is searched for the least squared error. A correction and
        the codes are fitted in turns, each to what the other leaves; the better of the rounds is kept. This looks at
        the weight alone: :func:`panther.compress` weighs errors by the data, too.

        Args:
            linear: The layer to approximate.
            bits: As in the constructor.
            group_size: As in the constructor.
            low_rank: As in the constructor, at most the smaller size of the weight.

        Raises:
            ValueError: If the weight has no values, or NaN or infinite ones.
            TypeError: If ``linear`` is not an nn.Linear.

        Cost: About 250 passes over the weight; with a correction four times that, and four truncated SVDs.

        Example:
            >>> import torch
            >>> dense = torch.nn.Linear(256, 128)
            >>> layer = QuantizedLinear.from_linear(dense, bits=4, group_size=64)
            >>> bool((layer.weight - dense.weight).norm() < 0.1 * dense.weight.norm())
            True
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear takes an nn.Linear, not {type(linear).__name__}")
        weight = linear.weight.detach()
        A = fittable(weight)
        make: Any = cls
        layer = make(
            linear.in_features,
            linear.out_features,
            bits,
            group_size=group_size,
            low_rank=low_rank,
            bias=linear.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        layer._fit_(A)
        if linear.bias is not None:
            with torch.no_grad():
                layer.bias.copy_(linear.bias)
        return layer.train(linear.training)

    def _fit_(self, A: Tensor) -> None:
        best, correction = math.inf, torch.zeros_like(A)
        for _ in range(_ROUNDS if self.low_rank and self.bits is not None else 1):
            parts: list[tuple[Tensor, Tensor, Tensor]] = []
            rest = A
            if self.bits is not None:
                size = self.group_size
                grid = quantization_grid(A - correction, self.bits, size)
                codes = quantize(A - correction, *grid, size, self.bits)
                scales, zeros = (spread(part.to(A.dtype), size, self.in_features) for part in grid)
                rest = A - scales * (codes.to(A.dtype) - zeros)
                parts.append((codes, *grid))
            if self.low_rank:
                left, right, c = factors = round_factors(*leading_factors(rest, self.low_rank))
                correction = (left.to(A.dtype) * c.to(A.dtype)) @ right.to(A.dtype)
                rest = rest - correction
                parts.append(factors)
            error = rest.square().sum().item()
            if error < best or math.isinf(best):
                best, kept = error, parts
        if self.bits is not None:
            self.set_codes_(*kept.pop(0))
        if self.low_rank:
            self.set_factors_(*kept.pop(0))

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
            raise ShapeError("this layer is low rank alone (bits=None) and has no codes: use set_factors_")
        groups = (self.out_features, self._groups)
        whole = (self.out_features, self.in_features)
        _check_shapes(codes=(codes, whole), scales=(scales, groups), zeros=(zeros, groups))
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
            left=(left, (self.out_features, rank)),
            right=(right, (rank, self.in_features)),
            factor_scales=(factor_scales, (rank,)),
        )
        for name, tensor in (("left", left), ("right", right)):
            if tensor.dtype is not torch.int8:
                raise DTypeError(f"{name} must be torch.int8, not {tensor.dtype}: round and cast it")
        _check_finite("factor_scales", factor_scales)
        self.left.copy_(left)
        self.right.copy_(right)
        self.factor_scales.copy_(factor_scales)
        return self

    def hold_scales_(self, dtype: torch.dtype) -> Self:
        """Hold ``scales`` and ``factor_scales`` in another dtype, as new parameters: make an optimizer after that.

        bfloat16, in which they are stored, has steps of 0.4 to 0.8 %, larger than most of an optimizer's. Train them in
        float32 and round them at the end; the step of an optimizer such as Adam must be small beside a scale, which is
        about as large as a step between two weights, or smaller.

        Raises:
            DTypeError: If ``dtype`` is not floating.

        Example:
            >>> import torch
            >>> layer = QuantizedLinear(64, 48).hold_scales_(torch.float32)
            >>> layer.scales.dtype, layer.hold_scales_(torch.bfloat16).scales.dtype
            (torch.float32, torch.bfloat16)
        """
        check_floating("dtype", dtype)
        for name in ("scales", "factor_scales"):
            scales = getattr(self, name)
            if scales is not None and scales.dtype is not dtype:
                setattr(self, name, nn.Parameter(scales.detach().to(dtype), requires_grad=scales.requires_grad))
        return self

    def scales_dtype(self) -> torch.dtype:
        """Return the dtype in which the scales are held, bfloat16 unless :meth:`hold_scales_` changed it."""
        return (self.factor_scales if self.bits is None else self.scales).dtype

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return the nn.Linear with this layer's effective weight and bias, copied.

        Example:
            >>> import torch
            >>> layer, x = QuantizedLinear(256, 128), torch.randn(2, 256)
            >>> torch.allclose(layer(x), layer.to_linear()(x), atol=1e-5)
            True
        """
        dense = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device=self.record.device, dtype=self.dtype
        )
        dense.weight.copy_(self.weight)
        if self.bias is not None:
            dense.bias.copy_(self.bias)
        return dense.train(self.training)

    def stored_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that the weight is computed from."""
        names = ("codes", "scales", "zeros", "left", "right", "factor_scales")
        return tuple(name for name in names if getattr(self, name) is not None)

    def extra_repr(self) -> str:
        """Return sizes and form, as shown by print."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, low_rank={self.low_rank}, bias={self.bias is not None}"
        )

    def _write_record(self) -> None:
        """Write the form, which two layers with tensors of the same shapes may differ in."""
        with torch.no_grad():
            self.record.copy_(torch.tensor(self._form, dtype=torch.int32, device="cpu"))

    @property
    def _form(self) -> list[int]:
        return [self.bits or 0, self.group_size or 0, self.low_rank]

    def check_record(self) -> None:
        """Write the record anew, as is done for saving: code that averages or empties buffers may have changed it."""
        if has_values(self.record) and self.record.tolist() != self._form:
            self._write_record()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.check_record()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load everything or nothing."""
        state = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        own = {**self._parameters, **self._buffers}
        expected = {name: tensor for name, tensor in own.items() if tensor is not None}
        record = state.get("record")
        if isinstance(record, Tensor) and record.shape == (3,) and has_values(record) and record.tolist() != self._form:
            bits, group_size, low_rank = (number or None for number in record.tolist())
            args[-1].append(
                f"{type(self).__name__} {prefix[:-1]!r} was saved with bits={bits}, group_size={group_size}, "
                f"low_rank={low_rank or 0} and here has {self.extra_repr()}: build the layer with those."
            )
            return
        if not self._fits(state, {name: tensor.shape for name, tensor in expected.items()}, prefix, *args):
            return
        wrong = [
            f"{prefix}{name} is {state[name].dtype} and must be {tensor.dtype}: cast only floating tensors."
            for name, tensor in expected.items()
            if not tensor.is_floating_point() and state[name].dtype is not tensor.dtype
        ]
        if wrong:
            args[-1].extend(wrong)
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn``, but let casts change the dtype of the computation and of the bias alone."""
        was_meta = self.record.is_meta
        cast = {id(self.bias)} | ({id(self.bias.grad)} if self.bias is not None else set())

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype is tensor.dtype or id(tensor) in cast:
                return moved
            return tensor.to(moved.device)

        super()._apply(keep, recurse)
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=self.record.device)).dtype
        if was_meta and not self.record.is_meta:
            self._write_record()
        return self


def stored_bytes(
    in_features: int, out_features: int, bits: int | None = 4, *, group_size: int | None = 128, low_rank: int = 0
) -> int:
    """Return the bytes that a :class:`QuantizedLinear` of this form takes in a file, without its bias.

    Example:
        >>> layer = QuantizedLinear(100, 60, 3, group_size=32, low_rank=2, bias=False)
        >>> stored_bytes(100, 60, 3, group_size=32, low_rank=2) == sum(t.nbytes for t in layer.state_dict().values())
        True
    """
    columns = check_size("in_features", in_features, least=1)
    rows = check_size("out_features", out_features, least=1)
    bits, group_size, low_rank = _checked_form(columns, bits, group_size, low_rank)
    size = _RECORD_BYTES + low_rank * (rows + columns + 2)
    if bits is not None and group_size is not None:
        size += rows * (code_bytes(columns, bits) + 3 * -(-columns // group_size))
    return size


def _checked_form(
    columns: int, bits: int | None, group_size: int | None, low_rank: int
) -> tuple[int | None, int | None, int]:
    """Return bits, group size and rank as a layer holds them."""
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


def _check_shapes(**tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    for name, (tensor, shape) in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.shape != shape:
            raise ShapeError(f"{name} must have shape {shape} in this layer, not {tuple(tensor.shape)}")


def _is_autocasting(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _check_finite(name: str, scales: Tensor) -> None:
    if not scales.to(torch.bfloat16).isfinite().all():
        raise ValueError(f"{name} must be finite in bfloat16: they hold NaN, infinite or too large numbers")
