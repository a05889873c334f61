"""State of the whole process that Panther changes for a while, also in several threads at the same time.

These are the filters of warnings, the precision of products, deterministic algorithms, and the random generators of
torch, Python and NumPy, from which seeds are drawn.
"""

__all__ = [
    "Block", "ProcessSetting", "check_seed", "deterministic_algorithms", "draw_seed", "exact_products",
    "full_precision", "ignored_warnings", "preserved_generators", "seed_cpu_generators", "seed_generators",
]  # fmt: skip

import os
import random
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from panther._torch import disable_dispatch_modes

_SEED_LIMIT = 1 << 63

Block = AbstractContextManager[bool]
"""What :meth:`ProcessSetting.held` returns."""


class ProcessSetting:
    """A setting of the process that has one value within blocks of several threads, and the user's value otherwise.

    The first block that begins saves the user's value, and the last block that ends restores it. A value that the user
    sets while blocks run stays, and the next block that begins saves it; only a value equal to ``value`` goes unseen.

    Args:
        read: Returns the present value.
        write: Sets a value.
        value: The value within the blocks. None leaves the setting to the blocks, and only restores it.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object], value: Any = None) -> None:
        self.read, self.write, self._value = read, write, value
        self._saved: Any = None
        self._blocks: Counter[int] = Counter()  # the number of open blocks of each thread
        self._suspending: int | None = None  # the thread within `suspended`
        self._condition = threading.Condition()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._forget_other_threads)

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Let the setting have ``value`` within the block. Yields whether the thread is in no other block of it."""
        thread = threading.get_ident()
        is_outermost = self._begin(thread)
        try:
            yield is_outermost
        finally:
            self._end(thread)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the setting have the user's value, unless blocks of other threads are open.

        The setting does not change within this block: blocks of other threads that would begin wait for its end.
        """
        thread = threading.get_ident()
        with self._condition:
            count = self._blocks[thread] if self._blocks.keys() == {thread} and self._suspending is None else 0
            if count:
                self._suspending = thread
                self._end(thread, count)
        try:
            yield
        finally:
            if count:
                with self._condition:
                    self._begin(thread, count)
                    self._suspending = None
                    self._condition.notify_all()

    def _begin(self, thread: int, count: int = 1) -> bool:
        """Open blocks of a thread. Return whether the thread had no open block before."""
        with self._condition:
            while self._suspending not in (None, thread):
                self._condition.wait()
            present = self.read()
            if not self._blocks or (self._value is not None and present != self._value):
                self._saved = present
            if self._value is not None and present != self._value:
                self.write(self._value)
            self._blocks[thread] += count
            return self._blocks[thread] == count

    def _end(self, thread: int, count: int = 1) -> None:
        """Close blocks of a thread."""
        with self._condition:
            if self._blocks.total() == count and (self._value is None or self.read() == self._value):
                self.write(self._saved)
            self._blocks[thread] -= count
            if not self._blocks[thread]:
                del self._blocks[thread]

    def _forget_other_threads(self) -> None:
        """Close the blocks of the threads that do not exist in a forked process."""
        self._condition, thread = threading.Condition(), threading.get_ident()
        self._suspending = thread if self._suspending == thread else None
        for other in self._blocks.keys() - {thread}:
            self._end(other, self._blocks[other])


def ignored_warnings(message: str = "", category: Any = Warning) -> Block:
    """Return a block that ignores warnings whose text begins with a regular expression, in all threads.

    ``warnings.catch_warnings`` restores the list of all filters, and so would undo what other threads did meanwhile.
    """
    return _filter(message, category).held()


@cache
def _filter(message: str, category: Any) -> ProcessSetting:
    marked = f"(?#panther){message}"  # so that the user's filters differ
    entry = ("ignore", re.compile(marked, re.IGNORECASE), category, None, 0)

    def is_set() -> bool:
        return entry in warnings.filters

    def toggle(_: Any) -> None:
        if is_set():
            filters: Any = warnings.filters
            filters.remove(entry)
        else:
            warnings.filterwarnings("ignore", marked, category)

    return ProcessSetting(is_set, toggle, True)


def draw_seed() -> int:
    """Draw a seed in ``[0, 2^63)`` from torch's default CPU generator, which ``torch.manual_seed`` governs.

    Works under the meta device and under fake tensors too: a seed is always a real number.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> seed = draw_seed()
        >>> 0 <= seed < 2**63
        True
    """
    with disable_dispatch_modes():
        return int(torch.randint(_SEED_LIMIT - 1, (), dtype=torch.int64, device="cpu"))


def check_seed(seed: int | None) -> int:
    """Return ``seed`` as a Python int, drawn by :func:`draw_seed` if it is None.

    Args:
        seed: An integer in ``[0, 2^63)``, or None.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is outside ``[0, 2^63)``.

    Example:
        >>> check_seed(7)
        7
    """
    if seed is None:
        return draw_seed()
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an integer or None, not {type(seed).__name__}: pass seed=0")
    seed = seed.__index__()
    if not 0 <= seed < _SEED_LIMIT:
        raise ValueError(f"seed={seed} must be in [0, 2^63): pass seed % 2**63")
    return seed


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


_MATMULS: Any = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


def _set_precisions(precisions: tuple[str, ...]) -> None:
    for backend, precision in zip(_MATMULS, precisions, strict=True):
        backend.fp32_precision = precision


_PRECISIONS = ProcessSetting(
    lambda: tuple(backend.fp32_precision for backend in _MATMULS), _set_precisions, ("ieee", "ieee")
)


def full_precision() -> Block:
    """Return a block that computes float32 products in float32, ignoring torch.set_float32_matmul_precision."""
    return _PRECISIONS.held()


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute without autograd, autocast and TF32, whose short mantissas no factorisation survives."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), full_precision():
        yield
