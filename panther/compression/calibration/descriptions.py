"""Short descriptions of batches and tensors, which differ where these differ.

They tell whether a search or a compression that continues has the arguments that it began with.
"""

__all__ = ["checksum", "described_batches", "hash_of", "shortened"]

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from panther._torch import tree_leaves, version_of

_LONG = 80  # a longer text is replaced by its beginning and a hash


def shortened(text: str) -> str:
    """Return a text, or its beginning and a hash if it is long."""
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({zlib.crc32(text.encode()):08x})"


def described_batches(calibration: Any) -> str:
    """Return the number of batches and a hash of their tensors, or only the type unless the batches are a sequence."""
    if not isinstance(calibration, Sequence):
        return f"a {type(calibration).__name__}"
    leaves = [
        leaf for batch in calibration for leaf in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    ]
    return f"{len(calibration)} batches {checksum(enumerate(leaves)):08x}"


def checksum(entries: Iterable[tuple[Any, Any]]) -> int:
    """Return a CRC-32 of names and values, and of hashes of tensors."""
    crc = 0
    for name, value in entries:
        content = hash_of(value) if isinstance(value, Tensor) else value
        crc = zlib.crc32(f"{name} {content}".encode(), crc)
    return crc


def hash_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, device and a hash of the memory."""
    if is_lazy(tensor):
        return (str(tensor.dtype), str(tensor.device))
    value = tensor.detach()
    about = tuple(value.shape), str(value.dtype), str(value.device)
    if not value.numel() or value.is_meta:
        return about
    try:
        memory: Any = value.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return *about, zlib.crc32(memory)
    except (RuntimeError, TypeError, NotImplementedError):  # a subclass of Tensor with another kind of memory
        return *about, version_of(tensor)
