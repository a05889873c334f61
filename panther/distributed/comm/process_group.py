"""Join the process group of a run, and leave it.

``init`` serves torchrun, ``launch``, ``mp.spawn`` and a single process alike, on gloo and NCCL.
"""

__all__ = [
    "DEFAULT_TIMEOUT_S", "check_backend", "check_timeout", "cleanup_distributed", "init", "setup_distributed",
    "shutdown", "start_group",
]  # fmt: skip

import os
import re
import signal
import sys
import time
from contextlib import ExitStack, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from panther._torch import end_with_parent
from panther.distributed.comm.diagnostics import explain_transport_error
from panther.distributed.comm.ending import (
    GRACE_PERIOD_VARIABLE,
    check_parent,
    record_uncaught_exceptions,
    show_stacks_on_request,
    start_limited,
    watch_parent,
)
from panther.distributed.comm.handshake import Agreement, check_in, meet, own_gpu
from panther.distributed.comm.ranks import in_process_group
from panther.distributed.comm.store import Meeting, find_route, interface_of, open_store
from panther.errors import DistributedError, ShapeError, check_size

DEFAULT_TIMEOUT_S = 300.0
_FAREWELL_S = 5.0
_STUCK_S = 10.0  # after the timeout; a start that is not stuck raises its error at the timeout
_INTERFACE = "GLOO_SOCKET_IFNAME"


_at_shutdown = ExitStack()
"""Functions that shutdown calls before it destroys the process group."""


def start_group(
    rank: int,
    world_size: int,
    backend: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    place: Meeting | dist.Store | tuple[str, str] | None = None,
) -> None:
    """Join the process group in a store, at a host and port, or else where the environment says."""
    _check_request(rank, world_size, backend, timeout_s)
    watch_parent()
    with start_limited(timeout_s + _STUCK_S):
        _join(rank, world_size, backend, timeout_s, place)


def _join(
    rank: int,
    world_size: int,
    backend: str | None,
    timeout_s: float,
    place: Meeting | dist.Store | tuple[str, str] | None,
) -> None:
    """Join the process group, for valid arguments."""
    if isinstance(place, dist.Store):
        place = Meeting(place, timeout_s, time.monotonic() + timeout_s)
    meeting = place if isinstance(place, Meeting) else open_store(rank, world_size, timeout_s, place)
    agreement = check_in(meeting, rank, world_size, backend)
    _choose_interface(agreement)
    store = meeting.group_store(agreement.token, world_size)
    _at_shutdown.callback(_wait_for_leaving_ranks, store, world_size)
    try:
        device = None
        if "nccl" in agreement.backend and (gpu := own_gpu(rank)) is not None:
            device = torch.device("cuda", gpu[0])
            torch.cuda.set_device(device)  # before NCCL starts; else every rank takes memory on GPU 0
        dist.init_process_group(
            agreement.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        # A rank that is connected and fails at once would close the connection of a rank that still connects.
        if not meet(store, "connected", world_size, meeting.deadline):
            raise RuntimeError("some of them checked in and then ended or stalled")
        del meeting  # this closes its store
    except BaseException as error:
        interface = os.environ.get(_INTERFACE, "of its host name")
        shutdown()
        if not isinstance(error, RuntimeError):
            raise
        raise DistributedError(
            f"rank {rank} of {world_size} could not connect to the others over {agreement.backend}, on interface "
            f"{interface} ({str(error).splitlines()[0]}): see whether one of them has ended, let all ports through "
            f"between the nodes, or set {_INTERFACE} to the interface that reaches them"
        ) from error


def _choose_interface(agreement: Agreement) -> None:
    """Choose the interface of gloo by the route to the other nodes, unless the user has chosen one.

    By itself, gloo resolves the host name. That may be impossible, and it gives 127.0.1.1 on Debian.
    """
    with suppress(OSError):  # gloo chooses an interface itself if no route is known
        name = interface_of("127.0.0.1" if agreement.one_host else find_route(agreement.address).own_address)
        if name is not None and _INTERFACE not in os.environ:
            os.environ[_INTERFACE] = name
            _at_shutdown.callback(os.environ.pop, _INTERFACE, None)


def _wait_for_leaving_ranks(store: dist.Store, world_size: int) -> None:
    # After an exception, the other ranks may never come, and the message of the exception must not wait for them.
    if sys.exc_info()[0] is None:
        with suppress(RuntimeError):  # the host of the store may leave first
            meet(store, "leave", world_size, time.monotonic() + _FAREWELL_S)


def _check_request(rank: int, world_size: int, backend: str | None, timeout_s: float) -> None:
    if in_process_group():
        raise DistributedError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} of a process group already: initialise "
            "once (launch does it for the function it runs), or call shutdown() first"
        )
    check_size("world_size", world_size, least=1)
    check_size("rank", rank, least=0)
    if rank >= world_size:
        raise ShapeError(f"rank={rank} must be in [0, world_size) = [0, {world_size}): number the processes from 0")
    check_backend(backend)
    check_timeout("timeout_s", timeout_s)


def check_timeout(name: str, seconds: float) -> None:
    """Raise unless an argument is a number of seconds that torch accepts as a timeout."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {type(seconds).__name__}")
    if not 0 < seconds < 1e8:
        raise ValueError(f"{name}={seconds:g} must be a positive number of seconds below 1e8, for example 300")


def check_backend(backend: str | None) -> None:
    """Raise unless this build of torch has the backend."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be a string or None, not {type(backend).__name__}")
    backends = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    for part in backend.split(",") if backend else ():  # "gloo", or "cpu:gloo,cuda:nccl"
        name = part.rpartition(":")[2].lower()
        if name not in backends:
            raise ValueError(f"backend={backend!r} is unknown: use one of {', '.join(map(repr, backends))}, or None")
        if not getattr(dist, f"is_{name}_available", lambda: True)():
            raise DistributedError(f"backend={backend!r} is not in this build of torch: use backend=None or 'gloo'")


def init(
    backend: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    *,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Join the process group of this run, or create a group of a single process.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are read from the environment, as torchrun sets them. Without any of
    them this process is rank 0 of 1; with RANK and WORLD_SIZE only, the processes of one parent on this machine find
    each other.

    gloo uses the interface on the route to the other nodes, and the loopback interface if there is only one node;
    GLOO_SOCKET_IFNAME names another. In a process that torchrun or ``panther launch`` started, an uncaught exception is
    reported to the launcher, and a launcher that is killed ends its processes (on Linux).

    Args:
        backend: ``"gloo"``, ``"nccl"`` or another backend of torch. None means the backend of ``panther launch
            --backend``, else nccl if every rank has a GPU of its own, else gloo; the ranks decide jointly. With nccl,
            the current CUDA device becomes the GPU of this rank.
        timeout_s: Seconds to wait for the other ranks, and afterwards for each collective operation.
        init_method: Where the ranks meet: ``"env://"`` or None, by the environment, or ``"tcp://HOST:PORT"`` of rank 0,
            in place of MASTER_ADDR and MASTER_PORT.
        rank: Number of this process, in place of RANK; only together with ``world_size``.
        world_size: Number of processes, in place of WORLD_SIZE.

    Raises:
        DistributedError: If ranks are missing (they are named), disagree, or the process is in a group already.
        ValueError: If ``backend``, ``timeout_s``, ``init_method`` or the environment is not valid, or only one of
            ``rank`` and ``world_size`` is given.

    Cost: a few messages a rank.

    Example:
        >>> init()
        >>> torch.distributed.get_world_size()
        1
        >>> shutdown()
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank} and world_size={world_size} belong together: give both, or neither")
    place = _meeting_place(init_method)
    if rank is None or world_size is None:
        rank, world_size = ranks_from_environment()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank that hangs or is stopped would outlive Panther's launcher, which passes on every signal that it gets. A
        # signal such as SIGUSR1 ends torchrun, and ranks then still save.
        end_with_parent(signal.SIGKILL if GRACE_PERIOD_VARIABLE in os.environ else signal.SIGTERM)
        check_parent()  # the launcher may have ended already
        record_uncaught_exceptions(explain_transport_error)
        show_stacks_on_request()
    start_group(rank, world_size, backend or os.environ.get("PANTHER_BACKEND"), timeout_s, place)


def _meeting_place(init_method: str | None) -> tuple[str, str] | None:
    """Return the host and port of an ``init_method``, or None if the environment has them."""
    if init_method in (None, "env://"):
        return None
    match = re.fullmatch(r"tcp://(\[.+\]|[^:/\[]+):(\d+)/?", init_method) if isinstance(init_method, str) else None
    if match is None:
        raise ValueError(f"init_method={init_method!r} must be 'env://' or 'tcp://HOST:PORT'")
    return match[1].strip("[]"), match[2]


def setup_distributed(rank: int, world_size: int, backend: str | None = None) -> None:
    """Join the process group as ``rank`` of ``world_size``, for example in a function that ``mp.spawn`` runs.

    The ranks meet at MASTER_ADDR and MASTER_PORT if these are set. Otherwise they are processes of one parent on this
    machine and need no address.

    Args:
        rank: This process, from 0.
        world_size: Number of processes.
        backend: As in :func:`init`.

    Raises:
        DistributedError: As :func:`init`.
        ValueError: If ``rank`` is not in ``[0, world_size)``, or ``backend`` is unknown.

    Example:
        >>> setup_distributed(0, 1)
        >>> cleanup_distributed()
    """
    start_group(rank, world_size, backend)


def shutdown() -> None:
    """Leave the process group; does nothing outside of one.

    It waits up to 5 s for the other ranks, which may still need the connections of this rank, unless an exception is
    being handled.

    Example:
        >>> init()
        >>> shutdown()
        >>> torch.distributed.is_initialized()
        False
    """
    _at_shutdown.close()
    if in_process_group():
        dist.destroy_process_group()


def cleanup_distributed() -> None:
    """Leave the process group: :func:`shutdown`, by the name that goes with :func:`setup_distributed`.

    Example:
        >>> cleanup_distributed()
    """
    shutdown()


def ranks_from_environment() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE, or 0 and 1 if the environment has no variables of a run."""
    rank_variables = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
    if not rank_variables and not address:
        return 0, 1
    variables = ", ".join(f"{name}={value}" for name, value in (rank_variables | address).items())
    if len(rank_variables) < 2 or not all(value.isdecimal() for value in rank_variables.values()):
        raise ValueError(
            f"RANK and WORLD_SIZE must both be set to numbers, and the environment has {variables}: start with "
            "torchrun, or unset these for a single process"
        )
    return int(rank_variables["RANK"]), int(rank_variables["WORLD_SIZE"])
