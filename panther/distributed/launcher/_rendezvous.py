"""How the launchers of a run meet, one on each node: on loopback for a single node, else by torch's c10d rendezvous.

Every attempt gets a store of its own for the workers. The store that torch would reuse after a restart keeps addresses
of workers that are gone, and some restarts then hang.
"""

__all__ = ["LoopbackRendezvous", "NodeRendezvous"]

import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from panther.distributed.comm._store import _listens
from panther.errors import DistributedError

_POLL_S = 0.2
_NAME_POLL_S = 1.0


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a single node: a store on a free port of the loopback interface, a new one each time."""

    use_agent_store = True  # the launcher hosts the store, so no worker has to find a free port

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a store for the next attempt."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
        port = listener.getsockname()[1]
        # Without a socket of ours torch's server would listen on every interface.
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def get_backend(self) -> str:
        """Name of the rendezvous."""
        return "loopback"

    def get_run_id(self) -> str:
        """A name that no other run has."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Nobody else ever comes."""
        return 0

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def shutdown(self) -> bool:
        """Nothing to close."""
        return True


class NodeRendezvous(RendezvousHandler):
    """torch's c10d rendezvous, with the nodes numbered as the user says and its failures in one sentence."""

    def __init__(
        self,
        parameters: RendezvousParameters,
        node_rank: int | None,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Connect, which waits for the node that hosts the store."""
        self._endpoint, self._node_rank, self._timeout_s = parameters.endpoint, node_rank, timeout_s
        host, port = parse_rendezvous_endpoint(self._endpoint, 0)
        deadline = time.monotonic() + timeout_s
        _await_name(host, port, deadline, timeout_s, say)
        hosts = _matches_machine_hostname(host) if node_rank is None else node_rank == 0
        if node_rank is not None:
            parameters.config["is_host"] = str(hosts)
        if hosts and node_rank is not None:
            _check_port(host, port)
        elif not hosts:
            _await_host(host, port, deadline, timeout_s)
        try:
            backend, store = create_backend(parameters)
            self._handler = create_handler(store, backend, parameters)
        except (RendezvousConnectionError, OSError) as error:
            raise DistributedError(f"the launchers cannot meet at {self._endpoint}: {_cause(error)}") from error

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other nodes."""
        try:
            info = self._handler.next_rendezvous()
        except RendezvousTimeoutError:
            raise DistributedError(
                f"not all nodes came to {self._endpoint} within {self._timeout_s:g} s: start the launcher on every "
                "node, with the same --nnodes, --rdzv-endpoint and --rdzv-id"
            ) from None
        except RendezvousConnectionError as error:
            raise DistributedError(
                f"the connection to {self._endpoint} is lost: the launcher of node 0 has ended, see what it says"
            ) from error
        if self._node_rank is None:
            return info
        # torch numbers the nodes by their names, and MASTER_ADDR is that of its first.
        if self._node_rank >= info.world_size or info.store.add(f"panther/node-rank/{self._node_rank}", 1) > 1:
            raise DistributedError(
                f"--node-rank must number the {info.world_size} nodes from 0, each once, and this node's "
                f"{self._node_rank} {'is too large' if self._node_rank >= info.world_size else 'came twice'}"
            )
        store = dist.PrefixStore("panther/nodes", info.store)
        address = RendezvousStoreInfo.build(self._node_rank, store, self._handler._this_node.addr)
        return RendezvousInfo(info.store, self._node_rank, info.world_size, address)

    @property
    def use_agent_store(self) -> bool:
        """Whether the launcher hosts the workers' store."""
        return self._handler.use_agent_store

    def get_backend(self) -> str:
        """Name of the rendezvous."""
        return self._handler.get_backend()

    def get_run_id(self) -> str:
        """As given by --rdzv-id."""
        return self._handler.get_run_id()

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the next attempt."""
        try:
            return self._handler.num_nodes_waiting()
        except RendezvousConnectionError as error:
            raise DistributedError(
                f"the connection to {self._endpoint} is lost: the launcher of node 0 has ended, see what it says"
            ) from error

    def is_closed(self) -> bool:
        """Whether a node has given up."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """Let no node in any more."""
        self._handler.set_closed()

    def shutdown(self) -> bool:
        """Leave; the host of the store may have gone first."""
        with suppress(RendezvousConnectionError):
            return self._handler.shutdown()
        return False


def _check_port(host: str, port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise DistributedError(
            f"node 0 cannot listen at {host}:{port} ({os.strerror(error.errno or 0)}): give another port in "
            "--rdzv-endpoint, on every node"
        ) from None


def _await_name(host: str, port: int, deadline: float, timeout_s: float, say: Callable[[str], None]) -> None:
    """Wait for the name of node 0, which Kubernetes and compose make known only once it has an address."""
    said = False
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise DistributedError(
                    f"the host {host} of --rdzv-endpoint could not be resolved within {timeout_s:g} s "
                    f"({error.strerror}): use the name or address of node 0, and start it"
                ) from None
            if not said:
                say(f"the host {host} cannot be resolved yet ({error.strerror}); trying for {timeout_s:g} s")
                said = True
        time.sleep(_NAME_POLL_S)


def _await_host(host: str, port: int, deadline: float, timeout_s: float) -> None:
    """Wait for node 0, whose store torch's client would look for with a C++ stack for each attempt."""
    while not _listens(host, port):
        if time.monotonic() > deadline:
            raise DistributedError(
                f"nobody listened at {host}:{port} within {timeout_s:g} s: start the launcher of node 0, or correct "
                "--rdzv-endpoint"
            )
        time.sleep(_POLL_S)


def _cause(error: BaseException) -> str:
    return str(error.__cause__ or error).split("\n", 1)[0]
