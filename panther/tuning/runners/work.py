"""Serialisation of the data that processes need to run trials: the user's function and the prepared model."""

__all__ = ["RETRIES", "deserialize", "serialize"]

import importlib
import mmap
import pickle
from dataclasses import replace
from typing import Any

from panther.errors import TuningError
from panther.tuning.evaluation import Evaluator
from panther.tuning.prepared import Prepared

RETRIES = 2  # further attempts of a trial whose process died


def serialize(evaluator: Evaluator, prepared: Prepared) -> bytes:
    """Return both as bytes. They share the model, so they are in one pickle.

    Raises:
        TuningError: If something in them cannot be pickled.
    """
    try:
        # cloudpickle supports functions of the main script, lambdas and closures. pickle only stores names in modules.
        dumps: Any = importlib.import_module("cloudpickle").dumps
    except ModuleNotFoundError:
        dumps = pickle.dumps
    if isinstance(prepared, Prepared):
        prepared = replace(prepared, model_fn=None)  # Only this process builds results.
    try:
        data: bytes = dumps((evaluator, prepared))
    except Exception as error:
        raise TuningError(
            f"the model, evaluate or the batches cannot be sent to other processes ({type(error).__name__}: {error}): "
            "define evaluate in a module, install cloudpickle, or use parallel=1"
        ) from error
    return data


def deserialize(data: bytes | mmap.mmap) -> tuple[Evaluator, Prepared]:
    """Return the arguments of :func:`serialize`.

    Raises:
        TuningError: If they cannot be loaded in this process.
    """
    try:
        evaluator, prepared = pickle.loads(data)
    except Exception as error:
        raise TuningError(
            f"the model, evaluate or the batches cannot be loaded in another process ({type(error).__name__}: "
            f"{error}): define evaluate in a module that can be imported, install cloudpickle, or use parallel=1"
        ) from error
    return evaluator, prepared
