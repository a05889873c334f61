"""Sizes of the chunks that torch.chunk makes, which is how every uneven dimension is sharded."""

__all__ = ["chunk_ranges", "chunk_sizes"]

import itertools

from panther.errors import ShapeError


def chunk_sizes(size: int, n: int) -> list[int]:
    """Return the sizes of the n chunks of :func:`torch.chunk`.

    Raises:
        ShapeError: If there are fewer than n.

    Example:
        >>> chunk_sizes(10, 4)
        [3, 3, 3, 1]
    """
    step = -(-size // n) if size else 0
    sizes = [max(0, min(step, size - i * step)) for i in range(n)]
    if not all(sizes):
        raise ShapeError(f"a dimension of {size} cannot be split into {n} chunks as torch.chunk does: use fewer ranks")
    return sizes


def chunk_ranges(size: int, n: int) -> list[range]:
    """Return the ranges of the n chunks of :func:`torch.chunk`.

    Raises:
        ShapeError: If there are fewer than n.

    Example:
        >>> chunk_ranges(10, 4)
        [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
    """
    ends = list(itertools.accumulate(chunk_sizes(size, n)))
    return [range(start, end) for start, end in itertools.pairwise([0, *ends])]
