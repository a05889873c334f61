"""Comparison of attention by features with softmax attention and with the mean of the values."""

__all__ = ["ApproximationError", "errors_of_layer_and_mean", "is_plain", "sample", "warn_if_worse"]

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from panther._torch import is_dispatch_mode_active
from panther.errors import NumericalWarning
from panther.kernels.ops.library import are_transforms_active

# The check uses this many positions of one sequence. With 8 heads it takes a millisecond.
_POSITIONS = 256


class ApproximationError(NamedTuple):
    """Relative errors against exact softmax attention, of the heads' outputs."""

    layer: float
    mean_of_values: float


def sample(
    q: Tensor,  # (N, H, L, d)
    k: Tensor,  # (N, H, S, d)
    v: Tensor,  # (N, H, S, d)
    exponent: Tensor | None,  # (N, 1, S)
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the first positions of the first sequence; if causal, with all keys before them."""
    L = q.shape[-2]
    q = q[:1, :, :_POSITIONS]
    # The queries of causal attention have the last positions.
    keys = k.shape[-2] - max(0, L - _POSITIONS) if is_causal else _POSITIONS
    return q, k[:1, :, :keys], v[:1, :, :keys], None if exponent is None else exponent[:1, :, :keys]


def errors_of_layer_and_mean(
    q: Tensor,  # (N, H, L, d), scaled
    k: Tensor,  # (N, H, S, d), scaled
    v: Tensor,  # (N, H, S, d)
    exponent: Tensor | None,  # (N, 1, S)
    is_causal: bool,
    layer_output: Tensor,  # (N, H, L, d)
) -> ApproximationError:
    """Return the relative errors of ``layer_output`` and of the mean of the values, which are 0 without keys."""
    q, k, v, layer_output = (x.float() for x in (q, k, v, layer_output))
    bias = q.new_zeros(1, 1, k.shape[-2]) if exponent is None else exponent.float()
    bias = bias[..., None, :].expand(*bias.shape[:2], q.shape[-2], -1)  # (N or 1, 1, L, S)
    if is_causal:
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        later = later.triu(1 + k.shape[-2] - q.shape[-2])
        bias = bias.masked_fill(later, -torch.inf)
    has_keys = (bias > -torch.inf).any(-1, keepdim=True)
    exact, mean = (torch.where(has_keys, (x + bias).softmax(-1) @ v, 0) for x in (q @ k.mT, q.new_zeros(())))
    layer_output = torch.where(has_keys, layer_output, 0)
    norm = exact.norm()
    errors = [((output - exact).norm() / norm).item() if norm else 0.0 for output in (layer_output, mean)]
    return ApproximationError(*errors)


def is_plain(x: Tensor) -> bool:
    """Return whether Python can read the values of x: they are not compiled, traced, captured or transformed."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or type(x) is not Tensor or x.is_meta:
        return False
    if are_transforms_active() or is_dispatch_mode_active():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def warn_if_worse(layer: Any, error: ApproximationError) -> None:
    """Warn if the layer is worse than the mean of the values."""
    if error.layer <= error.mean_of_values:
        return
    advice_by_kernel = {
        "hermite": "fit it to the model's inputs (layer.calibrate_)",
        "taylor": "use kernel_fn='hermite'",
        "relu": "train the model with it, or use kernel_fn='hermite'",
    }
    advice = advice_by_kernel.get(layer.kernel_fn, "use kernel_fn='hermite', or more features")
    warnings.warn(
        f"{layer.kernel_fn!r} features approximate this attention worse than the mean of its values would: on the "
        f"first {_POSITIONS} positions of its first input the relative error is {error.layer:.2f}, and the error of "
        f"the mean is {error.mean_of_values:.2f}. To approximate the softmax, {advice}, convert the model with "
        "pr.linearize_, which trains the features, or keep nn.MultiheadAttention. Ignore this warning if the model was "
        "trained with these features",
        NumericalWarning,
        stacklevel=4,
    )
