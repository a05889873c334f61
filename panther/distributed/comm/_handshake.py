"""Check-in: before the process group is made, every rank says that it is there, and rank 0 decides for all.

A store may hold what earlier attempts of the same run wrote (the store of an elastic agent outlives restarts), so
nothing found in it counts unless it answers the present processes: rank r writes a nonce, rank 0 publishes a *roll* of
the nonces it has read with a token of its own, rank r acknowledges the roll with its nonce in it, and rank 0's decision
is stored under the token. The process group then uses keys with that token only.
"""

__all__ = ["Agreement", "RankInfo", "check_in", "decide"]

import json
import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from panther.distributed.comm._ranks import name_ranks
from panther.errors import DistributedError

_POLL_S = (0.002, 0.1)  # first pause and longest
_GRACE_S = 2.0  # for a decision on the way


@dataclass(frozen=True)
class RankInfo:
    """What a rank says of itself."""

    host: str
    """Names a machine, or a container with its own network."""
    world_size: int
    backend: str | None
    """As asked for by the user."""
    gpus: tuple[str, ...]
    """Names of the GPUs this process sees, in its order."""
    local_rank: int | None
    """As told by a launcher."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks do."""

    token: str
    backend: str
    one_host: bool
    gpus: tuple[int | None, ...]
    """Index of the GPU of each rank, None without one of its own."""


def check_in(
    store: dist.Store,
    rank: int,
    world_size: int,
    backend: str | None,
    timeout_s: float,
    deadline: float,  # on time.monotonic's clock
) -> Agreement:
    """Wait for every rank and agree on the backend.

    Raises:
        DistributedError: If ranks are missing at the deadline, which are named, or ask for different things; the same
            on every rank that is there.
    """
    info = _describe(world_size, backend)
    with _lost_store(rank, world_size):
        if rank == 0:
            return _lead(store, info, timeout_s, deadline)
        return _follow(store, rank, info, timeout_s, deadline)


def decide(token: str, infos: list[RankInfo]) -> Agreement:
    """Choose the backend: what was asked for, else nccl if every rank has a GPU of its own, else gloo.

    Raises:
        DistributedError: If ranks ask for different backends or world sizes, or for nccl without the GPUs.

    Example:
        >>> info = RankInfo("here", 2, None, ("0", "1"), None)
        >>> decide("token", [info, info]).backend
        'nccl'
    """
    world_size = infos[0].world_size
    for rank, info in enumerate(infos):
        if info.world_size != world_size:
            raise DistributedError(
                f"every rank must be given the same world size: rank 0 has {world_size} and rank {rank} has "
                f"{info.world_size}"
            )
    gpus = _own_gpus(infos)
    poor = [rank for rank, gpu in enumerate(gpus) if gpu is None]
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
    return Agreement(token, backend, len({info.host for info in infos}) == 1, tuple(gpus))


def _own_gpus(infos: list[RankInfo]) -> list[int | None]:
    """Index of each rank's GPU, None for those that would share or have none."""
    seats: dict[str, int] = defaultdict(int)
    indices: list[int | None] = []
    owners: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, info in enumerate(infos):
        seat = seats[info.host] if info.local_rank is None else info.local_rank
        seats[info.host] += 1
        index = 0 if len(info.gpus) == 1 else seat  # a launcher may show each rank just its own
        indices.append(index if index < len(info.gpus) else None)
        if index < len(info.gpus):
            owners[info.host, info.gpus[index]].append(rank)
    for sharers in owners.values():
        for rank in sharers[1:]:
            indices[rank] = None
    return indices


def _describe(world_size: int, backend: str | None) -> RankInfo:
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        host = f"{uuid.getnode():x}"
    gpus: tuple[str, ...] = ()
    if torch.cuda.is_available() and dist.is_nccl_available() and not torch.cuda._is_in_bad_fork():
        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = tuple(visible.split(",")[:count]) if visible else tuple(map(str, range(count)))
    local_rank = os.environ.get("LOCAL_RANK", "")
    return RankInfo(
        f"{socket.gethostname()} {host}", world_size, backend, gpus, int(local_rank) if local_rank.isdecimal() else None
    )


def _lead(store: dist.Store, info: RankInfo, timeout_s: float, deadline: float) -> Agreement:
    token = uuid.uuid4().hex
    others = range(1, info.world_size)
    hellos = [f"hello/{rank}" for rank in others]
    acks = [f"ack/{token}/{rank}" for rank in others]
    store.set("hello/0", json.dumps({"nonce": token}))
    nonces: dict[str, str] = {}
    messages: list[dict] = []
    pause = _pauses()
    while others:
        if store.check(hellos):
            messages = [json.loads(text) for text in store.multi_get(hellos)]
            present = {str(rank): message["nonce"] for rank, message in zip(others, messages, strict=True)}
            if present != nonces:  # also when a process of an earlier attempt had left its hello
                nonces = present
                store.set("roll", json.dumps({"token": token, "nonces": nonces}))
            if store.check(acks) and [text.decode() for text in store.multi_get(acks)] == list(nonces.values()):
                break
        if time.monotonic() > deadline:
            _dismiss(store, token, info.world_size, timeout_s)
        next(pause)
    answer: dict
    try:
        infos = [info] + [_info(message) for message in messages]
        agreement = decide(token, infos)
        answer = asdict(agreement)
    except DistributedError as error:
        _answer_error(store, token, str(error), list(others))
        raise
    store.set("complete", "1")
    store.set(f"go/{token}", json.dumps(answer))
    return agreement


def _info(message: dict) -> RankInfo:
    return RankInfo(**message["info"] | {"gpus": tuple(message["info"]["gpus"])})


def _dismiss(store: dist.Store, token: str, world_size: int, timeout_s: float) -> None:
    """Tell the ranks that are there which are not, and raise the same."""
    nonces = {
        str(rank): json.loads(store.get(key))["nonce"]
        for rank in range(1, world_size)
        if store.check([key := f"hello/{rank}"])
    }
    store.set("roll", json.dumps({"token": token, "nonces": nonces}))
    time.sleep(5 * _POLL_S[1])
    present = [rank for rank in range(1, world_size) if store.check([f"ack/{token}/{rank}"])]
    message = _missing([0, *present], world_size, timeout_s)
    _answer_error(store, token, message, present)
    raise DistributedError(message)


def _answer_error(store: dist.Store, token: str, message: str, present: list[int]) -> None:
    store.set(f"go/{token}", json.dumps({"error": message}))
    read = [f"read/{token}/{rank}" for rank in present]
    end = time.monotonic() + _GRACE_S
    while read and not store.check(read) and time.monotonic() < end:  # rank 0 may host the store
        time.sleep(_POLL_S[0])


def _missing(present: list[int], world_size: int, timeout_s: float) -> str:
    missing = [rank for rank in range(world_size) if rank not in present]
    if not missing:
        return f"the {world_size} ranks did not all check in within {timeout_s:g} s, though later: raise timeout_s"
    return (
        f"{name_ranks(missing)} of {world_size} did not check in within {timeout_s:g} s, {name_ranks(present)} did: "
        "see why the missing ones did not start, or raise timeout_s"
    )


def _follow(store: dist.Store, rank: int, info: RankInfo, timeout_s: float, deadline: float) -> Agreement:
    nonce = uuid.uuid4().hex
    store.set(f"hello/{rank}", json.dumps({"nonce": nonce, "info": asdict(info)}))
    acknowledged = None
    pause = _pauses()
    while True:
        if store.check(["roll"]):
            roll = json.loads(store.get("roll"))
            token = roll["token"]
            if roll["nonces"].get(str(rank)) == nonce:
                if token != acknowledged:
                    store.set(f"ack/{token}/{rank}", nonce)
                    acknowledged = token
                if store.check([f"go/{token}"]):
                    break
        if time.monotonic() > deadline + _GRACE_S:
            present = [other for other in range(info.world_size) if store.check([f"hello/{other}"])]
            if len(present) == info.world_size:
                raise DistributedError(
                    f"rank 0 of {info.world_size} stopped answering rank {rank} during the check-in: see rank 0's error"
                )
            raise DistributedError(_missing(present, info.world_size, timeout_s))
        next(pause)
    answer = json.loads(store.get(f"go/{token}"))
    store.set(f"read/{token}/{rank}", "1")
    if "error" in answer:
        raise DistributedError(answer["error"])
    return Agreement(**answer | {"gpus": tuple(answer["gpus"])})


def _pauses() -> Iterator[None]:
    pause, longest = _POLL_S
    while True:
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
        yield


@contextmanager
def _lost_store(rank: int, world_size: int) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise DistributedError(
            f"rank {rank} of {world_size} lost the store in which the ranks check in: the process that hosts it has "
            "ended, see its error"
        ) from error
