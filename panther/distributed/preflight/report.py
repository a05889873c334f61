"""Judge the findings of the ranks, and report faults, with which a run would fail or go wrong, notes, and a table."""

__all__ = ["Findings", "Measured", "NodeInfo", "Report", "describe_node", "judge", "resolves"]

import os
import platform
import shutil
import socket
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch

from panther._text import counted, format_bytes, format_seconds, format_table
from panther._version import __version__
from panther.distributed.comm.agreement import differences
from panther.distributed.comm.handshake import Agreement
from panther.distributed.comm.ranks import name_ranks
from panther.distributed.comm.store import address_of, find_route, interface_of, largest_packet_of

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Measured:
    """Measurements of a connection, by the rank that made it."""

    round_trip_s: float
    offset_s: float
    """Seconds by which the other rank's clock is ahead."""
    bytes_per_s: float
    """Bandwidth of a TCP connection, towards the rank that listens."""


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


_CLOCK_S = 1.0
_SLOW = 0.5  # a pair is slow if its bandwidth is below this share of the median of all pairs
_SHARED_MEMORY_BYTES = 2**28  # docker gives a container 64 MiB by default
_SHOWN = 5


@dataclass
class Findings:
    """The findings of rank 0 so far."""

    world_size: int
    one_host: bool
    where: str
    nodes: dict[int, NodeInfo] = field(default_factory=dict)
    pairs: dict[tuple[int, int], Measured | str] = field(default_factory=dict)
    """Measurements by the rank that connected and the rank that listened; a string is the reason of a failure."""
    unwritable: dict[int, str] = field(default_factory=dict)
    """Reasons why ranks cannot write to the folder, by rank."""
    without_shared_folder: list[int] = field(default_factory=list)
    """Ranks that do not see what rank 0 wrote into the folder, or whose files rank 0 does not see."""
    cannot_resolve_host: list[int] = field(default_factory=list)
    """Ranks that cannot resolve the host name of rank 0."""
    missing: tuple[list[int], str] = field(default_factory=lambda: ([], ""))
    """Ranks that did not answer, and the sentence about them."""
    stopped_after_s: float | None = None
    """Seconds after which no further pairs were tested; None if all were."""


@dataclass(frozen=True)
class Report:
    """The result, equal on all ranks."""

    text: str
    faults: tuple[str, ...]
    notes: tuple[str, ...]


def judge(findings: Findings, free_bytes: float) -> Report:
    """Return the report; ``free_bytes`` is the number of bytes of free disk that each rank should have."""
    faults, notes = [], []
    if findings.missing[0]:
        faults.append(findings.missing[1])
    for rank, node in findings.nodes.items():
        faults += [f"{_name(findings, rank)}: {fault}" for fault in node.faults]
    faults += _compare_nodes(findings)
    faults += _failed_pairs(findings)
    faults += _disk_faults(findings, free_bytes)
    notes += _notes_on_names(findings)
    notes += _notes_on_speed(findings)
    heading = f"{counted(findings.world_size, 'rank')}, meeting {findings.where.partition(', ')[0]}"
    lines = [heading, *([_table(findings)] if findings.nodes else []), *_summary(findings)]
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
        f"{_name(findings, rank)} cannot write to {findings.nodes[rank].folder} ({why}): make the folder, or name a "
        "different one"
        for rank, why in findings.unwritable.items()
    ]
    if findings.without_shared_folder:
        faults.append(
            f"{name_ranks(findings.without_shared_folder)} and rank 0 do not see each other's files in "
            f"{findings.nodes[0].folder}: name a folder of a file system that all nodes share"
        )
    for rank, node in findings.nodes.items():
        if 0 < node.free_bytes < free_bytes:
            faults.append(
                f"{_name(findings, rank)} has {format_bytes(node.free_bytes)} free in {node.folder}, less than "
                f"{format_bytes(free_bytes)}: make room, or name another folder"
            )
    return faults


def _name(findings: Findings, rank: int) -> str:
    return f"rank {rank} ({findings.nodes[rank].host})"


def _failed_pairs(findings: Findings) -> list[str]:
    """Return a fault for each failed pair; a rank to which no rank can connect is a single fault."""
    failed = {pair: why for pair, why in findings.pairs.items() if isinstance(why, str)}
    faults = []
    for rank in findings.nodes if findings.world_size > 2 else ():
        towards = {pair: why for pair, why in failed.items() if pair[1] == rank}
        tested = [pair for pair in findings.pairs if pair[1] == rank]
        if len(tested) > 1 and len(towards) == len(tested):
            faults.append(f"no rank can connect to {_place(findings, rank)}: {next(iter(towards.values()))}")
            failed = {pair: why for pair, why in failed.items() if pair not in towards}
    first_failures = list(failed.items())[:_SHOWN]
    faults += [f"{_name(findings, a)} cannot connect to {_place(findings, b)}: {why}" for (a, b), why in first_failures]
    if len(failed) > _SHOWN:
        more = ", ".join(f"{a} to {b}" for a, b in list(failed)[_SHOWN : _SHOWN + 32])
        faults.append(f"{counted(len(failed) - _SHOWN, 'more pair')} cannot connect: {more}")
    if faults:
        faults[-1] += (
            "; let all ports through between the nodes, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to another "
            "interface"
        )
    return faults


def _place(findings: Findings, rank: int) -> str:
    return f"{_name(findings, rank)} at {findings.nodes[rank].address}:{findings.nodes[rank].port}"


def _notes_on_names(findings: Findings) -> list[str]:
    if findings.one_host:
        return []
    notes, unknown, loopback = [], [], []
    for rank, node in findings.nodes.items():
        if not node.own_name_resolves_to:
            unknown.append(rank)
        elif node.own_name_resolves_to.startswith("127.") or node.own_name_resolves_to == "::1":
            loopback.append(rank)
    fix = "Panther finds the interface by the route; programs without it need GLOO_SOCKET_IFNAME"
    if unknown:
        notes.append(
            f"{name_ranks(unknown)} cannot resolve {'its' if len(unknown) == 1 else 'their'} own host name: {fix}"
        )
    if loopback:
        notes.append(f"on {name_ranks(loopback)} the own host name leads to the loopback interface (/etc/hosts): {fix}")
    if findings.cannot_resolve_host:
        notes.append(
            f"{name_ranks(findings.cannot_resolve_host)} cannot resolve {findings.nodes[0].host}, the host name of "
            "rank 0: give addresses, as in --rdzv-endpoint and MASTER_ADDR"
        )
    return notes


def _notes_on_speed(findings: Findings) -> list[str]:
    notes = [] if findings.one_host else _slow_pairs(findings)
    mtus = {node.mtu for node in findings.nodes.values() if node.mtu}
    if len(mtus) > 1 and not findings.one_host:
        described = differences({rank: {"the MTU": str(node.mtu)} for rank, node in findings.nodes.items()})
        notes.append(f"{described['the MTU']}: set the same on all nodes, as larger packets may be dropped")
    for rank, offset, _ in _offsets(findings):
        if abs(offset) > _CLOCK_S:
            notes.append(
                f"the clock of {_name(findings, rank)} is {format_seconds(abs(offset))} "
                f"{'ahead of' if offset > 0 else 'behind'} the clock of rank 0: synchronise the clocks (NTP), or logs "
                "and times of files cannot be compared"
            )
    small = [
        r for r, n in findings.nodes.items() if (n.shared_memory_bytes or _SHARED_MEMORY_BYTES) < _SHARED_MEMORY_BYTES
    ]
    if small:
        smallest = min(findings.nodes[rank].shared_memory_bytes or 0 for rank in small)
        notes.append(
            f"/dev/shm of {name_ranks(small)} has {format_bytes(smallest)} free: the workers of a DataLoader may end "
            "with a bus error; give containers more (docker run --shm-size)"
        )
    if findings.stopped_after_s is not None:
        left = findings.world_size * (findings.world_size - 1) - len(findings.pairs)
        were = counted(left, "connection was", "connections were")
        notes.append(f"{were} not tested, as {findings.stopped_after_s:g} s had passed")
    return notes


def _slow_pairs(findings: Findings) -> list[str]:
    measured = {pair: result for pair, result in findings.pairs.items() if isinstance(result, Measured)}
    median = statistics.median(result.bytes_per_s for result in measured.values()) if measured else 0.0
    slow = sorted(
        (result.bytes_per_s, pair) for pair, result in measured.items() if result.bytes_per_s < _SLOW * median
    )
    return [
        f"from {_name(findings, a)} to {_name(findings, b)} a connection carries "
        f"{format_bytes(rate)}/s, less than half of the median of all pairs ({format_bytes(median)}/s)"
        for rate, (a, b) in slow[:_SHOWN]
    ]


def _offsets(findings: Findings) -> list[tuple[int, float, float]]:
    """Return each rank, the seconds by which its clock is ahead of rank 0's, and the round trip of the measurement."""
    return [
        (b, result.offset_s, result.round_trip_s)
        for (a, b), result in sorted(findings.pairs.items())
        if a == 0 and isinstance(result, Measured)
    ]


def _summary(findings: Findings) -> list[str]:
    measured = [result for result in findings.pairs.values() if isinstance(result, Measured)]
    if not measured:
        return []
    rates, trips = sorted(result.bytes_per_s for result in measured), sorted(result.round_trip_s for result in measured)
    return [
        f"{counted(len(measured), 'connection')} between pairs: {format_bytes(rates[0])}/s to "
        f"{format_bytes(rates[-1])}/s, round trip {format_seconds(trips[0])} to {format_seconds(trips[-1])}"
    ]


def _table(findings: Findings) -> str:
    # An offset below half of the round trip cannot be distinguished from 0.
    offsets = {rank: 0.0 if abs(offset) < trip / 2 else offset for rank, offset, trip in _offsets(findings)} | {0: 0.0}
    rows = [["rank", "host", "address", "interface", "MTU", *findings.nodes[0].versions, "GPUs", "free disk", "clock"]]
    for rank, node in findings.nodes.items():
        offset = offsets.get(rank)
        clock = "-" if offset is None else "0" if not offset else f"{'+-'[offset < 0]}{format_seconds(abs(offset))}"
        versions = [node.versions.get(name, "-") for name in findings.nodes[0].versions]
        rows.append([
            str(rank), node.host, node.address, node.interface or "-", str(node.mtu or "-"), *versions, str(node.gpus),
            format_bytes(node.free_bytes) if node.free_bytes else "-", clock,
        ])  # fmt: skip
    return format_table(rows)
