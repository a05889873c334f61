"""Muon with updates of low rank (``rank=``) beside the whole orthogonalisation: loss against rank.

The tasks, the sweep of learning rates and the rows are those of trial_optimizers.py. With rank r, a process sends
r (m + n) numbers for an (m, n) matrix whose sides are both sharded.
"""

__all__ = ["METHODS"]

import functools

from benchmarks.train.optimizer_methods import Method, muon, whole
from benchmarks.train.trial_optimizers import main

RANKS = (64, 16, 4)
METHODS = {
    method.name: method
    for method in (
        Method("whole", whole, muon, (1.2e-2, 2.4e-2, 4.8e-2)),
        *(
            Method(f"rank {rank}", whole, functools.partial(muon, rank=rank), (1.2e-2, 2.4e-2, 4.8e-2))
            for rank in RANKS
        ),
    )
}

if __name__ == "__main__":
    main(METHODS, ["characters", "words"], "muon-ranks", __doc__ or "")
