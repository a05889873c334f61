"""Run the checks between all ranks, in order. Rank 0 leads, judges the results, and sends its report to all ranks.

gloo connects every rank to every other rank, on ports that the system chooses. Here each rank listens on the interface
that gloo would use, and the ranks connect in pairs. A message begins with the token of this run and the rank that is
expected, so that a different program, or a different rank at the same address, is not mistaken for it.

The clock offset is computed as in NTP (D. Mills, 1991, doi:10.1109/26.103043): with t0 and t3 the times at which the
question left and the answer came, and t the time in the answer, it is t - (t0 + t3) / 2, of the exchange with the
shortest round trip.
"""

__all__ = ["Listener", "check_nodes", "measure", "schedule"]

import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from panther.distributed.comm.handshake import EndedError, Exchange, MissingRanksError, check_in, lost_store_explained
from panther.distributed.comm.store import Meeting
from panther.distributed.preflight.report import Findings, Measured, NodeInfo, Report, describe_node, judge, resolves

_CONNECT_S = 5.0
_PINGS = 10
_SEND_S = 0.2  # data is sent for this time, but at most _SEND_BYTES
_SEND_BYTES = 2**28
_CHUNK = bytes(2**18)
_ANSWER = struct.Struct("!d")
_TARGET = struct.Struct("!I")

_clock = time.time
"""Replaced by tests."""


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


class Listener:
    """Accept connections from other ranks until the end of the ``with`` block."""

    def __init__(self, address: str, rank: int, token: str) -> None:
        family = socket.AF_INET6 if ipaddress.ip_address(address.partition("%")[0]).version == 6 else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self._hello = token.encode() + _TARGET.pack(rank)
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        """Start a thread that accepts."""
        threading.Thread(target=self._accept, name="panther-preflight", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop accepting."""
        # Closing alone would leave the thread in accept.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection = self._socket.accept()[0]
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(60)
            if _read(connection, len(self._hello)) != self._hello:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_PINGS):
                _read(connection, 1)
                connection.sendall(_ANSWER.pack(_clock()))
            while connection.recv(len(_CHUNK)):  # until the other rank closes its side
                pass
            connection.sendall(b"!")


def measure(address: str, port: int, rank: int, token: str, timeout_s: float) -> Measured | str:
    """Connect to the listener of a rank and measure the connection; return the reason as a text if this fails.

    Args:
        address: Address of the listener.
        port: Port of the listener.
        rank: The rank that is expected to listen there.
        token: Token of this run.
        timeout_s: Timeout for connecting, and for each answer.
    """
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
            return _measure(connection, token.encode() + _TARGET.pack(rank))
        except TimeoutError:
            return (
                f"connected, but data did not arrive within {timeout_s:g} s, for example because large packets are "
                "dropped (MTU)"
            )
        except ConnectionError as error:
            return f"a different program answered there, or the connection broke ({error.strerror or error})"
        except OSError as error:
            return error.strerror or str(error)


def _measure(connection: socket.socket, hello: bytes) -> Measured:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(hello)
    pings = []
    for _ in range(_PINGS):
        begun, sent_s = time.perf_counter(), _clock()
        connection.sendall(b"?")
        (other_s,) = _ANSWER.unpack(_read(connection, _ANSWER.size))
        received_s, round_trip = _clock(), time.perf_counter() - begun
        pings.append((round_trip, other_s - (sent_s + received_s) / 2))
    round_trip, offset = min(pings)
    begun, count = time.perf_counter(), 0
    while count < _SEND_BYTES and time.perf_counter() < begun + _SEND_S:
        connection.sendall(_CHUNK)
        count += len(_CHUNK)
    connection.shutdown(socket.SHUT_WR)
    _read(connection, 1)  # waits for the other rank, because sent data may still be in the buffers of this node
    return Measured(round_trip, offset, count / (time.perf_counter() - begun))


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (chunk := connection.recv(count - len(data))):
            raise ConnectionError("it was closed")
        data += chunk
    return data


def schedule(n: int) -> Iterator[dict[int, int]]:
    """Yield rounds of pairs, as partners by rank, in which all ranks meet each other once (the circle method)."""
    seats = list(range(n + n % 2))  # an odd number of ranks gets an empty seat, and its partner waits
    for _ in range(len(seats) - 1):
        pairs = list(zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True))
        yield {a: b for pair in pairs for a, b in (pair, pair[::-1]) if max(pair) < n}
        seats = [seats[0], seats[-1], *seats[1:-1]]
