"""What the library logs, on standard error, where the program has not said what should become of it."""

__all__ = ["logs_shown"]

import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
