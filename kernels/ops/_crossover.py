"""The choice of an order of the sketched product by shapes, and the measurements that support it.

*chain*: four products. *joined*: two library products on concatenated factors. *pair*: two Triton kernels that split
the input features over the device. *fused*: one Triton kernel.
"""

__all__ = ["PATHS", "choose_path", "using_path"]

from collections.abc import Iterator
from contextlib import contextmanager

from ._plans import forget_plans

PATHS = ("chain", "joined", "pair", "fused")
_forced: list[str] = []


def choose_path(rows: int, rank: int, *, triton: bool, aligned: bool = True) -> str:
    """Return the path for a product of ``rows`` rows with factors of rank ``rank``.

    ``triton`` says whether the Triton kernels take the operands. ``aligned`` says whether sizes and strides are
    multiples of 16 and addresses are multiples of 16 bytes.
    """
    if _forced and (triton or _forced[-1] in ("chain", "joined")):
        return _forced[-1]
    if not triton:
        # Measured on two cores, widths 1024 to 8192, R 16 and 128, batch 1 to 512: 5 to 40 % faster from 4 R rows on.
        # With fewer rows the chain is faster, because it copies no factor. bfloat16 would gain from joining on one
        # thread and lose on two, because calls of its products are slow.
        return "joined" if rows >= 4 * rank else "chain"
    # The rest is predicted, not measured: `python -m benchmarks.gpu_suite` times every path at every shape.
    if rows >= max(4096, 200 * rank) and rank <= 64 and aligned:
        # x is read once and only y is written. Every tile of rows reads all factors from the L2 cache, which takes less
        # time than reading x only if a tile has twice as many rows as R. Three quarters of 132 multiprocessors have
        # such a tile from 200 R rows on. With 32 rows a tile, 4096 rows of 8192 x 8192, R = 64, read 537 MB of factors,
        # 107 us at 5 TB/s, for 134 MB of x and y, 31 us at 4.3 TB/s.
        # If sizes are not multiples of 16, entries are loaded one by one, for which the fused kernel, but not the
        # pair, spills registers (compiled for sm_80 and sm_90).
        return "fused"
    # The kernels take 20 to 24 us of the host for a call, and the products of torch 50 (``benchmarks.gpu.host``, with
    # stubs), so that the host never speaks against them.
    if rows <= 64:
        return "pair"  # Two launches of 2.5 us, three above R = 64. Copies and library products take four or more.
    if rank <= 64 and rows < (12800 if aligned else 4096):
        # At 512 rows of 8192 x 8192, R = 16, x and y take 3.9 us, as long as two launches, and the 17 MB that the
        # second kernel reads again come from the L2 cache. From 4096 rows on, tiles have 128 rows: 4096 rows of
        # 8192 x 8192, R = 64, read 134 MB of factors, 27 us, while x and y take 31 us, and one launch more is taken.
        return "pair"
    return "joined"  # Copying the factors costs 6 % of the bytes at 8192 rows of 4096 x 4096, R = 128.


@contextmanager
def using_path(path: str) -> Iterator[None]:
    """Force ``path`` wherever it can run, for tests and to measure the choice."""
    if path not in PATHS:
        raise ValueError(f"path={path!r} must be one of {', '.join(PATHS)}")
    _forced.append(path)
    forget_plans()
    try:
        yield
    finally:
        _forced.pop()
        forget_plans()
