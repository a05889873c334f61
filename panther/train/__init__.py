"""Training: a trainer, its settings, and what it leaves behind."""

from .config import TrainConfig
from .history import History
from .trainer import Callback, Trainer

__all__ = ["Callback", "History", "TrainConfig", "Trainer"]
