"""The checks of ``panther doctor --nodes`` between the ranks of a run before it is started.

The ranks meet in the store of the run, without a process group, because making one often fails. Each describes its
node, reads the descriptions of all ranks, and judges them alike: faults, with which a run would fail or go wrong, and a
table.
"""

__all__ = ["check_nodes"]

import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from panther._text import counted, format_table
from panther._version import __version__
from panther.distributed.comm.agreement import differences
from panther.distributed.comm.handshake import Agreement, check_in, lost_store_explained, meet, values_of
from panther.distributed.comm.ranks import name_ranks
from panther.distributed.comm.store import Meeting, address_of, find_route, interface_of
from panther.errors import DistributedError

_READ_S = 5.0  # time in which all ranks read the descriptions


@dataclass(frozen=True)
class NodeInfo:
    """The description of a rank and its node."""

    host: str
    address: str
    interface: str
    """Interface that gloo would use, by GLOO_SOCKET_IFNAME or by the route to the other nodes; "" if unknown."""
    versions: dict[str, str]
    gpus: int
    faults: tuple[str, ...]
    """Faults that were found on this node without the other nodes."""


@dataclass(frozen=True)
class Report:
    """The result, equal on all ranks."""

    text: str
    faults: tuple[str, ...]


def check_nodes(meeting: Meeting, rank: int, world_size: int) -> Report:
    """Compare the interfaces, addresses and versions of all ranks. Every rank must call it.

    Raises:
        DistributedError: If ranks do not answer within the timeout of the meeting, with their numbers.
    """
    agreement = check_in(meeting, rank, world_size, None)
    store = meeting.group_store(agreement.token, world_size)
    with lost_store_explained(meeting, rank, world_size):
        store.set(f"node/{rank}", json.dumps(asdict(_describe_node(agreement))))
        answers = values_of(store, "node", range(world_size), time.monotonic() + meeting.timeout_s)
        # Rank 0 may host the store, so it stays until the other ranks have read the descriptions.
        meet(store, "read", len(answers), time.monotonic() + _READ_S)
    if absent := [other for other in range(world_size) if other not in answers]:
        raise DistributedError(
            f"{name_ranks(absent)} did not describe the node within {meeting.timeout_s:g} s and has exited or hangs: "
            "see its log"
        )
    nodes = {other: NodeInfo(**answer) for other, answer in answers.items()}
    return judge(nodes, agreement.one_host, meeting.where)


def _describe_node(agreement: Agreement) -> NodeInfo:
    faults = [text for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if (text := _wrong_interface(name))]
    address = address_of(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0])
    if address is None:
        try:
            address = "127.0.0.1" if agreement.one_host else find_route(agreement.address).own_address
        except OSError as error:
            address = "127.0.0.1"
            faults.append(f"there is no route to {agreement.address} ({error.strerror or error})")
    versions = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "Panther": __version__,
    }
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
    return NodeInfo(
        host=socket.gethostname(),
        address=address,
        interface=interface_of(address) or "",
        versions=versions,
        gpus=torch.cuda.device_count(),
        faults=tuple(faults),
    )


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


def judge(nodes: Mapping[int, NodeInfo], one_host: bool, where: str) -> Report:
    """Return the report on the nodes, by rank, of ranks that met at the place ``where``."""
    faults = [f"rank {rank} ({node.host}): {fault}" for rank, node in nodes.items() for fault in node.faults]
    differing = differences({rank: node.versions for rank, node in nodes.items()})
    faults += [f"{text}: install the same version everywhere" for text in differing.values()]
    by_address: dict[str, list[int]] = {}
    for rank, node in nodes.items():
        by_address.setdefault(node.address, []).append(rank)
    for address, ranks in by_address.items():
        hosts = {nodes[rank].host for rank in ranks}
        if len(hosts) > 1 and not one_host:
            faults.append(
                f"{name_ranks(ranks)} are on the hosts {', '.join(sorted(hosts))} and have one address, {address} on "
                f"{nodes[ranks[0]].interface or 'an unknown interface'}: set GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME to the interface that leads to the other nodes"
            )
    rows = [["rank", "host", "address", "interface", *nodes[0].versions, "GPUs"]]
    for rank, node in nodes.items():
        versions = [node.versions.get(name, "-") for name in nodes[0].versions]
        rows.append([str(rank), node.host, node.address, node.interface or "-", *versions, str(node.gpus)])
    lines = [f"{counted(len(nodes), 'rank')}, meeting {where.partition(', ')[0]}", format_table(rows)]
    lines += [f"fault: {fault}" for fault in faults]
    lines.append(counted(len(faults), "fault") if faults else "no faults")
    return Report("\n".join(lines), tuple(faults))
