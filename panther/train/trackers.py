"""Where records of a run go: a progress bar, JSON lines, TensorBoard, MLflow; on the first rank only."""

__all__ = ["open_trackers"]

import importlib.util
import json
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from panther.errors import TrainingError, require_extra
from panther.train.config import TrainConfig
from panther.train.control import on_first


class _Tracker:
    """One place; does nothing by itself."""

    def expect(self, total: int | None, step: int) -> None:
        """The run has so many steps, and begins after ``step``."""

    def advance(self, step: int, loss: float) -> None:
        """A step is over."""

    def record(self, record: Mapping[str, Any]) -> None:
        """A record was made."""

    def close(self, status: str = "FINISHED") -> None:
        """The run is over: ``"FINISHED"``, ``"FAILED"`` by an exception, or ``"KILLED"`` by a signal."""


class _All(_Tracker):
    def __init__(self, trackers: list[_Tracker]) -> None:
        self.trackers = trackers

    def expect(self, total: int | None, step: int) -> None:
        for tracker in self.trackers:
            tracker.expect(total, step)

    def advance(self, step: int, loss: float) -> None:
        for tracker in self.trackers:
            tracker.advance(step, loss)

    def record(self, record: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.record(record)


class _Bar(_Tracker):
    """tqdm, where it is installed and the output is a terminal."""

    def __init__(self) -> None:
        self._tqdm = require_extra("tqdm", "demo").tqdm
        self._tqdm.set_lock(threading.RLock())  # its default is a semaphore, which outlives a process that is killed
        self._bar: Any = None

    def expect(self, total: int | None, step: int) -> None:
        self._bar = self._tqdm(total=total, initial=step, unit="step", disable=None)

    def advance(self, step: int, loss: float) -> None:
        self._bar.set_postfix_str(f"loss {loss:.4g}", refresh=False)
        self._bar.update()

    def close(self, status: str = "FINISHED") -> None:
        if self._bar is not None:
            self._bar.close()


class _JsonLines(_Tracker):
    """One line a record in ``log.jsonl``; records after the step from which a run goes on are taken out."""

    def __init__(self, path: Path, step: int) -> None:
        try:
            if path.exists():
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                beside = path.with_suffix(".tmp")
                beside.write_text("".join(line for line in lines if _before(line, step)), encoding="utf-8")
                os.replace(beside, path)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed with the run)
        except (OSError, ValueError) as error:
            raise TrainingError(f"{path} cannot be written ({error}): remove it, or name another directory") from None

    def record(self, record: Mapping[str, Any]) -> None:
        plain = {name: value if _finite(value) else None for name, value in record.items()}  # JSON has no NaN
        try:
            self._file.write(json.dumps(plain) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(f"{self._file.name} cannot be written ({error.strerror}): make room") from error

    def close(self, status: str = "FINISHED") -> None:
        self._file.close()


def _before(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):  # half a line, from a process that was killed
        return False


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


class _TensorBoard(_Tracker):
    """Event files in ``tensorboard/``; what a run that goes on repeats is hidden by TensorBoard's purge_step."""

    def __init__(self, folder: Path, step: int) -> None:
        module = require_extra("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def record(self, record: Mapping[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self, status: str = "FINISHED") -> None:
        self._writer.close()


class _MLflow(_Tracker):
    """A run in ``mlflow.db``, or where MLFLOW_TRACKING_URI says; its name is kept, and a restart goes on with it."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._mlflow = mlflow = require_extra("mlflow", "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve()}/mlflow.db"
        self._client = client = mlflow.MlflowClient(tracking_uri=uri)
        kept = folder / "mlflow-run"
        self._folder = folder
        known = kept.exists()
        try:
            if known:
                self._run = kept.read_text(encoding="utf-8").strip()
                client.update_run(self._run, status="RUNNING")
            else:
                self._run = self._begin(config)
                kept.write_text(self._run, encoding="utf-8")
        except mlflow.exceptions.MlflowException as error:
            why = str(error).splitlines()[0]
            fix = f"remove {kept} to begin another run there" if known else "see MLFLOW_TRACKING_URI"
            raise TrainingError(
                f"MLflow at {uri} does not take the run ({why}): {fix}, or leave 'mlflow' out of trackers"
            ) from None

    def _begin(self, config: TrainConfig) -> str:
        found = self._client.get_experiment_by_name(config.run_name)
        place = (self._folder / "mlflow-artifacts").resolve().as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(config.run_name, place)
        run = self._client.create_run(experiment, run_name=config.run_name).info.run_id
        for name, value in config.to_dict().items():
            self._client.log_param(run, name, str(value)[:500])
        return run

    def record(self, record: Mapping[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self._client.log_metric(self._run, name, value, step=record["step"])

    def close(self, status: str = "FINISHED") -> None:
        if (log := self._folder / "log.jsonl").exists():
            self._client.log_artifact(self._run, str(log))
        self._client.set_terminated(self._run, status)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "step" and isinstance(value, int | float)}


@contextmanager
def open_trackers(config: TrainConfig, step: int) -> Iterator[_All]:
    """The trackers that the configuration names, on the first rank; elsewhere none.

    Args:
        config: The settings.
        step: Where the run begins.
    """
    found: list[_Tracker] = []

    def make() -> None:
        if config.progress and importlib.util.find_spec("tqdm"):
            found.append(_Bar())
        if config.checkpoint_dir is not None:
            folder = Path(config.checkpoint_dir)
            makers: dict[str, Callable[[], _Tracker]] = {
                "jsonl": lambda: _JsonLines(folder / "log.jsonl", step),
                "tensorboard": lambda: _TensorBoard(folder / "tensorboard", step),
                "mlflow": lambda: _MLflow(config, folder),
            }
            for name in config.trackers:
                found.append(makers[name]())

    status = "FAILED"
    try:
        on_first(make)
        yield _All(found)
        status = "FINISHED"
    except SystemExit:
        status = "KILLED"
        raise
    finally:
        for tracker in found:
            try:
                tracker.close(status)
            except Exception as error:  # how the run ended is more than what a tracker says of it
                warnings.warn(f"a tracker could not be closed: {type(error).__name__}: {error}", stacklevel=3)
