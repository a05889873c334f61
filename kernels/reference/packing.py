"""Signs stored as one bit an entry, 32 to an int32 word: the layout of the Philox stream, a set bit a minus sign."""

__all__ = ["byte_signs", "pack_signs", "unpack_signs"]

from functools import lru_cache

import torch
from torch import Tensor

from .._torch import is_in_export

_WORD = 32


def pack_signs(signs: Tensor) -> Tensor:  # (rows, n) -> (rows, ceil(n / 32)), int32
    """Pack a matrix by the sign of its entries: bit ``j % 32`` of word ``j // 32`` is set where column j is negative.

    Args:
        signs: Shape ``(rows, n)``, any real dtype.

    Returns:
        int32 words of shape ``(rows, ceil(n / 32))``; bits past the last column are zero.

    Raises:
        ValueError: If ``signs`` has not two dimensions, or is complex.

    Cost: one pass, and temporaries of 4 bytes an entry.

    Example:
        >>> pack_signs(torch.tensor([[1.0, -1.0, -1.0]]))
        tensor([[6]], dtype=torch.int32)
    """
    if signs.dim() != 2 or signs.is_complex():
        raise ValueError(
            f"pack_signs takes a real matrix (rows, n), not {signs.dtype} of shape {tuple(signs.shape)}: reshape it"
        )
    rows, n = signs.shape
    words = -(-n // _WORD)
    bits = torch.zeros(rows, words * _WORD, dtype=torch.int32, device=signs.device)
    bits[:, :n] = signs < 0
    shift = torch.arange(_WORD, dtype=torch.int32, device=signs.device)
    # The bits of a word are distinct powers of two, the highest of them negative: the sum is the two's complement.
    return (bits.view(rows, words, _WORD) << shift).sum(-1).to(torch.int32)


def unpack_signs(words: Tensor, n: int, dtype: torch.dtype) -> Tensor:  # (rows, ceil(n / 32)) -> (rows, n)
    """Return the signs that :func:`pack_signs` packed, as +1 and -1.

    Args:
        words: int32, of shape ``(rows, ceil(n / 32))``.
        n: Number of columns.
        dtype: Floating dtype of the result.

    Raises:
        ValueError: If ``words`` is not int32 of that shape.

    Example:
        >>> unpack_signs(
        ...     torch.tensor([[6]], dtype=torch.int32), 3, torch.float32
        ... )
        tensor([[ 1., -1., -1.]])
    """
    if is_in_export() or torch.jit.is_tracing():  # no views of another dtype
        shift = torch.arange(_WORD, dtype=torch.int32, device=words.device)
        return (1 - 2 * (torch.bitwise_right_shift(words[:, :, None], shift) & 1)).to(dtype).flatten(1)[:, :n]
    if words.dtype is not torch.int32 or words.dim() != 2 or n < 0 or words.shape[1] != -(-n // _WORD):
        raise ValueError(
            f"unpack_signs takes int32 words of shape (rows, ceil(n / 32)) = (rows, {-(-n // _WORD)}) for n={n}, not "
            f"{words.dtype} of shape {tuple(words.shape)}: pass what pack_signs returned, and the n it was given"
        )
    # Fake tensors must not be cached, and a traced graph must not hold cached tensors.
    plain = type(words) is Tensor and words.device.type == "cpu" and not torch.compiler.is_compiling()
    table = _kept_table(dtype) if plain else byte_signs(dtype, words.device)
    index = words.contiguous().view(torch.uint8).flatten().to(torch.int32)  # bytes, the lowest first
    return table.index_select(0, index).view(words.shape[0], words.shape[1] * _WORD)[:, :n]


def byte_signs(dtype: torch.dtype, device: torch.device | str) -> Tensor:  # (256, 8)
    """Return the signs in every byte, from its lowest bit."""
    octets = torch.arange(256, dtype=torch.int64, device=device)[:, None]
    return (1 - 2 * (octets >> torch.arange(8, device=device) & 1)).to(dtype)


@lru_cache
def _kept_table(dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return byte_signs(dtype, "cpu")
