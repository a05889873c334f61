"""Workers on a Ray cluster: actors with one core each."""

__all__ = ["join_cluster", "ray_actors"]

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from panther.errors import ConfigError, DistributedError, TuningError, check_version, require_extra
from panther.tuning.runners.worker import Message, Start, TrialServer, deserialize

_CONNECT_S = 10.0


@contextmanager
def ray_actors(work: bytes, maximum: int, show: bool) -> Iterator[tuple[Start, int]]:
    """Yield a function that starts a worker, and the number of workers: the cores of the cluster, at most ``maximum``.

    The cluster is the joined one, or else the one in RAY_ADDRESS, or else a new one of this machine.
    """
    ray: Any = require_extra("ray", "ray")
    with join_cluster(None, show=show):
        actor_class = ray.remote(num_cpus=1, max_restarts=0)(_Server)
        cores = int(ray.cluster_resources().get("CPU", 1))
        yield partial(_Actor, ray, actor_class, ray.put(work)), max(1, min(cores, maximum))


class _Server(TrialServer):
    """The class of the actors."""

    def __init__(self, work: bytes) -> None:
        super().__init__(partial(deserialize, work))


class _Actor:
    """A worker: an actor, and the answer of its last call."""

    def __init__(self, ray: Any, actor_class: Any, work: Any) -> None:
        self._ray, self._actor = ray, actor_class.remote(work)
        self._answer: Any = None
        self._reason = "ended by the search"

    def call(self, method: str, *values: Any) -> None:
        self._answer = getattr(self._actor, method).remote(*values)

    def receive(self) -> Message:
        try:
            message: Message = self._ray.get(self._answer)
        except self._ray.exceptions.RayTaskError as error:  # The method raised, or its answer could not be sent.
            return "error", TuningError(f"a worker of the search failed: {error}")
        except self._ray.exceptions.RayError as error:
            self._reason = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
            return ("died",)
        return message

    def end(self, at_once: bool) -> str:
        self._ray.kill(self._actor)
        return self._reason

    @classmethod
    def wait(cls, workers: Sequence[Self]) -> list[Self]:
        by_answer = {worker._answer: worker for worker in workers}
        ready, _ = workers[0]._ray.wait(list(by_answer), num_returns=1)
        return [by_answer[answer] for answer in ready]


@contextmanager
def join_cluster(address: str | None, show: bool = True) -> Iterator[bool]:
    """Join a Ray cluster, and yield whether it is a new cluster of only this machine, which cannot grow.

    The address is as in ``ray.init``; None is the joined cluster, which stays joined afterwards, or else the cluster in
    RAY_ADDRESS, or else a new cluster of this machine. Without ``show`` the cluster logs errors only.
    """
    ray: Any = require_extra("ray", "ray")
    check_version("ray", ray.__version__, 2, least=(2, 60))
    if ray.is_initialized():
        if address is not None:
            raise ConfigError(f"address={address!r}, but ray.init was called already: leave out address, or ray.init")
        yield False
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        _probe(address)
        ray.init(address=address, **{} if show else {"logging_level": logging.ERROR, "log_to_driver": False})
    except (OSError, RuntimeError, ValueError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DistributedError(
            f"no Ray cluster could be joined at {address!r} ({reason}): check that it runs and is "
            "reachable, or leave address out to use only this machine"
        ) from error
    try:
        yield address == "local"
    finally:
        ray.shutdown()


def _probe(address: str) -> None:
    """Raise OSError unless a process listens at HOST:PORT, because Ray would retry for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), _CONNECT_S).close()
