"""The state of modules before a load, which is restored if the load fails."""

__all__ = ["ModuleState"]

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther._torch import loading_code_of, untracked_shard

# Python modules whose methods and hooks accept all values that passed the checks before a load.
_TRUSTED = ("torch.", "panther.nn.base", "panther.nn.protocol", "panther.distributed.tensor.")


class ModuleState:
    """The tensors and attributes of modules, as the same objects with the same contents.

    Values of tensors are copied only if a module could refuse to load, because it has a load hook or overrides a
    method, which may have written to tensors before it raises an error. Modules of torch and sketched layers of Panther
    accept all values that passed the checks.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        attributes = [value for module in modules for value in vars(module).values()]
        # Containers, such as the dictionary of parameters, and objects, such as a config, stay the same objects.
        contents: list[Any] = [*map(vars, modules)]
        for value in attributes:
            if isinstance(value, dict | list | set):
                contents.append(value)
            elif not isinstance(value, nn.Module | Tensor | type) and isinstance(getattr(value, "__dict__", 0), dict):
                contents.append(vars(value))
        self._contents = [(value, copy.copy(value)) for value in {id(value): value for value in contents}.values()]
        refusing = any(_may_refuse(module) for module in modules)
        tensors = [
            *attributes,
            *(tensor for value in attributes if isinstance(value, dict) for tensor in value.values()),
        ]
        self._values = [
            (tensor, local, local.clone())
            for tensor in {id(tensor): tensor for tensor in tensors if refusing and isinstance(tensor, Tensor)}.values()
            if not (tensor.is_meta or is_lazy(tensor))
            for local in [untracked_shard(tensor).detach()]
        ]

    def restore(self) -> None:
        """Restore the objects and the values."""
        for value, saved in self._contents:
            value.clear()
            value.extend(saved) if isinstance(value, list) else value.update(saved)
        with torch.no_grad():
            for tensor, local, saved in self._values:
                if untracked_shard(tensor) is tensor and tensor.data_ptr() != local.data_ptr():
                    tensor.data = local  # A module may replace the memory of a parameter.
                if not torch.equal(local, saved):  # The memory of a mapped file may not be written.
                    local.copy_(saved)


def _may_refuse(module: nn.Module) -> bool:
    return any(
        not (getattr(function, "__module__", None) or "").startswith(_TRUSTED) for function in loading_code_of(module)
    )
