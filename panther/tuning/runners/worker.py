"""A process that runs trials. It receives plans through a socket and sends outcomes.

It receives ``(number, plan)``, or None to end, and after each report whether the trial should end. It sends
``("report", step, figures)``, ``("done", outcome)`` and ``("error", exception)``.
"""

__all__ = ["main"]

import mmap
import signal
import sys
from multiprocessing.connection import Connection

import torch

from panther.errors import PantherError, TuningError
from panther.tuning.goal import Figures
from panther.tuning.prepared import Plan
from panther.tuning.runners.work import deserialize


def main() -> None:
    """Run trials until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The search ends its processes.
    number, work, threads = map(int, sys.argv[-3:])
    connection = Connection(number)
    torch.set_num_threads(threads)
    try:
        _serve(connection, work)
    except (EOFError, ConnectionError):  # The search has ended or was killed.
        pass
    except PantherError as error:
        connection.send(("error", error))
    except Exception as error:
        connection.send(("error", TuningError(f"a process of the search failed: {type(error).__name__}: {error}")))


def _serve(connection: Connection, work: int) -> None:
    with mmap.mmap(work, 0, prot=mmap.PROT_READ) as data:  # All processes share the position in the file, so map it.
        evaluator, prepared = deserialize(data)

    def report(step: int, figures: Figures) -> bool:
        connection.send(("report", step, figures))
        return bool(connection.recv())

    while (job := connection.recv()) is not None:
        number, plan = job
        connection.send(("done", evaluator.run(prepared, Plan.from_json(plan), number, report)))
