r"""The computation of attention by features: its feature maps, the checks of its inputs, and its masks.

Inner products of features approximate the weights of attention, :math:`\exp(x \cdot y)` or others. Positive random
features of the exponential kernel, for :math:`\omega` normal and any :math:`A \le 0`:

.. math:: \phi_r(x) \propto \exp\!\left(A \|\omega_r\|^2 + \sqrt{1 - 4 A}\; \omega_r \cdot x - \|x\|^2 / 2\right).

A = 0 is FAVOR+ (K. Choromanski et al., "Rethinking attention with Performers", ICLR 2021, arXiv:2009.14794). The A with
the least variance depends on the mean square norm :math:`\varphi` of x + y (V. Likhosherstov et al., "Chefs' random
tables: non-trigonometric random features", NeurIPS 2022, arXiv:2205.15317):

.. math:: A = \frac{1 - 1/\rho}{8}, \qquad
    \rho = \frac{\sqrt{(2 \varphi + d)^2 + 8 d \varphi} - 2 \varphi - d}{4 \varphi}.

Features are returned as :math:`e^{c} \phi` with :math:`\phi \le 1` and one exponent c for each vector, so that they
neither overflow nor depend on other vectors.
"""

__all__ = [
    "batched_first", "check_inputs", "is_causal_mask", "key_exponent", "optimal_shift", "orthogonal_gaussian",
    "positive_features", "products", "relu_features", "taylor_features",
]  # fmt: skip

import math
from typing import Any

import torch
from torch import Tensor

from panther.errors import DTypeError, ShapeError
from panther.kernels.ops.library import can_autocast, runs_eagerly_on_gpu
from panther.sketch import GaussianSketch

# This is added to every ReLU feature, as in the Performer, so that every query has some weight.
_RELU_FLOOR = 1e-3


def optimal_shift(phi: float, d: int) -> float:
    """Return the A of least variance if the mean square norm of x + y is ``phi``, in ``d`` dimensions."""
    # This form of the formula has no difference of nearly equal numbers, and is valid for phi = 0.
    rho = 2 * d / (math.sqrt((2 * phi + d) ** 2 + 8 * d * phi) + 2 * phi + d)
    return (1 - 1 / rho) / 8


def orthogonal_gaussian(rows: int, d: int, *, heads: int, seed: int, stream: int, only: range | None = None) -> Tensor:
    """Return directions (heads, rows, d) in float64 on the CPU: each normal, orthogonal within a block of d.

    They are drawn from ``stream`` and the next stream. Q of a QR factorisation with a positive diagonal is distributed
    as a random rotation. The lengths are distributed as for independent normal vectors. With ``only``, only these heads
    are drawn.
    """
    blocks = -(-rows // d)
    only = range(heads) if only is None else only
    shape = (len(only), blocks, d, d)

    def draw(stream: int) -> Tensor:
        sketch = GaussianSketch(
            heads * blocks * d, d, seed=seed, stream=stream, scale=False, dtype=torch.float64, device="cpu"
        )
        return sketch.block(range(only.start * blocks * d, only.stop * blocks * d), range(d)).view(shape)

    Q, R = torch.linalg.qr(draw(stream))
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    length = draw(stream + 1).norm(dim=-1, keepdim=True)
    features: Tensor = (Q.mT * length).flatten(1, 2)[:, :rows].contiguous()
    return features


def positive_features(
    x: Tensor,  # (*batch, heads, n, d)
    directions: Tensor,  # (heads, m, d)
    shift: float = 0.0,
) -> tuple[Tensor, Tensor]:  # (*batch, heads, n, m), (*batch, heads, n)
    r"""Return features :math:`\phi` of the exponential kernel, at most 1, and each vector's exponent c, in float32.

    Inner products of :math:`e^{c} \phi` are, in expectation, proportional to :math:`\exp(x \cdot y)`, by a factor that
    is the same for all pairs.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, W = x.to(wide), directions.to(wide)
    logits = x @ (W * math.sqrt(1 - 4 * shift) if shift else W).mT
    if shift:
        logits = logits + shift * W.square().sum(-1)[:, None, :]
    largest = logits.detach().amax(-1, keepdim=True)  # The result does not depend on it, so it needs no gradient.
    return (logits - largest).exp(), largest[..., 0] - x.square().sum(-1) / 2


def relu_features(x: Tensor, directions: Tensor) -> Tensor:  # (*batch, heads, n, m)
    """Return ``relu(x . w) + 1e-3``: weights that do not approximate softmax, for layers trained with them."""
    return torch.relu(x @ directions.to(x.dtype).mT) + _RELU_FLOOR


def products(x: Tensor) -> Tensor:  # (*batch, d) -> (*batch, d (d + 1) / 2)
    """Return the products of all pairs of entries, in the order of ``torch.triu_indices``.

    On a CPU they are computed by slices, because taking them from the square takes more memory. On a GPU the slices are
    d launches, about a hundred with their gradients for ten entries, and those of the square about ten.
    """
    d = x.shape[-1]
    if d and runs_eagerly_on_gpu(x):
        i, j = torch.triu_indices(d, d, device=x.device)
        # Each entry of the square is taken at most once, so that no two summands of a gradient meet in one entry.
        return (x[..., :, None] * x[..., None, :]).flatten(-2).index_select(-1, i * d + j)
    return torch.cat([x[..., i : i + 1] * x[..., i:] for i in range(d)], -1) if d else x


def taylor_features(x: Tensor) -> Tensor:  # (*batch, d) -> (*batch, 1 + d + d (d + 1) / 2)
    r"""Return features with :math:`\phi(x) \cdot \phi(y) = 1 + x \cdot y + (x \cdot y)^2 / 2`, a Taylor polynomial.

    The polynomial has no zeros, so every weight is positive. The product of two different entries occurs once, times
    the square root of 2.
    """
    d = x.shape[-1]
    i, j = torch.triu_indices(d, d, device=x.device)
    weight = torch.where(i == j, math.sqrt(0.5), 1.0).to(x.dtype)
    return torch.cat((x.new_ones(*x.shape[:-1], 1), x, products(x) * weight), -1)


def check_inputs(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise unless queries, keys, values and the mask of keys fit an attention layer and each other."""
    for name, x in (("query", query), ("key", key), ("value", value), ("key_padding_mask", mask)):
        if not isinstance(x, Tensor) and not (name == "key_padding_mask" and x is None):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}: use torch.as_tensor")
    widths = (layer.embed_dim, layer.kdim, layer.vdim)
    shapes = tuple(tuple(x.shape) for x in (query, key, value))
    if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
        raise ShapeError(f"query, key and value must all have 2 dimensions or all 3, and have shapes {shapes}")
    if tuple(shape[-1] for shape in shapes) != widths:
        raise ShapeError(
            f"query, key and value must end in embed_dim={widths[0]}, kdim={widths[1]} and vdim={widths[2]}, and "
            f"have shapes {shapes}"
        )
    batch = 0 if layer.batch_first else 1
    if shapes[1][:-1] != shapes[2][:-1] or (query.dim() == 3 and shapes[0][batch] != shapes[1][batch]):
        raise ShapeError(
            f"key and value must have one length, and all three one batch size, and have shapes {shapes} "
            f"(batch_first={layer.batch_first})"
        )
    if mask is not None and mask.dim() != query.dim() - 1:
        shape = "(keys,), as there is no batch" if query.dim() == 2 else "(batch, keys)"
        raise ShapeError(f"key_padding_mask must have shape {shape}, not {tuple(mask.shape)}")
    device, dtypes = query.device.type, tuple(x.dtype for x in (query, key, value))
    if any(dtype != layer.Wq.dtype for dtype in dtypes):
        if can_autocast(device) and torch.is_autocast_enabled(device):
            return
        raise DTypeError(
            f"query, key and value must be {layer.Wq.dtype}, as the layer, and are {dtypes}: cast them, or the "
            "layer, or run under torch.autocast"
        )


def batched_first(x: Tensor, batch_first: bool) -> Tensor:
    """Return an input of attention, with a batch or without one, as (batch, length, width)."""
    return x[None] if x.dim() == 2 else x if batch_first else x.transpose(0, 1)


def key_exponent(mask: Tensor | None, key: Tensor) -> Tensor | None:  # (N, 1, S)
    """Return the numbers that a mask of keys adds to their logits, None without a mask."""
    if mask is None:
        return None
    if mask.shape != key.shape[:2]:
        raise ShapeError(
            f"key_padding_mask must have shape (batch, keys) = {tuple(key.shape[:2])}, not {tuple(mask.shape)}"
        )
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
    elif not mask.is_floating_point():
        raise ValueError(f"key_padding_mask must be boolean or floating, not {mask.dtype}")
    return mask.to(torch.promote_types(mask.dtype, torch.float32))[:, None]


def is_causal_mask(mask: Tensor, L: int, S: int) -> bool:
    """Return whether a mask of pairs is the causal one, False for one that masks nothing; raise for any other.

    With more keys than queries, the causal mask has its diagonal at the lower right: queries have the last positions.
    """
    if mask.shape[-2:] != (L, S):
        raise ShapeError(f"attn_mask must end in (queries, keys) = ({L}, {S}), and has shape {tuple(mask.shape)}")
    left_out = mask if mask.dtype is torch.bool else mask == -torch.inf
    if mask.dtype is torch.bool or not (mask.masked_fill(left_out, 0) != 0).any():
        if not left_out.any():
            return False
        later = torch.ones(L, S, dtype=torch.bool, device=mask.device).triu(1 + S - L)
        if L <= S and bool((left_out == later).all()):
            return True
    raise ValueError(
        "attn_mask must be causal or mask nothing, because linear attention sums the keys once for all queries: use "
        "key_padding_mask for keys, is_causal=True for causal attention, or nn.MultiheadAttention"
    )
