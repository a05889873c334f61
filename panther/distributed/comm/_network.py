"""Addresses of this machine: which one reaches a host, which interface has it, and whether somebody listens there."""

__all__ = ["Route", "find_route", "interface_of", "listens"]

import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Route:
    """How this machine reaches a host."""

    own_address: str
    host_address: str

    @property
    def is_loopback(self) -> bool:
        """Whether the route leads only to this machine, as it does for ``127.0.1.1 name`` in /etc/hosts."""
        return ipaddress.ip_address(self.own_address.partition("%")[0]).is_loopback

    @property
    def is_local(self) -> bool:
        """Whether the host is this machine."""
        return self.is_loopback or self.own_address == self.host_address

    def __str__(self) -> str:
        return f"from {self.own_address} on interface {interface_of(self.own_address) or 'unknown'}"


def find_route(host: str, port: int = 1) -> Route:
    """Return the route to a host. Nothing is sent: connecting a UDP socket only asks the kernel for the route.

    Raises:
        OSError: If the name cannot be resolved, or no route leads there.

    Example:
        >>> find_route("127.0.0.1").is_local
        True
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return Route(probe.getsockname()[0], str(address[0]))


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address; None if none is found, or the system is not Linux.

    Example:
        >>> interface_of("192.0.2.1") is None  # an address for documentation
        True
    """
    if not hasattr(socket, "if_nameindex") or not Path("/proc/self").exists():
        return None
    found = ipaddress.ip_address(address.partition("%")[0])
    if found.is_loopback:
        return "lo"
    if found.version == 6:
        lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((fields[-1] for fields in lines if int(fields[0], 16) == int(found)), None)
    import fcntl  # is not there on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if answer[20:24] == found.packed:
                return name
    return None


def listens(host: str, port: int) -> bool:
    """Return whether the port accepts connections; asked first, as torch's client logs a stack for each failure."""
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False
