"""The error file from which torch's launcher reads the exception of a rank.

It has the format that ``torch.distributed.elastic.multiprocessing.errors.record`` writes. This decorator is not used,
because it has to wrap the main function of a script, and most scripts have none.
"""

__all__ = ["record_failure", "record_uncaught_exceptions"]

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from panther.files import write_json

_installed = False


def record_failure(error: BaseException) -> None:
    """Write the error file of this rank; do nothing in a process that was not started by a launcher."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():  # an inner handler, such as torch's record, has written the file
        return
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with suppress(OSError):  # the launcher still has the exit code
        # Written atomically, because the launcher may end this process, and torch fails on an incomplete file.
        write_json(path, {"message": message}, indent=None)


def record_uncaught_exceptions(explain: Callable[[BaseException], BaseException | None] = lambda error: None) -> None:
    """Make uncaught exceptions call :func:`record_failure` before they are shown, once in a process.

    Args:
        explain: Returns an error to record and show in the place of another one, or None.
    """
    global _installed
    if _installed:
        return
    _installed, show = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (explained := explain(error)) is not None:
            explained.__cause__ = error
            kind, error, trace = type(explained), explained, None
        record_failure(error)
        show(kind, error, trace)

    sys.excepthook = hook
