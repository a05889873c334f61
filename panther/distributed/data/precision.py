"""The dtypes behind the names of ``mixed_precision``."""

__all__ = ["compute_dtype"]

import torch

_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(mixed_precision: str | None) -> torch.dtype | None:
    """Return the dtype of matrix products with ``mixed_precision``; None without it."""
    if mixed_precision not in _DTYPES:
        raise ValueError(f"mixed_precision={mixed_precision!r} is unknown: use 'bf16', 'fp16' or None")
    return _DTYPES[mixed_precision]
