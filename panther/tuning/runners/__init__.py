"""Runners of trials: one after the other, in processes of this machine, or on Ray Tune."""

__all__ = ["check_parallel", "run_trials"]

from typing import Any

from panther.errors import ConfigError
from panther.tuning.evaluation import Evaluator
from panther.tuning.prepared import Prepared
from panther.tuning.runners.processes import run_in_processes
from panther.tuning.runners.ray import run_on_ray
from panther.tuning.runners.serial import run_here
from panther.tuning.search.study import Study


def check_parallel(parallel: Any) -> int | str:
    """Return ``parallel`` of :func:`panther.tune`, or raise ConfigError if it is not valid.

    Raises:
        ConfigError: If it is neither a number of processes nor ``"ray"``.
    """
    if parallel == "ray" or (isinstance(parallel, int) and not isinstance(parallel, bool) and parallel >= 1):
        return parallel
    raise ConfigError(f"parallel={parallel!r} must be a number of processes, at least 1, or 'ray'")


def run_trials(
    search: Study, evaluator: Evaluator, prepared: Prepared, trials: int, deadline: float | None, parallel: int | str
) -> str:
    """Run trials until there are ``trials``. If they end before, return why, else "".

    Raises:
        TuningError: If ``evaluate`` raises or changes the model, or its data cannot be sent to a process.
    """
    if parallel == "ray":
        return run_on_ray(search, evaluator, prepared, trials, deadline)
    if parallel == 1:
        return run_here(search, evaluator, prepared, trials, deadline)
    return run_in_processes(search, evaluator, prepared, trials, deadline, int(parallel))
