"""The rendezvous of a launcher on a single node, which waits for no other launcher."""

__all__ = ["BACKEND", "LoopbackRendezvous"]

import socket
import uuid

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_LOOPBACK = "127.0.0.1"
BACKEND = "panther-loopback"
"""The name for ``--rdzv-backend``."""


class LoopbackRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous for one node, with a new store for every attempt.

    The store that torch reuses after a restart keeps addresses of workers that have ended, and some restarts then hang.

    Args:
        listen: Whether workers are scripts that connect to the store, which then listens on a free port of the loopback
            interface. Workers that run a function may be forked, and this process must not have such a store then: with
            torch's c10d rendezvous and its threads, about one in a hundred forked workers hung at its start.
    """

    def __init__(self, listen: bool) -> None:
        super().__init__(_LOOPBACK, 0, rank=0, world_size=1, run_id=uuid.uuid4().hex, timeout=0)
        self._listen = listen

    @property
    def use_agent_store(self) -> bool:
        """Whether workers connect to the store of the launcher, so that no worker has to find a free port."""
        return self._listen

    def get_backend(self) -> str:
        """Return the name of the rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a store for the next attempt."""
        if self._listen:
            listener = socket.create_server((_LOOPBACK, 0), backlog=socket.SOMAXCONN)
            port = listener.getsockname()[1]
            # With its own socket, torch's server would listen on every interface, and another process could take the
            # port before.
            store = TCPStore(
                _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, port))
        alone = HashStore()
        return RendezvousInfo(alone, 0, 1, RendezvousStoreInfo.build(0, alone, _LOOPBACK))


rendezvous_handler_registry.register(BACKEND, lambda parameters: LoopbackRendezvous(listen=True))
