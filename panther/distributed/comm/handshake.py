"""Check-in: before the process group is made, every rank says that it is there, and rank 0 decides for all.

A store may hold what earlier attempts of the same run wrote (the store of an elastic agent outlives restarts), so
nothing found in it counts unless it answers the present processes. Rank 0 writes a new *token*; rank r answers under it
with a *nonce* of its own; rank 0's decision, under the token too, counts for rank r only if its nonce is in it.
The process group then uses keys with that token only, or a file of that name.
"""

__all__ = ["Agreement", "RankInfo", "check_in", "decide", "meet", "own_gpu"]

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from panther._torch import is_forked_from_cuda
from panther.distributed.comm.ranks import name_ranks
from panther.distributed.comm.store import Meeting
from panther.distributed.comm.supervision.ending import check_parent
from panther.errors import DistributedError

_POLL_S = (0.002, 0.1)  # first pause and longest
_GRACE_S = 2.0  # for a decision on the way


@dataclass(frozen=True)
class RankInfo:
    """What a rank reports about itself."""

    host: str
    """Names a machine, or a container with its own network."""
    world_size: int
    backend: str | None
    """As asked for by the user."""
    gpu: str | None
    """Name of the GPU that this rank would use."""
    address: str = ""
    """By which this machine reaches the store; "" if only this machine is known to take part, or it is loopback."""


@dataclass(frozen=True)
class Agreement:
    """The decision of rank 0, for all ranks."""

    token: str
    backend: str
    nodes: tuple[int, ...]
    """The node of each rank, numbered from 0 in the order of ranks."""
    address: str = ""
    """Address of one machine that all others reach. Ranks communicate on the interface of the route to it."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one node."""
        return len(set(self.nodes)) == 1


def check_in(meeting: Meeting, rank: int, world_size: int, backend: str | None) -> Agreement:
    """Wait for every rank and agree on the backend, or raise the same error on every rank that is there."""
    name = f"{socket.gethostname()} {_machine()}"
    gpu = own_gpu(rank)
    info = RankInfo(name, world_size, backend, None if gpu is None else gpu[1], meeting.own_address)
    try:
        return _lead(meeting, info) if rank == 0 else _follow(meeting, rank, info)
    except dist.DistError as error:
        raise DistributedError(
            f"rank {rank} of {world_size} lost the store in which the ranks check in, {meeting.where}: the process "
            "that hosts it has ended, see its error"
        ) from error


def own_gpu(rank: int) -> tuple[int, str] | None:
    """Return index and name of the GPU for this rank, by its number on this machine; None if it sees none."""
    if not torch.cuda.is_available() or not dist.is_nccl_available() or is_forked_from_cuda():
        return None
    given = os.environ.get("LOCAL_RANK", "")
    # 0 if the launcher shows each rank just its own.
    index = (int(given) if given.isdecimal() else rank) % torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # There are too few names if the variable was changed after torch had read it.
    return index, (visible[index].strip() if index < len(visible) else "") or str(index)


def decide(token: str, infos: list[RankInfo]) -> Agreement:
    """Choose the backend: the one that was asked for, else nccl if every rank has a GPU of its own, else gloo."""
    world_size = infos[0].world_size
    taken: set[tuple[str, str | None]] = set()
    poor = []
    for rank, info in enumerate(infos):
        if info.world_size != world_size:
            raise DistributedError(
                f"every rank must be given the same world size: rank 0 has {world_size} and rank {rank} has "
                f"{info.world_size}"
            )
        if info.gpu is None or (info.host, info.gpu) in taken:  # NCCL refuses two ranks on one GPU
            poor.append(rank)
        taken.add((info.host, info.gpu))
    asked = {info.backend: rank for rank, info in reversed(list(enumerate(infos))) if info.backend is not None}
    if len(asked) > 1:
        found = ", ".join(f"rank {rank} asks for {name!r}" for name, rank in asked.items())
        raise DistributedError(f"every rank must ask for the same backend: {found}; or leave it None")
    backend = next(iter(asked), "gloo" if poor else "nccl")
    if "nccl" in backend and poor:
        raise DistributedError(
            f"backend={backend!r} needs a GPU of its own for every rank, and {name_ranks(poor)} of {world_size} "
            "lacks one: start fewer processes, or use backend=None or 'gloo'"
        )
    address = next((info.address for info in infos if info.address), "")
    hosts = list(dict.fromkeys(info.host for info in infos))
    return Agreement(token, backend, tuple(hosts.index(info.host) for info in infos), address)


def _machine() -> str:
    # A container has its machine's boot id and often its host name; its network namespace tells it apart.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return f"{uuid.getnode():x}"


def _lead(meeting: Meeting, info: RankInfo) -> Agreement:
    store, token, others = meeting.store, uuid.uuid4().hex, range(1, info.world_size)
    store.set("token", token)
    for _ in _pauses():
        hellos = _read(store, f"hello/{token}", others)
        if len(hellos) == len(others) or time.monotonic() > meeting.deadline:
            break
    nonces = {other: hello["nonce"] for other, hello in hellos.items()}
    try:
        if len(hellos) < len(others):
            _raise_missing([0, *hellos], info.world_size, meeting)
        agreement = decide(token, [info, *(RankInfo(**hello["info"]) for hello in hellos.values())])
        store.set(f"go/{token}", json.dumps({"nonces": nonces, "agreement": asdict(agreement)}))
        return agreement
    except DistributedError as error:
        store.set(f"go/{token}", json.dumps({"nonces": nonces, "error": str(error)}))
        # This rank may host the store, and must not end before they have read it.
        meet(store, f"read/{token}", 1 + len(hellos), time.monotonic() + _GRACE_S)
        raise
    finally:
        store.compare_set("token", token, "")  # those who come now are of another attempt


def _follow(meeting: Meeting, rank: int, info: RankInfo) -> Agreement:
    store, nonce, token, answer = meeting.store, uuid.uuid4().hex, "", {}
    hello = json.dumps({"nonce": nonce, "info": asdict(info)})
    store.set(f"hello/{token}/{rank}", hello)  # for the errors of the others if rank 0 never comes
    for _ in _pauses():
        if store.check(["token"]):
            found = store.get("token").decode()
            if found not in ("", token):  # the first, or the present one after that of an earlier attempt
                token = found
                store.set(f"hello/{token}/{rank}", hello)
            if store.check([f"go/{token}"]):
                answer = json.loads(store.get(f"go/{token}"))
                if answer["nonces"].get(str(rank)) == nonce:
                    break
        if time.monotonic() > meeting.deadline + _GRACE_S:  # rank 0 answers at the deadline, if it is there
            present = _read(store, f"hello/{token}", range(1, info.world_size))
            _raise_missing(list(present), info.world_size, meeting)
    store.delete_key(f"hello//{rank}")
    if "error" in answer:
        store.add(f"read/{token}", 1)
        raise DistributedError(answer["error"])
    return Agreement(**answer["agreement"])


def meet(store: dist.Store, key: str, count: int, deadline: float) -> bool:
    """Wait until as many ranks have come to the key, a counter in the store; return whether they did."""
    came = store.add(key, 1)
    while came < count and time.monotonic() < deadline:
        check_parent()
        time.sleep(0.01)
        came = store.add(key, 0)
    return came >= count


def _read(store: dist.Store, name: str, ranks: range) -> dict[int, Any]:
    """Return what ranks have stored under this name, by rank, without those that have stored nothing."""
    return {rank: json.loads(store.get(f"{name}/{rank}")) for rank in ranks if store.check([f"{name}/{rank}"])}


def _raise_missing(present: list[int], world_size: int, meeting: Meeting) -> NoReturn:
    missing = [rank for rank in range(world_size) if rank not in present]
    raise DistributedError(
        f"{name_ranks(missing)} of {world_size} did not check in within {meeting.timeout_s:g} s {meeting.where}; "
        f"{name_ranks(present)} did: see why the missing ones did not start, or raise timeout_s"
    )


def _pauses() -> Iterator[None]:
    pause, longest = _POLL_S
    while True:
        yield
        check_parent()
        time.sleep(pause)
        pause = min(1.5 * pause, longest)  # short waits stay short, and long ones do not load the store
