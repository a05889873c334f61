"""Judge what the ranks have found: faults, with which a run would fail or go wrong; notes; a table."""

__all__ = ["Found", "Report", "judge"]

import statistics
from dataclasses import dataclass, field

from panther._text import counted, format_bytes, format_seconds, format_table
from panther.distributed.comm._agreement import differences
from panther.distributed.comm._ranks import name_ranks
from panther.distributed.preflight.node import NodeInfo
from panther.distributed.preflight.pairs import Measured

_CLOCK_S = 1.0
_SLOW = 0.5  # of the median of all pairs
_SHARED_MEMORY_BYTES = 2**28  # docker gives a container 64 MiB unless told otherwise
_SHOWN = 5


@dataclass
class Found:
    """What rank 0 has learned so far."""

    world_size: int
    one_host: bool
    where: str
    nodes: dict[int, NodeInfo] = field(default_factory=dict)
    pairs: dict[tuple[int, int], Measured | str] = field(default_factory=dict)
    """By the rank that connected and the one that listened; a string says why it failed."""
    unwritable: dict[int, str] = field(default_factory=dict)
    """Why ranks cannot write to the folder."""
    blind: list[int] = field(default_factory=list)
    """Ranks that do not see what rank 0 wrote into the folder, or whose files rank 0 does not see."""
    strangers: list[int] = field(default_factory=list)
    """Ranks that cannot resolve the host name of rank 0."""
    missing: tuple[list[int], str] = field(default_factory=lambda: ([], ""))
    """Ranks that did not answer, and the sentence about them."""
    stopped_after_s: float | None = None
    """When no more pairs were tested, if it took too long."""


@dataclass(frozen=True)
class Report:
    """The result, equal on all ranks."""

    text: str
    faults: tuple[str, ...]
    notes: tuple[str, ...]


def judge(found: Found, free_bytes: float) -> Report:
    """Return the report; ``free_bytes`` of free disk are asked for."""
    faults, notes = [], []
    if found.missing[0]:
        faults.append(found.missing[1])
    for rank, node in found.nodes.items():
        faults += [f"{_name(found, rank)}: {fault}" for fault in node.faults]
    faults += _compare_nodes(found)
    faults += _failed_pairs(found)
    faults += _disk_faults(found, free_bytes)
    notes += _notes_on_names(found)
    notes += _notes_on_speed(found)
    heading = f"{counted(found.world_size, 'rank')}, meeting {found.where.partition(', ')[0]}"
    lines = [heading, *([_table(found)] if found.nodes else []), *_summary(found)]
    for title, texts in (("fault", faults), ("note", notes)):
        lines += [f"{title}: {text}" for text in texts]
    lines.append("no faults" if not faults else counted(len(faults), "fault"))
    return Report("\n".join(lines), tuple(faults), tuple(notes))


def _compare_nodes(found: Found) -> list[str]:
    differing = differences({rank: node.versions for rank, node in found.nodes.items()})
    faults = [f"{text}: install the same version everywhere" for text in differing.values()]
    by_address: dict[str, list[int]] = {}
    for rank, node in found.nodes.items():
        by_address.setdefault(node.address, []).append(rank)
    for address, ranks in by_address.items():
        hosts = {found.nodes[rank].host for rank in ranks}
        if len(hosts) > 1 and not found.one_host:
            faults.append(
                f"{name_ranks(ranks)} are on the hosts {', '.join(sorted(hosts))} and have one address, {address} on "
                f"{found.nodes[ranks[0]].interface or 'an unknown interface'}: set GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME to the interface that leads to the other nodes"
            )
    return faults


def _disk_faults(found: Found, free_bytes: float) -> list[str]:
    faults = [
        f"{_name(found, rank)} cannot write to {found.nodes[rank].folder} ({why}): make the folder, or name another one"
        for rank, why in found.unwritable.items()
    ]
    if found.blind:
        faults.append(
            f"{name_ranks(found.blind)} and rank 0 do not see each other's files in {found.nodes[0].folder}: name a "
            "folder of a file system that all nodes share"
        )
    for rank, node in found.nodes.items():
        if 0 < node.free_bytes < free_bytes:
            faults.append(
                f"{_name(found, rank)} has {format_bytes(node.free_bytes)} free in {node.folder}, less than "
                f"{format_bytes(free_bytes)}: make room, or name another folder"
            )
    return faults


def _name(found: Found, rank: int) -> str:
    return f"rank {rank} ({found.nodes[rank].host})"


def _failed_pairs(found: Found) -> list[str]:
    """Return a fault for each pair, and one for each rank that fails with all others."""
    failed = {pair: why for pair, why in found.pairs.items() if isinstance(why, str)}
    faults = []
    for rank in found.nodes if found.world_size > 2 else ():
        towards = {pair: why for pair, why in failed.items() if pair[1] == rank}
        tested = [pair for pair in found.pairs if pair[1] == rank]
        if len(tested) > 1 and len(towards) == len(tested):
            faults.append(f"no rank can connect to {_place(found, rank)}: {next(iter(towards.values()))}")
            failed = {pair: why for pair, why in failed.items() if pair not in towards}
    shown = list(failed.items())[:_SHOWN]
    faults += [f"{_name(found, a)} cannot connect to {_place(found, b)}: {why}" for (a, b), why in shown]
    if len(failed) > _SHOWN:
        more = ", ".join(f"{a} to {b}" for a, b in list(failed)[_SHOWN : _SHOWN + 32])
        faults.append(f"{counted(len(failed) - _SHOWN, 'more pair')} cannot connect: {more}")
    if faults:
        faults[-1] += (
            "; let all ports through between the nodes, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to another "
            "interface"
        )
    return faults


def _place(found: Found, rank: int) -> str:
    return f"{_name(found, rank)} at {found.nodes[rank].address}:{found.nodes[rank].port}"


def _notes_on_names(found: Found) -> list[str]:
    if found.one_host:
        return []
    notes, unknown, own = [], [], []
    for rank, node in found.nodes.items():
        if not node.own_name_leads_to:
            unknown.append(rank)
        elif node.own_name_leads_to.startswith("127.") or node.own_name_leads_to == "::1":
            own.append(rank)
    fix = "Panther finds the interface by the route; programs without it need GLOO_SOCKET_IFNAME"
    if unknown:
        notes.append(
            f"{name_ranks(unknown)} cannot resolve {'its' if len(unknown) == 1 else 'their'} own host name: {fix}"
        )
    if own:
        notes.append(f"on {name_ranks(own)} the own host name leads to the loopback interface (/etc/hosts): {fix}")
    if found.strangers:
        notes.append(
            f"{name_ranks(found.strangers)} cannot resolve {found.nodes[0].host}, the host name of rank 0: give "
            "addresses, as in --rdzv-endpoint and MASTER_ADDR"
        )
    return notes


def _notes_on_speed(found: Found) -> list[str]:
    notes = [] if found.one_host else _slow_pairs(found)
    mtus = {node.mtu for node in found.nodes.values() if node.mtu}
    if len(mtus) > 1 and not found.one_host:
        described = differences({rank: {"the MTU": str(node.mtu)} for rank, node in found.nodes.items()})
        notes.append(f"{described['the MTU']}: set the same on all nodes, as larger packets may be dropped")
    for rank, offset, _ in _offsets(found):
        if abs(offset) > _CLOCK_S:
            notes.append(
                f"the clock of {_name(found, rank)} is {format_seconds(abs(offset))} "
                f"{'ahead of' if offset > 0 else 'behind'} that of rank 0: synchronise the clocks (NTP), or logs and "
                "times of files cannot be compared"
            )
    small = [
        r for r, n in found.nodes.items() if (n.shared_memory_bytes or _SHARED_MEMORY_BYTES) < _SHARED_MEMORY_BYTES
    ]
    if small:
        least = min(found.nodes[rank].shared_memory_bytes or 0 for rank in small)
        notes.append(
            f"/dev/shm of {name_ranks(small)} has {format_bytes(least)} free: the workers of a DataLoader may end with "
            "a bus error; give containers more (docker run --shm-size)"
        )
    if found.stopped_after_s is not None:
        left = found.world_size * (found.world_size - 1) - len(found.pairs)
        were = counted(left, "connection was", "connections were")
        notes.append(f"{were} not tested, as {found.stopped_after_s:g} s had passed")
    return notes


def _slow_pairs(found: Found) -> list[str]:
    measured = {pair: one for pair, one in found.pairs.items() if isinstance(one, Measured)}
    median = statistics.median(one.bytes_per_s for one in measured.values()) if measured else 0.0
    slow = sorted((one.bytes_per_s, pair) for pair, one in measured.items() if one.bytes_per_s < _SLOW * median)
    return [
        f"from {_name(found, a)} to {_name(found, b)} a connection carries "
        f"{format_bytes(rate)}/s, less than half of the median of all pairs ({format_bytes(median)}/s)"
        for rate, (a, b) in slow[:_SHOWN]
    ]


def _offsets(found: Found) -> list[tuple[int, float, float]]:
    """Return by how much each rank's clock is ahead of rank 0's, and the round trip of that measurement."""
    return [
        (b, one.offset_s, one.round_trip_s)
        for (a, b), one in sorted(found.pairs.items())
        if a == 0 and isinstance(one, Measured)
    ]


def _summary(found: Found) -> list[str]:
    measured = [one for one in found.pairs.values() if isinstance(one, Measured)]
    if not measured:
        return []
    rates, trips = sorted(one.bytes_per_s for one in measured), sorted(one.round_trip_s for one in measured)
    return [
        f"{counted(len(measured), 'connection')} between pairs: {format_bytes(rates[0])}/s to "
        f"{format_bytes(rates[-1])}/s, round trip {format_seconds(trips[0])} to {format_seconds(trips[-1])}"
    ]


def _table(found: Found) -> str:
    # Less than half of the round trip is not known from nothing.
    offsets = {rank: 0.0 if abs(offset) < trip / 2 else offset for rank, offset, trip in _offsets(found)} | {0: 0.0}
    rows = [["rank", "host", "address", "interface", "MTU", *found.nodes[0].versions, "GPUs", "free disk", "clock"]]
    for rank, node in found.nodes.items():
        offset = offsets.get(rank)
        clock = "-" if offset is None else "0" if not offset else f"{'+-'[offset < 0]}{format_seconds(abs(offset))}"
        versions = [node.versions.get(name, "-") for name in found.nodes[0].versions]
        rows.append([
            str(rank), node.host, node.address, node.interface or "-", str(node.mtu or "-"), *versions, str(node.gpus),
            format_bytes(node.free_bytes) if node.free_bytes else "-", clock,
        ])  # fmt: skip
    return format_table(rows)
