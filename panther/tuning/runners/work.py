"""What a process needs to run trials, as bytes: the user's function, the prepared model, and the plan of a trial."""

__all__ = ["RETRIES", "packed", "unpacked"]

import importlib
import mmap
import pickle
from dataclasses import replace
from typing import Any

from panther.errors import TuningError
from panther.tuning.evaluation import Evaluator
from panther.tuning.prepared import Prepared

RETRIES = 2  # of a trial whose process died


def packed(evaluator: Evaluator, prepared: Prepared) -> bytes:
    """Return both as bytes; in one pickle, because they share the model.

    Raises:
        TuningError: If something in them cannot be pickled.
    """
    try:
        # Sends functions of the script itself, lambdas and closures; pickle sends what a module has by name.
        dumps: Any = importlib.import_module("cloudpickle").dumps
    except ModuleNotFoundError:
        dumps = pickle.dumps
    if isinstance(prepared, Prepared):
        prepared = replace(prepared, model_fn=None)  # results are built here
    try:
        data: bytes = dumps((evaluator, prepared))
    except Exception as error:
        raise TuningError(
            f"the model, evaluate or the batches cannot be sent to other processes ({type(error).__name__}: {error}): "
            "define evaluate in a module, install cloudpickle, or use parallel=1"
        ) from error
    return data


def unpacked(data: bytes | mmap.mmap) -> tuple[Evaluator, Prepared]:
    """Return what :func:`packed` was given.

    Raises:
        TuningError: If it cannot be loaded here.
    """
    try:
        evaluator, prepared = pickle.loads(data)
    except Exception as error:
        raise TuningError(
            f"the model, evaluate or the batches cannot be loaded in another process ({type(error).__name__}: "
            f"{error}): define evaluate in a module that can be imported, install cloudpickle, or use parallel=1"
        ) from error
    return evaluator, prepared
