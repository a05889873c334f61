"""Trials on Ray Tune: on all cores of a cluster, ended early by Ray's schedulers, and repeated if a worker died.

The search stays in this process. A searcher of Ray sends its plans and returns the results to it, so that the storage
is the same as without Ray, and a search can be resumed from it.
"""

__all__ = ["join_cluster", "run_on_ray"]

import json
import logging
import math
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from panther.errors import ConfigError, DistributedError, PantherError, TuningError, check_version, require_extra
from panther.tuning.evaluation import Evaluator, Outcome, failed
from panther.tuning.goal import Figures
from panther.tuning.prepared import Plan, Prepared
from panther.tuning.runners.serial import EXHAUSTED, OVER
from panther.tuning.runners.work import RETRIES, deserialize, serialize
from panther.tuning.search.study import Job, Study

_CONNECT_S = 10.0
_VALUE = "panther_value"  # the value that schedulers compare
_LONGEST = 10**6  # bound of the number of partial metrics, which ASHA needs
# Disable Ray's files of results and its hint about them, because the search has its storage.
_QUIET = {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}
_PREFIX, _LOCK = "panther-tune-", "lock"  # prefix of folders, and the file in them that a running search locks
_loaded: dict[str, Any] = {}  # in a worker: the data that its trials share


def run_on_ray(search: Study, evaluator: Evaluator, prepared: Prepared, trials: int, deadline: float | None) -> str:
    """Run trials until there are ``trials``. If they end before, return why, else ""."""
    tune: Any = require_extra("ray.tune", "ray")
    show = prepared.runner.show
    with join_cluster(None, show=show), _environment(show), _folder() as folder:
        searcher = _searcher(tune, search, trials, deadline)
        work = serialize(evaluator, prepared)
        left = max(trials - search.count, 0)
        if not left:
            return ""
        tuner = tune.Tuner(
            tune.with_parameters(_trial, work=work, key=uuid.uuid4().hex),
            tune_config=tune.TuneConfig(
                search_alg=searcher, scheduler=_scheduler(tune, search), num_samples=left, reuse_actors=True,
                metric=_VALUE if _is_single(search) else None, mode="max" if _rises(search) else "min",
            ),
            run_config=tune.RunConfig(
                storage_path=folder, verbose=0, stop=_stopper(tune, searcher),
                failure_config=tune.FailureConfig(max_failures=RETRIES),
            ),
        )  # fmt: skip
        tuner.fit()
    if searcher.error is not None:
        raise searcher.error
    return str(searcher.why) if search.count < trials else ""


@contextmanager
def join_cluster(address: str | None, show: bool = True) -> Iterator[bool]:
    """Join a Ray cluster, and yield whether it is a new cluster of only this machine, which cannot grow.

    A cluster that was joined before stays joined afterwards.

    Args:
        address: The cluster, as in ``ray.init``. None is the joined cluster, or else the cluster in RAY_ADDRESS, or
            else a new cluster of this machine.
        show: Whether a cluster that is joined here logs more than errors, and the output of its workers.

    Raises:
        ConfigError: If the installed version of Ray is not supported, or another cluster is joined already.
        DistributedError: If the cluster cannot be reached.
    """
    ray: Any = require_extra("ray", "ray")
    check_version("ray", ray.__version__, 2, least=(2, 60))
    if ray.is_initialized():
        if address is not None:
            raise ConfigError(f"address={address!r}, but ray.init was called already: leave out address, or ray.init")
        yield False
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        _probe(address)
        ray.init(address=address, **{} if show else {"logging_level": logging.ERROR, "log_to_driver": False})
    except (OSError, RuntimeError, ValueError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DistributedError(
            f"no Ray cluster could be joined at {address!r} ({reason}): check that it runs and is "
            "reachable, or leave address out to use only this machine"
        ) from error
    try:
        yield address == "local"
    finally:
        ray.shutdown()


def _probe(address: str) -> None:
    """Raise OSError unless a process listens at HOST:PORT, because Ray would retry for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), _CONNECT_S).close()


def _is_single(search: Study) -> bool:
    return len(search.goal.directions) == 1


def _rises(search: Study) -> bool:
    return _is_single(search) and search.goal.directions[0] == "maximize"


def _scheduler(tune: Any, search: Study) -> Any:
    """Return Ray's scheduler that corresponds to the search's pruner."""
    from optuna import pruners

    pruner = search.study.pruner
    if not _is_single(search) or isinstance(pruner, pruners.NopPruner):
        return tune.schedulers.FIFOScheduler()
    if isinstance(pruner, pruners.SuccessiveHalvingPruner):
        return tune.schedulers.ASHAScheduler(max_t=_LONGEST, grace_period=1)
    return tune.schedulers.MedianStoppingRule(grace_period=1, min_samples_required=4)


def _searcher(tune: Any, search: Study, trials: int, deadline: float | None) -> Any:
    """Return a searcher of Ray that draws plans from the study and records their results in it."""

    class Searcher(tune.search.Searcher):
        def __init__(self) -> None:
            super().__init__(metric=_VALUE, mode="max" if _rises(search) else "min")
            self.why = ""
            self.error: TuningError | None = None
            self.jobs: dict[str, Job] = {}
            self.partial: dict[str, list[tuple[int, float, Figures]]] = {}

        def set_search_properties(self, *args: Any, **kwargs: Any) -> bool:
            return True

        def suggest(self, trial_id: str) -> Any:
            if self.error is not None or search.count >= trials:
                return self.FINISHED
            if deadline is not None and time.perf_counter() > deadline and search.trials:
                self.why = OVER
                return self.FINISHED
            job = search.ask()
            if job is None:
                self.why = EXHAUSTED
                return None if self.jobs else self.FINISHED
            self.jobs[trial_id], self.partial[trial_id] = job, []
            return {"number": job.number, "plan": job.plan.to_json()}

        def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
            step = result.get("step")
            if step and trial_id in self.jobs:  # A repeated trial reports its first steps again.
                figures = Figures(*result["figures"])
                self.partial[trial_id] = [report for report in self.partial[trial_id] if report[0] < step]
                self.partial[trial_id].append((step, figures.metric, figures))

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            result = result or {}
            # If a scheduler ended the trial, only this call has the last result.
            self.on_trial_result(trial_id, result)
            job = self.jobs.pop(trial_id, None)
            partial = self.partial.pop(trial_id, [])
            if job is None:
                return
            if result.get("raised") is not None:
                self.error = TuningError(result["raised"])
            elif error:
                search.tell(job, failed(f"its worker died {RETRIES + 1} times"))
            elif result.get("outcome") is not None:
                search.tell(job, _outcome(result["outcome"]))
            elif partial:  # The scheduler ended it.
                metrics = tuple(metric for _, metric, _ in partial)
                search.tell(job, Outcome(partial[-1][2], "pruned", metrics, 0.0, 0.0))
            else:
                search.tell(job, failed("it ended without a result"))

        def save(self, checkpoint_path: str) -> None:
            """Save nothing, because the storage of the search has everything."""

        def restore(self, checkpoint_path: str) -> None:
            """Restore nothing."""

    return Searcher()


def _stopper(tune: Any, searcher: Any) -> Any:
    class Stopper(tune.Stopper):
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return searcher.error is not None

    return Stopper()


def _trial(config: dict[str, Any], work: bytes, key: str) -> None:
    """Run a trial on a worker of Ray, which may run further trials later."""
    tune: Any = require_extra("ray.tune", "ray")
    number, plan = config["number"], Plan.from_json(config["plan"])

    def value(figures: Figures) -> float:
        assert evaluator.unchanged is not None
        if len(evaluator.goal.directions) > 1:
            return 0.0
        penalised: float = evaluator.goal.penalised(figures, evaluator.unchanged)
        return penalised

    def report(step: int, figures: Figures) -> bool:
        tune.report({"step": step, "figures": _plain(figures), _VALUE: value(figures)})
        return False  # Ray ends the trial.

    try:  # An exception must not lead to a retry, which would raise it again.
        if key not in _loaded:
            _loaded.clear()
            _loaded[key] = deserialize(work)
        evaluator, prepared = _loaded[key]
        outcome = evaluator.run(prepared, plan, number, report)
    except PantherError as error:
        tune.report({"raised": str(error), _VALUE: math.inf})
        return
    except Exception as error:
        raised = f"a worker of the search failed: {type(error).__name__}: {error}"
        tune.report({"raised": raised, _VALUE: math.inf})
        return
    figures = outcome.figures
    last = vars(outcome) | {"figures": _plain(figures)}
    bad = -math.inf if evaluator.goal.directions[0] == "maximize" else math.inf
    is_complete = outcome.state == "complete"
    # The outcome is a text, because Ray flattens mappings.
    tune.report({"outcome": json.dumps(last), _VALUE: value(figures) if is_complete else bad})


def _plain(figures: Figures) -> tuple[float, int, float | None, float]:
    return figures.metric, figures.size, figures.latency, figures.objective


def _outcome(text: str) -> Outcome:
    fields = json.loads(text)
    tuples = {name: tuple(fields[name]) for name in ("partial", "uncalled")}
    return Outcome(**fields | tuples | {"figures": Figures(*fields["figures"])})


@contextmanager
def _folder() -> Iterator[str]:
    """Make a folder for Ray's files, and remove folders of killed searches."""
    with suppress(ImportError):  # Windows has no such locks
        import fcntl

        for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
            with suppress(OSError), lock.open("ab") as file:  # A running search has the lock, or another user the file.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, Path(folder, _LOCK).open("ab") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield folder


@contextmanager
def _environment(show: bool) -> Iterator[None]:
    """Silence Ray Tune, and also its log unless progress is shown. Restore variables and levels afterwards."""
    log = logging.getLogger("ray.tune")
    before, level = {name: os.environ.get(name) for name in _QUIET}, log.level
    os.environ.update(_QUIET)
    if not show:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old
