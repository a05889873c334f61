"""How a launched script ends: what is left of it, or what is raised."""

__all__ = ["Interrupted", "LaunchError", "LaunchResult"]

import signal
from dataclasses import dataclass
from pathlib import Path

from panther.errors import DistributedError


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """What is left of a run that went well."""

    world_size: int
    """Processes on all nodes."""

    restarts: int
    """How often they were started again."""

    log_dir: Path | None
    """Folder of this run, with ``attempt-A/rank-R.out`` and ``.err``."""


class LaunchError(DistributedError):
    """A launched script failed; ``exit_code`` is that of the rank that failed first."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(Exception):  # noqa: N818 - not an error
    """The launcher got a signal, and its processes have ended."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
