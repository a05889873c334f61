"""The error file by which torch's launcher learns of a rank's exception.

It has the form that ``torch.distributed.elastic.multiprocessing.errors.record`` writes. That decorator does not serve
here: it has to stand around the main function of a script, and most scripts have none.
"""

__all__ = ["record_failure", "record_uncaught_exceptions"]

import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from panther.files import write_json

_installed = False


def record_failure(error: BaseException) -> None:
    """Write the error file of this rank; does nothing in a process that no launcher started."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():  # an inner handler, such as torch's record, came first
        return
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with suppress(OSError):  # the launcher still has the exit code
        # At once: the launcher may end this process meanwhile, and torch fails on half a file.
        write_json(path, {"message": message}, indent=None)


def record_uncaught_exceptions() -> None:
    """Install :func:`record_failure` in front of what shows uncaught exceptions, once in a process."""
    global _installed
    if _installed:
        return
    _installed, show = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        record_failure(error)
        show(kind, error, trace)

    sys.excepthook = hook
