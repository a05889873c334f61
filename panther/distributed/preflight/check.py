"""The checks between all ranks, in order. Rank 0 leads, judges, and gives all ranks the same report."""

__all__ = ["check_nodes"]

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from panther.distributed.comm._handshake import check_in
from panther.distributed.comm._store import Meeting
from panther.distributed.preflight.exchange import EndedError, Exchange, MissingRanksError
from panther.distributed.preflight.node import NodeInfo, describe_node, resolves
from panther.distributed.preflight.pairs import Listener, Measured, measure, schedule
from panther.distributed.preflight.report import Found, Report, judge
from panther.errors import DistributedError

_CONNECT_S = 5.0


def check_nodes(
    meeting: Meeting, rank: int, world_size: int, folder: Path | None = None, free_bytes: float = 1e9
) -> Report:
    """Check names, interfaces, versions, clocks, disk, a shared folder and the connections of all pairs of ranks.

    Every rank must call it. It needs no process group, and makes none.

    Args:
        meeting: Where the ranks meet; its timeout is for each step.
        rank: This process.
        world_size: Number of processes.
        folder: That all ranks should see; None checks the free disk of the working directory only.
        free_bytes: Of free disk that each rank should have.

    Raises:
        DistributedError: If ranks do not come (they are named), or rank 0 is lost.

    Cost: half a second for each two ranks; an unreachable pair takes ten.
    """
    agreement = check_in(meeting, rank, world_size, None)
    exchange = Exchange(meeting.group_store(agreement.token, world_size), rank, world_size, meeting.timeout_s)
    found = Found(world_size, agreement.one_host, meeting.where)
    try:
        if rank == 0:
            with suppress(MissingRanksError), _noting_missing(found):
                _check(exchange, agreement, folder, found)
            report = judge(found, free_bytes)
            exchange.end(asdict(report), len(found.missing[0]))
            return report
        try:
            _check(exchange, agreement, folder, found)
            exchange.give()  # never comes: the end does
            raise AssertionError
        except EndedError as end:
            exchange.has_read()
            (told,) = end.args
            return Report(told["text"], tuple(told["faults"]), tuple(told["notes"]))
    except dist.DistError as error:
        raise DistributedError(
            f"rank {rank} of {world_size} lost the store in which the ranks meet, {meeting.where}: the process that "
            "hosts it has ended, see its error"
        ) from error


@contextmanager
def _noting_missing(found: Found) -> Iterator[None]:
    try:
        yield
    except MissingRanksError as error:
        found.missing = (error.ranks, str(error))
        raise


def _check(exchange: Exchange, agreement: Any, folder: Path | None, found: Found) -> None:
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
        found.nodes = {other: NodeInfo(**one) for other, one in infos.items()}
        _check_folder(exchange, folder, found)
        host, places = exchange.give((info.host, [(node.address, node.port) for node in found.nodes.values()]))
        known = exchange.gather(resolves(host), lambda _: f"looking up the host name {host}")
        found.strangers = [other for other, one in known.items() if other and not one]
        _check_pairs(exchange, places, agreement.token, found)


def _check_folder(exchange: Exchange, folder: Path | None, found: Found) -> None:
    """Let rank 0 see the files of all others, and the others that of rank 0."""
    # A new name each time, because file systems remember for a while what was not there.
    name = exchange.give(f".panther-{secrets.token_hex(8)}")
    if folder is None:
        return
    own, failure = folder / f"{name}-{exchange.rank}", ""
    try:
        try:
            own.touch()
        except OSError as error:
            failure = error.strerror or str(error)
        failures = exchange.gather(failure, lambda _: f"writing to {folder}")
        found.unwritable = {rank: why for rank, why in failures.items() if why}
        seen = [rank for rank in failures if (folder / f"{name}-{rank}").exists()]
        exchange.give()  # all have written
        sees = exchange.gather((folder / f"{name}-0").exists(), lambda _: f"reading from {folder}")
        found.blind = [rank for rank, can in sees.items() if not (can and rank in seen) and not failures[rank]]
        if failures.get(0):
            found.blind = []
    finally:
        with suppress(OSError):
            own.unlink()


def _check_pairs(exchange: Exchange, places: list[tuple[str, int]], token: str, found: Found) -> None:
    """Let all ranks connect in pairs, in both directions, one after the other: firewalls know directions."""
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

            for other, one in exchange.gather(result, doing).items():
                if one is not None:
                    found.pairs[other, partners[other]] = Measured(**one) if isinstance(one, dict) else one
            if exchange.give(time.monotonic() > begun + limit_s):
                found.stopped_after_s = limit_s
                return
