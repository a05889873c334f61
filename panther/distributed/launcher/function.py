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

from panther._torch import end_with_parent, usable_cores
from panther.distributed.comm.diagnostics import explain_transport_error
from panther.distributed.comm.ending import DEFAULT_GRACE_PERIOD_S, record_failure
from panther.distributed.comm.process_group import check_timeout, shutdown, start_group
from panther.distributed.comm.ranks import in_process_group
from panther.errors import DistributedError, check_size


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nproc: int,
    max_restarts: int = 0,
    start_method: str = "spawn",
    timeout_s: float = 300.0,
    grace_period_s: float = DEFAULT_GRACE_PERIOD_S,
) -> list[Any]:
    """Run ``fn(*args)`` on ``nproc`` processes of this machine, in one process group.

    Each process gets its own copy of ``fn`` and ``args``, an equal share of the cores (``OMP_NUM_THREADS`` overrides
    it), and is initialised before and shut down after the call. If a process fails, all processes are ended, and
    started again up to ``max_restarts`` times. The processes are torch elastic workers: ``TORCHELASTIC_RESTART_COUNT``
    counts the restarts.

    Args:
        fn: A function of a module, or of a script whose call of ``launch`` is under ``if __name__ == "__main__":``.
            With ``start_method="fork"`` any function.
        *args: Arguments of ``fn``; they are pickled unless the processes are forked.
        nproc: Number of processes.
        max_restarts: How often to start all processes again after a failure.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``, as in :mod:`multiprocessing`. Forked processes
            start at once, use one thread each, and cannot use a GPU that this process has used.
        timeout_s: Seconds that the processes wait for each other, at the start and in each collective operation.
        grace_period_s: Seconds that the processes have to save and end after SIGTERM or Ctrl-C. Then they are killed.

    Returns:
        The values that ``fn`` returned, by rank. They are sent as pickles.

    Raises:
        DistributedError: If a process raised an error, was killed or exited; the message has its rank and traceback.
        TypeError: If ``fn`` or ``args`` cannot be pickled.
        ValueError: If a number or the start method is not valid.

    Cost: about two seconds to spawn two processes, which import torch again; a tenth of that to fork them.

    Example:
        >>> launch(max, 3, 5, nproc=2, start_method="fork")
        [5, 5]
    """
    from panther.distributed.launcher import _agent  # its import takes as long as the import of torch

    _check_launch(fn, nproc, max_restarts, start_method)
    for name, seconds in (("timeout_s", timeout_s), ("grace_period_s", grace_period_s)):
        check_timeout(name, seconds)
    call = (fn, args) if start_method == "fork" else _pickle_call(fn, args)
    with _agent.signals_followed(), tempfile.TemporaryDirectory(prefix="panther-launch-") as folder:
        arguments = (call, Path(folder), timeout_s)
        failure = _agent.run_agent(_work, arguments, nproc, max_restarts, start_method, folder, grace_period_s)
        if failure:
            raise DistributedError(failure)  # here, so that no traceback keeps torch's objects
        return [pickle.loads(_result_of(rank, Path(folder)).read_bytes()) for rank in range(nproc)]


def _result_of(rank: int, folder: Path) -> Path:
    return folder / f"result-{rank}.pickle"


def _work(call: bytes | tuple[Callable[..., Any], tuple[Any, ...]], folder: Path, timeout_s: float) -> None:
    """Run the function of :func:`launch`, in one of its workers."""
    end_with_parent(signal.SIGKILL)  # also if the worker hangs or is stopped
    # The parent may have handlers of these signals, which a forked worker inherits.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        if (
            hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN
        ):  # nohup ignores SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        _run(call, folder, timeout_s)
    except BaseException as error:
        # Exit at once after the error is recorded. Other ranks notice it by their closed connections, so their records
        # come later. With a process group, the normal shutdown of the interpreter would abort.
        record_failure(explain_transport_error(error) or error)
        for child in multiprocessing.active_children():
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _run(call: bytes | tuple[Callable[..., Any], tuple[Any, ...]], folder: Path, timeout_s: float) -> None:
    forked = isinstance(call, tuple)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if forked or "OMP_NUM_THREADS" not in os.environ:
        # A forked OpenMP pool would hang.
        torch.set_num_threads(1 if forked else max(1, usable_cores() // world_size))
    fn, args = call if isinstance(call, tuple) else pickle.loads(call)
    # This attempt has a new file, which contains no entries of earlier attempts and needs no free port.
    file = folder / f"store-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    start_group(rank, world_size, timeout_s=timeout_s, place=dist.FileStore(str(file), world_size))
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
    start_methods = multiprocessing.get_all_start_methods()
    if start_method not in start_methods:
        raise ValueError(f"start_method={start_method!r} is unknown: use one of {', '.join(map(repr, start_methods))}")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DistributedError(
            "a process started by launch imports the script and calls launch again: put the call under "
            'if __name__ == "__main__":'
        )
    if start_method == "fork" and in_process_group():
        raise DistributedError(
            "start_method='fork' copies the process group this process is in: call shutdown() first, or use 'spawn'"
        )
