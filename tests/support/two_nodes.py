"""Two nodes on one machine: network namespaces joined by a virtual cable, whose rate can be limited. Root on Linux."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["TwoNodes", "UnavailableError", "two_nodes"]

_LEAST_BURST = 32 * 1024  # bytes; of the bucket, which holds a millisecond of the rate if that is more


class UnavailableError(RuntimeError):
    """This machine lets nobody make network namespaces, or not this user."""


@dataclass(frozen=True)
class TwoNodes:
    """Names of the namespaces, and their addresses and interfaces on the cable."""

    names: tuple[str, str]
    addresses: tuple[str, str] = ("10.99.0.1", "10.99.0.2")
    interfaces: tuple[str, str] = ("ptr-a", "ptr-b")

    def limit(self, bits_per_s: float | None) -> None:
        """Limit what either node sends by a token bucket (``tc-tbf``); None sends as fast as the processors can."""
        for name, interface in zip(self.names, self.interfaces, strict=True):
            place = ("dev", interface, "root")
            subprocess.run(["tc", "-n", name, "qdisc", "delete", *place], check=False, capture_output=True)
            if bits_per_s is not None:
                burst = max(_LEAST_BURST, round(bits_per_s / 8e3))
                rate = ("rate", f"{bits_per_s:.0f}bit", "burst", f"{burst}", "latency", "50ms")
                _call("tc", "-n", name, "qdisc", "add", *place, "tbf", *rate)


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Make two nodes, and remove them in the end.

    Raises:
        UnavailableError: Where this cannot be done, with a sentence that says why.
    """
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise UnavailableError("network namespaces need root on Linux")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"{tool} is not installed (package iproute2)")
    nodes = TwoNodes((f"panther-a-{os.getpid()}", f"panther-b-{os.getpid()}"))
    try:
        for name in nodes.names:
            _call("ip", "netns", "add", name)
        ends = [("name", port, "netns", name) for port, name in zip(nodes.interfaces, nodes.names, strict=True)]
        _call("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address, interface in zip(nodes.names, nodes.addresses, nodes.interfaces, strict=True):
            _call("ip", "-n", name, "address", "add", f"{address}/24", "dev", interface)
            for device in ("lo", interface):
                _call("ip", "-n", name, "link", "set", device, "up")
        yield nodes
    finally:
        for name in nodes.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _call(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(f"two nodes cannot be made here, {' '.join(command)}: {done.stderr.strip()}")
