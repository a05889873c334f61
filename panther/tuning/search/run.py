"""The arguments of :func:`panther.tune` that control how a search runs."""

__all__ = ["Run"]

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from panther.sketch import check_seed
from panther.tuning.goal import Goal
from panther.tuning.search.storage import OpenStudy, open_study


@dataclass(frozen=True)
class Run:
    """Arguments of :func:`panther.tune`, and the time of the call."""

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
    new_seed: int = field(init=False)
    """The seed of a new study."""

    def __post_init__(self) -> None:
        """Draw the seed for a new study."""
        object.__setattr__(self, "new_seed", check_seed(self.seed))

    @property
    def deadline(self) -> float | None:
        """Return the time after which no trial begins, or None."""
        return None if self.timeout_s is None else self.began + self.timeout_s

    def opened(self, goal: Goal, identity: Mapping[str, str]) -> AbstractContextManager[OpenStudy]:
        """Create or resume the study."""
        return open_study(self.storage, goal, identity, self.sampler, self.pruner)

    def seed_of(self, opened: OpenStudy) -> int:
        """Return the seed of the study.

        Raises:
            ConfigError: If the stored seed differs from the argument.
        """
        seed = int(opened.remembered.get("seed", self.new_seed))
        if self.seed is not None and seed != self.new_seed:
            raise opened.other(f"seed {seed} instead of {self.seed}")
        return seed
