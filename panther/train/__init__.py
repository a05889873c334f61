"""Training: the Trainer, its settings and its history."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from panther._hints import missing_name

if TYPE_CHECKING:
    from .callbacks import Callback
    from .config import TrainConfig
    from .history import History
    from .trainer import Trainer

# PEP 562: importing the Trainer loads torch's distributed engines, which a TrainConfig does not need.
_HOME = {"Callback": "callbacks", "History": "history", "TrainConfig": "config", "Trainer": "trainer"}

__all__ = ["Callback", "History", "TrainConfig", "Trainer"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise missing_name(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
