"""A worker of a search, and workers that are processes of this machine.

A worker runs one trial after another, step by step, with a copy of the model and of the data.

The search calls ``begin`` with a trial's number and plan, and ``proceed`` with whether the trial should end after a
partial metric. The answers are ``("partial", step, figures)``, ``("outcome", outcome)`` and ``("error", exception)``;
the search reads ``("died",)`` if the worker died.
"""

__all__ = ["Message", "Start", "TrialServer", "Worker", "deserialize", "local_processes", "serialize", "serve"]

import importlib
import json
import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import IO, Any, Protocol, Self

import torch

from panther.errors import PantherError, TuningError
from panther.tuning.compressed_models import CompressedModels
from panther.tuning.evaluation import Evaluator, Outcome, Steps
from panther.tuning.plan import Plan

Message = tuple[Any, ...]


class Worker(Protocol):
    """A worker, as the search sees it."""

    def call(self, method: str, *values: Any) -> None:
        """Call ``begin`` or ``proceed``, without waiting for the answer. If the worker died, ``receive`` says so."""

    def receive(self) -> Message:
        """Return the answer of the last call, or ``("died",)``."""

    def end(self, at_once: bool) -> str:
        """End the worker, and return how it ended; ``at_once``, it is killed if it does not end by itself."""

    @classmethod
    def wait(cls, workers: Sequence[Self]) -> list[Self]:
        """Wait until workers have answered or died, and return them."""


Start = Callable[[], Worker]
"""Starts a worker."""


def serialize(evaluator: Evaluator, models: CompressedModels) -> bytes:
    """Return both as bytes. They share the model, so they are in one pickle."""
    try:
        # cloudpickle supports functions of the main script, lambdas and closures. pickle only stores names in modules.
        dumps: Any = importlib.import_module("cloudpickle").dumps
    except ModuleNotFoundError:
        dumps = pickle.dumps
    try:
        data: bytes = dumps((evaluator, models))
    except Exception as error:
        raise TuningError(
            f"the model, evaluate or the batches cannot be sent to other processes ({type(error).__name__}: {error}): "
            "define evaluate in a module, install cloudpickle, or use parallel=1"
        ) from error
    return data


def deserialize(data: bytes | mmap.mmap) -> tuple[Evaluator, CompressedModels]:
    """Return the arguments of :func:`serialize`."""
    try:
        evaluator, models = pickle.loads(data)
    except Exception as error:
        raise TuningError(
            f"the model, evaluate or the batches cannot be loaded in another process ({type(error).__name__}: "
            f"{error}): define evaluate in a module that can be imported, install cloudpickle, or use parallel=1"
        ) from error
    return evaluator, models


class TrialServer:
    """Runs trials in the process of a worker."""

    def __init__(self, load: Callable[[], tuple[Evaluator, CompressedModels]]) -> None:
        """Make a server; ``load`` is called for the first trial."""
        self._load = load
        self._loaded: tuple[Evaluator, CompressedModels] | None = None
        self._steps: Steps[Outcome]

    def begin(self, number: int, plan: str) -> Message:
        """Run a trial up to its first partial metric, or to its end."""
        self._steps = self._trial(number, plan)
        return self._step(None)

    def proceed(self, ends: bool) -> Message:
        """Run the trial up to its next partial metric, or to its end; ``ends`` says whether it should end now."""
        return self._step(ends)

    def _trial(self, number: int, plan: str) -> Steps[Outcome]:
        if self._loaded is None:
            self._loaded = self._load()
        evaluator, models = self._loaded
        return (yield from evaluator.trial(models, Plan.from_json(plan), number))

    def _step(self, ends: Any) -> Message:
        try:
            return "partial", *self._steps.send(ends)
        except StopIteration as stop:
            return "outcome", stop.value
        except PantherError as error:
            return "error", error
        except Exception as error:
            return "error", TuningError(f"a process of the search failed: {type(error).__name__}: {error}")


def serve() -> None:
    """Answer the calls that come through a socket, in a process of :func:`local_processes`, until None comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The search ends its processes.
    descriptor, work, threads = map(int, sys.argv[-3:])
    connection = Connection(descriptor)
    torch.set_num_threads(threads)

    def load() -> tuple[Evaluator, CompressedModels]:
        # All processes share the position in the file, so it is mapped.
        with mmap.mmap(work, 0, prot=mmap.PROT_READ) as data:
            return deserialize(data)

    server = TrialServer(load)
    try:
        while (call := connection.recv()) is not None:
            method, values = call
            connection.send(getattr(server, method)(*values))
    except (EOFError, ConnectionError):  # The search has ended or was killed.
        pass


# The process has the search path of this process, so that it imports the same modules.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from panther.tuning.runners.worker import serve; serve()"
)  # fmt: skip
_END_S = 10.0  # seconds after which a process that should end is killed


@contextmanager
def local_processes(work: bytes, count: int) -> Iterator[tuple[Start, int]]:
    """Yield a function that starts a worker, and the number of workers, which share torch's threads."""
    threads = max(1, torch.get_num_threads() // count)
    with tempfile.TemporaryFile(prefix="panther-tune-") as file:  # It has no name, so that a kill leaves no file.
        file.write(work)
        file.flush()
        yield partial(_Process, file, threads), count


class _Process:
    """A worker: a process and its connection."""

    def __init__(self, work: IO[bytes], threads: int) -> None:
        self.connection, other = multiprocessing.Pipe()
        files = [other.fileno(), work.fileno()]
        arguments = [json.dumps(sys.path), *map(str, files), str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen([sys.executable, "-c", _START, *arguments], pass_fds=files, env=environment)
        other.close()

    def call(self, method: str, *values: Any) -> None:
        with suppress(ConnectionError):
            self.connection.send((method, values))

    def receive(self) -> Message:
        try:
            message: Message = self.connection.recv()
        except (EOFError, ConnectionError):
            return ("died",)
        return message

    def end(self, at_once: bool) -> str:
        with suppress(ConnectionError):
            self.connection.send(None)
        self.connection.close()
        try:
            code = self.process.wait(0.1 if at_once else _END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(_END_S)
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    @classmethod
    def wait(cls, workers: Sequence[Self]) -> list[Self]:
        by_connection = {id(worker.connection): worker for worker in workers}
        return [by_connection[id(connection)] for connection in wait([worker.connection for worker in workers])]
