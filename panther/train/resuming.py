"""The directory of a run: its lock, the checkpoint from which a run continues, and how far the run was."""

__all__ = ["SAVED_ATTRIBUTES", "locked_directory", "read_progress", "resume_run"]

import os
import secrets
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from panther._text import list_names
from panther.distributed import checkpoint, get_rank, get_world_size
from panther.distributed.comm.agreement import gather_objects, run_on_first_rank
from panther.errors import CheckpointError, ConfigError, FormatError, TrainingError
from panther.files import parse_json
from panther.files.writer import take_lock
from panther.train.history import History
from panther.train.optimization.parameter_groups import RateScheduler

# Attributes of the Trainer that checkpoints store unchanged.
SAVED_ATTRIBUTES = ("epoch", "skipped", "_windows_done", "_validated_at")
_LOCK = ".lock"


def resume_run(directory: str | None, resume: str, load: Callable[[Path], int]) -> None:
    """Load the checkpoint from which a run continues, if it does. Every rank must call it.

    ``load`` loads a checkpoint, and returns the step after which it was saved.
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
) -> dict[str, Any]:
    """Return the values that ``Trainer._save`` stored in a checkpoint."""
    if not isinstance(extra, Mapping) or "_windows_done" not in extra:
        raise CheckpointError(
            f"{path} was not written by a Trainer: use panther.distributed.checkpoint.load and a new run"
        )
    try:
        saved = {name: extra[name] for name in (*SAVED_ATTRIBUTES, "_sums", "_elapsed_s", "scaler")} | {
            "history": History(parse_json(bytes(extra["history"].numpy()).decode())),
            # Earlier versions did not save it, and a run rarely continues on a different number of processes.
            "device_seconds": float(extra.get("device_seconds", extra["_elapsed_s"] * get_world_size())),
            "callbacks": [(name, state) for name, state in extra["callbacks"]],
            "samples": int(extra["samples"]),
            "trainable": extra.get("trainable", {}),
            "peak_rates": extra.get("peak_rates", []),
            "scheduler": dict(extra.get("scheduler") or {}),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path} is damaged: it does not say how far the run was ({error!r})") from None
    kinds = saved["scheduler"].get("kind", "none"), getattr(scheduler, "kind", "none")
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{path} has the scheduler {kinds[0]}, but the run has {kinds[1]}: pass the same scheduler"
        )
    saved_names = [name for name, _ in saved["callbacks"]]
    if saved_names != callback_names:
        raise CheckpointError(
            f"{path} has states of the callbacks {saved_names}, but the run has {callback_names}: pass the same "
            "callbacks in the same order"
        )
    return saved


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Create a directory if it is missing, and hold a lock on it that other runs, on every rank, find."""
    with ExitStack() as lock_files:

        def lock() -> None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                file = lock_files.enter_context(open(directory / _LOCK, "a+", encoding="utf-8"))
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint_dir {directory} cannot be written to ({error.strerror}): name another directory"
                ) from None
            # The operating system releases the lock when the process ends, so a killed run leaves no stale lock.
            if not take_lock(file.fileno()):
                file.seek(0)
                owner = file.read().strip() or "another process"
                raise TrainingError(
                    f"another run writes to {directory} ({owner}): wait for it, or name another directory"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()

        run_on_first_rank(lock, None)
        _check_shared(directory)
        yield


def _check_shared(directory: Path) -> None:
    """Raise CheckpointError on every rank unless all ranks see a file that the first rank writes.

    Without this check, the first checkpoint would fail, perhaps at the end of the run.
    """
    if get_world_size() == 1:
        return

    def write() -> str:
        # The name is new each time, because file systems remember for a while which names did not exist.
        token = directory / f".shared-{secrets.token_hex(8)}"
        token.touch()
        return token.name

    name = run_on_first_rank(write, None)
    views = gather_objects(((directory / name).exists(), socket.gethostname(), str(directory.absolute())), None)
    if get_rank() == 0:
        (directory / name).unlink()
    failed_ranks = [
        f"rank {rank} ({host}, {path})" for rank, (sees_token, host, path) in enumerate(views) if not sees_token
    ]
    if failed_ranks:
        raise CheckpointError(
            f"checkpoint_dir must be one folder for all ranks, and {list_names(failed_ranks, 3)} cannot see what "
            f"rank 0 ({views[0][1]}, {views[0][2]}) wrote there: name a folder of a file system that all nodes share"
        )
