"""Functional forms of the sketched layers, and linear attention, whose time grows linearly with the sequence."""

__all__ = ["linear_attention", "sketched_conv", "sketched_linear", "windowed_linear_attention"]

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from panther import kernels
from panther._docstrings import inherit_arguments
from panther.errors import DTypeError, ShapeError, check_size
from panther.kernels import causal_linear_attention, sketched_matmul, unpack_signs
from panther.kernels.ops.library import autocast, is_exporting
from panther.kernels.reference import dense_sketch
from panther.kernels.reference.attention import no_autocast
from panther.nn.conv.product import convolve
from panther.nn.sketch_sizes import check_padding, per_dim


def sketched_linear(
    x: Tensor,  # (*batch, in)
    S1: Tensor,  # (in, R)
    U1: Tensor,  # (R, out)
    S2: Tensor,  # (R, out)
    U2: Tensor,  # (in, R)
    bias: Tensor | None = None,  # (out,)
    *,
    scale: float = 1.0,
) -> Tensor:  # (*batch, out)
    r"""Apply a sketched weight: :math:`y = s\,(x S_1 U_1 + x U_2 S_2) + b`.

    Args:
        x: Input of shape ``(*batch, in)``, any floating dtype; one-dimensional, empty and nested input too.
        S1: Trained factor of shape ``(in, R)``.
        U1: Sketch of shape ``(R, out)``, or its signs packed to int32 words ``(R, ceil(out / 32))``, or the signs of a
            sparse sketch, ``(out,)``: output j has sign j in row ``j mod R``.
        S2: Trained factor of shape ``(R, out)``.
        U2: Sketch of shape ``(in, R)``, or its signs packed along the features, ``(R, ceil(in / 32))``, if U1 is
            packed; or the signs of a sparse sketch, ``(in,)``, if U1 is sparse.
        bias: Bias of shape ``(out,)``, or None.
        scale: The number s.

    Returns:
        A tensor of shape ``(*batch, out)``, in the autocast dtype under autocast, else in the dtype of ``x``.

    Raises:
        ShapeError: If the last dimension of ``x`` is not ``in``, or the factors do not fit together.
        DTypeError: If the dtypes differ, outside autocast.
        TypeError: If ``x`` is not a tensor.

    Cost: ``4 R (in + out)`` flops for each row, against ``2 in out`` dense; backward 1.5 times that if U1 and U2
    require no gradient, twice that if they do. With sparse sketches ``2 R (in + out)``, and backward twice that.

    Example:
        >>> import torch
        >>> x, S1, U1 = torch.ones(5, 3), torch.ones(3, 2), torch.ones(2, 4)
        >>> sketched_linear(x, S1, U1, U1, S1, scale=0.5).shape
        torch.Size([5, 4])
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a tensor, not {type(x).__name__}: use torch.as_tensor")
    x, S1, U1, S2, U2, bias = autocast(x.device, x, S1, U1, S2, U2, bias)  # This casts each operand once.
    if not torch.jit.is_tracing():  # Tracing would warn about the comparison of sizes, which are tensors.
        _check(x, S1, U1, S2, U2, bias)
    if x.is_nested or torch.jit.is_tracing() or (is_exporting() and U1.dim() == 2):
        # F.linear is one of the few operations that nested tensors and other programs support.
        if U1.dim() == 1:
            U1, U2 = dense_sketch(U1, S1.shape[1]).mT, dense_sketch(U2, S1.shape[1])
        elif not U1.is_floating_point():
            U1, U2 = unpack_signs(U1, S2.shape[1], S1.dtype), unpack_signs(U2, S1.shape[0], S1.dtype).mT
        if x.dtype is torch.float16:  # See sketched_matmul.
            U1, U2, scale = U1 * scale, U2 * scale, 1.0
        left, right = F.linear(x, S1.mT), F.linear(x, U2.mT)
        return F.linear(left * scale, U1.mT, bias) + F.linear(right * scale, S2.mT)
    return sketched_product(x, S1, U1, S2, U2, bias, scale)


def sketched_product(
    x: Tensor,  # (*batch, in)
    S1: Tensor,
    U1: Tensor,
    S2: Tensor,
    U2: Tensor,
    bias: Tensor | None,
    scale: float,
) -> Tensor:  # (*batch, out)
    """Return :func:`sketched_linear` of a strided input and factors that are known to fit together."""
    shape = x.shape
    if len(shape) == 2:  # A reshape would cost as much as a small product.
        return sketched_matmul(x, S1, U1, S2, U2, bias, scale)
    rows = x.reshape(math.prod(shape[:-1]), shape[-1])
    return sketched_matmul(rows, S1, U1, S2, U2, bias, scale).reshape(*shape[:-1], S2.shape[1])


def sketched_conv(
    x: Tensor,  # (N, in, *size) or (in, *size)
    S: Tensor,  # (rows, in / groups, *kernel)
    U: Tensor,  # (rows, out / groups)
    bias: Tensor | None = None,  # (out,)
    stride: int | Sequence[int] = 1,
    padding: Any = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    scale: float = 1.0,
) -> Tensor:  # (N, out, *size) or (out, *size)
    r"""Apply a sketched convolution in one, two or three dimensions: :math:`y = s\,U^T (x * S) + b`.

    A convolution to a few channels, the rows of S, which U mixes into ``out`` at every position. With groups, group j
    of the rows serves group j of the outputs.

    Args:
        x: Input of shape ``(N, in, *size)``, or ``(in, *size)`` without a batch, any floating dtype.
        S: Trained kernel of shape ``(rows, in / groups, *kernel)``; says the number of dimensions.
        U: Sketch of shape ``(rows, out / groups)``.
        bias: Bias of shape ``(out,)``, or None.
        stride: One integer, or one for each dimension; this and the next three are as in
            :func:`torch.nn.functional.conv2d`.
        padding: As ``stride``; ``"same"``, ``"same_upper"`` or ``"valid"``; or a pair (before, after) for each
            dimension.
        dilation: As ``stride``.
        groups: Number of groups.
        scale: The number s.

    Returns:
        A tensor of shape ``(N, out, *size)``, or ``(out, *size)``, in the autocast dtype under autocast, else in the
        dtype of ``x``; in channels_last where :func:`torch.nn.functional.conv2d` returns it.

    Raises:
        ShapeError: If the input, the factors and the groups do not fit together, or a size is out of range.
        DTypeError: If the dtypes differ; under autocast the dtype of the input may differ.
        ValueError: If ``padding`` is a word other than ``"same"``, ``"same_upper"`` and ``"valid"``.

    Cost: ``2 rows (in / groups * kernel + out / groups)`` flops for each output position, against ``2 in / groups *
    kernel * out`` dense. Where the factors are too small or too large to save time, as with one channel in each group,
    the dense kernel is formed and used.

    Example:
        >>> import torch
        >>> x, S, U = (
        ...     torch.ones(5, 3, 8, 8),
        ...     torch.ones(4, 3, 3, 3),
        ...     torch.ones(4, 6),
        ... )
        >>> sketched_conv(x, S, U, padding="same").shape
        torch.Size([5, 6, 8, 8])
    """
    check_size("groups", groups, least=1)
    dim = S.dim() - 2
    if not 1 <= dim <= 3 or U.dim() != 2 or U.shape[0] != S.shape[0] or U.shape[0] % groups:
        raise ShapeError(
            "S must be (rows, in / groups, *kernel), with one to three dimensions of the kernel, and U (rows, out / "
            f"groups), rows divisible by groups={groups}: got S {tuple(S.shape)}, U {tuple(U.shape)}"
        )
    out_channels = U.shape[1] * groups
    if bias is not None and bias.shape != (out_channels,):
        raise ShapeError(f"bias must have shape ({out_channels},), not {tuple(bias.shape)}")
    if any(tensor is not None and tensor.dtype != S.dtype for tensor in (U, bias)):
        dtypes = [None if tensor is None else tensor.dtype for tensor in (S, U, bias)]
        raise DTypeError(f"S, U and bias must share a dtype and have {dtypes}: cast them to one")
    stride = per_dim("stride", stride, dim, least=1)
    padding = check_padding(padding, stride, dim)
    return convolve(x, S, U, bias, stride, padding, per_dim("dilation", dilation, dim, least=1), groups, scale)


def linear_attention(
    q: Tensor,  # (*batch, L, m)
    k: Tensor,  # (*batch, S, m)
    v: Tensor,  # (*batch, S, E)
    log_scale: Tensor | None = None,  # (*batch, S)
    *,
    is_causal: bool = False,
) -> Tensor:  # (*batch, L, E)
    r"""Return the mean of the values with weights :math:`e^{c_j} (q_i \cdot k_j)`: linear attention.

    .. math:: y_i = \frac{\sum_j e^{c_j} (q_i \cdot k_j) v_j}{\sum_j e^{c_j} (q_i \cdot k_j)}

    over all keys, or with ``is_causal`` over :math:`j \le i`; 0 where all weights are 0. Two products with a state of
    m (E + 1) numbers, or :func:`~panther.kernels.causal_linear_attention`. A key whose exponent is -inf is masked: it
    has no influence, even if it is NaN (A. Katharopoulos et al., "Transformers are RNNs", ICML 2020,
    arXiv:2006.16236).

    Args:
        q: Features of the queries, usually not negative.
        k: Features of the keys.
        v: Values.
        log_scale: The exponents c, 0 if not given.
        is_causal: Whether a query sees only the keys up to its own position.

    Returns:
        The output, in the dtype of ``v``; half precision is summed in float32.

    Raises:
        ShapeError: If shapes do not fit together, or ``is_causal`` and there are not as many keys as queries.
        DTypeError: If q, k or v is not floating.

    Cost: ``2 m E (L + S)`` flops for each batch entry, and no memory that grows with L S.

    Example:
        >>> import torch
        >>> q = k = torch.ones(3, 2)
        >>> linear_attention(q, k, torch.tensor([[0.0], [1.0], [2.0]])).squeeze(
        ...     -1
        ... )
        tensor([1., 1., 1.])
    """
    _check_attention(q, k, v, log_scale)
    if is_causal:
        if q.shape[-2] != k.shape[-2]:
            raise ShapeError(
                f"causal attention needs as many keys as queries, and got {k.shape[-2]} and {q.shape[-2]}: leave "
                "is_causal out for attention to a different sequence"
            )
        dtype = torch.promote_types(q.dtype, v.dtype)
        return causal_linear_attention(q.to(dtype), k.to(dtype), v.to(dtype), log_scale).to(v.dtype)
    wide = torch.promote_types(v.dtype, torch.float32)
    with no_autocast(q.device):
        q, k, values = q.to(wide), k.to(wide), v.to(wide)
        if log_scale is not None:
            left_out = (log_scale == -torch.inf)[..., None]
            k, values = k.masked_fill(left_out, 0), values.masked_fill(left_out, 0)
            # The result does not depend on the subtracted number, so it needs no gradient. It is 0 if all keys are
            # masked.
            largest = log_scale.detach().amax(-1, keepdim=True) if k.shape[-2] else log_scale.new_zeros(())
            weight = (log_scale - largest.masked_fill(largest == -torch.inf, 0)).to(wide).exp()
            k = k * weight[..., None]
        numerator = q @ (k.mT @ values)
        denominator = q @ k.sum(-2)[..., None]
        empty = denominator == 0
        return (numerator / denominator.masked_fill(empty, 1)).masked_fill(empty, 0).to(v.dtype)


@inherit_arguments(kernels.windowed_linear_attention)
def windowed_linear_attention(
    q: Tensor,  # (*batch, n, D)
    k: Tensor,  # (*batch, n, D)
    v: Tensor,  # (*batch, n, E)
    phi_q: Tensor,  # (*batch, n, m)
    phi_k: Tensor,  # (*batch, n, m)
    log_q: Tensor | None = None,  # broadcast to (*batch, n)
    log_k: Tensor | None = None,  # broadcast to (*batch, n)
    key_mask: Tensor | None = None,  # broadcast to (*batch, n)
    *,
    window: int = 64,
    is_causal: bool = False,
) -> Tensor:  # (*batch, n, E)
    r"""Compute attention that is exact among near positions and linear, through features, among far positions.

    The weights are :math:`e^{q_i \cdot k_j}` if j is in the same block of ``window`` positions as i or in a
    neighbouring block, and :math:`e^{a_i + b_j} (\phi_{q,i} \cdot \phi_{k,j})` elsewhere; with ``is_causal``, only
    where :math:`j \le i`. The output is the mean of the values with these weights, and 0 where there is no key.
    See :func:`panther.kernels.windowed_linear_attention`, whose operands have one dtype, for the numerics.

    Returns:
        The output, in the dtype of ``v``; half precision is summed in float32.

    Raises:
        ValueError: If shapes do not fit together, or the window is less than 1.
        TypeError: If q, k, v, the features or the exponents are not floating, or the mask is not boolean.

    Cost: about ``n (4 w (D + E) + 4 m E)`` flops for each batch entry with w = ``window``, ``n (6 w (D + E) + 4 m E)``
    if not causal, against ``4 n^2 D`` for softmax attention, half of it if causal.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 8, 100, 16).unbind()
        >>> windowed_linear_attention(
        ...     q, k, v, q.exp(), k.exp(), window=32, is_causal=True
        ... ).shape
        torch.Size([2, 8, 100, 16])
    """
    window = check_size("window", window, least=1)
    dtype = v.dtype
    for x in (q, k, phi_q, phi_k):
        dtype = torch.promote_types(dtype, x.dtype)
    log_q, log_k, key_mask = (
        _expanded(name, x, q.shape[:-1]) for name, x in (("log_q", log_q), ("log_k", log_k), ("key_mask", key_mask))
    )
    q, k, values, phi_q, phi_k = (x.to(dtype) for x in (q, k, v, phi_q, phi_k))
    y = kernels.windowed_linear_attention(
        q, k, values, phi_q, phi_k, log_q, log_k, key_mask, window=window, is_causal=is_causal
    )
    return y.to(v.dtype)


def _expanded(name: str, x: Tensor | None, rows: torch.Size) -> Tensor | None:
    """Return ``x``, one number per position, expanded to all batch entries as a view."""
    if x is None:
        return None
    sizes = zip(reversed(x.shape), reversed(rows), strict=False)
    if x.dim() > len(rows) or any(size not in (1, row) for size, row in sizes):
        raise ShapeError(f"{name} of shape {tuple(x.shape)} must broadcast to (*batch, n) = {tuple(rows)}: reshape it")
    return x.expand(rows)


def _check(x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None) -> None:
    if S1.dim() != 2 or S2.dim() != 2:
        raise ShapeError(f"factors must have two dimensions: got S1 {tuple(S1.shape)}, S2 {tuple(S2.shape)}")
    (in_features, R), out_features = S1.shape, S2.shape[1]
    packed = U1.dtype is torch.int32 and U2.dtype is torch.int32
    expected: Any = ((R, -(-out_features // 32)), (R, -(-in_features // 32))) if packed else (S2.shape, S1.shape)
    if U1.dim() == 1:
        expected = (out_features,), (in_features,)
    if S2.shape[0] != R or U1.shape != expected[0] or U2.shape != expected[1]:
        words = ", U2 and U1 packed to (R, ceil(in / 32)) and (R, ceil(out / 32))" if packed else ""
        words = ", U2 and U1 sparse with signs (in,) and (out,)" if U1.dim() == 1 else words
        raise ShapeError(
            f"S1 and U2 must be (in, R) and U1 and S2 (R, out){words}: got S1 {tuple(S1.shape)}, U1 "
            f"{tuple(U1.shape)}, S2 {tuple(S2.shape)}, U2 {tuple(U2.shape)}: transpose those that differ"
        )
    if bias is not None and bias.shape != (out_features,):
        raise ShapeError(f"bias must have shape ({out_features},), not {tuple(bias.shape)}")
    if x.dim() == 0 or x.size(-1) != in_features:
        shape = "a nested tensor" if x.is_nested else tuple(x.shape)
        raise ShapeError(f"the last dimension of the input, {shape}, must be in_features={in_features}: reshape it")
    sketches = () if packed else (U1, U2)
    if any(tensor is not None and tensor.dtype != S1.dtype for tensor in (S2, *sketches, bias)):
        dtypes = [None if tensor is None else tensor.dtype for tensor in (S1, U1, S2, U2, bias)]
        raise DTypeError(f"S1, U1, S2, U2 and bias must share a dtype and have {dtypes}: cast them to one")
    if x.dtype != S1.dtype:
        other = f", or the layer, layer.to({x.dtype}), or run under torch.autocast" if x.is_floating_point() else ""
        raise DTypeError(f"the input is {x.dtype} and the layer {S1.dtype}: cast the input, x.to({S1.dtype}){other}")


def _check_attention(q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor | None) -> None:
    scales = None if log_scale is None else tuple(log_scale.shape)
    fit = min(q.dim(), k.dim(), v.dim()) >= 2 and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
    if not fit or (scales is not None and scales[-1:] != k.shape[-2:-1]):
        raise ShapeError(
            "attention takes q (*batch, L, m), k (*batch, S, m), v (*batch, S, E) and log_scale (*batch, S), not "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} and {scales}: transpose or slice them"
        )
    if not all(x.is_floating_point() for x in (q, k, v)):
        raise DTypeError(f"q, k and v must be floating, and are {q.dtype}, {k.dtype} and {v.dtype}: cast them")
