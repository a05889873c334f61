"""Optuna's samplers and pruners by name."""

__all__ = ["check_sampler", "make_pruner", "make_sampler", "quiet", "uses_constraints"]

from functools import cache
from typing import Any

from panther._process_settings import Block, ProcessSetting
from panther.errors import ConfigError, require_extra

_SAMPLERS = ("tpe", "gp", "random")
_PRUNERS = ("median", "asha", "none")
_PRUNER_STARTUP = 4  # first trials, which the median pruner does not prune


def check_sampler(sampler: Any) -> None:
    """Raise ConfigError unless this is a name, or a sampler of Optuna."""
    optuna = require_extra("optuna", "tune")
    if isinstance(sampler, str) and sampler not in _SAMPLERS:
        raise ConfigError(f"sampler={sampler!r} is unknown: use {', '.join(map(repr, _SAMPLERS))}, or one of Optuna's")
    if not isinstance(sampler, str | optuna.samplers.BaseSampler):
        raise ConfigError(f"sampler must be a name or one of Optuna's samplers, not a {type(sampler).__name__}")


def make_sampler(name: str, seed: int, startup: int, others_run: bool) -> Any:
    """Return the sampler with a name."""
    from optuna import samplers

    if name == "tpe":
        # The constant liar keeps the sampler away from the plans of running trials.
        return samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=others_run)
    if name == "gp":
        return samplers.GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
    return samplers.RandomSampler(seed=seed)


def uses_constraints(sampler: Any) -> bool:
    """Return whether a sampler, or the sampler with a name, uses constraints. Others get values with penalties."""
    from optuna import samplers

    if isinstance(sampler, str):
        return sampler in ("tpe", "gp")
    return isinstance(
        sampler, (samplers.TPESampler, samplers.GPSampler, samplers.NSGAIISampler, samplers.NSGAIIISampler)
    )


def make_pruner(optuna: Any, pruner: Any) -> Any:
    """Return the pruner with a name, or ``pruner`` if it is one of Optuna's.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(pruner, optuna.pruners.BasePruner):
        return pruner
    if pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=_PRUNER_STARTUP)
    if pruner == "asha":
        return optuna.pruners.SuccessiveHalvingPruner()
    if pruner == "none":
        return optuna.pruners.NopPruner()
    raise ConfigError(f"pruner={pruner!r} is unknown: use {', '.join(map(repr, _PRUNERS))}, or one of Optuna's")


def quiet() -> Block:
    """Return a block that silences Optuna's log, because the search shows its progress."""
    return _verbosity().held()


@cache
def _verbosity() -> ProcessSetting:
    from optuna import logging

    return ProcessSetting(logging.get_verbosity, logging.set_verbosity, logging.WARNING)
