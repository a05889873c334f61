"""The random generators of a run (torch's, Python's and NumPy's), and deterministic algorithms."""

__all__ = ["deterministic_algorithms", "preserved_generators", "seed_cpu_generators", "seed_generators"]

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, on all devices, Python and NumPy."""
    torch.manual_seed(seed)
    seed_cpu_generators(seed)


def seed_cpu_generators(seed: int) -> None:
    """Seed the generators that :func:`preserved_generators` restores: all generators except for GPUs."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # NumPy's seeds have 32 bits.


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the states of the CPU's generators on leaving the block."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Let torch use only algorithms that give the same bits in every run."""
    before = torch.are_deterministic_algorithms_enabled()
    # cuBLAS reads this variable when its first handle is created. Without it torch refuses matrix products on GPUs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
