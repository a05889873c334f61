"""The checks of ``panther doctor --nodes`` between the ranks of a run before it is started.

They need no process group, because making one often fails. The ranks meet in the store of the run, and each connects to
all others by a socket of its own, as gloo does, on ports that the system chooses. A connection begins with the token of
this run and the rank that is expected, so that a different program, or a different rank at the same address, is not
mistaken for it. Rank 0 judges the answers and gives all ranks the same report: faults, with which a run would fail or
go wrong, notes, and a table.
"""

__all__ = ["check_nodes"]

import ipaddress
import json
import os
import platform
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from panther._text import counted, format_bytes, format_table
from panther._version import __version__
from panther.distributed.comm.agreement import differences
from panther.distributed.comm.handshake import Agreement, check_in, lost_store_explained, meet, pauses, values_of
from panther.distributed.comm.ranks import name_ranks
from panther.distributed.comm.store import Meeting, address_of, find_route, interface_of
from panther.errors import DistributedError

_CONNECT_S = 5.0
_THREADS = 64  # connections that a rank tests at the same time
_READ_S = 5.0  # time in which all ranks read the report
_DATA = bytes(2**16)  # larger than a packet, because a network may drop large packets only
_TARGET = struct.Struct("!I")
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_BYTES = 2**28  # docker gives a container 64 MiB by default
_SHOWN = 5


@dataclass(frozen=True)
class NodeInfo:
    """The report of a rank about its node."""

    host: str
    address: str
    interface: str
    """Interface that gloo would use, by GLOO_SOCKET_IFNAME or by the route to the other nodes; "" if unknown."""
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
    unwritable: str = ""
    """Reason why this rank cannot write to the shared folder."""


@dataclass
class Findings:
    """The findings of rank 0 so far."""

    world_size: int
    one_host: bool
    where: str
    nodes: dict[int, NodeInfo] = field(default_factory=dict)
    connections: dict[tuple[int, int], str] = field(default_factory=dict)
    """By the rank that connected and the rank that listened: the reason of a failure; "" is none."""
    without_shared_folder: list[int] = field(default_factory=list)
    """Ranks that do not see what rank 0 wrote into the folder, or whose files rank 0 does not see."""
    absent: list[int] = field(default_factory=list)
    """Ranks that did not answer in the last step."""
    last_step: str = ""


@dataclass(frozen=True)
class Report:
    """The result, equal on all ranks."""

    text: str
    faults: tuple[str, ...]
    notes: tuple[str, ...]


def check_nodes(
    meeting: Meeting, rank: int, world_size: int, folder: Path | None = None, free_bytes: float = 1e9
) -> Report:
    """Check interfaces, versions, disk, a shared folder and the connections of all pairs of ranks.

    Every rank must call it. It needs no process group, and makes none. The timeout of the meeting applies to each step.

    Raises:
        DistributedError: If ranks are missing (they are named), or rank 0 is lost.
    """
    agreement = check_in(meeting, rank, world_size, None)
    store = meeting.group_store(agreement.token, world_size)
    findings = Findings(world_size, agreement.one_host, meeting.where)

    def gather(name: str, value: dict[str, Any], doing: str) -> dict[int, dict[str, Any]]:
        """Return the values of all ranks on rank 0, and note the ranks that do not answer."""
        store.set(f"{name}/{rank}", json.dumps(value))
        if rank:
            return {}
        values = values_of(store, name, range(world_size), time.monotonic() + meeting.timeout_s)
        findings.absent = [other for other in range(world_size) if other not in values]
        findings.last_step = f"within {meeting.timeout_s:g} s, {doing}"
        return values

    with lost_store_explained(meeting, rank, world_size), ExitStack() as files:
        prefix = f".panther-{agreement.token[:16]}"  # a new name each time: file systems cache that a file is missing
        info = files.enter_context(_present(agreement, rank, folder, prefix))
        answers = gather("node", asdict(info), "describing its node")
        findings.nodes = {other: NodeInfo(**answer) for other, answer in answers.items()}
        visible_ranks = [other for other in answers if folder is not None and (folder / f"{prefix}-{other}").exists()]
        if rank == 0 and not findings.absent:
            store.set("places", json.dumps([(node.address, node.port) for node in findings.nodes.values()]))
        if not findings.absent and (places := _wait_for(store, "places", rank, world_size, meeting.timeout_s)):
            # A firewall may block one direction only, so both ranks of a pair connect.
            timeout_s = min(_CONNECT_S, meeting.timeout_s / 2 / -(-world_size // _THREADS))
            connected = _connect_to_all(places, rank, agreement.token, timeout_s)
            sees = folder is None or (folder / f"{prefix}-0").exists()
            results = gather("result", {"connected": connected, "sees": sees}, "testing its connections")
            for other, result in results.items():
                findings.connections |= {(other, target): failure for target, failure in result["connected"]}
            if folder is not None and not info.unwritable:
                findings.without_shared_folder = [
                    other
                    for other, result in results.items()
                    if not (result["sees"] and other in visible_ranks) and not findings.nodes[other].unwritable
                ]
        if rank == 0:
            report = judge(findings, free_bytes)
            store.set("report", json.dumps(asdict(report)))
        report = Report(**_wait_for(store, "report", rank, world_size, meeting.timeout_s))
        # Rank 0 may host the store, so it stays until the other ranks have read the report.
        if rank:
            store.add("read", 1)
        else:
            meet(store, "read", world_size - len(findings.absent), time.monotonic() + _READ_S)
        return Report(report.text, tuple(report.faults), tuple(report.notes))


def _wait_for(store: dist.Store, key: str, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return a value that rank 0 sets; None if rank 0 has ended the checks with its report instead."""
    deadline = time.monotonic() + 2 * timeout_s
    for _ in pauses():
        if store.check([key]):
            return json.loads(store.get(key))
        if key != "report" and store.check(["report"]):
            return None
        if time.monotonic() > deadline:
            break
    raise DistributedError(
        f"rank 0 did not answer rank {rank} of {world_size} within {2 * timeout_s:g} s: it has exited or hangs; see "
        "its log"
    )


@contextmanager
def _present(agreement: Agreement, rank: int, folder: Path | None, prefix: str) -> Iterator[NodeInfo]:
    """Listen for other ranks and show a file in the shared folder during the block; yield the description of the node.

    ``agreement`` is the result of the ranks' meeting.
    """
    faults = [text for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if (text := _wrong_interface(name))]
    address = address_of(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0])
    if address is None:
        try:
            address = "127.0.0.1" if agreement.one_host else find_route(agreement.address).own_address
        except OSError as error:
            address = "127.0.0.1"
            faults.append(f"there is no route to {agreement.address} ({error.strerror or error})")
    listener, unwritable, free = None, "", 0
    family = socket.AF_INET6 if ipaddress.ip_address(address.partition("%")[0]).version == 6 else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family)
        hello = agreement.token.encode() + _TARGET.pack(rank)
        threading.Thread(target=_accept, args=(listener, hello), name="panther-preflight", daemon=True).start()
    except OSError as error:
        faults.append(f"it cannot listen on {address} ({error.strerror or error})")
    if folder is not None:
        try:
            (folder / f"{prefix}-{rank}").touch()
        except OSError as error:
            unwritable = error.strerror or str(error)
    with suppress(OSError):  # there is no such folder
        free = shutil.disk_usage(folder or Path()).free
    versions = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "Panther": __version__,
    }
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
    try:
        yield NodeInfo(
            host=socket.gethostname(),
            address=address,
            interface=interface_of(address) or "",
            versions=versions,
            folder=str((folder or Path()).absolute()),
            free_bytes=free,
            shared_memory_bytes=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
            gpus=torch.cuda.device_count(),
            faults=tuple(faults),
            port=listener.getsockname()[1] if listener else 0,
            unwritable=unwritable,
        )
    finally:
        if listener is not None:
            with suppress(OSError):  # closing alone would leave the thread in accept
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        if folder is not None:
            with suppress(OSError):
                (folder / f"{prefix}-{rank}").unlink()


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


def _accept(listener: socket.socket, hello: bytes) -> None:
    with suppress(OSError):
        while True:
            connection = listener.accept()[0]
            threading.Thread(target=_serve, args=(connection, hello), daemon=True).start()


def _serve(connection: socket.socket, hello: bytes) -> None:
    with connection, suppress(OSError):
        connection.settimeout(60)
        if _read(connection, len(hello)) == hello:
            _read(connection, len(_DATA))
            connection.sendall(b"!")


def _connect_to_all(places: list[tuple[str, int]], rank: int, token: str, timeout_s: float) -> list[tuple[int, str]]:
    """Return what :func:`connect` returns for each other rank, given the addresses and ports of all ranks."""
    other_ranks = [other for other in range(len(places)) if other != rank]
    with ThreadPoolExecutor(min(len(places), _THREADS)) as threads:
        outcomes = threads.map(lambda other: connect(*places[other], other, token, timeout_s), other_ranks)
        return list(zip(other_ranks, outcomes, strict=True))


def connect(address: str, port: int, rank: int, token: str, timeout_s: float) -> str:
    """Connect to the listener of a rank and send it data; return the reason of a failure, or ""."""
    try:
        connection = socket.create_connection((address, port), timeout=timeout_s)
    except ConnectionRefusedError:
        return "the connection was refused, for example by a firewall"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s, for example because a firewall drops packets"
    except OSError as error:
        return error.strerror or str(error)
    with connection:
        try:
            connection.sendall(token.encode() + _TARGET.pack(rank) + _DATA)
            _read(connection, 1)
            return ""
        except TimeoutError:
            return (
                f"connected, but data did not arrive within {timeout_s:g} s, for example because large packets are "
                "dropped (MTU)"
            )
        except ConnectionError as error:
            return f"a different program answered there, or the connection broke ({error.strerror or error})"
        except OSError as error:
            return error.strerror or str(error)


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (chunk := connection.recv(count - len(data))):
            raise ConnectionError("it was closed")
        data += chunk
    return data


def judge(findings: Findings, free_bytes: float) -> Report:
    """Return the report; ``free_bytes`` is the number of bytes of free disk that each rank should have."""
    faults = []
    if findings.absent:
        reasons = [f"rank {rank} did not answer {findings.last_step}" for rank in findings.absent[:_SHOWN]]
        reasons += [f"and {more} more"] if (more := len(findings.absent) - _SHOWN) > 0 else []
        faults.append(f"{'; '.join(reasons)}: it has exited or hangs; see its log")
    for rank, node in findings.nodes.items():
        faults += [f"{_name(findings, rank)}: {fault}" for fault in node.faults]
    faults += [*_compare_nodes(findings), *_failed_connections(findings), *_disk_faults(findings, free_bytes)]
    notes = _notes(findings)
    heading = f"{counted(findings.world_size, 'rank')}, meeting {findings.where.partition(', ')[0]}"
    lines = [heading, *([_table(findings)] if findings.nodes else [])]
    if num_connections := sum(not failure for failure in findings.connections.values()):
        lines.append(f"{counted(num_connections, 'connection')} between pairs")
    for title, texts in (("fault", faults), ("note", notes)):
        lines += [f"{title}: {text}" for text in texts]
    lines.append("no faults" if not faults else counted(len(faults), "fault"))
    return Report("\n".join(lines), tuple(faults), tuple(notes))


def _compare_nodes(findings: Findings) -> list[str]:
    differing = differences({rank: node.versions for rank, node in findings.nodes.items()})
    faults = [f"{text}: install the same version everywhere" for text in differing.values()]
    by_address: dict[str, list[int]] = {}
    for rank, node in findings.nodes.items():
        by_address.setdefault(node.address, []).append(rank)
    for address, ranks in by_address.items():
        hosts = {findings.nodes[rank].host for rank in ranks}
        if len(hosts) > 1 and not findings.one_host:
            faults.append(
                f"{name_ranks(ranks)} are on the hosts {', '.join(sorted(hosts))} and have one address, {address} on "
                f"{findings.nodes[ranks[0]].interface or 'an unknown interface'}: set GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME to the interface that leads to the other nodes"
            )
    return faults


def _disk_faults(findings: Findings, free_bytes: float) -> list[str]:
    faults = [
        f"{_name(findings, rank)} cannot write to {node.folder} ({node.unwritable}): make the folder, or name a "
        "different one"
        for rank, node in findings.nodes.items()
        if node.unwritable
    ]
    if findings.without_shared_folder:
        faults.append(
            f"{name_ranks(findings.without_shared_folder)} and rank 0 do not see each other's files in "
            f"{findings.nodes[0].folder}: name a folder of a file system that all nodes share"
        )
    return faults + [
        f"{_name(findings, rank)} has {format_bytes(node.free_bytes)} free in {node.folder}, less than "
        f"{format_bytes(free_bytes)}: make room, or name another folder"
        for rank, node in findings.nodes.items()
        if 0 < node.free_bytes < free_bytes
    ]


def _name(findings: Findings, rank: int) -> str:
    return f"rank {rank} ({findings.nodes[rank].host})"


def _failed_connections(findings: Findings) -> list[str]:
    """Return a fault for each pair that cannot connect; a rank to which no rank can connect is a single fault."""
    failed = {pair: why for pair, why in findings.connections.items() if why and pair[1] not in findings.absent}
    places = {rank: f"{_name(findings, rank)} at {node.address}:{node.port}" for rank, node in findings.nodes.items()}
    faults = []
    for rank in findings.nodes if findings.world_size > 2 else ():
        towards = {pair: why for pair, why in failed.items() if pair[1] == rank}
        if len(towards) == findings.world_size - 1:
            faults.append(f"no rank can connect to {places[rank]}: {next(iter(towards.values()))}")
            failed = {pair: why for pair, why in failed.items() if pair not in towards}
    first_failures = list(failed.items())[:_SHOWN]
    faults += [f"{_name(findings, a)} cannot connect to {places[b]}: {why}" for (a, b), why in first_failures]
    if len(failed) > _SHOWN:
        more = ", ".join(f"{a} to {b}" for a, b in list(failed)[_SHOWN : _SHOWN + 32])
        faults.append(f"{counted(len(failed) - _SHOWN, 'more pair')} cannot connect: {more}")
    if faults:
        faults[-1] += (
            "; let all ports through between the nodes, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to another "
            "interface"
        )
    return faults


def _notes(findings: Findings) -> list[str]:
    shared_memory = {rank: node.shared_memory_bytes for rank, node in findings.nodes.items()}
    small = {rank: size for rank, size in shared_memory.items() if size is not None and size < _SHARED_MEMORY_BYTES}
    if not small:
        return []
    return [
        f"/dev/shm of {name_ranks(list(small))} has {format_bytes(min(small.values()))} free: the workers of a "
        "DataLoader may end with a bus error; give containers more (docker run --shm-size)"
    ]


def _table(findings: Findings) -> str:
    rows = [["rank", "host", "address", "interface", *findings.nodes[0].versions, "GPUs", "free disk"]]
    for rank, node in findings.nodes.items():
        versions = [node.versions.get(name, "-") for name in findings.nodes[0].versions]
        free = format_bytes(node.free_bytes) if node.free_bytes else "-"
        rows.append([str(rank), node.host, node.address, node.interface or "-", *versions, str(node.gpus), free])
    return format_table(rows)
