"""Check all values of a checkpoint before they are loaded, and undo the load if a module or optimizer refuses them."""

__all__ = ["check_optimizer_values", "check_random_state", "check_sketch_records", "undo_of"]

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from panther.distributed.checkpoint import state as states
from panther.errors import FormatError, SketchMismatchError
from panther.nn.base import SketchedModule
from panther.nn.module_state import ModuleState
from panther.nn.sketch_record import read_record

# Names of states of torch's optimizers that have the shape of their parameter.
_LIKE_PARAMETER = {
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "sum",
}  # fmt: skip


def check_sketch_records(parts: Sequence[nn.Module], values: Mapping[str, Any], file: str) -> None:
    """Raise FormatError if the record of a sketch is not valid, before the layer would raise an error."""
    for part in parts:
        for name, module in part.named_modules():
            if not isinstance(module, SketchedModule):
                continue
            key = states.plain(f"{name}.sketch_seed" if name else "sketch_seed")
            record = values.get(key)
            if isinstance(record, Tensor) and not isinstance(record, DTensor) and record.shape == (4,):
                try:
                    read_record(record, module.num_terms, key)
                except SketchMismatchError as error:
                    raise FormatError(f"{file} is damaged: {error}") from None


def check_random_state(values: Any, file: str) -> None:
    """Raise FormatError unless random generators accept the decoded states of :func:`state.random_state`."""
    try:
        torch.Generator().set_state(values["torch"])
        random.Random().setstate(states.python_state(values["python"]))
        np.random.RandomState().set_state(states.numpy_state(values["numpy"]))
        if "cuda" in values and (values["cuda"].dtype is not torch.uint8 or values["cuda"].dim() != 1):
            raise TypeError("the state of CUDA's generator is not a row of bytes")
    except Exception as error:  # three libraries raise errors of different types
        raise FormatError(f"{file} is damaged: it has no valid states of the random generators ({error})") from None


def check_optimizer_values(
    parameters: Sequence[tuple[str, nn.Parameter]],
    saved_states: Mapping[str, Any],
    saved_settings: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    file: str,
) -> None:
    """Raise FormatError unless decoded states and settings, by parameter, have the types that an optimizer uses.

    Args:
        parameters: The optimizer's parameters with their names.
        saved_states: The state of each parameter, such as its moments.
        saved_settings: The settings of each parameter, such as ``lr``.
        groups: The optimizer's own groups, whose settings have the expected types.
        file: The file, for the message.
    """
    group_of = {parameter: group for group in groups for parameter in group["params"]}
    for name, parameter in parameters:
        for key, value in saved_states.get(name, {}).items():
            if key == "step" and not _is_number(value):
                raise FormatError(f"{file} is damaged: the optimizer's 'step' of {name!r} is {value!r}, not a number")
            shape = tuple(value.shape) if isinstance(value, Tensor) else None
            if key in _LIKE_PARAMETER and value is not None and shape != tuple(parameter.shape):
                kind = type(value).__name__ if shape is None else f"a tensor of the shape {shape}"
                raise FormatError(
                    f"{file} is damaged: the optimizer's {key!r} of {name!r} is {kind}, and the parameter has the "
                    f"shape {tuple(parameter.shape)}"
                )
        for key, value in saved_settings[name].items():
            if key in group_of[parameter] and not _is_same_kind(value, group_of[parameter][key]):
                raise FormatError(f"{file} is damaged: the optimizer's {key!r} of {name!r} is {value!r}")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same_kind(value: Any, current: Any) -> bool:
    """Return whether a saved setting can replace the optimizer's current one; None stands for a default."""
    if value is None or current is None:
        return True
    if isinstance(current, tuple | list):
        fits = isinstance(value, tuple | list) and len(value) == len(current)
        return fits and all(map(_is_same_kind, value, current))
    if isinstance(current, bool):
        return isinstance(value, bool)
    if isinstance(current, int | float | Tensor):
        return _is_number(value)
    return isinstance(value, type(current)) or not isinstance(current, str)


def undo_of(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Return a function that restores the present state of modules, an optimizer and the random generators.

    :class:`ModuleState` says when the values of the modules are copied.
    """
    model = ModuleState(parts)
    undo_optimizer = None if optimizer is None else states.optimizer_undo(optimizer)
    tensors: dict[str, Tensor] = {}
    generators = states.random_state("random", tensors)

    def undo() -> None:
        if undo_optimizer is not None:
            undo_optimizer()
        model.restore()
        states.set_random_state(states.decode(generators, tensors))

    return undo
