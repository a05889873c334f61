"""Find the checkpoint from which a run continues, and read how far the run was."""

__all__ = ["SAVED_ATTRIBUTES", "SavedProgress", "read_progress", "resume_run"]

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panther.distributed import checkpoint, get_world_size
from panther.distributed.comm.agreement import run_on_first_rank
from panther.errors import CheckpointError, ConfigError, FormatError
from panther.files import parse_json
from panther.train.history import History
from panther.train.optimization.scheduler import RateScheduler

# Attributes of the Trainer that checkpoints store unchanged.
SAVED_ATTRIBUTES = ("epoch", "skipped", "_windows_done", "_validated_at")


@dataclass(frozen=True)
class SavedProgress:
    """The values that a Trainer stores in a checkpoint beside the model, the optimizer and the generators."""

    attributes: Mapping[str, Any]
    """Values of SAVED_ATTRIBUTES."""
    history: History
    loss_sums: list[float]
    """The weighted losses since the last record, and their weights."""
    elapsed_s: float
    device_seconds: float
    callbacks: Sequence[tuple[str, Any]]
    """Class name of each callback with a state, and the first rank's state in checkpoints of earlier versions."""
    samples: int
    """Samples of the batches of a step over all processes."""
    scaler: dict[str, Any]
    trainable: Mapping[str, bool]
    """Parameters that were frozen or unfrozen since the start of the run."""
    peak_rates: Sequence[float]
    scheduler: Mapping[str, Any]
    """State of the scheduler that the Trainer made; empty without one."""


def resume_run(directory: str | None, resume: str, load: Callable[[Path], int]) -> None:
    """Load the checkpoint from which a run continues, if it does. Every rank must call it.

    Args:
        directory: The directory of the run's checkpoints, or None.
        resume: The setting of the configuration: ``"auto"``, ``"never"`` or the path of a checkpoint.
        load: Loads a checkpoint, and returns the step after which it was saved.

    Raises:
        ConfigError: On every rank, if the directory has checkpoints that the run must not continue from.
        CheckpointError: On every rank, if every checkpoint is damaged.
    """
    paths = [] if directory is None else run_on_first_rank(lambda: checkpoint.checkpoints(directory), None)
    if resume == "never":
        if paths:
            raise ConfigError(f"resume='never', but {directory} has checkpoints ({paths[-1]}): use another one")
    elif resume == "auto":
        reasons = []
        for path in reversed(paths):
            try:
                load(path)
                break
            except FormatError as error:
                warnings.warn(f"{path} is skipped: {error}", UserWarning, stacklevel=4)
                reasons.append(str(error))
        else:
            if reasons:
                raise CheckpointError(
                    f"every checkpoint in {directory} is damaged, and none was removed; of the latest, "
                    f"{reasons[0]}: copy a sound one there, or name another checkpoint_dir to begin anew"
                )
    else:
        step = load(Path(resume))
        if paths and int(paths[-1].stem.removeprefix("step-")) > step:
            raise ConfigError(
                f"the run resumes from step {step}, but {directory} has {paths[-1].name}, which the next run would "
                "take for the latest: name another checkpoint_dir, or remove the later checkpoints"
            )


def read_progress(
    path: Path, extra: Any, scheduler: RateScheduler | None, callback_names: Sequence[str]
) -> SavedProgress:
    """Return the values that a Trainer stored in a checkpoint.

    Args:
        path: The checkpoint, for errors.
        extra: The values ``extra`` of the checkpoint.
        scheduler: The scheduler of the run.
        callback_names: Classes of the run's callbacks with a state.

    Raises:
        CheckpointError: If the checkpoint was not written by a Trainer, or with another scheduler or other callbacks.
        FormatError: If values are missing or have a wrong type.
    """
    if not isinstance(extra, Mapping) or "_windows_done" not in extra:
        raise CheckpointError(
            f"{path} was not written by a Trainer: use panther.distributed.checkpoint.load and a new run"
        )
    try:
        saved = SavedProgress(
            attributes={name: extra[name] for name in SAVED_ATTRIBUTES},
            history=History(parse_json(bytes(extra["history"].numpy()).decode())),
            loss_sums=extra["_sums"],
            elapsed_s=extra["_elapsed_s"],
            # Earlier versions did not save it, and a run rarely continues on a different number of processes.
            device_seconds=float(extra.get("device_seconds", extra["_elapsed_s"] * get_world_size())),
            callbacks=[(name, state) for name, state in extra["callbacks"]],
            samples=int(extra["samples"]),
            scaler=extra["scaler"],
            trainable=extra.get("trainable", {}),
            peak_rates=extra.get("peak_rates", []),
            scheduler=dict(extra.get("scheduler") or {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path} is damaged: it does not say how far the run was ({error!r})") from None
    kinds = saved.scheduler.get("kind", "none"), getattr(scheduler, "kind", "none")
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{path} has the scheduler {kinds[0]}, but the run has {kinds[1]}: pass the same scheduler"
        )
    saved_names = [name for name, _ in saved.callbacks]
    if saved_names != callback_names:
        raise CheckpointError(
            f"{path} has states of the callbacks {saved_names}, but the run has {callback_names}: pass the same "
            "callbacks in the same order"
        )
    return saved
