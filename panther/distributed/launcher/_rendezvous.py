"""The rendezvous of launchers on a single node: nobody to wait for."""

__all__ = ["BACKEND", "LoopbackRendezvous"]

import uuid

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from panther.distributed.comm._store import listening_store

BACKEND = "panther-loopback"
"""What ``--rdzv-backend`` calls it."""


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a single node, which gives every attempt a new store.

    The store that torch reuses after a restart keeps addresses of workers that are gone, and some restarts then hang.

    Args:
        listen: Whether workers are scripts that connect to the store, which then listens on a free port of the loopback
            interface. A function that is forked must not find such a store in this process: with torch's c10d
            rendezvous and its threads, one forked worker in some hundred hung at birth.
    """

    def __init__(self, listen: bool) -> None:
        self._listen, self._run_id = listen, uuid.uuid4().hex

    @property
    def use_agent_store(self) -> bool:
        """Whether workers connect to the launcher's store, so that none of them has to find a free port."""
        return self._listen

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a store for the next attempt."""
        if self._listen:
            store, port = listening_store()
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))
        alone = HashStore()
        return RendezvousInfo(alone, 0, 1, RendezvousStoreInfo.build(0, alone, "127.0.0.1"))

    def get_backend(self) -> str:
        """Return the name of the rendezvous."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return a name that no other run has."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node ever comes."""
        return 0

    def is_closed(self) -> bool:
        """Return False: there is nothing to close."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def shutdown(self) -> bool:
        """Do nothing, with success."""
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(listen=True)


rendezvous_handler_registry.register(BACKEND, _create)
