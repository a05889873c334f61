"""Settings of the whole process that Panther changes for a while, also in several threads at the same time."""

__all__ = ["Block", "ProcessSetting", "environment_variable", "ignored_warnings"]

import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self


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
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_other_threads)

    def held(self) -> "Block":
        """Return a block, for a ``with`` statement, within which the setting has ``value``."""
        return Block(self)

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
            is_changed = self._value is not None and present != self._value
            if is_changed or not self._blocks:
                self._saved = present
            is_first = thread not in self._blocks
            self._blocks[thread] += count
            if is_changed:
                self.write(self._value)
            return is_first

    def _end(self, thread: int, count: int = 1) -> None:
        """Close blocks of a thread. The setting comes first, so that an interrupted call can be repeated."""
        with self._condition:
            if self._blocks.total() == count and (self._value is None or self.read() == self._value):
                self.write(self._saved)
            self._blocks[thread] -= count
            if not self._blocks[thread]:
                del self._blocks[thread]

    def _forget_other_threads(self) -> None:
        """Close the blocks of the threads that do not exist in a forked process."""
        self._condition = threading.Condition()
        thread = threading.get_ident()
        if self._suspending != thread:
            self._suspending = None
        for other in self._blocks.keys() - {thread}:
            self._end(other, self._blocks[other])


class Block:
    """A block of code within which a :class:`ProcessSetting` has its value.

    Attributes:
        is_outermost: Whether the thread had no open block when this one began.
    """

    __slots__ = ("_setting", "_thread", "is_outermost")

    def __init__(self, setting: ProcessSetting) -> None:
        self._setting, self.is_outermost = setting, False
        self._thread: int | None = None

    def __enter__(self) -> Self:
        thread = threading.get_ident()
        self.is_outermost = self._setting._begin(thread)
        self._thread = thread
        return self

    def __exit__(self, *_: object) -> None:
        """End the block. Further calls change nothing."""
        if self._thread is not None:
            self._setting._end(self._thread)
            self._thread = None


def environment_variable(name: str, value: str) -> ProcessSetting:
    """Return the setting of a variable of the environment, which a user may not have set."""

    def write(content: str | None) -> None:
        if content is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = content

    return ProcessSetting(lambda: os.environ.get(name), write, value)


def ignored_warnings(message: str = "", category: type[Warning] = Warning) -> Block:
    """Return a block that ignores warnings whose text begins with a regular expression, in all threads.

    ``warnings.catch_warnings`` restores the list of all filters, and so would undo what other threads did meanwhile.
    """
    return _filter(message, category).held()


@cache
def _filter(message: str, category: type[Warning]) -> ProcessSetting:
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
