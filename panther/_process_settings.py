"""Settings of the whole process that Panther changes for a while, also in several threads at the same time."""

__all__ = ["Block", "ProcessSetting", "ignored_warnings"]

import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

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
