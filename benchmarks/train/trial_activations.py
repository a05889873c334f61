"""Sketches of activations beside activation checkpointing: loss, time and peak memory on a model of characters.

The methods are those of sketched_activations.py, under AdamW; the measurements are those of trial_optimizers.py with
two learning rates and two seeds. Checkpointing of blocks computes the gradients that all rows give, so that its loss
after equal steps is that of AdamW, and it loses by the steps that it cannot take in the same time.
"""

__all__: list[str] = []

from benchmarks.train.sketched_activations import ACTIVATIONS
from benchmarks.train.trial_optimizers import main

if __name__ == "__main__":
    main(ACTIVATIONS, ("characters",), "activations", __doc__ or "")
