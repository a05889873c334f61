"""The store in which the ranks of one run meet before they have a process group.

With MASTER_ADDR and MASTER_PORT in the environment, it is torch's TCP store. Without them, the ranks are processes of
one machine with one parent, as under ``mp.spawn``. They meet in a file that is named after the parent, and their
process group uses a second file. The last rank that has these files open removes them.

The route from a machine to the host of the store also determines on which interface the machine reaches other ranks.
"""

__all__ = ["Meeting", "Route", "address_of", "find_route", "interface_of", "listens", "open_store"]

import getpass
import ipaddress
import os
import socket
import stat
import struct
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from panther.distributed.comm.ending import check_parent
from panther.errors import DistributedError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_POLL_S = 0.02
_LAUNCHER_S = 10.0  # a busy launcher on this machine answers within this time
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Route:
    """The addresses between which this machine reaches a host."""

    own_address: str
    host_address: str

    @property
    def is_loopback(self) -> bool:
        """Whether the route leads only to this machine, as it does for ``127.0.1.1 name`` in /etc/hosts."""
        return ipaddress.ip_address(self.own_address.partition("%")[0]).is_loopback

    @property
    def is_local(self) -> bool:
        """Whether the host is this machine."""
        return self.is_loopback or self.own_address == self.host_address

    def __str__(self) -> str:
        return f"from {self.own_address} on interface {interface_of(self.own_address) or 'unknown'}"


def find_route(host: str, port: int = 1) -> Route:
    """Return the route to a host; raise OSError if no route exists, or the name cannot be resolved.

    Nothing is sent: connecting a UDP socket only asks the kernel for the route.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return Route(probe.getsockname()[0], str(address[0]))


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address; None if it is not found, or the system is not Linux."""
    if fcntl is None or not hasattr(socket, "if_nameindex") or not Path("/proc/self").exists():
        return None
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback:
        return "lo"
    if ip.version == 6:
        lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((fields[-1] for fields in lines if int(fields[0], 16) == int(ip)), None)
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has no address, or the system is not Linux."""
    if fcntl is None or not Path("/proc/self").exists():
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # the interface does not exist or has no address
            return None
    return socket.inet_ntoa(answer[20:24])


def listens(host: str, port: int) -> bool:
    """Return whether the port accepts connections. torch's own client would log a stack for each failure."""
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


@dataclass(frozen=True)
class Meeting:
    """The store in which ranks meet, and how long they wait for each other."""

    store: dist.Store
    timeout_s: float
    deadline: float
    """Time of ``time.monotonic`` until which the ranks wait."""
    where: str = "on this machine"
    """The address of the store, and the address and interface from which it is reached, for errors."""
    own_address: str = ""
    """Address by which this machine reaches the host of the store, if the host may be a different machine."""
    folder: Path | None = None
    """Folder for the file of the process group, if the store is a file."""

    def group_store(self, token: str, world_size: int) -> dist.Store:
        """Return the store of the process group that the ranks have agreed on."""
        if self.folder is None:
            return dist.PrefixStore(token, self.store)
        return dist.FileStore(str(self.folder / token), world_size)


def open_store(rank: int, world_size: int, timeout_s: float, place: tuple[str, str] | None = None) -> Meeting:
    """Open the store of this run, at a host and port in place of MASTER_ADDR and MASTER_PORT.

    Raises:
        DistributedError: If the store cannot be created, or reached before the deadline.
    """
    deadline = time.monotonic() + timeout_s
    if place is not None or "MASTER_ADDR" in os.environ or "MASTER_PORT" in os.environ:
        place = place or (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
        return _tcp_store(rank, world_size, timeout_s, deadline, *place)
    if world_size == 1:
        return Meeting(dist.HashStore(), timeout_s, deadline)
    folder = _private_folder()
    # The name contains nothing but the parent's id, because ranks may have met a different number of times before. The
    # file is closed once the ranks are connected, and so before one of them can meet again.
    store = dist.FileStore(str(folder / str(os.getppid())), world_size)
    where = "on this machine, among processes of one parent, as MASTER_ADDR and MASTER_PORT are not set"
    return Meeting(store, timeout_s, deadline, where, folder=folder)


def _tcp_store(rank: int, world_size: int, timeout_s: float, deadline: float, address: str, port: str) -> Meeting:
    if not address or not port.isdecimal():
        raise DistributedError(
            f"MASTER_ADDR={address!r} and MASTER_PORT={port!r} must be a host and a port number: set both, or unset "
            "both to start on one machine"
        )
    try:
        route = find_route(address, int(port))
    except OSError as error:
        raise DistributedError(
            f"MASTER_ADDR={address} cannot be resolved or reached ({error}): use rank 0's host name or address"
        ) from error
    where = f"at {address}:{port}, tried {route}"
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = "the launcher" if agent_hosts else "rank 0"
    if rank != 0 or agent_hosts:
        # A launcher listens before it starts a rank. A launcher on this machine that does not listen has ended.
        wait_s = min(timeout_s, _LAUNCHER_S) if agent_hosts and route.is_local else timeout_s
        limit = deadline - timeout_s + wait_s
        while not listens(address, int(port)):
            check_parent()
            if time.monotonic() > limit:
                raise DistributedError(
                    f"{host} did not listen {where} within {wait_s:g} s, for rank {rank} of {world_size}: start it, "
                    "or correct MASTER_ADDR and MASTER_PORT"
                )
            time.sleep(5 * _POLL_S)
    try:
        store = dist.TCPStore(
            address,
            int(port),
            is_master=rank == 0 and not agent_hosts,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
            wait_for_workers=False,  # the check-in waits and names missing ranks
            multi_tenant=True,  # a process may host the store of a port again
        )
    except (RuntimeError, ValueError, OSError) as error:
        fault = "cannot listen" if rank == 0 and not agent_hosts else f"cannot reach {host}"
        cause = str(error).split("\n", 1)[0]
        raise DistributedError(
            f"rank {rank} of {world_size} {fault} {where}: {cause}; set MASTER_ADDR to rank 0's address and "
            "MASTER_PORT to a free port"
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))  # the deadline was for connecting only
    return Meeting(store, timeout_s, deadline, where, "" if route.is_loopback else route.own_address)


def _private_folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    folder = Path(tempfile.gettempdir()) / f"panther-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)  # all users write to /tmp, and a file of a different user must not count
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != user):
        raise DistributedError(
            f"{folder} must be a folder of this user, for the ranks to meet in: remove it, or set MASTER_ADDR and "
            "MASTER_PORT"
        )
    return folder
