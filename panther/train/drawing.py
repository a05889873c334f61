"""The generators that a run draws from: torch's, Python's and NumPy's."""

__all__ = ["deterministic", "kept_generators", "seed_generators"]

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed all of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave them as they were; those of GPUs are not looked at."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch use only algorithms that give the same bits every time."""
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
