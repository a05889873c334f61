"""Choosing forms, ranks and settings by a user's own measure of a model: :func:`panther.tune`.

``space`` says what a setting may be, ``selection`` which layers a line of a space is of, ``layer_space`` what a study
draws plans from; ``prepared`` holds what trials share, ``evaluation`` runs one, ``study`` is Optuna's part, ``result``
what is found.
"""

from ._tree import ModuleTree, TreeRow, tree
from ._tune import tune
from .prepared import Plan
from .result import Trial, TuneResult
from .selection import Group
from .space import Choice, Float, Int

__all__ = [
    "Choice", "Float", "Group", "Int", "ModuleTree", "Plan", "TreeRow", "Trial", "TuneResult", "tree", "tune",
]  # fmt: skip
