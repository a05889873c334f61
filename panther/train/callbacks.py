"""What is called at points of a run: the user's callbacks, and those that the Trainer makes itself."""

__all__ = ["BuiltInCallback", "Callback"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from panther.train.trainer import Trainer


class Callback:
    """Base class of callbacks, whose methods the Trainer calls during a run.

    Every method is called on every rank; by default it does nothing. If a callback has the methods ``state_dict`` and
    ``load_state_dict``, its state is stored in checkpoints.
    """

    def on_start(self, trainer: "Trainer") -> None:
        """Run before the first step, after resuming."""

    def on_step(self, trainer: "Trainer", loss: float) -> None:
        """Run after every optimizer step, with the mean loss of its window over all ranks."""

    def on_skip(self, trainer: "Trainer") -> None:
        """Run after a step that was skipped because of ``on_nonfinite="skip"``; ``trainer.step`` counts it."""

    def on_record(self, trainer: "Trainer", record: Mapping[str, Any]) -> None:
        """Run after every new record of the history."""

    def on_epoch(self, trainer: "Trainer") -> None:
        """Run after every epoch."""

    def on_checkpoint(self, trainer: "Trainer") -> None:
        """Run when saving a checkpoint has begun; an asynchronous one is still being written."""


class BuiltInCallback(Callback):
    """A callback that the Trainer makes for each run, and closes at its end."""

    def close(self, status: str) -> None:
        """End the run as ``"FINISHED"``, ``"FAILED"`` by an exception, or ``"KILLED"`` by a signal."""
