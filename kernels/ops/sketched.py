"""The sketched product, by the fastest of four paths for the operands; see ``_crossover`` for which and why."""

__all__ = ["sketched_matmul"]

from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._backend import use_triton
from ..reference.packing import unpack_signs
from ._crossover import choose_path
from ._library import define, needs_torch
from .philox import sign_block

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WORDS, _STREAM = torch.int32, torch.int64


def sketched_matmul(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U1: Tensor,  # (R, out), or words, or a stream
    S2: Tensor,  # (R, out)
    U2: Tensor,  # (in, R), or words, or a stream
    bias: Tensor | None = None,  # (out,)
    scale: float = 1.0,
) -> Tensor:  # (rows, out)
    """``scale (x S1 U1 + x U2 S2) + bias``.

    The sketches U1 and U2 come in one of three forms, both in the same: dense; as int32 *words* of signs, one bit an
    entry along the features, ``(R, ceil(out / 32))`` and ``(R, ceil(in / 32))``, see :func:`pack_signs` (U2 is packed
    transposed); or as int64 *streams* ``(seed, stream, tag)``, whose signs, those of :func:`sign_block`, are drawn
    while they are used. Words and streams are for inference: they have no gradient, and a backward pass spends
    products as for dense signs.

    Args:
        x: Input, two-dimensional.
        S1: Trained factor on the input side.
        U1: Sketch on the output side.
        S2: Trained factor on the output side.
        U2: Sketch on the input side.
        bias: Added to every row.
        scale: Multiplies both products.

    Returns:
        The output of shape ``(rows, out)``.

    Raises:
        ValueError: If words or streams do not have the shape that the factors call for.
        RuntimeError: If ``PANTHER_KERNELS=triton`` and no Triton kernel takes the operands.

    Cost: ``4 R (in + out)`` flops a row, and 1.5 times that backward when U1 and U2 are fixed. Bytes: the input and the
    output once, the factors once (words an eighth of a byte an entry).

    Example:
        >>> ones = torch.ones(2, 2)
        >>> sketched_matmul(ones, ones, ones, ones, ones, scale=0.5).shape
        torch.Size([2, 2])
    """
    if not U1.is_floating_point() or not U2.is_floating_point():
        _check_signs(x, S1, U1, S2, U2)
        if torch.compiler.is_compiling() or not needs_torch():
            return _operator(x, S1, U1, S2, U2, bias, scale)[0]
        U1, U2 = _dense_signs(S1, U1, S2, U2)
    # A compiled graph may serve any batch, so it must not branch on one. On the CPU Inductor fuses what the chain
    # writes twice; on a GPU the operator looks at the batch when it runs.
    if torch.compiler.is_compiling():
        if x.is_cuda:
            return _operator(x, S1, U1, S2, U2, bias, scale)[0]
        return _chain(x, S1, U1, S2, U2, bias, scale)
    if use_triton("sketched_matmul", x.device, _refusal(x, S1, U1, S2, U2)) and not needs_torch():
        return _operator(x, S1, U1, S2, U2, bias, scale)[0]
    if choose_path(x.shape[0], S1.shape[1], x.dtype, triton=False) == "chain":
        return _chain(x, S1, U1, S2, U2, bias, scale)
    product = _Joined.apply if torch.is_grad_enabled() else _Joined.forward
    return product(x, S1, U1, S2, U2, bias, scale)[0]


def _chain(x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if x.dtype is torch.float16 and scale != 1.0:
        # Products with signs grow with the square root of the width, and float16 ends at 65,504. It ends at 6e-8 too,
        # so the signs are scaled and not the input.
        U1, U2, scale = U1 * scale, U2 * scale, 1.0
    return reference.sketched_matmul(x, S1, U1, S2, U2, bias, scale)


def _refusal(x: Tensor, *factors: Tensor) -> str | None:
    """The rule of the Triton kernels that the operands break."""
    if x.dtype not in _DTYPES:
        return f"takes float32, float16 and bfloat16, not {x.dtype}"
    if any(factor.is_floating_point() and factor.dtype is not x.dtype for factor in factors):
        return f"takes factors of the input's dtype, {x.dtype}, not {[factor.dtype for factor in factors]}"
    return None


def _check_signs(x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor) -> None:
    R = S1.shape[1]
    expected = {
        _WORDS: ((R, -(-S2.shape[1] // 32)), (R, -(-S1.shape[0] // 32))),
        _STREAM: ((3,), (3,)),
    }.get(U1.dtype)
    if expected is None or U2.dtype is not U1.dtype:
        raise ValueError(
            f"U1 and U2 must both be dense, int32 words or int64 streams, not {U1.dtype} and {U2.dtype}: use "
            "pack_signs for both, or for neither"
        )
    if (tuple(U1.shape), tuple(U2.shape)) != expected:
        raise ValueError(
            f"U1 and U2 as {U1.dtype} must have the shapes {expected[0]} and {expected[1]} for in = {S1.shape[0]}, "
            f"out = {S2.shape[1]} and R = {R}, not {tuple(U1.shape)} and {tuple(U2.shape)}: "
            + ("pack U1 and U2.mT" if U1.dtype is _WORDS else "give (seed, stream, tag) for each")
        )


def _check(x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None) -> None:
    """What the kernels rely on, since they would read beyond their operands otherwise."""
    tensors = {"x": x, "S1": S1, "U1": U1, "S2": S2, "U2": U2} | ({} if bias is None else {"bias": bias})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dense = U1.is_floating_point() and U2.is_floating_point()
    matrices = (x, S1, S2, U1, U2) if dense else (x, S1, S2)
    if (
        any(matrix.dim() != 2 for matrix in matrices)
        or not x.shape[1] == S1.shape[0]
        or S1.shape[1] != S2.shape[0]
        or (dense and (U1.shape != S2.shape or U2.shape != S1.shape))
        or (bias is not None and bias.shape != S2.shape[1:])
    ):
        raise ValueError(
            "sketched_matmul takes x (rows, in), S1 and U2 (in, R), U1 and S2 (R, out) and bias (out,), not "
            + ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        )
    if not dense:
        _check_signs(x, S1, U1, S2, U2)
    devices = {str(tensor.device) for tensor in tensors.values()}
    if len(devices) > 1:
        raise ValueError(
            f"sketched_matmul takes operands on one device, not on {', '.join(sorted(devices))}: move them"
        )


def _dense_signs(S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor) -> tuple[Tensor, Tensor]:
    """U1 (R, out) and U2 (in, R) as numbers, from any form."""
    if U1.dtype is _WORDS:
        return unpack_signs(U1, S2.shape[1], S2.dtype), unpack_signs(U2, S1.shape[0], S1.dtype).mT
    if U1.dtype is _STREAM:
        return _stream_signs(U1, *S2.shape, S2.dtype), _stream_signs(U2, *S1.shape, S1.dtype)
    return U1, U2


def _draw(stream: Tensor, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    seed, number, tag = stream.tolist()
    return sign_block(seed, number, tag, range(rows), range(cols), dtype=dtype, device=stream.device)


# An operator, so that a graph can be traced of a backward pass that draws.
_stream_signs = define(
    "stream_signs(Tensor stream, SymInt rows, SymInt cols, ScalarType dtype) -> Tensor",
    _draw,
    lambda stream, rows, cols, dtype: stream.new_empty(rows, cols, dtype=dtype),
)


def _implementation(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and ``scale x [S1 | U2]``."""
    _check(x, S1, U1, S2, U2, bias)
    rows, R = x.shape[0], S1.shape[1]
    triton = use_triton("sketched_matmul", x.device, _refusal(x, S1, U1, S2, U2)) and 0 not in (*x.shape, *S2.shape)
    aligned = triton and _aligned(x, S1, U1, S2, U2)
    path = choose_path(rows, R, x.dtype, triton=triton, aligned=aligned)
    if path in ("pair", "fused"):
        from .._triton import sketched

        kernel = sketched.pair_matmul if path == "pair" else sketched.fused_matmul
        if U1.dtype in (_WORDS, _STREAM):
            U1, U2 = U1.contiguous(), U2.contiguous()
        return kernel(x, S1, U1, S2, U2, None if bias is None else bias.contiguous(), scale)
    if U1.dtype is _WORDS and not x.is_cuda:
        return reference.packed_matmul(x, S1, U1, S2, U2, bias, scale)
    U1, U2 = _dense_signs(S1, U1, S2, U2)
    product = reference.chained_matmul if path == "chain" else reference.joined_matmul
    return product(x, S1, U1, S2, U2, bias, scale)


def _aligned(x: Tensor, S1: Tensor, *others: Tensor) -> bool:
    """Whether sizes and strides are multiples of 16: Triton then knows that it may load several entries at once."""
    dense = [operand for operand in (x, S1, *others) if operand.is_floating_point()]
    steps = [stride for operand in dense for stride in operand.stride() if stride != 1]
    sizes = (*S1.shape, *(operand.shape[1] for operand in others if operand.is_floating_point()))
    return all(n % 16 == 0 for n in (*steps, *sizes)) and all(operand.data_ptr() % 16 == 0 for operand in dense)


def _fake(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], S2.shape[1]), x.new_empty(x.shape[0], 2 * S1.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_inner: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of the input is a sketched product again, of transposed factors in exchanged places."""
    x, S1, U1, S2, U2, inner = ctx.saved_tensors
    need_x, need_S1, need_U1, need_S2, need_U2, need_bias, _ = ctx.needs_input_grad
    R, scale = S1.shape[1], ctx.scale
    if grad is None:
        grad = x.new_zeros(x.shape[0], S2.shape[1])
    if U1.dtype is _STREAM:
        U1, U2 = _dense_signs(S1, U1, S2, U2)
    dx = d_left = d_right = None
    if need_x:
        V1, V2 = (U2, U1) if U1.dtype is _WORDS else (U2.mT, U1.mT)
        dx, d_inner = _operator(grad, S2.mT, V1, S1.mT, V2, None, scale)
        d_right, d_left = d_inner[:, :R], d_inner[:, R:]
    elif need_S1 or need_U2:
        d_left = (grad @ _dense_signs(S1, U1, S2, U2)[0].mT) * scale if need_S1 else None
        d_right = (grad @ S2.mT) * scale if need_U2 else None
    if grad_inner is not None:
        d_left = _add(d_left, grad_inner[:, :R] * scale)
        d_right = _add(d_right, grad_inner[:, R:] * scale)
        if need_x:
            dense_U2 = _dense_signs(S1, U1, S2, U2)[1]
            dx = dx + (grad_inner[:, :R] @ S1.mT + grad_inner[:, R:] @ dense_U2.mT) * scale
    return (
        dx,
        x.mT @ d_left if need_S1 else None,
        inner[:, :R].mT @ grad if need_U1 else None,
        inner[:, R:].mT @ grad if need_S2 else None,
        x.mT @ d_right if need_U2 else None,
        grad.sum(0) if need_bias else None,
        None,
    )


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, tuple[int, int]]:
    """A batch of inputs becomes more rows; batches of factors, an ensemble, run one by one."""
    x, *rest = args
    if in_dims[0] is not None and all(dim is None for dim in in_dims[1:]):
        x = x.movedim(in_dims[0], 0)
        outputs = _operator(x.flatten(0, 1), *rest)
        return tuple(out.unflatten(0, x.shape[:2]) for out in outputs), (0, 0)
    one_by_one = [
        _operator(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return tuple(torch.stack(outputs) for outputs in zip(*one_by_one, strict=True)), (0, 0)


_operator = define(
    "sketched_matmul(Tensor x, Tensor S1, Tensor U1, Tensor S2, Tensor U2, Tensor? bias, float scale)"
    " -> (Tensor, Tensor)",
    _implementation,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
    vmap=_vmap,
    autocast=True,
)


class _Joined(torch.autograd.Function):
    """The joined product, on the CPU. Autograd on the concatenations would spend products on fixed sketches.

    The second output, ``scale x [S1 | U2]``, is there for backward to read. It is an output like the first, with
    gradients and tangents of its own, so that double backward and torch.func work; the operator has no forward mode.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        return reference.joined_matmul(x, S1, U1, S2, U2, bias, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
        *tensors, _, ctx.scale = inputs
        ctx.save_for_backward(*tensors, outputs[1])
        ctx.save_for_forward(*tensors, outputs[1])  # torch's vmap rule wants both lists to be one

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inner: Tensor) -> tuple[Tensor | None, ...]:
        x, S1, U1, S2, U2, inner = ctx.saved_tensors
        need_x, need_S1, need_U1, need_S2, need_U2, need_bias, _ = ctx.needs_input_grad
        R = S1.shape[1]
        left, right = inner[:, :R], inner[:, R:]
        outer = torch.cat((U1, S2), 0).mT
        d_inner = torch.addmm(grad_inner, grad, outer, beta=ctx.scale, alpha=ctx.scale)  # of x [S1 | U2]
        return (
            d_inner @ torch.cat((S1, U2), 1).mT if need_x else None,
            x.mT @ d_inner[:, :R] if need_S1 else None,
            left.mT @ grad if need_U1 else None,
            right.mT @ grad if need_S2 else None,
            x.mT @ d_inner[:, R:] if need_U2 else None,
            grad.sum(0) if need_bias else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Any, dS1: Any, dU1: Any, dS2: Any, dU2: Any, dbias: Any, _: Any) -> tuple[Tensor, Tensor]:
        x, S1, U1, S2, U2, inner = ctx.saved_tensors
        d_in = _concatenate_tangents(1, (dS1, S1), (dU2, U2))
        d_out = _concatenate_tangents(0, (dU1, U1), (dS2, S2))
        d_inner = _add(_product(dx, torch.cat((S1, U2), 1)), _product(x, d_in))
        d_inner = torch.zeros_like(inner) if d_inner is None else d_inner * ctx.scale
        out = _add(d_inner @ torch.cat((U1, S2), 0), _product(inner, d_out))
        return _add(out, dbias), d_inner  # type: ignore[return-value]


def _concatenate_tangents(dim: int, *pairs: tuple[Tensor | None, Tensor]) -> Tensor | None:
    if all(tangent is None for tangent, _ in pairs):
        return None
    return torch.cat([torch.zeros_like(primal) if tangent is None else tangent for tangent, primal in pairs], dim)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a @ b


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
