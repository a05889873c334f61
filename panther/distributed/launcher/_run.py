"""Run what ``panther launch`` was asked for, and say in words how it ended."""

__all__ = ["run_job"]

import os
import socket
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.launcher.api import _get_addr_and_port

from panther.distributed.launcher._agent import own_signal_handlers, quiet
from panther.distributed.launcher._arguments import Job, environment
from panther.distributed.launcher._rendezvous import LoopbackRendezvous, NodeRendezvous
from panther.distributed.launcher._result import Interrupted, LaunchError, LaunchResult
from panther.distributed.launcher._script_agent import Outcome, ScriptAgent
from panther.distributed.launcher.function import _cores

_GRACE_S = 30


def run_job(job: Job, say: Callable[[str], None]) -> LaunchResult:
    """Start the processes, watch them, and return or raise when they have ended.

    Raises:
        LaunchError: If the script failed.
        Interrupted: On a signal, once the processes have ended.
    """
    settings = {
        # A shared store keeps the addresses of an earlier attempt, and some restarts hang on them.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": job.config.signals_to_handle,
    }
    with quiet(), own_signal_handlers(), environment(settings):
        agent = _agent(job, say)
        handler = agent.get_worker_group().spec.rdzv_handler
        try:
            result = agent.run()
        except SignalException as interrupt:
            number = interrupt.sigval
            codes = ", ".join(f"rank {rank} with {code}" for rank, code in agent.exit_codes().items())
            say(f"{number.name} was passed on; the processes have ended, {codes}")
            raise Interrupted(number) from None  # the rendezvous stays open: this node may come back
        except BaseException:
            handler.shutdown()
            raise
        finally:
            agent.kill()
        handler.shutdown()
        if result.is_failed():
            raise _error(agent.outcomes(), job, agent.restarts)
        world_size = agent.get_worker_group().workers[0].world_size
        return LaunchResult(world_size=world_size, restarts=agent.restarts, log_dir=job.folder)


def _agent(job: Job, say: Callable[[str], None]) -> ScriptAgent:
    config = job.config
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=job.nodes[0],
        max_nodes=job.nodes[1],
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    address: dict[str, Any] = {}
    handler: RendezvousHandler
    if job.own_rendezvous:
        handler = rendezvous_registry.get_rendezvous_handler(parameters)
        address["master_addr"], address["master_port"] = _get_addr_and_port(parameters)
    elif not config.rdzv_endpoint:
        handler = LoopbackRendezvous()
    else:
        handler = NodeRendezvous(parameters, job.node_rank, parameters.get_as_int("join_timeout", 600) or 600, say)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=job.command,
        args=job.arguments,
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
        **address,
    )
    return ScriptAgent(
        spec,
        job.logs,
        environment=_worker_environment(job, isinstance(handler, LoopbackRendezvous)),
        sizes=job.world_sizes,
        asked=job.asked,
        shown=None if job.folder is None else _shown(job.shown),
        say=say,
        grace_s=_GRACE_S if config.shutdown_timeout is None else config.shutdown_timeout,
    )


def _shown(local_ranks: frozenset[int] | None) -> Callable[[int, int], bool]:
    if local_ranks is None:
        return lambda local_rank, rank: rank == 0
    return lambda local_rank, rank: local_rank in local_ranks


def _worker_environment(job: Job, one_node: bool) -> dict[str, str]:
    values = {}
    if job.backend is not None:
        values["PANTHER_BACKEND"] = job.backend
    if "OMP_NUM_THREADS" not in os.environ:
        values["OMP_NUM_THREADS"] = str(max(1, _cores() // job.config.nproc_per_node))
    if one_node and "GLOO_SOCKET_IFNAME" not in os.environ and hasattr(socket, "if_nameindex"):
        # The machine's own name need not resolve, and nothing has to be reached from outside.
        names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
        if names:
            values["GLOO_SOCKET_IFNAME"] = names.pop()
    return values


def _error(outcomes: list[Outcome], job: Job, restarts: int) -> LaunchError:
    if not outcomes:
        return LaunchError("the processes failed, and none says why: see the launchers of the other nodes", 1)
    first, *others = outcomes
    attempts = f", in the last of {restarts + 1} attempts" if restarts else ""
    lines = [f"{first.name} {first.text}{attempts}; the other ranks were ended"]
    lines += [f"{other.name} {other.text}" for other in others]
    if job.folder is not None:
        lines.append(f"What every rank wrote is in {job.folder}")
    if first.output:
        kind = "Traceback" if "(most recent call last):" in first.output else "Last lines"
        lines += ["", f"{kind} of rank {first.rank}:", first.output]
    return LaunchError("\n".join(lines), first.exit_code)
