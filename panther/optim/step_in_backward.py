"""Steps of single parameters in the backward pass: hooks that run when a gradient is complete, and free it."""

__all__ = ["BackwardSteps"]

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from panther.errors import ConfigError


class BackwardSteps:
    """Hooks of an optimizer's parameters; a hook takes the step of its parameter in the backward pass.

    Parameters hold their hooks, and Python's garbage collector does not look into them. Therefore hooks refer weakly to
    this object, and this object to the optimizer; both end with the optimizer, and hooks then do nothing.

    Args:
        step_one: A method that takes the step of one parameter, from the number of its group and its index there.
    """

    def __init__(self, step_one: Callable[[int, int], None]) -> None:
        self._step_one = weakref.WeakMethod(step_one)
        self._handles: list[RemovableHandle] = []
        self._trained: set[Tensor] = set()
        self._stepped: set[Tensor] = set()
        self._is_checked = False

    def add(self, number: int, index: int, name: str, parameter: Tensor) -> None:
        """Register the hook of a parameter; the numbers are the arguments of ``step_one``."""
        if parameter.requires_grad:
            hook = partial(_call, weakref.WeakMethod(self._run), number, index, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            self._trained.add(parameter)
            self._is_checked = False

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def end_step(self) -> None:
        """Allow each parameter its next step."""
        self._stepped.clear()

    def _run(self, number: int, index: int, name: str, parameter: Tensor) -> None:
        step_one = self._step_one()
        if parameter.grad is None or step_one is None:
            return
        if not self._is_checked:
            _refuse_ddp(self._trained)
            self._is_checked = True
        if parameter in self._stepped:
            raise RuntimeError(
                f"{name} took its step in a backward pass already, and gets a second gradient before "
                "optimizer.step(): call optimizer.step() after every backward pass, and step_in_backward_(False) to "
                "accumulate gradients"
            )
        with torch.no_grad():
            step_one(number, index)
        parameter.grad = None
        self._stepped.add(parameter)


def _call(reference: "weakref.WeakMethod[Callable[..., None]]", *arguments: Any) -> None:
    method = reference()
    if method is not None:
        method(*arguments)


def _refuse_ddp(parameters: set[Tensor]) -> None:
    """Raise ConfigError if DistributedDataParallel, whose averages come after the hooks, has one of the parameters.

    It leaves no trace at its parameters, therefore this looks through the objects of the process, once.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    wrapper = nn.parallel.DistributedDataParallel
    # A wrapper that is not used any more may wait for the garbage collector.
    for collect in (lambda: None, gc.collect):
        collect()
        models = [value for value in gc.get_objects() if issubclass(type(value), wrapper)]
        if not any(p in parameters for model in models for p in model.parameters()):
            return
    raise ConfigError(
        "step_in_backward_() takes steps before DistributedDataParallel averages the gradients, which it keeps in "
        "its buckets in any case: shard the model by fully_shard, or do not call step_in_backward_()"
    )
