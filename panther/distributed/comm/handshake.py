"""Check-in: before the process group is created, every rank reports to rank 0, which decides for all ranks.

A store may contain entries of earlier attempts of the same run, because the store of an elastic agent outlives
restarts. So an entry counts only if it answers the present processes. Rank 0 writes a new *token*. Every other rank
writes a random *nonce* under this token. Rank 0 writes its decision under the token as well, and a rank accepts the
decision only if its nonce is in it. The process group then uses only keys with the token, or a file of that name.
"""

__all__ = [
    "Agreement", "RankInfo", "check_in", "decide", "lost_store_explained", "meet", "own_gpu", "pauses", "values_of",
]  # fmt: skip

import json
import os
import socket
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from panther._torch import is_forked_from_cuda
from panther.distributed.comm.ending import check_parent
from panther.distributed.comm.ranks import name_ranks
from panther.distributed.comm.store import Meeting
from panther.errors import DistributedError

_POLL_S = (0.002, 0.1)  # first pause and longest
_GRACE_S = 2.0  # additional time for a decision that rank 0 is about to write


@dataclass(frozen=True)
class RankInfo:
    """The report of a rank about itself."""

    host: str
    """Names a machine, or a container with its own network."""
    world_size: int
    backend: str | None
    """The backend that the user asks for."""
    gpu: str | None
    """Name of the GPU that this rank would use."""
    address: str = ""
    """Address by which this machine reaches the store; "" for loopback, or if no other machine is known."""


@dataclass(frozen=True)
class Agreement:
    """The decision of rank 0, for all ranks."""

    token: str
    backend: str
    one_host: bool
    """Whether all ranks are on one node."""
    address: str = ""
    """Address of a node that all other nodes reach. Ranks communicate on the interface of the route to it."""


def check_in(meeting: Meeting, rank: int, world_size: int, backend: str | None) -> Agreement:
    """Wait for every rank and agree on the backend, or raise the same error on every rank that has checked in."""
    name = f"{socket.gethostname()} {_machine()}"
    gpu = own_gpu(rank)
    info = RankInfo(name, world_size, backend, None if gpu is None else gpu[1], meeting.own_address)
    with lost_store_explained(meeting, rank, world_size):
        return _lead(meeting, info) if rank == 0 else _follow(meeting, rank, info)


@contextmanager
def lost_store_explained(meeting: Meeting, rank: int, world_size: int) -> Iterator[None]:
    """Turn an error of the store within the block into an error that says which rank lost which store."""
    try:
        yield
    except dist.DistError as error:
        raise DistributedError(
            f"rank {rank} of {world_size} lost the store in which the ranks meet, {meeting.where}: the process that "
            "hosts it has ended, see its error"
        ) from error


def own_gpu(rank: int) -> tuple[int, str] | None:
    """Return index and name of the GPU for this rank, by its number on this machine; None if it has no GPU."""
    if not torch.cuda.is_available() or not dist.is_nccl_available() or is_forked_from_cuda():
        return None
    local_rank = os.environ.get("LOCAL_RANK", "")
    # The index is 0 if the launcher shows each rank a single GPU.
    index = (int(local_rank) if local_rank.isdecimal() else rank) % torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # The variable has too few names if it was changed after torch had read it.
    return index, (visible[index].strip() if index < len(visible) else "") or str(index)


def decide(token: str, infos: list[RankInfo]) -> Agreement:
    """Choose the backend: the one that the user asks for, else nccl if every rank has a GPU of its own, else gloo."""
    world_size = infos[0].world_size
    used_gpus: set[tuple[str, str | None]] = set()
    ranks_without_gpu = []
    for rank, info in enumerate(infos):
        if info.world_size != world_size:
            raise DistributedError(
                f"every rank must be given the same world size: rank 0 has {world_size} and rank {rank} has "
                f"{info.world_size}"
            )
        if info.gpu is None or (info.host, info.gpu) in used_gpus:  # NCCL refuses two ranks on one GPU
            ranks_without_gpu.append(rank)
        used_gpus.add((info.host, info.gpu))
    rank_by_backend = {
        info.backend: rank for rank, info in reversed(list(enumerate(infos))) if info.backend is not None
    }
    if len(rank_by_backend) > 1:
        requests = ", ".join(f"rank {rank} asks for {name!r}" for name, rank in rank_by_backend.items())
        raise DistributedError(f"every rank must ask for the same backend: {requests}; or leave it None")
    backend = next(iter(rank_by_backend), "gloo" if ranks_without_gpu else "nccl")
    if "nccl" in backend and ranks_without_gpu:
        raise DistributedError(
            f"backend={backend!r} needs a GPU of its own for every rank, and {name_ranks(ranks_without_gpu)} of "
            f"{world_size} lacks one: start fewer processes, or use backend=None or 'gloo'"
        )
    address = next((info.address for info in infos if info.address), "")
    return Agreement(token, backend, len({info.host for info in infos}) == 1, address)


def _machine() -> str:
    # A container has the boot id and often the host name of its machine, but its own network namespace.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return f"{uuid.getnode():x}"


def _lead(meeting: Meeting, info: RankInfo) -> Agreement:
    store, token, other_ranks = meeting.store, uuid.uuid4().hex, range(1, info.world_size)
    store.set("token", token)
    hellos = values_of(store, f"hello/{token}", other_ranks, meeting.deadline)
    nonces = {other: hello["nonce"] for other, hello in hellos.items()}
    try:
        if len(hellos) < len(other_ranks):
            _raise_missing([0, *hellos], info.world_size, meeting)
        agreement = decide(token, [info, *(RankInfo(**hello["info"]) for hello in hellos.values())])
        store.set(f"go/{token}", json.dumps({"nonces": nonces, "agreement": asdict(agreement)}))
        return agreement
    except DistributedError as error:
        store.set(f"go/{token}", json.dumps({"nonces": nonces, "error": str(error)}))
        # This rank may host the store, and must not end before the other ranks have read the error.
        meet(store, f"read/{token}", 1 + len(hellos), time.monotonic() + _GRACE_S)
        raise
    finally:
        store.compare_set("token", token, "")  # ranks that check in from now on belong to a later attempt


def _follow(meeting: Meeting, rank: int, info: RankInfo) -> Agreement:
    store, nonce, token, answer = meeting.store, uuid.uuid4().hex, "", {}
    hello = json.dumps({"nonce": nonce, "info": asdict(info)})
    store.set(f"hello/{token}/{rank}", hello)  # other ranks name it in their errors if rank 0 never comes
    for _ in pauses():
        if store.check(["token"]):
            current_token = store.get("token").decode()
            if current_token not in ("", token):  # the first token, or a new one after the token of an earlier attempt
                token = current_token
                store.set(f"hello/{token}/{rank}", hello)
            if store.check([f"go/{token}"]):
                answer = json.loads(store.get(f"go/{token}"))
                if answer["nonces"].get(str(rank)) == nonce:
                    break
        if time.monotonic() > meeting.deadline + _GRACE_S:  # rank 0 answers at the deadline, if it is there
            present = values_of(store, f"hello/{token}", range(1, info.world_size), meeting.deadline)
            _raise_missing(list(present), info.world_size, meeting)
    store.delete_key(f"hello//{rank}")
    if "error" in answer:
        store.add(f"read/{token}", 1)
        raise DistributedError(answer["error"])
    return Agreement(**answer["agreement"])


def meet(store: dist.Store, key: str, count: int, deadline: float) -> bool:
    """Wait until ``count`` ranks have increased the counter ``key`` of the store; return whether they have in time."""
    arrived = store.add(key, 1)
    while arrived < count and time.monotonic() < deadline:
        check_parent()
        time.sleep(0.01)
        arrived = store.add(key, 0)
    return arrived >= count


def values_of(store: dist.Store, name: str, ranks: Collection[int], deadline: float) -> dict[int, Any]:
    """Return the values that ranks have stored under a name, once all have stored one, or at the deadline."""
    for _ in pauses():
        present = [rank for rank in ranks if store.check([f"{name}/{rank}"])]
        if len(present) == len(ranks) or time.monotonic() > deadline:
            break
    return {rank: json.loads(store.get(f"{name}/{rank}")) for rank in present}


def _raise_missing(present: list[int], world_size: int, meeting: Meeting) -> NoReturn:
    absent = [rank for rank in range(world_size) if rank not in present]
    raise DistributedError(
        f"{name_ranks(absent)} of {world_size} did not check in within {meeting.timeout_s:g} s {meeting.where}; "
        f"{name_ranks(present)} did: see why the missing ones did not start, or raise timeout_s"
    )


def pauses() -> Iterator[None]:
    """Pause between the looks at a store, longer each time; raise if the launcher of this process has ended."""
    pause, longest = _POLL_S
    while True:
        yield
        check_parent()
        time.sleep(pause)
        pause = min(1.5 * pause, longest)  # short waits stay short, and long ones do not load the store
