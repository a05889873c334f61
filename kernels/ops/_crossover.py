"""The table that chooses an order of the sketched product by shapes, with the measurements behind it.

*chain*: four products. *joined*: two library products on concatenated factors. *pair*: two Triton kernels that split
the input features over the device. *fused*: one Triton kernel.
"""

__all__ = ["GPU_RULES", "PATHS", "Rule", "choose_path", "using_path"]

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PATHS = ("chain", "joined", "pair", "fused")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A class of shapes and the path it takes; the first rule that holds decides."""

    path: str
    min_rows: int = 0
    max_rows: int | None = None
    min_rows_per_rank: int = 0
    max_rank: int | None = None
    aligned_only: bool = False
    why: str

    def holds(self, rows: int, rank: int, aligned: bool = True) -> bool:
        """Return whether the shape is of this class."""
        return (
            (aligned or not self.aligned_only)
            and rows >= max(self.min_rows, self.min_rows_per_rank * rank)
            and (self.max_rows is None or rows <= self.max_rows)
            and (self.max_rank is None or rank <= self.max_rank)
        )


_FUSED = Rule(
    path="fused",
    min_rows=4096,
    max_rank=64,
    aligned_only=True,
    why="predicted, not measured: with 32 rows or more a program, 4096 rows fill 128 multiprocessors, x is read once "
    "and nothing but y written. Where sizes are not multiples of 16, entries are loaded one by one, for which the "
    "fused kernel, and not the pair, spills registers (compiled for sm_80 and sm_90)",
)
_PAIR = Rule(
    path="pair",
    max_rows=64,
    why="predicted, not measured: two launches of 2.5 us (three above R = 64), where copies and library products take "
    "four or more",
)
_PAIR_OF_SMALL_RANK = Rule(
    path="pair",
    max_rows=4095,
    max_rank=64,
    why="predicted, not measured: at 512 rows of 8192 x 8192, R = 16, x and y take 3.9 us, as long as two launches, "
    "and the 17 MB that the second kernel reads again come from the L2 cache",
)
_JOINED_ON_GPU = Rule(
    path="joined",
    why="predicted, not measured: copying the factors costs 6 % of the bytes at 8192 rows of 4096 x 4096, R = 128",
)
# `python -m benchmarks.gpu_suite` times every path at every shape.
GPU_RULES = (_FUSED, _PAIR, _PAIR_OF_SMALL_RANK, _JOINED_ON_GPU)
_TORCH = (
    Rule(
        path="joined",
        min_rows_per_rank=4,
        why="measured on two cores, widths 1024 to 8192, R 16 and 128, batch 1 to 512: 5 to 40 % faster from 4 R rows "
        "on. Below, bfloat16 would gain from it on one thread and lose on two: its products are slow to call",
    ),
    Rule(path="chain", why="reads the factors once and copies none"),
)
_forced: list[str] = []


def choose_path(rows: int, rank: int, *, triton: bool, aligned: bool = True) -> str:
    """Return the path for a product of ``rows`` rows with factors of rank ``rank``.

    Args:
        rows: Rows of the input.
        rank: R.
        triton: Whether the Triton kernels take the operands.
        aligned: Whether sizes and strides are multiples of 16, and operands start at 16 bytes.
    """
    if _forced and (triton or _forced[-1] in ("chain", "joined")):
        return _forced[-1]
    rules = GPU_RULES if triton else _TORCH
    return next(rule.path for rule in rules if rule.holds(rows, rank, aligned))


@contextmanager
def using_path(path: str) -> Iterator[None]:
    """Take ``path`` wherever it can run: for tests, and to measure the table."""
    if path not in PATHS:
        raise ValueError(f"path={path!r} must be one of {', '.join(PATHS)}")
    _forced.append(path)
    try:
        yield
    finally:
        _forced.pop()
