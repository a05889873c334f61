"""Pipeline schedules, the stages that they need, and the balance of stages, without an import of torch."""

__all__ = ["SCHEDULES", "ScheduleKind", "balance_stages", "check_schedule"]

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from panther._hints import value_hint
from panther.errors import ShapeError


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of torch, and the stages that it needs on a rank."""

    class_name: str
    stages_per_rank: int = 2
    """Number of stages of a rank if the library chooses; torch's looped schedules take any number above 1."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed in two passes."""

    @property
    def make(self) -> Any:
        """Torch's class. It takes a stage if ``stages_per_rank`` is 1, and otherwise a list of stages."""
        from torch.distributed.pipelining import schedules

        return getattr(schedules, self.class_name)


# make_schedule, HybridParallelTrainer and the advisor read this table.
SCHEDULES = {
    "gpipe": ScheduleKind("ScheduleGPipe", stages_per_rank=1),
    "1f1b": ScheduleKind("Schedule1F1B", stages_per_rank=1),
    "interleaved": ScheduleKind("ScheduleInterleaved1F1B"),
    "looped_bfs": ScheduleKind("ScheduleLoopedBFS"),
    "zero_bubble": ScheduleKind("ScheduleInterleavedZeroBubble", splits_backward=True),
}


def check_schedule(name: str) -> None:
    """Raise ValueError unless there is a schedule of this name."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown: {value_hint('schedule', name, tuple(SCHEDULES))}")


def balance_stages(costs: Sequence[float], n: int) -> list[int]:
    """Divide items into n non-empty runs of consecutive items with the smallest largest sum; return where runs begin.

    Cost: O(n len(costs)^2).
    """
    if len(costs) < n:
        raise ShapeError(f"{len(costs)} layers cannot make {n} stages of at least one layer: use fewer stages")
    sums = [0, *accumulate(costs)]  # of the items before each item
    # best[j] is the cost of the largest run in the best division of the first j items, and where its last run begins.
    best = [(float(total), 0) for total in sums]
    begins = []
    for run in range(1, n):
        longer = [(float("inf"), 0)] * len(sums)
        for j in range(run + 1, len(sums)):
            longer[j] = min((max(best[i][0], sums[j] - sums[i]), i) for i in range(run, j))
        begins.append([begin for _, begin in longer])
        best = longer
    last, end = [], len(costs)
    for table in reversed(begins):
        end = table[end]
        last.append(end)
    return [0, *reversed(last)]
