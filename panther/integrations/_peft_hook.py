"""``import panther`` makes PEFT ask Panther before it changes compressed layers, without importing PEFT or torch.

PEFT skips layers that it does not know in silence, and copies integer codes to train them. The methods below are
wrapped when PEFT is imported, and the adapter is imported when one of them meets the first compressed layer.
"""

__all__ = ["PEFT", "wrap_peft"]

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

PEFT = "peft"
_ADAPTER = "panther.integrations.peft.model"
# The methods, and the functions of the adapter that are called first with the same arguments.
_METHODS = (
    ("peft.tuners.tuners_utils", "BaseTuner", "__init__", "before_tuner"),
    ("peft.tuners.tuners_utils", "BaseTuner", "inject_adapter", "before_injection"),
    ("peft.tuners.tuners_utils", "BaseTuner", "_inject_parameters", "before_parameters"),
    ("peft.tuners.trainable_tokens", "TrainableTokensLayer", "__init__", "before_token_training"),
    ("peft.utils.other", "ModulesToSaveWrapper", "update", "before_copy"),
)


def wrap_peft(peft: ModuleType) -> None:
    """Wrap the methods, once."""
    for place, class_name, name, function in _METHODS:
        kind = getattr(sys.modules.get(place), class_name, None)
        if hasattr(kind, name) and not hasattr(getattr(kind, name), "_panther"):  # a version need not have all of them
            setattr(kind, name, _asking(getattr(kind, name), function))


def _asking(method: Any, function: str) -> Any:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch and the class are loaded if there is a layer of the class.
        layers = getattr(sys.modules.get("panther.nn.base"), "CompressedModule", None)
        arguments = (*args, *kwargs.values(), getattr(self, "original_module", None))
        modules = (module for x in arguments if hasattr(x, "modules") for module in x.modules())
        if layers is not None and any(isinstance(module, layers) for module in modules):
            getattr(importlib.import_module(_ADAPTER), function)(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    wrapped._panther = True  # type: ignore[attr-defined]
    return wrapped
