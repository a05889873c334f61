"""The report of a rank about its node: names, the interface that gloo would use, versions, free disk."""

__all__ = ["NodeInfo", "describe_node", "resolves"]

import os
import platform
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from panther._version import __version__
from panther.distributed.comm.handshake import Agreement
from panther.distributed.comm.store import address_of, find_route, interface_of, largest_packet_of

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class NodeInfo:
    """The report of a rank about its node."""

    host: str
    own_name_resolves_to: str
    """Address to which this node resolves its host name; "" if it cannot."""
    address: str
    interface: str
    """Interface that gloo would use, by GLOO_SOCKET_IFNAME or by the route to the other nodes; "" if unknown."""
    mtu: int
    """Largest packet of the interface in bytes; 0 if it is unknown."""
    versions: dict[str, str]
    folder: str
    free_bytes: int
    """Free bytes of the file system of the folder; 0 if there is no such folder."""
    shared_memory_bytes: int | None
    """Free bytes in /dev/shm, through which the workers of a DataLoader send batches; None without /dev/shm."""
    gpus: int
    faults: tuple[str, ...]
    """Faults that were found on this node without the other nodes."""
    port: int = 0
    """Port on which this rank listens."""


def describe_node(agreement: Agreement, folder: Path) -> NodeInfo:
    """Return the report of this rank; ``agreement`` is the result of the ranks' meeting."""
    faults = [text for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if (text := _wrong_interface(name))]
    interface_name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = address_of(interface_name) if interface_name else None
    if address is None:
        try:
            address = "127.0.0.1" if agreement.one_host else find_route(agreement.address).own_address
        except OSError as error:
            address = "127.0.0.1"
            faults.append(f"there is no route to {agreement.address} ({error.strerror or error})")
    interface = interface_of(address) or ""
    host = socket.gethostname()
    try:
        leads_to = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        leads_to = ""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # the ranks will try to write to the folder, and report the error
        free = 0
    shm = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    versions = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "Panther": __version__,
    }
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
    return NodeInfo(
        host, leads_to, address, interface, largest_packet_of(interface), versions, str(folder.absolute()), free, shm,
        torch.cuda.device_count(), tuple(faults),
    )  # fmt: skip


def resolves(host: str) -> bool:
    """Return whether this node can resolve the name of a host."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _wrong_interface(variable: str) -> str | None:
    """Return a message if a variable names no interface of this node, and otherwise None.

    NCCL's variable may begin with = (exact names) or ^ (all interfaces except for these).
    """
    value = os.environ.get(variable, "")
    if not value or not hasattr(socket, "if_nameindex"):
        return None
    names = [name for _, name in socket.if_nameindex()]
    patterns = value.lstrip("^=").split(",")
    exact = value.startswith("=") or variable.startswith("GLOO")
    matches = any(name in patterns if exact else name.startswith(tuple(patterns)) for name in names)
    if matches or value.startswith("^"):
        return None
    return f"{variable}={value} names no interface of this node, which has {', '.join(names)}: correct it"
