"""``SketchedAdamW(model.parameters())`` and ``MuonAdamW(model.parameters())`` beside AdamW: loss and time of a step.

All settings but the learning rate are the defaults, and each optimizer selects the matrices by itself. The tasks, the
sweep of learning rates and the rows are those of trial_optimizers.py.
"""

__all__ = ["METHODS"]

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.train.optimizer_methods import BASELINE, Method, whole
from benchmarks.train.optimizer_methods import METHODS as ALL
from benchmarks.train.optimizer_tasks import OptimizerTask
from benchmarks.train.trial_optimizers import main
from panther.optim import MuonAdamW, SketchedAdamW


def _with_defaults(optimizer: Callable[..., torch.optim.Optimizer]) -> Any:
    def make(task: OptimizerTask, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return optimizer(model.parameters(), lr=lr)

    return make


METHODS = {
    method.name: method
    for method in (
        ALL[BASELINE],
        Method("SketchedAdamW", whole, _with_defaults(SketchedAdamW), (3e-3, 6e-3, 1.2e-2)),
        Method("MuonAdamW", whole, _with_defaults(MuonAdamW), (6e-3, 1.2e-2, 2.4e-2)),
    )
}

if __name__ == "__main__":
    main(METHODS, ["characters", "encoder"], "default-optimizers", __doc__ or "")
