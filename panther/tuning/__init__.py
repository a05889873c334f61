"""Choosing forms, ranks and settings by a user's own measure of a model: :func:`panther.tune`.

``search`` has the function. ``space`` has what plans are drawn from, ``compressed_models`` makes the models of plans,
``evaluation`` runs one trial, ``study`` is Optuna's part, ``runners`` runs trials in turn or side by side, and
``result`` has the classes of the result.
"""

from .plan import Plan
from .result import Trial, TuneResult
from .search import tune
from .space.lines import Group
from .space.values import Choice, Float, Int

__all__ = ["Choice", "Float", "Group", "Int", "Plan", "Trial", "TuneResult", "tune"]
