"""Connections between two ranks: whether they can be made, their round trip, clock offset and bandwidth.

gloo connects every rank to every other rank, on ports that the system chooses. Here each rank listens on the interface
that gloo would use, and the ranks connect in pairs. A message begins with the token of this run and the rank that is
expected, so that a different program, or a different rank at the same address, is not mistaken for it.

The clock offset is computed as in NTP (D. Mills, 1991, doi:10.1109/26.103043): with t0 and t3 the times at which the
question left and the answer came, and t the time in the answer, it is t - (t0 + t3) / 2, of the exchange with the
shortest round trip.
"""

__all__ = ["Listener", "Measured", "measure", "schedule"]

import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

_PINGS = 10
_SEND_S = 0.2  # data is sent for this time, but at most _SEND_BYTES
_SEND_BYTES = 2**28
_CHUNK = bytes(2**18)
_ANSWER = struct.Struct("!d")
_TARGET = struct.Struct("!I")

_clock = time.time
"""Replaced by tests."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a connection, by the rank that made it."""

    round_trip_s: float
    offset_s: float
    """Seconds by which the other rank's clock is ahead."""
    bytes_per_s: float
    """Bandwidth of a TCP connection, towards the rank that listens."""


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
