"""Run the checks between all ranks, in order. Rank 0 leads, judges the results, and sends its report to all ranks."""

__all__ = ["check_nodes"]

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from panther.distributed.comm.handshake import check_in, meet
from panther.distributed.comm.ranks import name_ranks
from panther.distributed.comm.store import Meeting
from panther.distributed.preflight.pairs import Listener, Measured, measure, schedule
from panther.distributed.preflight.report import Findings, NodeInfo, Report, describe_node, judge, resolves
from panther.errors import DistributedError

_POLL_S = 0.005
_GRACE_S = 5.0


class MissingRanksError(Exception):
    """Ranks that did not answer, on rank 0."""

    def __init__(self, ranks: list[int], text: str) -> None:
        super().__init__(text)
        self.ranks = ranks


class EndedError(Exception):
    """Rank 0 has ended the checks; the argument is its last message."""


class Exchange:
    """Steps in which rank 0 gathers a value of every rank, or gives a value to all. Every rank makes the same calls.

    Args:
        store: A store whose keys belong to this run only.
        rank: Rank of this process.
        world_size: Number of processes.
        timeout_s: Seconds for which rank 0 waits for the other ranks in each step; they wait for rank 0 twice as long.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self.rank, self.world_size, self.timeout_s = store, rank, world_size, timeout_s
        self._step = 0

    def gather(self, value: Any, doing: Callable[[int], str]) -> dict[int, Any]:
        """Return the values of all ranks on rank 0, and an empty dictionary on the other ranks.

        Args:
            value: The value of this rank, which can be written as JSON.
            doing: A function of a rank that describes this step, for the error.

        Raises:
            MissingRanksError: On rank 0, if ranks do not answer in time.
        """
        self._step += 1
        if self.rank:
            self._store.set(f"from/{self._step}/{self.rank}", json.dumps(value))
            return {}
        values, deadline = {0: value}, time.monotonic() + self.timeout_s
        while True:
            for rank in range(1, self.world_size):
                if rank not in values and self._store.check([f"from/{self._step}/{rank}"]):
                    values[rank] = json.loads(self._store.get(f"from/{self._step}/{rank}"))
            missing = [rank for rank in range(self.world_size) if rank not in values]
            if not missing:
                return dict(sorted(values.items()))
            if time.monotonic() > deadline:
                text = "; ".join(
                    f"rank {rank} did not answer within {self.timeout_s:g} s, {doing(rank)}" for rank in missing[:5]
                )
                more = f"; and {len(missing) - 5} more" if len(missing) > 5 else ""
                raise MissingRanksError(missing, f"{text}{more}: it has exited or hangs; see its log")
            time.sleep(_POLL_S)

    def give(self, value: Any = None) -> Any:
        """Return rank 0's value on all ranks.

        Raises:
            EndedError: On the other ranks, if rank 0 has ended the checks.
            DistributedError: On the other ranks, if rank 0 gives nothing in time.
        """
        self._step += 1
        key = f"to/{self._step}"
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        deadline = time.monotonic() + 2 * self.timeout_s
        while not self._store.check([key]):
            if self._store.check(["end"]):
                raise EndedError(json.loads(self._store.get("end")))
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"{name_ranks([0])} did not answer rank {self.rank} of {self.world_size} within "
                    f"{2 * self.timeout_s:g} s: it has exited or hangs; see its log"
                )
            time.sleep(_POLL_S)
        return json.loads(self._store.get(key))

    def end(self, value: Any, missing: int) -> None:
        """Publish the last message, on rank 0, and wait until all ranks have read it, except for missing ranks."""
        self._store.set("end", json.dumps(value))
        meet(self._store, "read", self.world_size - missing, time.monotonic() + _GRACE_S)

    def has_read(self) -> None:
        """Tell rank 0, which may host the store, that this rank has read the last message."""
        self._store.add("read", 1)


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
    try:
        if rank == 0:
            with suppress(MissingRanksError), _recording_missing_ranks(findings):
                _check(exchange, agreement, folder, findings)
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
    except dist.DistError as error:
        raise DistributedError(
            f"rank {rank} of {world_size} lost the store in which the ranks meet, {meeting.where}: the process that "
            "hosts it has ended, see its error"
        ) from error


@contextmanager
def _recording_missing_ranks(findings: Findings) -> Iterator[None]:
    try:
        yield
    except MissingRanksError as error:
        findings.missing = (error.ranks, str(error))
        raise


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
