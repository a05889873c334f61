"""The table of pipeline schedules. torch is imported only when a schedule is made, and not for planning."""

__all__ = ["SCHEDULES", "ScheduleKind", "check_schedule"]

from dataclasses import dataclass
from typing import Any

from panther._setting_names import value_hint


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of torch, and the stages that it needs on a rank."""

    class_name: str
    stages_per_rank: int = 2
    """Number of stages of a rank if the library chooses; torch's looped schedules take any number above 1."""
    order: str = "loop"
    """The ``order`` of :func:`split_stages` that the schedule needs."""
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
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", order="v", splits_backward=True),
    "dualpipev": ScheduleKind("ScheduleDualPipeV", order="v", splits_backward=True),
}


def check_schedule(name: str) -> None:
    """Raise ValueError unless there is a schedule of this name."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown: {value_hint('schedule', name, tuple(SCHEDULES))}")
