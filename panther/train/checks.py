"""Checks of the arguments of a Trainer, before training starts."""

__all__ = ["check_arguments", "check_model", "check_scheduler", "knows_settings"]

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from panther._hints import name_hint
from panther.errors import ConfigError
from panther.train.callbacks import Callback, check_callback
from panther.train.config import TrainConfig

_Method = TypeVar("_Method", bound=Callable[..., Any])


def knows_settings(method: _Method) -> _Method:
    """Wrap a method of the Trainer so that a setting among its arguments raises an error that says where to put it."""
    arguments = [name for name in inspect.signature(method).parameters if name != "self"]
    place = "Trainer" if method.__name__ == "__init__" else f"Trainer.{method.__name__}"

    @functools.wraps(method)
    def checked(self: Any, *arguments_by_position: Any, **keywords: Any) -> Any:
        settings = [field.name for field in dataclasses.fields(TrainConfig)]
        for name in keywords:
            if name in settings:
                fix = f"pass config=TrainConfig({name}=...) to Trainer"
                raise ConfigError(f"{name!r} is not an argument of {place}: {fix}")
            if name not in arguments:
                hint = name_hint(name, [*arguments, *settings], "TrainConfig")
                raise ConfigError(f"{name!r} is not an argument of {place}, nor a setting of TrainConfig: {hint}")
        return method(self, *arguments_by_position, **keywords)

    return checked  # type: ignore[return-value]


def check_model(model: Any) -> None:
    """Raise ConfigError unless the model is a module with a trainable parameter."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, not a {_kind(model)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("no parameter of the model requires a gradient: there is nothing to train")


def check_arguments(optimizer: Any, loss_fn: Any, config: Any, callbacks: Any, metrics: Any) -> None:
    """Raise ConfigError if an argument has the wrong type; the message says what to pass instead."""
    if isinstance(loss_fn, type):
        raise ConfigError(f"loss_fn is the class {loss_fn.__name__}: pass an object, loss_fn={loss_fn.__name__}()")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn must be a function of output and target, not a {_kind(loss_fn)}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise ConfigError(
            f"optimizer must be an optimizer, or a function of parameters such as torch.optim.AdamW, not a "
            f"{_kind(optimizer)}"
        )
    if config is not None and not isinstance(config, TrainConfig):
        raise ConfigError(
            f"config must be a TrainConfig, not a {_kind(config)}: use TrainConfig(**settings) for a dict"
        )
    if not isinstance(callbacks, list | tuple) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise ConfigError("callbacks must be a list of objects whose classes derive from panther.train.Callback")
    for callback in callbacks:
        check_callback(callback)
    if metrics is not None and not (isinstance(metrics, Mapping) and all(map(callable, metrics.values()))):
        raise ConfigError("metrics must be a mapping of names to functions of output and target")
    if metrics is not None and "loss" in metrics:
        raise ConfigError("a metric must not be named 'loss', which is the name of the loss: choose another name")


def check_scheduler(scheduler: Any, config: TrainConfig) -> None:
    """Raise ConfigError if the argument ``scheduler`` is not a function, or does not suit the settings."""
    defaults = TrainConfig()
    wrong = ("scheduler_interval", "scheduler_metric") if scheduler is None else ("schedule", "warmup_steps")
    for name in wrong:
        if (value := getattr(config, name)) != getattr(defaults, name):
            verb = "needs" if scheduler is None else "excludes"
            raise ConfigError(f"{name}={value!r} {verb} the argument scheduler of Trainer: set one of them, or both")
    if scheduler is not None and not callable(scheduler):
        kind = _kind(scheduler)
        raise ConfigError(f"scheduler must be a function, such as lambda optimizer: {kind}(optimizer, ...)")


def _kind(value: Any) -> str:
    return type(value).__name__
