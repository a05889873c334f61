"""The product with a quantized weight: the choice among all the ways to compute it, and its gradients.

With gradients of the scales, and in traced programs, the weight is expanded by differentiable operations. If only the
input needs a gradient, the backward pass expands the weight again. Without gradients a Triton kernel, integers, torch's
kernel for 4 bits or expansion block by block serve.
"""

__all__ = ["has_compiled_kernel", "prepared_product", "quantized_matmul", "quantized_weight"]

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from .._torch import are_transforms_active, int_mm, is_differentiated_forward, is_plain_call, is_tracing
from ..cpu import integers, native, quantized
from ..cpu.int4 import PackedCodes
from ..selection import backend, multiplies_by_instruction, runs_kernels, use_triton
from ._plans import Plans, plan_key
from .library import define, is_exporting, refused_dtype
from .quantized_operands import (
    FACTOR_UNIT,
    QuantizedCodes,
    QuantizedFactors,
    QuantizedOperands,
    dense_weight,
    expanded_codes,
    rounded_input,
    rounded_rows,
    rounded_weight,
    wide_factors,
)

_NAME = "quantized_matmul"
# The kernel multiplies up to this many rows, and cuBLAS multiplies more rows by the expanded weight (predicted).
_KERNEL_ROWS = 256
# One kernel computes codes, correction and bias of up to this many rows and up to this rank. Each program reads the
# right factor. At rank 32 it takes twice the bytes of the program's codes of 4 bits, from the second-level cache, and
# less time than the launches that it replaces (predicted).
_FEW_ROWS = 16
_FEW_ROWS_RANK = 32
# Up to this many rounded rows are multiplied by the stored codes of a weight with groups. As integers 16 rows take 1.0
# to 2.0 times as long on a Zen 4, and one row 2.7 to 7.1 times, because the weight is rounded again in each call.
# In bfloat16, with instructions for it, integers of 32 rows take 1.2 to 2.0 times as long, and of 128 rows 1.1 times.
_STORED_CODES_ROWS, _STORED_CODES_ROWS_BY_INSTRUCTION = 16, 128


def quantized_matmul(
    x: Tensor,  # (*, in)
    weight: QuantizedOperands,
    bias: Tensor | None = None,  # (out,)
    *,
    rounds_input: bool = False,
    packed_codes: Callable[[QuantizedCodes], PackedCodes] | None = None,
) -> Tensor:  # (*, out)
    r"""Return ``x W^T + bias`` for a weight of codes, of factors in 8 bits, or of both.

    On a GPU without gradients, up to 256 rows are multiplied by a Triton kernel, which expands the weight in registers,
    tile by tile, and reads it in its few bits from memory (weights of few bits and activations of 16, as E. Frantar et
    al., "MARLIN", 2024, arXiv:2408.11743, have them; the correction is of the form of Z. Yao et al., 2023,
    arXiv:2303.08302). Up to 16 rows, with a correction of rank up to 32, take one launch. **No GPU has run it yet**: it
    was checked by Triton's interpreter and by compilation ahead of time. On a CPU without gradients the weight is
    expanded block by block. Elsewhere it is expanded at once.

    Args:
        x: Input of any floating dtype and any strides; nested input too.
        weight: Codes and factors, differentiable by their scales.
        bias: Added to every row.
        rounds_input: Whether to round each row of the input to 8 bits, so that integers can be multiplied. A weight
            with more than one group in a row is then rounded again, to 8 bits with one step per row, unless the
            compiled kernel multiplies few rows by the stored codes.
        packed_codes: A function that returns a copy of the codes for torch's kernel for 4 bits, which serves few rows
            in bfloat16 on a CPU; None does without the copy.

    Raises:
        RuntimeError: If ``PANTHER_KERNELS=triton`` and the kernel does not take the operands.

    Cost: ``2 rows in out`` flops and the expansion of the codes.

    Example:
        >>> from panther.kernels import QuantizedCodes, QuantizedOperands
        >>> # The codes 1 and 3.
        >>> packed = torch.tensor([[0x31]], dtype=torch.uint8)
        >>> codes = QuantizedCodes(
        ...     packed,
        ...     4,
        ...     torch.ones(1, 1),
        ...     torch.zeros(1, 1, dtype=torch.uint8),
        ...     group_size=2,
        ... )
        >>> quantized_matmul(
        ...     torch.tensor([[10.0, 1.0]]), QuantizedOperands(2, codes)
        ... )
        tensor([[13.]])
    """
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and _is_plain(x) and not _needs_gradient(x, weight, bias):
        return _without_gradients(x, weight, bias, rounds_input, packed_codes)
    is_compiled = is_compiling and not (is_exporting() or rounds_input)
    is_frozen = not rounds_input and not (torch.is_grad_enabled() and _is_weight_trained(weight))
    if is_frozen and ((is_compiled and _is_strided(x)) or (_is_plain(x) and x.requires_grad)):
        codes, factors = weight.codes, weight.factors
        of_codes: Any = (None, 0, None, None, 0) if codes is None else codes
        of_factors: Any = (None, None, None) if factors is None else factors
        operands: Any = x, *of_codes, *of_factors, bias
        return _frozen_product(*operands)
    return _by_expansion(x, weight, bias, rounds_input)


def prepared_product(
    x: Tensor, weight: QuantizedOperands, bias: Tensor | None
) -> Callable[[Tensor], Tensor | None] | None:
    """Return the product with a weight and a bias on a CPU, for a layer to keep; None if there is none.

    A call of it takes less time than :func:`quantized_matmul`, which decides anew in each call what the operands are,
    and returns None for inputs of other dtypes and columns. The layer has to know that nothing observes the call, and
    that the tensors are still where they were.

    Args:
        x: An input like those of the product.
        weight: Codes and factors.
        bias: The bias that is added.

    Example:
        >>> from panther.kernels import QuantizedFactors, QuantizedOperands
        >>> left, right = (
        ...     torch.tensor([[2]], dtype=torch.int8),
        ...     torch.tensor([[1, 3]], dtype=torch.int8),
        ... )
        >>> scales = torch.ones(1, dtype=torch.bfloat16)
        >>> weight = QuantizedOperands(
        ...     2, None, QuantizedFactors(left, right, scales)
        ... )
        >>> x = torch.ones(1, 2)
        >>> product = prepared_product(x, weight, None)
        >>> product is None or product(x).item() == 8
        True
    """
    tensors = [*(weight.codes or ()), *(weight.factors or ()), bias]
    are_plain = all(type(each) in (Tensor, torch.nn.Parameter) for each in tensors if isinstance(each, Tensor))
    is_added = bias is None or (bias.dtype is x.dtype and bias.is_contiguous())  # Otherwise it would be copied.
    if not (are_plain and is_added and type(x) is Tensor and x.is_cpu and is_plain_call()) or runs_kernels(x):
        return None
    product, dtype = native.prepared(weight, bias, x.dtype), x.dtype
    if product is None:
        return None

    def multiply(x: Tensor) -> Tensor | None:
        output = product(x)
        if output is None and x.dtype is dtype and x.numel() and x.shape[-1] == weight.columns:
            return _by_blocks(x, weight, bias, None)
        return output

    return multiply


def quantized_weight(
    x: Tensor,  # (*, in)
    weight: QuantizedOperands,
    bias: Tensor | None = None,  # (out,)
) -> Tensor:  # (out, in)
    """Return the weight as a matrix in the dtype of x, for a product with x and a bias that the caller computes.

    On a CPU, if none of the operands needs a gradient, codes are expanded block by block.

    Args:
        x: The input of the product.
        weight: Codes and factors, differentiable by their scales.
        bias: The bias that the caller adds.

    Example:
        >>> from panther.kernels import QuantizedFactors, QuantizedOperands
        >>> left, right = (
        ...     torch.tensor([[2]], dtype=torch.int8),
        ...     torch.tensor([[1, 3]], dtype=torch.int8),
        ... )
        >>> weight = QuantizedOperands(
        ...     2, None, QuantizedFactors(left, right, torch.ones(1))
        ... )
        >>> quantized_weight(torch.zeros(1, 2), weight)
        tensor([[2., 6.]])
    """
    codes, factors = weight.codes, weight.factors
    if codes is None or not x.is_cpu or not _is_plain(x) or _needs_gradient(x, weight, bias):
        return dense_weight(weight, x.dtype)
    dense = quantized.expanded(codes, weight.columns, x.dtype)
    return dense if factors is None else dense.addmm_(*wide_factors(factors, x.dtype))


def has_compiled_kernel(codes: QuantizedCodes | None = None, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the compiled kernel for CPUs is in use, and multiplies inputs of a dtype by these codes.

    Args:
        codes: Codes of a weight; None asks for none in particular.
        dtype: Dtype of the input.

    Example:
        >>> has_compiled_kernel() in (True, False)
        True
    """
    return native.library() is not None if codes is None else native.takes(codes, dtype)


def _is_plain(x: Tensor) -> bool:
    """Return whether nothing is traced or transformed, and the input is a strided tensor."""
    if torch.compiler.is_compiling() or is_tracing() or type(x) is not Tensor:
        return False
    return _is_strided(x)


def _is_strided(x: Tensor) -> bool:
    if x.is_nested or x.layout is not torch.strided:
        return False
    return not (are_transforms_active() or is_differentiated_forward())


def _needs_gradient(x: Tensor, weight: QuantizedOperands, bias: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or (bias is not None and bias.requires_grad) or _is_weight_trained(weight)


def _is_weight_trained(weight: QuantizedOperands) -> bool:
    return any(part is not None and part.scales.requires_grad for part in (weight.codes, weight.factors))


def _without_gradients(
    x: Tensor,
    weight: QuantizedOperands,
    bias: Tensor | None,
    rounds_input: bool,
    packed_codes: Callable[[QuantizedCodes], PackedCodes] | None,
) -> Tensor:
    """Return the output by the fastest method for strided tensors without gradients."""
    if rounds_input:
        if _reads_stored_codes(x, weight):
            numbers, steps = rounded_rows(x)
            return _without_gradients((numbers * steps).to(x.dtype), weight, bias, False, None)
        if integers.multiplies_integers(x):
            return _by_integers(x, weight, bias)
    elif weight.codes is not None and _kernel_takes(x):
        return _by_kernel(x, weight, weight.codes, bias)
    elif x.is_cpu:
        product = native.prepared(weight, bias, x.dtype)
        output = None if product is None else product(x)
        return _by_blocks(x, weight, bias, packed_codes) if output is None else output
    return _by_expansion(x, weight, bias, rounds_input)


def _reads_stored_codes(x: Tensor, weight: QuantizedOperands) -> bool:
    """Return whether rounded rows are multiplied by the stored codes, because making integers of them takes longer."""
    codes = weight.codes
    if codes is None or codes.scales.shape[1] == 1 or not native.takes(codes, x.dtype):
        return False
    if x.numel() <= _STORED_CODES_ROWS * weight.columns:
        return True
    is_few = x.numel() <= _STORED_CODES_ROWS_BY_INSTRUCTION * weight.columns
    return is_few and x.dtype is torch.bfloat16 and multiplies_by_instruction(x.dtype)


def _by_expansion(x: Tensor, weight: QuantizedOperands, bias: Tensor | None, rounds_input: bool) -> Tensor:
    """Return the output by differentiable operations, which can be traced."""
    dtype, codes = x.dtype, weight.codes
    if rounds_input:
        x = rounded_input(x)
    output = None
    if codes is not None:
        if rounds_input and codes.scales.shape[1] > 1:
            wide = torch.promote_types(dtype, torch.float32)
            Q = expanded_codes(codes, weight.columns, wide)
            Q = rounded_weight(Q, codes.scales, codes.zeros, codes.bits).to(dtype)
        else:
            Q = expanded_codes(codes, weight.columns, dtype)
        output = F.linear(x, Q, bias)
    if weight.factors is not None:
        left, right = wide_factors(weight.factors, dtype)
        correction = F.linear(F.linear(x, right), left, bias if output is None else None)
        output = correction if output is None else output + correction
    assert output is not None  # a weight has codes or factors
    return output


def _kernel_takes(x: Tensor) -> bool:
    """Return whether the Triton kernel runs. It expands the weight for every 64 rows, so it takes few rows."""
    if x.dtype is torch.float64 or x.numel() > _KERNEL_ROWS * x.shape[-1]:
        return False
    return use_triton(_NAME, x.device) if x.is_cuda or backend() == "triton" else False


def _by_kernel(x: Tensor, weight: QuantizedOperands, codes: QuantizedCodes, bias: Tensor | None) -> Tensor:
    """Return the output by the kernel that expands the weight in registers."""
    rows = x if x.dim() == 2 else x.reshape(-1, weight.columns)
    inner = left = None
    if _is_one_kernel(len(rows), 0 if weight.factors is None else len(weight.factors.right)):
        parts: tuple[Tensor | None, Tensor | None, Tensor | None] = weight.factors or (None, None, None)
        output = _few_rows_matmul(rows, *codes, *parts, bias)
        return output if x.dim() == 2 else output.view(*x.shape[:-1], output.shape[1])
    if weight.factors is not None:
        left, right, scales = weight.factors
        if x.dtype is torch.float16:
            inner = (rows @ (right.to(x.dtype) * FACTOR_UNIT).mT) * (scales / FACTOR_UNIT).to(x.dtype)
        else:  # The other dtypes cannot overflow, and each operation takes time on the host.
            inner = (rows @ right.to(x.dtype).mT).mul_(scales)
    output = _quantized_matmul(rows, *codes, inner, left, bias)
    return output if x.dim() == 2 else output.view(*x.shape[:-1], output.shape[1])


def _by_integers(x: Tensor, weight: QuantizedOperands, bias: Tensor | None) -> Tensor:
    """Return the output by integer products."""
    dtype = x.dtype
    numbers, steps = rounded_rows(x.reshape(math.prod(x.shape[:-1]), weight.columns))
    rows = numbers.to(torch.int8)
    output = None
    if weight.codes is not None:
        output = integers.integer_matmul(rows, steps, weight.codes, bias, dtype)
    if weight.factors is not None:
        left, right, scales = weight.factors
        inner = int_mm(rows, right.mT) * (steps * scales)
        if output is None:
            output = F.linear(inner.to(dtype), left.to(dtype), bias)
        else:
            output.addmm_(inner.to(dtype), left.to(dtype).mT)
    assert output is not None  # a weight has codes or factors
    return output.view(*x.shape[:-1], output.shape[-1])


def _by_blocks(
    x: Tensor,
    weight: QuantizedOperands,
    bias: Tensor | None,
    packed_codes: Callable[[QuantizedCodes], PackedCodes] | None,
) -> Tensor:
    """Return the output without expanding the whole weight."""
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), weight.columns)
    codes, output = weight.codes, None
    if codes is not None:
        if packed_codes is not None and not native.takes(codes, rows.dtype) and PackedCodes.is_best_for(rows, codes):
            output = packed_codes(codes).product(rows, bias)
        else:
            output = quantized.blockwise_matmul(rows, codes, bias)
    if weight.factors is not None:
        if x.dtype is torch.float16:
            left, right = wide_factors(weight.factors, x.dtype)
            inner = rows @ right.mT
        else:  # The scales multiply the small product between the factors.
            left, right = weight.factors.left.to(x.dtype), weight.factors.right.to(x.dtype)
            inner = (rows @ right.mT).mul_(weight.factors.scales)
        output = F.linear(inner, left, bias) if output is None else output.addmm_(inner, left.mT)
    assert output is not None  # a weight has codes or factors
    return output if x.dim() == 2 else output.reshape(*x.shape[:-1], output.shape[-1])


def _product(
    x: Tensor, packed: Tensor | None, bits: int, scales: Tensor | None, zeros: Tensor | None, group_size: int,
    left: Tensor | None, right: Tensor | None, factor_scales: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    weight = _joined(x.shape[-1], packed, bits, scales, zeros, group_size, left, right, factor_scales)
    return _without_gradients(x, weight, bias, False, None)


def _joined(
    columns: int, packed: Any, bits: int, scales: Any, zeros: Any, group_size: int, left: Any, right: Any,
    factor_scales: Any,
) -> QuantizedOperands:  # fmt: skip
    codes = None if packed is None else QuantizedCodes(packed, bits, scales, zeros, group_size)
    factors = None if left is None else QuantizedFactors(left, right, factor_scales)
    return QuantizedOperands(columns, codes, factors)


def _fake_product(
    x: Tensor, packed: Tensor | None, bits: int, scales: Tensor | None, zeros: Tensor | None, group_size: int,
    left: Tensor | None, *_: Any,
) -> Tensor:  # fmt: skip
    rows = packed if packed is not None else left
    assert rows is not None  # a weight has codes or factors
    return x.new_empty(*x.shape[:-1], len(rows))


def _set_up_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, bits, scales, zeros, group_size, left, right, factor_scales, bias = inputs
    # As an attribute, since code that moves saved tensors away from a device, or counts them, must not see the weight.
    ctx.weight = _joined(x.shape[-1], packed, bits, scales, zeros, group_size, left, right, factor_scales)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of input and bias; the weight is expanded again, and not kept for all layers at once."""
    weight, at_input, at_bias = ctx.weight, None, None
    if ctx.needs_input_grad[0]:
        if weight.codes is not None:
            at_input = grad @ expanded_codes(weight.codes, weight.columns, grad.dtype)
        if weight.factors is not None:
            wide_left, wide_right = wide_factors(weight.factors, grad.dtype)
            correction = (grad @ wide_left) @ wide_right
            at_input = correction if at_input is None else at_input + correction
    if ctx.needs_input_grad[9]:
        at_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=ctx.bias_dtype)
    return at_input, *(None,) * 8, at_bias


# The product with a weight that is not trained. Autograd would keep the expanded weight of every layer from the forward
# to the backward, in the memory of the dense model, which adapters on a quantized model should save.
_frozen_product = define(
    "quantized_product(Tensor x, Tensor? packed, int bits, Tensor? scales, Tensor? zeros, int group_size, "
    "Tensor? left, Tensor? right, Tensor? factor_scales, Tensor? bias) -> Tensor",
    _product,
    _fake_product,
    setup_context=_set_up_product,
    backward=_differentiate_product,
)


# The plans of the Triton kernel.
_plans: Plans[Callable[..., Tensor]] = Plans()


def _forward(
    x: Tensor, codes: Tensor, bits: int, scales: Tensor, zeros: Tensor, group_size: int,
    inner: Tensor | None, left: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    operands = x, codes, scales, zeros, inner, left, bias
    key = plan_key((bits, group_size), *operands) if runs_kernels(x) else None
    if key is not None and (plan := _plans.get(key)) is not None:
        return plan(*operands)
    if not use_triton(_NAME, x.device, refused_dtype(x.dtype)):
        return reference.quantized_matmul(x, codes, bits, scales, zeros, group_size, inner, left, bias)
    if not len(x) or not len(codes):
        return x.new_empty(len(x), len(codes))
    from .._triton.quantized import quantized_plan

    plan = quantized_plan(x, codes, bits, scales, zeros, group_size, inner, left, bias)
    return (plan if key is None else _plans.add(key, plan))(*operands)


def _fake(x: Tensor, codes: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


# The kernel takes the product of x with the right factor and the scales of the correction, which is small.
_quantized_matmul = define(
    f"{_NAME}(Tensor x, Tensor codes, int bits, Tensor scales, Tensor zeros, int group_size, Tensor? inner, "
    "Tensor? left, Tensor? bias) -> Tensor",
    _forward,
    _fake,
)


# The plans of the Triton kernel for few rows.
_few_rows_plans: Plans[Callable[..., Tensor]] = Plans()


def _is_one_kernel(rows: int, rank: int) -> bool:
    return rows <= _FEW_ROWS and rank <= _FEW_ROWS_RANK


def _few_rows_forward(
    x: Tensor, codes: Tensor, bits: int, scales: Tensor, zeros: Tensor, group_size: int,
    left: Tensor | None, right: Tensor | None, factor_scales: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    operands = x, codes, scales, zeros, left, right, factor_scales, bias
    key = plan_key((bits, group_size), *operands) if runs_kernels(x) else None
    if key is not None and (plan := _few_rows_plans.get(key)) is not None:
        return plan(*operands)
    refusal = refused_dtype(x.dtype)
    if refusal is None and not _is_one_kernel(len(x), 0 if right is None else len(right)):
        refusal = f"takes up to {_FEW_ROWS} rows and a correction of rank up to {_FEW_ROWS_RANK}"
    if not use_triton(_NAME, x.device, refusal):
        inner = None
        if right is not None and factor_scales is not None:
            wide = torch.promote_types(x.dtype, torch.float32)
            inner = (x.to(wide) @ right.to(wide).mT) * factor_scales.to(wide)
        return reference.quantized_matmul(x, codes, bits, scales, zeros, group_size, inner, left, bias)
    if not len(x) or not len(codes):
        return x.new_empty(len(x), len(codes))
    from .._triton.quantized_few_rows import few_rows_plan

    plan = few_rows_plan(x, codes, bits, scales, zeros, group_size, left, right, factor_scales, bias)
    return (plan if key is None else _few_rows_plans.add(key, plan))(*operands)


# The correction is left diag(factor_scales) right. Its two factors are (out, r) and (r, in), in int8.
_few_rows_matmul = define(
    f"{_NAME}_few_rows(Tensor x, Tensor codes, int bits, Tensor scales, Tensor zeros, int group_size, Tensor? left, "
    "Tensor? right, Tensor? factor_scales, Tensor? bias) -> Tensor",
    _few_rows_forward,
    _fake,
)
