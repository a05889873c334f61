"""The random generators of a run (torch's, Python's and NumPy's), and deterministic algorithms."""

__all__ = ["deterministic_algorithms", "preserved_generators", "seed_cpu_generators", "seed_generators"]

import os
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from panther._process_settings import Block, ProcessSetting


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, on all devices, Python and NumPy."""
    torch.manual_seed(seed)
    seed_cpu_generators(seed)


def seed_cpu_generators(seed: int) -> None:
    """Seed the generators that :func:`preserved_generators` restores: all generators except for GPUs."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # NumPy's seeds have 32 bits.


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


_CPU_GENERATORS = ProcessSetting(_states, _set_states)


@cache
def _gpu_generator(index: int) -> ProcessSetting:
    return ProcessSetting(partial(torch.cuda.get_rng_state, index), partial(torch.cuda.set_rng_state, device=index))


@contextmanager
def preserved_generators(gpus: Iterable[int] = ()) -> Iterator[None]:
    """Restore the states of the generators of the CPU and of GPUs on leaving the block.

    Threads share the generators: of blocks of several threads, the last one to end restores the states that the first
    one has found.
    """
    with ExitStack() as stack:
        for setting in (_CPU_GENERATORS, *map(_gpu_generator, gpus)):
            if not stack.enter_context(setting.held()):
                stack.callback(setting.write, setting.read())
        yield


_DETERMINISTIC = ProcessSetting(
    lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    (True, False),
)


def deterministic_algorithms() -> Block:
    """Return a block in which torch uses only algorithms that give the same bits in every run."""
    # cuBLAS reads this variable when its first handle is created. Without it torch refuses matrix products on GPUs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return _DETERMINISTIC.held()
