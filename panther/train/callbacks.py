"""The base class of callbacks, and the checks of their methods."""

__all__ = ["Callback", "check_callback"]

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from panther._hints import advice_for
from panther.errors import ConfigError


class Callback:
    """Base class of callbacks, whose methods the Trainer calls during a run.

    Every method is called on every rank; by default it does nothing. If a callback has the methods ``state_dict`` and
    ``load_state_dict``, its state is stored in checkpoints.
    """

    def on_start(self, trainer: Any) -> None:
        """Run before the first step, after resuming."""

    def on_step(self, trainer: Any, loss: float) -> None:
        """Run after every optimizer step, with the mean loss of its accumulation group over all ranks."""

    def on_skip(self, trainer: Any) -> None:
        """Run after a step that ``on_nonfinite="skip"`` or the scaler of fp16 skipped; ``trainer.step`` counts it."""

    def on_record(self, trainer: Any, record: Mapping[str, Any]) -> None:
        """Run after every new record of the history."""

    def on_epoch(self, trainer: Any) -> None:
        """Run after every epoch."""

    def on_checkpoint(self, trainer: Any) -> None:
        """Run when saving a checkpoint has begun; an asynchronous checkpoint is still being written."""


_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
_CLOSE = 0.8  # difflib's similarity of 'on_stpe' and 'on_step' is 0.86, and of 'on_load' and 'on_record' 0.67


def check_callback(callback: Callback) -> None:
    """Raise ConfigError if a Trainer would never call a method, would call it with wrong arguments, or lose a state.

    Every method whose name begins with ``on_``, or is similar to the name of a hook, is meant as a hook.
    """
    kind = type(callback).__name__
    for name in dir(type(callback)):
        if not callable(getattr(type(callback), name)) or name in _HOOKS:
            continue
        near = get_close_matches(name.lower(), _HOOKS, 1, cutoff=_CLOSE)
        if name.lower().startswith("on_") or (near and name.lower().startswith("on")):
            fix = f"did you mean {near[0]}?" if near else f"use some of {', '.join(_HOOKS)}"
            fix = advice_for(name, "Callback") or fix
            raise ConfigError(f"{kind}.{name} would never be called, because a Callback has no such hook: {fix}")
    for name in _HOOKS:
        method, arguments = getattr(callback, name), inspect.signature(getattr(Callback, name)).parameters
        passed = [argument for argument in arguments if argument != "self"]
        try:
            inspect.signature(method).bind(*passed)
        except TypeError:
            raise ConfigError(
                f"{kind}.{name} does not take what it is called with: write {name}(self, {', '.join(passed)})"
            ) from None
        except ValueError:  # the function has no signature, for example in a compiled module
            continue
    saves, loads = (hasattr(callback, name) for name in ("state_dict", "load_state_dict"))
    if saves != loads:
        present, absent = ("state_dict", "load_state_dict") if saves else ("load_state_dict", "state_dict")
        raise ConfigError(f"{kind} has {present} and no {absent}, so its state would not be saved: add the other one")
