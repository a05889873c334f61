"""Run a function on several processes of this machine."""

__all__ = ["launch"]

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from panther._torch import usable_cores
from panther.distributed._error_file import record_failure
from panther.distributed.comm._ranks import in_process_group
from panther.distributed.comm.process_group import shutdown, start_group
from panther.errors import DistributedError, check_size


def launch(
    fn: Callable[..., Any], *args: Any, nproc: int, max_restarts: int = 0, start_method: str = "spawn"
) -> list[Any]:
    """Run ``fn(*args)`` on ``nproc`` processes of this machine, in one process group.

    Each process gets its own copy of ``fn`` and ``args``, an equal share of the cores (``OMP_NUM_THREADS`` overrides
    it), and is initialised before and shut down after the call. If one fails, all are ended, and started again while
    ``max_restarts`` lasts. The processes are torch elastic workers: ``TORCHELASTIC_RESTART_COUNT`` counts the restarts.

    Args:
        fn: A function of a module, or of a script whose call of ``launch`` is under ``if __name__ == "__main__":``.
            With ``start_method="fork"`` any function.
        *args: Its arguments, picklable unless forked.
        nproc: Number of processes.
        max_restarts: How often to start all processes again after a failure.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``, as in :mod:`multiprocessing`. Forked processes
            start at once, use one thread each, and cannot use a GPU that this process has used.

    Returns:
        What ``fn`` returned, by rank. Results travel as pickles.

    Raises:
        DistributedError: If a process raised, was killed or left, with its rank and traceback.
        TypeError: If ``fn`` or ``args`` cannot be pickled.
        ValueError: If a number or the start method is not valid.

    Cost: about two seconds to spawn two processes, which import torch again; a tenth of that to fork them.

    Example:
        >>> launch(max, 3, 5, nproc=2, start_method="fork")
        [5, 5]
    """
    from panther.distributed.launcher import _agent  # whose import takes as long as that of torch

    _check_launch(fn, nproc, max_restarts, start_method)
    call = (fn, args) if start_method == "fork" else _pickle_call(fn, args)
    with _agent.signals_followed(), tempfile.TemporaryDirectory(prefix="panther-launch-") as folder:
        failure = _agent.run_agent(_work, (call, Path(folder)), nproc, max_restarts, start_method, folder)
        if failure:
            raise DistributedError(failure)  # here, so that no traceback keeps torch's objects
        return [pickle.loads(_result_of(rank, Path(folder)).read_bytes()) for rank in range(nproc)]


def _result_of(rank: int, folder: Path) -> Path:
    return folder / f"result-{rank}.pickle"


def _work(call: bytes | tuple[Callable[..., Any], tuple[Any, ...]], folder: Path) -> None:
    """Run in each worker of launch."""
    # SIGINT is also what a worker gets when its parent dies: it must end even one that waits in a collective operation.
    # The others may be handled by the parent that was forked.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        _run(call, folder)
    except BaseException as error:
        # Leave at once, with the record written: the others find out by the closed connections, so theirs come later,
        # and a live process group would abort the interpreter's shutdown.
        record_failure(error)
        for child in multiprocessing.active_children():
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _run(call: bytes | tuple[Callable[..., Any], tuple[Any, ...]], folder: Path) -> None:
    forked = isinstance(call, tuple)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if forked or "OMP_NUM_THREADS" not in os.environ:
        # A forked OpenMP pool would hang.
        torch.set_num_threads(1 if forked else max(1, usable_cores() // world_size))
    fn, args = call if isinstance(call, tuple) else pickle.loads(call)
    # A file of this attempt: nothing of an earlier one is in it, and no port can be taken.
    file = folder / f"store-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    start_group(rank, world_size, store=dist.FileStore(str(file), world_size))
    try:
        result = fn(*args)
    except SystemExit as error:
        raise RuntimeError(f"the function called sys.exit({error.code!r}) instead of returning") from error
    try:
        data = pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(result).__name__} that cannot be pickled ({error}): return tensors, "
            "numbers or other plain data"
        ) from error
    _result_of(rank, folder).write_bytes(data)
    shutdown()


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    fix = "use functions of a module and plain data, or start_method='fork'"
    try:
        data = pickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(f"spawned processes get fn and args as a pickle, which fails ({error}): {fix}") from error
    main = sys.modules.get("__main__")
    if getattr(fn, "__module__", None) == "__main__" and not os.path.isfile(getattr(main, "__file__", None) or ""):
        raise TypeError(
            f"spawned processes cannot import {getattr(fn, '__qualname__', fn)!r}, defined in an interactive session: "
            f"{fix}"
        )
    return data


def _check_launch(fn: Callable[..., Any], nproc: int, max_restarts: int, start_method: str) -> None:
    if not callable(fn):
        raise TypeError(
            f"fn must be a function, not {type(fn).__name__}: pass launch(fn, *args), not launch(fn(*args))"
        )
    check_size("nproc", nproc, least=1)
    check_size("max_restarts", max_restarts, least=0)
    known = multiprocessing.get_all_start_methods()
    if start_method not in known:
        raise ValueError(f"start_method={start_method!r} is unknown: use one of {', '.join(map(repr, known))}")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DistributedError(
            "a process started by launch imports the script and calls launch again: put the call under "
            'if __name__ == "__main__":'
        )
    if start_method == "fork" and in_process_group():
        raise DistributedError(
            "start_method='fork' copies the process group this process is in: call shutdown() first, or use 'spawn'"
        )
