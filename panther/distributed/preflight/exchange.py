"""Messages between rank 0 and all other ranks through a store; ranks that do not answer are named."""

__all__ = ["EndedError", "Exchange", "MissingRanksError"]

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from panther.distributed.comm.handshake import meet
from panther.distributed.comm.ranks import name_ranks
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
