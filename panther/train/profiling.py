"""The first steps of a run under torch.profiler."""

__all__ = ["profiled"]

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import profiler

from panther.distributed import get_rank
from panther.train.config import TrainConfig

_WAIT, _WARMUP, _ACTIVE = 2, 1, 5


class Steps(Protocol):
    """What is told of every step."""

    def step(self) -> None:
        """A step is over."""


class _Nothing:
    def step(self) -> None:
        """Not profiled."""


@contextmanager
def profiled(config: TrainConfig) -> Iterator[Steps]:
    """Profile a few steps, after the first ones, into a Chrome trace and a table of every rank."""
    if not config.profile:
        yield _Nothing()
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on the terminal that it starts and stops
    folder = Path(config.checkpoint_dir or "") / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    rank = get_rank()

    def write(measured: Any) -> None:
        measured.export_chrome_trace(str(folder / f"rank-{rank}.json"))
        table = measured.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
        (folder / f"rank-{rank}.txt").write_text(table, encoding="utf-8")

    plan = profiler.schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1)
    with profiler.profile(schedule=plan, on_trace_ready=write) as measured:
        yield measured
