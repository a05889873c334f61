"""The choice of an order of the sketched product by shapes, and the measurements that support it.

*chain*: four products. *joined*: two library products on concatenated factors. *pair*, with sparse sketches: two Triton
kernels that split the input features over the device.
"""

__all__ = ["PATHS", "choose_path", "using_path"]

from collections.abc import Iterator
from contextlib import contextmanager

from ._plans import forget_plans

PATHS = ("chain", "joined", "pair")
_forced: list[str] = []


def choose_path(rows: int, rank: int, *, triton: bool) -> str:
    """Return the path for a product of ``rows`` rows with factors of rank ``rank``.

    ``triton`` says whether the Triton kernels take the operands.
    """
    if _forced and (triton or _forced[-1] in ("chain", "joined")):
        return _forced[-1]
    if not triton:
        # Measured on two cores, widths 1024 to 8192, R 16 and 128, batch 1 to 512: 5 to 40 % faster from 4 R rows on.
        # With fewer rows the chain is faster, because it copies no factor. bfloat16 would gain from joining on one
        # thread and lose on two, because calls of its products are slow.
        return "joined" if rows >= 4 * rank else "chain"
    # Predicted, not measured: two launches of 2.5 us, three above R = 64, in place of four or more. Above R = 64 every
    # tile of many rows would read the factors too often.
    return "pair" if rows <= 64 or rank <= 64 else "joined"


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
