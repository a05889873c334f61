"""Workers that are processes of this machine."""

__all__ = ["local_processes"]

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import IO, Any, Self

import torch

from panther.tuning.runners.worker import Message, Start

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
        """Send a call. If the process died, :meth:`receive` returns this."""
        with suppress(ConnectionError):
            self.connection.send((method, values))

    def receive(self) -> Message:
        """Return the answer of the last call, or ``("died",)``."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, ConnectionError):
            return ("died",)
        return message

    def end(self, at_once: bool) -> str:
        """End the process, and return how it ended."""
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
        """Wait until processes have answered or died, and return them."""
        by_connection = {id(worker.connection): worker for worker in workers}
        return [by_connection[id(connection)] for connection in wait([worker.connection for worker in workers])]
