"""Where the ranks of one run meet before they have a process group: a store that all of them reach.

With MASTER_ADDR and MASTER_PORT in the environment that is torch's TCP store. Without them the ranks are processes of
one machine with one parent, as under ``mp.spawn``, and meet in a file. Rank 0 makes a file of its own and publishes its
name in a *pointer*, which bears rank 0's process id and start time, so that what a crashed run leaves behind is never
taken for the present one.
"""

__all__ = ["open_store"]

import getpass
import json
import os
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from panther.errors import DistributedError

_POLL_S = 0.02

_joined: set[str] = set()  # files this process has used: a second init of one process must not meet in the first's file


def open_store(
    rank: int,
    world_size: int,
    timeout_s: float,
    deadline: float,  # on time.monotonic's clock
) -> tuple[dist.Store, Callable[[], None]]:
    """Open the store of this run, and a function that removes what it leaves on disk.

    Raises:
        DistributedError: If rank 0, which makes the store, does not come before the deadline.
    """
    if "MASTER_ADDR" in os.environ or "MASTER_PORT" in os.environ:
        return _tcp_store(rank, world_size, timeout_s, deadline), _nothing
    if world_size == 1:
        return dist.HashStore(), _nothing
    folder = _private_folder()
    key = f"{os.getppid()}-{_start_time(os.getppid())}"
    if rank == 0:
        return _publish(folder, key, world_size)
    return _find(folder, key, rank, world_size, timeout_s, deadline), _nothing


def _nothing() -> None:
    pass


def _tcp_store(rank: int, world_size: int, timeout_s: float, deadline: float) -> dist.Store:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise DistributedError(
            f"MASTER_ADDR={address!r} and MASTER_PORT={port!r} must be a host and a port number: set both, or unset "
            "both to start on one machine"
        )
    try:
        socket.getaddrinfo(address, int(port))  # torch would print a C++ stack for each attempt
    except OSError as error:
        raise DistributedError(
            f"MASTER_ADDR={address} cannot be resolved ({error}): use rank 0's host name or address"
        ) from error
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = "the launcher" if agent_hosts else "rank 0"
    if rank != 0 or agent_hosts:
        # torch's client prints a C++ stack for each attempt that fails, so it connects once somebody listens.
        while not _listens(address, int(port)):
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"{host} did not listen at {address}:{port} within {timeout_s:g} s, for rank {rank} of "
                    f"{world_size}: start it, or correct MASTER_ADDR and MASTER_PORT"
                )
            time.sleep(5 * _POLL_S)
    try:
        # A world size of -1 keeps rank 0 from waiting here for the others: the check-in does, and names who is missing.
        store: dist.Store = next(
            rendezvous(f"env://?rank={rank}&world_size=-1", timeout=timedelta(seconds=_left(deadline)))
        )[0]
    except (RuntimeError, ValueError, OSError) as error:
        fault = "cannot listen" if rank == 0 and not agent_hosts else f"cannot reach {host}"
        raise DistributedError(
            f"rank {rank} of {world_size} {fault} at MASTER_ADDR={address}, MASTER_PORT={port}: {_first_line(error)}; "
            "use rank 0's address and a free port"
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=5):
            return True
    except OSError:
        return False


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


@dataclass(frozen=True)
class _Pointer:
    """Says which file the ranks of one parent meet in, and which process made it."""

    pid: int
    started: str
    token: str
    world_size: int

    @classmethod
    def read(cls, path: Path) -> Self | None:
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def file(self, folder: Path) -> Path:
        return folder / f"{self.pid}-{self.started}-{self.token}.store"


def _publish(folder: Path, key: str, world_size: int) -> tuple[dist.Store, Callable[[], None]]:
    for leftover in folder.glob("*.store"):
        pid, started, _ = leftover.name.split("-", 2)
        if not _is_alive(int(pid), started):
            leftover.unlink(missing_ok=True)
    for path in folder.glob("*.json"):
        pointer = _Pointer.read(path)
        if pointer is not None and not _is_alive(pointer.pid, pointer.started):
            path.unlink(missing_ok=True)

    pointer = _Pointer(os.getpid(), _start_time(os.getpid()), uuid.uuid4().hex, world_size)
    path, file = folder / f"{key}.json", pointer.file(folder)
    store = dist.FileStore(str(file), world_size)
    draft = folder / f"{pointer.token}.draft"
    draft.write_text(json.dumps(asdict(pointer)))
    draft.replace(path)

    def remove() -> None:
        if _Pointer.read(path) == pointer:
            path.unlink(missing_ok=True)
        if not store.check(["complete"]):  # a complete run's file goes with the last of its stores
            file.unlink(missing_ok=True)

    return store, remove


def _find(folder: Path, key: str, rank: int, world_size: int, timeout_s: float, deadline: float) -> dist.Store:
    path = folder / f"{key}.json"
    other = ""
    while True:
        pointer = _Pointer.read(path)
        if pointer is not None and pointer.token not in _joined and _is_alive(pointer.pid, pointer.started):
            if pointer.world_size != world_size:
                other = f" (process {pointer.pid} offers a world of {pointer.world_size})"
            else:
                store = dist.FileStore(str(pointer.file(folder)), world_size)
                _joined.add(pointer.token)
                if not store.check(["complete"]):
                    return store
                other = f" (the run of process {pointer.pid} is complete)"
        if time.monotonic() > deadline:
            raise DistributedError(
                f"rank 0 of {world_size} did not come within {timeout_s:g} s, for rank {rank}{other}: start every rank "
                "from one parent process, or set MASTER_ADDR and MASTER_PORT"
            )
        time.sleep(_POLL_S)


def _private_folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    folder = Path(tempfile.gettempdir()) / f"panther-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != user):
        raise DistributedError(
            f"{folder} must be a folder of this user, for the ranks to meet in: remove it, or set MASTER_ADDR and "
            "MASTER_PORT"
        )
    return folder


def _start_time(pid: int) -> str:
    """Start time of a process in clock ticks since boot, which tells it from a later one of its id; "" if unknown."""
    fields = _stat_fields(pid)
    return "" if fields is None else fields[19]


def _is_alive(pid: int, started: str) -> bool:
    fields = _stat_fields(pid)
    if fields is not None:
        return fields[19] == started and fields[0] not in "ZX"  # a zombie has ended and waits for its parent
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/pid/stat from the third, the state, on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
