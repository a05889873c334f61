"""Check the model before anything runs; each message states the rule, the value and the fix."""

__all__ = ["check_adapters", "check_model"]

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from panther.errors import CompressionError


def check_model(model: Any) -> None:
    """Raise unless the argument is a module whose layers can be replaced."""
    if not isinstance(model, nn.Module):
        instance = f"the class {model.__name__}: pass an instance of it" if isinstance(model, type) else None
        raise TypeError(f"the model must be an nn.Module, not {instance or f'a {type(model).__name__}'}")
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise CompressionError(
            f"the model is wrapped in {type(model).__name__}, which keeps references to the old parameters: compress "
            "model.module, and wrap it again"
        )
    for name, parameter in model.named_parameters():
        # A DTensor is recognized by its method, because torch may be built without DTensor.
        if hasattr(parameter, "full_tensor"):
            raise CompressionError(
                f"{name!r} is a DTensor, on a device mesh: compress the model before it is sharded, or compress "
                "panther.distributed.unshard_module(model)"
            )


def check_adapters(model: nn.Module) -> None:
    """Raise if layers have adapters of PEFT.

    PEFT merges adapters into a dense weight, and would lose them if the layer was replaced. The adapters themselves are
    pairs of nn.Linear, and would be compressed too.
    """
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")  # no model has adapters before this module is imported
    if peft is None:
        return
    adapted = [name for name, module in model.named_modules() if isinstance(module, peft.BaseTunerLayer)]
    if adapted:
        raise CompressionError(
            f"{len(adapted)} of the layers have adapters of PEFT (first {adapted[0]!r}), which would be compressed "
            "too: detach them (unload() of the PEFT model) or merge them (merge_and_unload()), compress the base "
            "model, and attach adapters to the result"
        )
