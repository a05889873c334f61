r"""Signs of a sketch by their position in a stream, in NumPy; the values equal :func:`panther.sketch.signs`.

Keras builds layers inside the tracers of TensorFlow and JAX, and on torch's meta device, where a torch tensor may have
no values. NumPy's arrays always have values. Philox-4x32-10 is by Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011, doi:10.1145/2063384.2063405; NumPy's own generator ``Philox`` has words of 64
bits.
"""

__all__ = ["draw_signs"]

import numpy as np

from panther.sketch.streams import Kind, tag

_MASK = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_SIGNS_PER_CALL = 128  # four words of 32 bits


def draw_signs(seed: int, stream: int, rows: int, cols: int) -> np.ndarray:  # (rows, cols), int8
    """Return the first rows and columns of a sign stream, as +1 and -1.

    Args:
        seed: In ``[0, 2^63)``.
        stream: Which matrix of this seed.
        rows: Number of rows.
        cols: Number of columns.

    Cost: one Philox call for each row and each 128 columns, with some 100 bytes of workspace a call.

    Example:
        >>> draw_signs(0, 0, 2, 8)
        array([[ 1,  1, -1, -1,  1, -1,  1,  1],
               [-1, -1, -1,  1, -1,  1,  1,  1]], dtype=int8)
    """
    calls = -(-cols // _SIGNS_PER_CALL)
    row, call = np.indices((rows, calls), dtype=np.uint64)
    words = np.stack(_philox_4x32(row, call, stream, tag(Kind.SIGN), seed), axis=-1)  # (rows, calls, 4)
    octets = words.astype("<u4").view(np.uint8).reshape(rows, 16 * calls)
    bits = np.unpackbits(octets, axis=1, count=cols, bitorder="little")
    return 1 - 2 * bits.astype(np.int8)


def _philox_4x32(row: np.ndarray, call: np.ndarray, stream: int, tag: int, seed: int) -> tuple[np.ndarray, ...]:
    """Apply ten rounds to the counters (row, call, stream, tag): words of 32 bits held in uint64."""
    c0, c1, c2, c3 = row, call, np.full_like(row, stream), np.full_like(row, tag)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(_ROUNDS):
        product0, product2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product2 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), product2 & _MASK
        c2, c3 = (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1), product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3
