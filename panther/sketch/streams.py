"""Random streams: sketches as functions of an integer seed.

Key of the Philox-4x32-10 generator: the seed. Counter: ``(row, column block, stream, tag)`` with
``tag = version * 2^16 + kind``. The same seed gives the same numbers on every rank, device and torch version, and a
block of a sketch can be drawn without the rest.
"""

__all__ = ["STREAM_VERSION", "Kind", "check_stream", "signs", "tag"]

from enum import IntEnum

import torch
from torch import Tensor

from panther._process_settings import check_seed
from panther.errors import ShapeError, check_floating
from panther.kernels import sign_block

# A change of the numbers that a seed gives needs a new version. Layers and checkpoints store their version.
STREAM_VERSION = 1


class Kind(IntEnum):
    """The kind of a stream's numbers. It is part of the counter, so that kinds with the same seed are independent."""

    SIGN = 1
    GAUSSIAN = 2
    UNIFORM = 3
    SPARSE = 4
    SRHT = 5
    ROUNDING = 6


def tag(kind: Kind, version: int = STREAM_VERSION) -> int:
    """Return the fourth word of the counter: ``version * 2^16 + kind``."""
    return (version << 16) + kind


def check_stream(stream: int) -> int:
    """Return a user's stream number as a Python int, or raise unless it is in ``[0, 2^32)``."""
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise TypeError(f"stream must be an integer, not {type(stream).__name__}: pass stream=0")
    if not 0 <= stream.__index__() < 1 << 32:
        raise ValueError(f"stream={stream} must be in [0, 2^32): number the matrices of a seed from 0")
    return stream.__index__()


def signs(
    seed: int,
    stream: int,
    rows: range,
    cols: range,
    *,
    version: int = STREAM_VERSION,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:  # (len(rows), len(cols))
    """Return entries +1 and -1 of a sign stream at the given rows and columns.

    Args:
        seed: In ``[0, 2^63)``.
        stream: Which matrix of this seed.
        rows: Contiguous range of rows.
        cols: Contiguous range of columns.
        version: Version of the stream; ``STREAM_VERSION`` is the current one.
        dtype: Floating dtype; None is torch's default.
        device: None is torch's default.

    Returns:
        A tensor of shape ``(len(rows), len(cols))``.

    Raises:
        ShapeError: If ``rows`` or ``cols`` is not a range of step 1.
        DTypeError: If ``dtype`` is not floating.
        ValueError: If ``seed`` is outside ``[0, 2^63)``, or ``stream`` outside ``[0, 2^32)``.

    Cost: one Philox call for each row and each 128 columns touched.

    Example:
        >>> whole = signs(0, 0, range(4), range(300))
        >>> bool(
        ...     (
        ...         signs(0, 0, range(1, 3), range(200, 300))
        ...         == whole[1:3, 200:]
        ...     ).all()
        ... )
        True
    """
    check_floating("dtype", dtype)
    stream = check_stream(stream)
    for name, part in (("rows", rows), ("cols", cols)):
        if not isinstance(part, range) or (len(part) and (part.step != 1 or part.start < 0)):
            raise ShapeError(f"{name}={part!r} must be a range of step 1 from 0 or more: use range(start, stop)")
    device = torch.get_default_device() if device is None else device
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return sign_block(check_seed(seed), stream, tag(Kind.SIGN, version), rows, cols, dtype=dtype, device=device)
