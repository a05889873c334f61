"""The table of pipeline schedules. It imports torch where one is made, so that planning does not wait for it."""

__all__ = ["SCHEDULES", "ScheduleKind", "check_schedule"]

from dataclasses import dataclass
from typing import Any

from panther._setting_names import value_hint


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of torch's, and which stages it needs on a rank."""

    class_name: str
    stages_per_rank: int = 2
    """Stages of a rank where the library chooses; torch's looped schedules take any number above 1."""
    order: str = "loop"
    """The ``order`` of :func:`split_stages` that the schedule needs."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed in two passes."""

    @property
    def make(self) -> Any:
        """Torch's class. It takes one stage if ``stages_per_rank`` is 1, else a list."""
        from torch.distributed.pipelining import schedules

        return getattr(schedules, self.class_name)


# The one table of schedules: make_schedule, HybridParallelTrainer and the advisor read it.
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
