"""Checks of the inputs of an attention layer, and its masks."""

__all__ = ["check_inputs", "is_causal_mask", "key_exponent"]

from typing import Any

import torch
from torch import Tensor

from panther.errors import DTypeError, ShapeError


def check_inputs(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise unless queries, keys, values and the mask of keys fit an attention layer and one another.

    Raises:
        ShapeError: If shapes do not fit.
        DTypeError: If a dtype differs from the layer's, outside autocast.
    """
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
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return
        raise DTypeError(
            f"query, key and value must be {layer.Wq.dtype}, as the layer, and are {dtypes}: cast them, or the "
            "layer, or run under torch.autocast"
        )


def key_exponent(mask: Tensor | None, key: Tensor) -> Tensor | None:  # (N, 1, S)
    """Return the numbers that a mask of keys adds to their logits, None without a mask.

    Raises:
        ShapeError: If it is not of shape (batch, keys).
        ValueError: If it is neither boolean nor floating.
    """
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
    """Return whether a mask of pairs is the causal one.

    Raises:
        ShapeError: If its shape is not that of the pairs.
        ValueError: If it is neither causal nor masks nothing.
    """
    if mask.shape[-2:] != (L, S):
        raise ShapeError(f"attn_mask must end in (queries, keys) = ({L}, {S}), and has shape {tuple(mask.shape)}")
    left_out = mask if mask.dtype is torch.bool else mask == -torch.inf
    if mask.dtype is torch.bool or not (mask.masked_fill(left_out, 0) != 0).any():
        if not left_out.any():
            return False
        later = torch.ones(L, S, dtype=torch.bool, device=mask.device).triu(1)
        if L == S and bool((left_out == later).all()):
            return True
    raise ValueError(
        "attn_mask must be causal or mask nothing, because linear attention sums the keys once for all queries: use "
        "key_padding_mask for keys, is_causal=True for causal attention, or nn.MultiheadAttention"
    )
