"""The processes of ``panther launch``: torch's elastic agent on a script, and what is known of a run that failed.

Panther's subclass shows what rank 0 writes, checks the size of the world, says each restart, and finds out which rank
failed first and why. On several nodes the launcher whose worker failed tells the others by the store they share.
"""

__all__ = ["Outcome", "ScriptAgent"]

import json
import math
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from panther.distributed.launcher._logs import Tail, last_lines, last_traceback
from panther.errors import DistributedError

_FAILURE = "panther/failure"
_TOLD = "panther/told"
_NEWS_S = 5.0  # for a failure of another node to arrive, or to be read there
_LOST = re.compile(  # what a rank says because another one has ended
    "Connection (was likely )?(closed|reset)|Broken pipe|connection was closed|failed to recv|remote process exited"
    "|lost the store|see whether one of them has ended|checked in and then ended or stalled"
)


@dataclass(frozen=True)
class Outcome:
    """How one worker failed."""

    rank: int
    world_size: int
    text: str
    """In words, to follow the rank."""
    output: str
    """Its whole traceback, or the last lines it wrote."""
    exit_code: int
    """For the launcher: the worker's own, or 128 and the signal."""
    lost: bool
    """Whether it ended because another had."""

    @property
    def name(self) -> str:
        """Such as ``rank 1 of 4``."""
        return f"rank {self.rank} of {self.world_size}"


class ScriptAgent(LocalElasticAgent):
    """torch's agent for a script."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: LogsSpecs,
        *,
        environment: dict[str, str],  # of the workers
        sizes: tuple[int, int],  # of the world, least and most
        asked: str,  # the same in words
        shown: Callable[[int, int], bool] | None,  # whether to show a worker, by its local and global rank
        say: Callable[[str], None],
        grace_s: int,
    ) -> None:
        super().__init__(spec, logs, "spawn", shutdown_timeout=grace_s)
        self._environment, self._sizes, self._asked, self._shown = environment, sizes, asked, shown
        self._say, self._grace_s = say, grace_s
        self._tail: Tail | None = None
        self._ended: dict[int, float] = {}
        self._failed_elsewhere: Outcome | None = None

    @property
    def restarts(self) -> int:
        """How often the workers were started again after a failure."""
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    # What torch's agent calls

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        try:
            super()._rendezvous(worker_group)
        except RendezvousClosedError:
            raise DistributedError(
                "another node has given up, so this one cannot go on: see what its launcher says"
            ) from None
        world_size, (least, most) = worker_group.workers[0].world_size, self._sizes
        nodes = self._nodes(worker_group)
        if not least <= world_size <= most or world_size != nodes * worker_group.spec.local_world_size:
            raise DistributedError(
                f"the world has {world_size} processes on {nodes} nodes, and {self._asked} was "
                "asked for: give every node the same --nnodes and --nproc-per-node"
            )

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env.update(self._environment)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ended = {}
        ids = super()._start_workers(worker_group)
        if self._shown is not None:
            context = self._context()
            shown = [w for w in worker_group.workers if self._shown(w.local_rank, w.global_rank)]
            self._tail = Tail(
                [
                    (f"[rank {w.global_rank}] " if len(shown) > 1 else "", Path(files[w.local_rank]), stream)
                    for w in shown
                    for files, stream in ((context.stdouts, sys.stdout), (context.stderrs, sys.stderr))
                ]
            )
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Those that have ended before the agent ends the others.
        now = time.monotonic()
        for local_rank, handler in self._context().subprocess_handlers.items():
            if handler.proc.poll() is not None:
                self._ended.setdefault(local_rank, now)
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY and self._hear(worker_group):
            result = RunResult(state=WorkerState.FAILED)
        if result.state is WorkerState.FAILED:
            self._stop_tail()
            if self._failed_elsewhere is None and all(outcome.lost for outcome in self.outcomes()):
                self._wait_for_news(worker_group)
            if self._failed_elsewhere is not None:
                self._remaining_restarts = 0
            elif self._remaining_restarts == 0:
                self._tell(worker_group)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        failed = worker_group.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        if failed:
            first = next(iter(self.outcomes()), None)
            text = f"{first.name} {first.text}" if first else "the workers failed"
            self._say(f"{text}; restart {self.restarts} of {worker_group.spec.max_restarts}")
        else:
            self._say("another node comes or starts its processes again: so does this one")
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        super()._shutdown(death_sig, self._grace_s if timeout is None else timeout)
        self._close_files()

    # What the launcher asks

    def outcomes(self) -> list[Outcome]:
        """How the workers of the last attempt failed, the first first."""
        if self._failed_elsewhere is not None:
            return [self._failed_elsewhere]
        if self._pcontext is None:
            return []
        context, found = self._context(), []
        for worker in self._worker_group.workers:
            local_rank = worker.local_rank
            code = context.subprocess_handlers[local_rank].proc.poll()
            if not code:
                continue
            errors = Path(context.stderrs[local_rank]) if context.stderrs[local_rank] else None
            outcome = _describe(worker.global_rank, worker.world_size, code, errors)
            by_agent = code in (-signal.SIGTERM, -signal.SIGKILL) and local_rank not in self._ended
            # After a failure the others fail too, often between two looks; the time of its last words tells then.
            written = errors.stat().st_mtime if errors is not None and outcome.output else 0.0
            ended = self._ended.get(local_rank, math.inf)
            found.append((by_agent, outcome.lost, ended, code > 0, written, outcome))
        found.sort(key=lambda entry: entry[:-1])
        return [outcome for by_agent, *_, outcome in found if by_agent == found[0][0]]

    def exit_codes(self) -> dict[int, int | None]:
        """Exit code of each worker of the last attempt, by rank."""
        handlers = {} if self._pcontext is None else self._context().subprocess_handlers
        return {
            worker.global_rank: handlers[worker.local_rank].proc.poll()
            for worker in self._worker_group.workers
            if worker.local_rank in handlers
        }

    def kill(self) -> None:
        """End what is still there."""
        if self._pcontext is not None:
            for handler in self._context().subprocess_handlers.values():
                if handler.proc.poll() is None:
                    with suppress(ProcessLookupError):
                        handler.close(signal.SIGKILL)
                    handler.proc.wait()
            self._close_files()

    def _context(self) -> SubprocessContext:
        assert isinstance(self._pcontext, SubprocessContext)
        return self._pcontext

    def _close_files(self) -> None:
        self._stop_tail()
        if self._pcontext is not None:
            for handler in self._context().subprocess_handlers.values():  # torch closes those of processes it ends
                for file in (handler._stdout, handler._stderr):
                    if file is not None:
                        file.close()

    def _stop_tail(self) -> None:
        if self._tail is not None:
            self._tail.stop()
            self._tail = None

    # Between nodes

    @staticmethod
    def _nodes(worker_group: WorkerGroup) -> int:
        return worker_group.group_world_size or 1

    def _hear(self, worker_group: WorkerGroup) -> bool:
        """Whether another node says that it has failed for good."""
        store = worker_group.store
        if self._nodes(worker_group) == 1 or store is None or self._failed_elsewhere is not None:
            return self._failed_elsewhere is not None
        with suppress(dist.DistError, RuntimeError):
            if store.check([_FAILURE]):
                self._failed_elsewhere = Outcome(**json.loads(store.get(_FAILURE)))
                store.add(_TOLD, 1)
        return self._failed_elsewhere is not None

    def _wait_for_news(self, worker_group: WorkerGroup) -> None:
        deadline = time.monotonic() + _NEWS_S
        while self._nodes(worker_group) > 1 and not self._hear(worker_group) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _tell(self, worker_group: WorkerGroup) -> None:
        """Say to the other nodes that this one has failed, and wait until they know: this one may host the store."""
        store, outcome = worker_group.store, next(iter(self.outcomes()), None)
        if self._nodes(worker_group) == 1 or store is None or outcome is None:
            return
        news = asdict(outcome) | {"text": f"{outcome.text} (on {socket.gethostname()})"}
        deadline = time.monotonic() + _NEWS_S
        with suppress(dist.DistError, RuntimeError):
            if store.compare_set(_FAILURE, "", json.dumps(news)) != json.dumps(news).encode():
                self._hear(worker_group)
                return
            while store.add(_TOLD, 0) < self._nodes(worker_group) - 1 and time.monotonic() < deadline:
                time.sleep(0.1)


def _describe(rank: int, world_size: int, code: int, errors: Path | None) -> Outcome:
    written = errors.read_text(errors="replace") if errors is not None and errors.is_file() else ""
    traceback = last_traceback(written)
    summary = next((line for line in reversed(_messages(traceback))), "")
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        text, lost = f"was ended by {name} (exit code {code})", False
    elif traceback:
        lost = _LOST.search(traceback) is not None
        text = f"{'lost another rank:' if lost else 'raised'} {summary}"
        text += "" if code == 1 else f" (exit code {code})"
    else:
        text, lost = f"left with exit code {code} and no traceback", False
    return Outcome(rank, world_size, text, traceback or last_lines(written), code if code > 0 else 128 - code, lost)


def _messages(traceback: str) -> list[str]:
    """The first line of each exception of a chain."""
    found, open_ = [], False
    for line in traceback.splitlines():
        if line.endswith("(most recent call last):"):
            open_ = True
        elif open_ and line and not line.startswith(" "):
            found.append(line)
            open_ = False
    return found
