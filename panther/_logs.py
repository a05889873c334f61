"""What the library logs, on standard error, where the program has not said what should become of it."""

__all__ = ["logged_items", "logs_shown"]

import datetime
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

_Item = TypeVar("_Item")
_EVERY_S = 10.0


@contextmanager
def logs_shown(message_format: str = "%(message)s", *, always: bool = False) -> Iterator[None]:
    """Print what the logger ``panther`` gets from INFO on.

    A program that has set up logging, also by ``logging.basicConfig``, gets it through its own handlers alone, at the
    levels that it set; with ``always`` it is printed in any case. A level that the logger ``panther`` has stays.
    """
    logger = logging.getLogger("panther")
    if logger.hasHandlers() and not always:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(message_format))
    level = logger.level
    logger.addHandler(handler)
    if always or level == logging.NOTSET:
        logger.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def logged_items(
    items: Collection[_Item],
    description: str,
    logger: logging.Logger,
    *,
    announce: bool = True,
    every_s: float = _EVERY_S,
) -> Iterator[_Item]:
    """Yield items, and log at level INFO how many there are and, every ten seconds, how many are left and for how long.

    ``description`` names the phase, whose items take equally long; ``announce`` logs their number before the first one.
    """
    if announce:
        logger.info("%s: %d to do", description, len(items))
    begin = logged = time.monotonic()
    for number, item in enumerate(items):
        now = time.monotonic()
        if number and now - logged >= every_s:
            left = datetime.timedelta(seconds=round((now - begin) / number * (len(items) - number)))
            logger.info("%s: %d of %d, %s left", description, number, len(items), left)
            logged = now
        yield item
