"""The built-in callbacks of a run: progress, JSON lines, TensorBoard and MLflow on the first rank, and a profiler."""

__all__ = ["BuiltInCallback", "ProgressLines", "built_in_callbacks"]

import datetime
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import profiler

from panther.distributed import get_rank
from panther.distributed.comm.agreement import run_on_first_rank
from panther.errors import TrainingError, require_extra
from panther.files import read_text, write_text
from panther.train.callbacks import Callback
from panther.train.config import TrainConfig
from panther.train.history import History

_WAIT, _WARMUP, _ACTIVE = 2, 1, 5  # steps; the first steps allocate and compile, and are left out of the profile
_LINES_OF_A_RUN, _LINE_EVERY_S = 10, 30.0
_encode = json.JSONEncoder(default=float).encode  # json.dumps would make an encoder for each line
_log = logging.getLogger(__name__)
_progress_log = logging.getLogger("panther.train.progress")  # TrainConfig tells programs this name


class BuiltInCallback(Callback):
    """A callback that the Trainer creates for each run, and closes at the end of the run."""

    def close(self, status: str) -> None:
        """End the run as ``"FINISHED"``, ``"FAILED"`` by an exception, or ``"KILLED"`` by a signal."""


class _StepProfiler(BuiltInCallback):
    """Profile a few steps, and write a Chrome trace and a table for each rank."""

    def __init__(self, folder: Path) -> None:
        # Without this variable, the profiler's library prints that it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._folder, self._steps = folder, 0
        plan = profiler.schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1)
        self._profiler = profiler.profile(schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    def on_step(self, trainer: Any, loss: float) -> None:
        self.on_skip(trainer)

    def on_skip(self, trainer: Any) -> None:
        self._steps += 1  # it was computed up to its gradients
        self._profiler.step()

    def close(self, status: str) -> None:
        self._profiler.stop()
        if self._steps < _WAIT + _WARMUP + _ACTIVE and get_rank() == 0:
            profiled = max(0, self._steps - _WAIT - _WARMUP)
            _log.warning("profiled %d of %d steps: the run had only %d", profiled, _ACTIVE, self._steps)

    def _write(self, measured: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        measured.export_chrome_trace(str(self._folder / f"rank-{get_rank()}.json"))
        table = measured.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
        write_text(self._folder / f"rank-{get_rank()}.txt", table)


class ProgressLines(BuiltInCallback):
    """Log lines with losses, speed and remaining time: one for each tenth of the run, and one each 30 seconds.

    Records with and without validation are counted apart. The last record has a line in any case.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._begun = (0, 0.0)
        self._logged: dict[bool, tuple[float, float]] = {}  # step and time of the last line, by whether it validates
        self._last: Mapping[str, Any] = {}

    def on_start(self, trainer: Any) -> None:
        """Note the step and the time at which the run begins or continues."""
        self._begun = (trainer.step, time.perf_counter())

    def on_record(self, trainer: Any, record: Mapping[str, Any]) -> None:
        """Log the line, if one is due."""
        self._last = record
        step, total, now = record["step"], trainer.total_steps, time.perf_counter()
        validates = any(_is_validation(*item) for item in record.items())
        logged_step, logged_at = self._logged.get(validates, (-math.inf, -math.inf))
        is_due = total is not None and (step == total or step - logged_step >= total / _LINES_OF_A_RUN)
        if not is_due and now - logged_at < _LINE_EVERY_S:
            return
        self._logged[validates] = step, now
        values = [
            f"{name} {value:.4g}" for name, value in record.items() if name == "loss" or _is_validation(name, value)
        ]
        if record.get("samples_per_s") is not None:
            values.append(f"{record['samples_per_s']:,.4g} samples a second")
        if total is not None and step < total and (left := self._seconds_left(step, total)) is not None:
            values.append(f"{datetime.timedelta(seconds=round(left))} left")
        of_total = "" if total is None else f" of {total}"
        _progress_log.info("%sstep %d%s: %s", self._prefix, step, of_total, ", ".join(values))

    def _seconds_left(self, step: int, total: int) -> float | None:
        first, begin = self._begun
        if step == first:
            return None
        return (time.perf_counter() - begin) / (step - first) * (total - step)

    def close(self, status: str) -> None:
        """Log the time of a finished run."""
        if status == "FINISHED" and "device_hours" in self._last:
            elapsed = datetime.timedelta(seconds=round(self._last["elapsed_s"]))
            hours = self._last["device_hours"]
            _progress_log.info("%sfinished after %s: %.3g device-hours", self._prefix, elapsed, hours)


def _is_validation(name: str, value: Any) -> bool:
    return name.startswith("validation_") and isinstance(value, int | float)


class _JsonLines(BuiltInCallback):
    """Write a line per record to ``log.jsonl``; a resumed run first writes the records in its checkpoint again."""

    def __init__(self, path: Path, history: History) -> None:
        try:
            write_text(path, "".join(map(_line, history)))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed with the run)
        except OSError as error:
            raise TrainingError(f"{path} cannot be written ({error}): remove it, or name another directory") from None

    def on_record(self, trainer: Any, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(_line(record))
            # Each record is written at once, because a user may watch the file.
            self._file.flush()
        except OSError as error:
            raise TrainingError(f"{self._file.name} cannot be written ({error.strerror}): make room") from error

    def close(self, status: str) -> None:
        self._file.close()
        path = Path(self._file.name)
        if not path.stat().st_size:  # a run that failed at once leaves no file
            path.unlink()


def _line(record: Mapping[str, Any]) -> str:
    # JSON has no NaN.
    odd = {name: None for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return _encode({**record, **odd}) + "\n"


class _TensorBoard(BuiltInCallback):
    """Write event files to ``tensorboard/``. After resuming, ``purge_step`` hides the repeated steps."""

    def __init__(self, folder: Path, step: int) -> None:
        module = require_extra("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def on_record(self, trainer: Any, record: Mapping[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self, status: str) -> None:
        self._writer.close()


class _MLflow(BuiltInCallback):
    """Log to the MLflow run that is active in this process, or else to a new run, which a restart continues.

    The store is set by ``mlflow.set_tracking_uri`` or MLFLOW_TRACKING_URI, and is else ``mlflow.db`` in the folder.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        # Nothing is sent to a third party unless the user asks for it.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = require_extra("mlflow", "mlflow")
        active = mlflow.active_run()
        is_uri_set_by_user = active is not None or mlflow.is_tracking_uri_set()
        uri = mlflow.get_tracking_uri() if is_uri_set_by_user else f"sqlite:///{folder.resolve()}/mlflow.db"
        self._client, self._folder = mlflow.MlflowClient(tracking_uri=uri), folder
        self._is_own = active is None  # the user ends a run that the user began
        identifier = folder / "mlflow-run"
        is_continued = self._is_own and identifier.exists()
        try:
            if active is not None:
                self._run: str = active.info.run_id
                self._log_settings(config)
                return
            self._run = read_text(identifier).strip() if is_continued else self._begin(config)
            self._client.update_run(self._run, status="RUNNING")
            if not is_continued:
                write_text(identifier, self._run)
        except mlflow.exceptions.MlflowException as error:
            why = str(error).splitlines()[0]
            fix = f"remove {identifier} to start another run there" if is_continued else "see MLFLOW_TRACKING_URI"
            raise TrainingError(
                f"MLflow at {uri} refuses the run ({why}): {fix}, or leave 'mlflow' out of trackers"
            ) from None

    def _begin(self, config: TrainConfig) -> str:
        # mlflow.set_experiment sets the first variable.
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if not experiment_id:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or config.run_name
            experiment = self._client.get_experiment_by_name(name)
            place = (self._folder / "mlflow-artifacts").resolve().as_uri()
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name, place)
        self._run = self._client.create_run(experiment_id, run_name=config.run_name).info.run_id
        self._log_settings(config)
        return self._run

    def _log_settings(self, config: TrainConfig) -> None:
        """Log each setting as a parameter, unless the run has it already: MLflow does not change parameters."""
        present = self._client.get_run(self._run).data.params
        for name, value in asdict(config).items():
            if name not in present:
                self._client.log_param(self._run, name, str(value)[:500])

    def on_record(self, trainer: Any, record: Mapping[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self._client.log_metric(self._run, name, value, step=record["step"])

    def close(self, status: str) -> None:
        if (log := self._folder / "log.jsonl").exists():
            self._client.log_artifact(self._run, str(log))
        if self._is_own:
            self._client.set_terminated(self._run, status)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "step" and isinstance(value, int | float)}


@contextmanager
def built_in_callbacks(config: TrainConfig, step: int, history: History) -> Iterator[list[BuiltInCallback]]:
    """Yield the profiler of each rank and, on the first rank, the trackers of a run that continues after ``step``."""
    folder = Path(config.checkpoint_dir or "")
    makers: dict[str, Callable[[], BuiltInCallback]] = {
        "jsonl": lambda: _JsonLines(folder / "log.jsonl", history),
        "tensorboard": lambda: _TensorBoard(folder / "tensorboard", step),
        "mlflow": lambda: _MLflow(config, folder),
    }
    callbacks: list[BuiltInCallback] = []

    def make_trackers() -> None:
        if config.progress and sys.stderr is not None:  # pythonw has no stderr
            callbacks.append(ProgressLines())
        for name in config.trackers if config.checkpoint_dir is not None else ():
            callbacks.append(makers[name]())

    status = "FAILED"
    try:
        run_on_first_rank(make_trackers, None)
        if config.profile:
            callbacks.append(_StepProfiler(folder / "profile"))
        yield callbacks
        status = "FINISHED"
    except SystemExit:
        status = "KILLED"
        raise
    finally:
        for callback in callbacks:
            try:
                callback.close(status)
            except Exception as error:  # this error must not hide how the run ended
                _log.warning("%s could not be closed: %s: %s", type(callback).__name__, type(error).__name__, error)
