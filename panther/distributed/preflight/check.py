"""Run the checks between all ranks, in order. Rank 0 leads, judges the results, and sends its report to all ranks."""

__all__ = ["check_nodes"]

import secrets
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from panther.distributed.comm.handshake import (
    EndedError,
    Exchange,
    MissingRanksError,
    check_in,
    lost_store_explained,
)
from panther.distributed.comm.store import Meeting
from panther.distributed.preflight.pairs import Listener, Measured, measure, schedule
from panther.distributed.preflight.report import Findings, NodeInfo, Report, describe_node, judge, resolves

_CONNECT_S = 5.0


def check_nodes(
    meeting: Meeting, rank: int, world_size: int, folder: Path | None = None, free_bytes: float = 1e9
) -> Report:
    """Check names, interfaces, versions, clocks, disk, a shared folder and the connections of all pairs of ranks.

    Every rank must call it. It needs no process group, and makes none.

    Args:
        meeting: The store in which the ranks meet; its timeout applies to each step.
        rank: Rank of this process.
        world_size: Number of processes.
        folder: A folder that all ranks should share; None checks only the free disk of the working directory.
        free_bytes: Bytes of free disk that each rank should have.

    Raises:
        DistributedError: If ranks are missing (they are named), or rank 0 is lost.

    Cost: half a second for each pair of ranks, and ten seconds for an unreachable pair.
    """
    agreement = check_in(meeting, rank, world_size, None)
    exchange = Exchange(meeting.group_store(agreement.token, world_size), rank, world_size, meeting.timeout_s)
    findings = Findings(world_size, agreement.one_host, meeting.where)
    with lost_store_explained(meeting, rank, world_size):
        if rank == 0:
            try:
                _check(exchange, agreement, folder, findings)
            except MissingRanksError as error:
                findings.missing = (error.ranks, str(error))
            report = judge(findings, free_bytes)
            exchange.end(asdict(report), len(findings.missing[0]))
            return report
        try:
            _check(exchange, agreement, folder, findings)
            exchange.give()  # raises EndedError, because rank 0 ends the checks instead of giving a value
            raise AssertionError
        except EndedError as end:
            exchange.has_read()
            (message,) = end.args
            return Report(message["text"], tuple(message["faults"]), tuple(message["notes"]))


def _check(exchange: Exchange, agreement: Any, folder: Path | None, findings: Findings) -> None:
    rank = exchange.rank
    info = describe_node(agreement, folder or Path())
    try:
        listener = Listener(info.address, rank, agreement.token)
    except OSError as error:
        reason = f"it cannot listen on {info.address} ({error.strerror or error})"
        info = replace(info, faults=(*info.faults, reason))
        listener = None
    with listener or nullcontext():
        info = replace(info, port=listener.port if listener else 0)
        infos = exchange.gather(asdict(info), lambda _: "describing its node")
        findings.nodes = {other: NodeInfo(**answer) for other, answer in infos.items()}
        _check_folder(exchange, folder, findings)
        host, places = exchange.give((info.host, [(node.address, node.port) for node in findings.nodes.values()]))
        resolved = exchange.gather(resolves(host), lambda _: f"looking up the host name {host}")
        findings.cannot_resolve_host = [other for other, answer in resolved.items() if other and not answer]
        _check_pairs(exchange, places, agreement.token, findings)


def _check_folder(exchange: Exchange, folder: Path | None, findings: Findings) -> None:
    """Check that rank 0 sees the files of all other ranks, and that these ranks see the file of rank 0."""
    # A new name each time, because file systems may cache that a file does not exist.
    name = exchange.give(f".panther-{secrets.token_hex(8)}")
    if folder is None:
        return
    own_file, failure = folder / f"{name}-{exchange.rank}", ""
    try:
        try:
            own_file.touch()
        except OSError as error:
            failure = error.strerror or str(error)
        failures = exchange.gather(failure, lambda _: f"writing to {folder}")
        findings.unwritable = {rank: why for rank, why in failures.items() if why}
        seen_ranks = [rank for rank in failures if (folder / f"{name}-{rank}").exists()]
        exchange.give()  # tells all ranks that every rank has written its file
        sees = exchange.gather((folder / f"{name}-0").exists(), lambda _: f"reading from {folder}")
        findings.without_shared_folder = [
            rank for rank, can in sees.items() if not (can and rank in seen_ranks) and not failures[rank]
        ]
        if failures.get(0):
            findings.without_shared_folder = []
    finally:
        with suppress(OSError):
            own_file.unlink()


def _check_pairs(exchange: Exchange, places: list[tuple[str, int]], token: str, findings: Findings) -> None:
    """Connect all ranks in pairs, in both directions, because a firewall may block one direction only."""
    begun, limit_s = time.monotonic(), 10 * exchange.timeout_s
    timeout_s = min(_CONNECT_S, exchange.timeout_s / 4)
    for partners in schedule(exchange.world_size):
        for upwards in (True, False):
            result: Any = None
            partner = partners.get(exchange.rank)
            if partner is not None and (exchange.rank < partner) == upwards:
                measured = measure(*places[partner], partner, token, timeout_s)
                result = asdict(measured) if isinstance(measured, Measured) else measured

            def doing(other: int, partners: dict[int, int] = partners) -> str:
                return f"testing its connection with rank {partners.get(other, 'none')}"

            for other, outcome in exchange.gather(result, doing).items():
                if outcome is not None:
                    findings.pairs[other, partners[other]] = (
                        Measured(**outcome) if isinstance(outcome, dict) else outcome
                    )
            if exchange.give(time.monotonic() > begun + limit_s):
                findings.stopped_after_s = limit_s
                return
