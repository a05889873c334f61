"""Training: a trainer, its settings, and what it leaves behind."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import TrainConfig
    from .history import History
    from .trainer import Callback, Trainer

# PEP 562: a trainer needs torch's engines, and a config needs nothing.
_HOME = {"Callback": "trainer", "History": "history", "TrainConfig": "config", "Trainer": "trainer"}

__all__ = ["Callback", "History", "TrainConfig", "Trainer"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
