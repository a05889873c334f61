"""Choosing forms, ranks and settings by a user's own measure of a model: :func:`panther.tune`.

``spaces`` has the values that a setting may have, and the layers; ``prepared`` holds what trials share, ``evaluation``
runs one trial, ``runners`` runs trials in turn or side by side, ``study`` is Optuna's part, ``result`` the result.
"""

from ._tune import tune
from .prepared import Plan
from .result import Trial, TuneResult
from .spaces.selection import Group
from .spaces.values import Choice, Float, Int

__all__ = ["Choice", "Float", "Group", "Int", "Plan", "Trial", "TuneResult", "tune"]
