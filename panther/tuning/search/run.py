"""How a search runs: the arguments of :func:`panther.tune` that are not of the model."""

__all__ = ["Run"]

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from panther.sketch import check_seed
from panther.tuning.goal import Goal
from panther.tuning.search.storage import Opened, opened_study


@dataclass(frozen=True)
class Run:
    """The arguments of :func:`panther.tune` by their names, and when it was called."""

    trials: int
    first: int | None
    timeout_s: float | None
    began: float
    sampler: Any
    pruner: Any
    storage: Any
    repeats: int
    parallel: int | str
    seed: int | None
    progress: bool | None
    catch: tuple[type[Exception], ...]
    drawn: int = field(init=False)
    """The seed of a new study."""

    def __post_init__(self) -> None:
        """Draw the seed that a new study has."""
        object.__setattr__(self, "drawn", check_seed(self.seed))

    @property
    def deadline(self) -> float | None:
        """Return the time after which no trial begins."""
        return None if self.timeout_s is None else self.began + self.timeout_s

    def opened(self, goal: Goal, identity: Mapping[str, str]) -> AbstractContextManager[Opened]:
        """Make or continue the study."""
        return opened_study(self.storage, goal, identity, self.sampler, self.pruner)

    def seed_of(self, opened: Opened) -> int:
        """Return the seed of the study.

        Raises:
            ConfigError: If another one was given.
        """
        known = int(opened.known.get("seed", self.drawn))
        if self.seed is not None and known != self.drawn:
            raise opened.other(f"seed {known} instead of {self.seed}")
        return known
