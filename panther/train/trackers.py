"""The built-in callbacks of a run: a progress bar, JSON lines, TensorBoard and MLflow on the first rank; a profiler."""

__all__ = ["built_in_callbacks"]

import importlib.util
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from panther.distributed.comm._agreement import run_on_first_rank
from panther.errors import TrainingError, require_extra
from panther.files import read_text, write_text
from panther.train.callbacks import BuiltInCallback, StepProfiler
from panther.train.config import TrainConfig
from panther.train.history import History

_encode = json.JSONEncoder(default=float).encode  # json.dumps would make an encoder for each line
_log = logging.getLogger(__name__)


class _Bar(BuiltInCallback):
    """A progress bar of tqdm."""

    def __init__(self) -> None:
        self._tqdm = require_extra("tqdm", "demo").tqdm
        # The default lock is a named semaphore, which a killed process would leave in the system.
        self._tqdm.set_lock(threading.RLock())
        self._bar: Any = None

    def on_start(self, trainer: Any) -> None:
        self._bar = self._tqdm(total=trainer.total_steps, initial=trainer.step, unit="step")

    def on_step(self, trainer: Any, loss: float) -> None:
        self._bar.set_postfix_str(f"loss {loss:.4g}", refresh=False)
        self._bar.update()

    def on_skip(self, trainer: Any) -> None:
        self._bar.update()

    def close(self, status: str) -> None:
        if self._bar is not None:
            self._bar.close()


class _JsonLines(BuiltInCallback):
    """One line per record in ``log.jsonl``, written anew when a run resumes, from the history in its checkpoint."""

    def __init__(self, path: Path, history: History) -> None:
        try:
            write_text(path, "".join(map(_line, history)))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed with the run)
        except OSError as error:
            raise TrainingError(f"{path} cannot be written ({error}): remove it, or name another directory") from None

    def on_record(self, trainer: Any, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(_line(record))
            # Each record is on disk at once, for whoever watches the run.
            self._file.flush()
        except OSError as error:
            raise TrainingError(f"{self._file.name} cannot be written ({error.strerror}): make room") from error

    def close(self, status: str) -> None:
        self._file.close()
        path = Path(self._file.name)
        if not path.stat().st_size:  # a run that failed at once leaves nothing
            path.unlink()


def _line(record: Mapping[str, Any]) -> str:
    # JSON has no NaN.
    odd = {name: None for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return _encode({**record, **odd}) + "\n"


class _TensorBoard(BuiltInCallback):
    """Event files in ``tensorboard/``. On resuming, ``purge_step`` hides the steps that are repeated."""

    def __init__(self, folder: Path, step: int) -> None:
        module = require_extra("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def on_record(self, trainer: Any, record: Mapping[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self, status: str) -> None:
        self._writer.close()


class _MLflow(BuiltInCallback):
    """A run in ``mlflow.db`` or at MLFLOW_TRACKING_URI. Its identifier is stored, so that a restart continues it."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        # Nothing of a run goes to a third party unless the user asks for it.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = require_extra("mlflow", "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve()}/mlflow.db"
        self._client, self._folder = mlflow.MlflowClient(tracking_uri=uri), folder
        kept = folder / "mlflow-run"
        known = kept.exists()
        try:
            self._run = read_text(kept).strip() if known else self._begin(config)
            self._client.update_run(self._run, status="RUNNING")
            if not known:
                write_text(kept, self._run)
        except mlflow.exceptions.MlflowException as error:
            why = str(error).splitlines()[0]
            fix = f"remove {kept} to start another run there" if known else "see MLFLOW_TRACKING_URI"
            raise TrainingError(
                f"MLflow at {uri} refuses the run ({why}): {fix}, or leave 'mlflow' out of trackers"
            ) from None

    def _begin(self, config: TrainConfig) -> str:
        found = self._client.get_experiment_by_name(config.run_name)
        place = (self._folder / "mlflow-artifacts").resolve().as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(config.run_name, place)
        run = self._client.create_run(experiment, run_name=config.run_name).info.run_id
        for name, value in asdict(config).items():
            self._client.log_param(run, name, str(value)[:500])
        return run

    def on_record(self, trainer: Any, record: Mapping[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self._client.log_metric(self._run, name, value, step=record["step"])

    def close(self, status: str) -> None:
        if (log := self._folder / "log.jsonl").exists():
            self._client.log_artifact(self._run, str(log))
        self._client.set_terminated(self._run, status)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "step" and isinstance(value, int | float)}


@contextmanager
def built_in_callbacks(config: TrainConfig, step: int, history: History) -> Iterator[list[BuiltInCallback]]:
    """Yield the profiler of each rank and, on the first one, the trackers of a run that continues after a step."""
    folder = Path(config.checkpoint_dir or "")
    makers: dict[str, Callable[[], BuiltInCallback]] = {
        "jsonl": lambda: _JsonLines(folder / "log.jsonl", history),
        "tensorboard": lambda: _TensorBoard(folder / "tensorboard", step),
        "mlflow": lambda: _MLflow(config, folder),
    }
    found: list[BuiltInCallback] = []

    def make_trackers() -> None:
        # Else the bar would be asked in every step, and show nothing. There is no stderr under pythonw.
        shows = config.progress and sys.stderr is not None and sys.stderr.isatty()
        if shows and importlib.util.find_spec("tqdm"):
            found.append(_Bar())
        for name in config.trackers if config.checkpoint_dir is not None else ():
            found.append(makers[name]())

    status = "FAILED"
    try:
        run_on_first_rank(make_trackers, None)
        if config.profile:
            found.append(StepProfiler(folder / "profile"))
        yield found
        status = "FINISHED"
    except SystemExit:
        status = "KILLED"
        raise
    finally:
        for callback in found:
            try:
                callback.close(status)
            except Exception as error:  # it must not hide how the run ended
                _log.warning("%s could not be closed: %s: %s", type(callback).__name__, type(error).__name__, error)
