"""Start a script on several processes, on one node or several: ``panther launch`` and the same from Python.

torch's own launcher does it, with torchrun's options.
"""

__all__ = ["LOG_DIR", "LaunchConfig", "launch_distributed_training", "run_script"]

import signal
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from panther.errors import DistributedError

LOG_DIR = "panther-logs"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How to start a script: torchrun's options, under the same names.

    Attributes:
        nproc_per_node: Processes on each node; ``"auto"`` is one for each GPU, or for each core where there is none.
        nnodes: Number of nodes, or ``"MIN:MAX"``.
        node_rank: Number of this node, from 0. Node 0 hosts the rendezvous. None lets torch number the nodes.
        rdzv_backend: ``"static"``, or ``"c10d"``, which restarts all nodes together; None means static if there is a
            node_rank.
        rdzv_endpoint: ``"HOST:PORT"`` of node 0, the same on every node. One node needs none.
        rdzv_id: A name of the run, the same on every node, for runs that share an endpoint.
        rdzv_timeout_s: How long to wait for the other nodes, in whole seconds.
        max_restarts: How often to start all processes again after a failure.
        monitor_interval_s: Time between two looks at the processes.
        backend: What :func:`panther.distributed.init` uses in the script: ``"gloo"``, ``"nccl"``, or None, by the GPUs.
        log_dir: Folder in which each run gets a folder for what its ranks write.
        shutdown_timeout_s: Time that processes have to save and leave after SIGTERM or Ctrl-C, before they are killed;
            whole seconds.
        module: Whether the script is the name of a module, as after ``python -m``.

    Example:
        >>> LaunchConfig(nproc_per_node=4, backend="gloo").arguments()
        ['--nproc-per-node=4', '--backend=gloo']
    """

    nproc_per_node: int | str = 1
    nnodes: int | str = 1
    node_rank: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str = ""
    rdzv_id: str = "none"
    rdzv_timeout_s: float = 600
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    backend: str | None = None
    log_dir: str | PathLike[str] = LOG_DIR
    shutdown_timeout_s: float = 30
    module: bool = False

    def arguments(self) -> list[str]:
        """Return these options as ``panther launch`` takes them, without those that have their default."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if field.name == "module":
                found.append("--module")
            elif field.name == "rdzv_timeout_s":  # the static rendezvous has the first, c10d the second
                found.append(f"--rdzv-conf=timeout={int(value)},join_timeout={int(value)}")
            else:
                value = int(value) if field.name == "shutdown_timeout_s" else value
                found.append(f"--{field.name.removesuffix('_s').replace('_', '-')}={value}")
        return found


def launch_distributed_training(
    script: str | PathLike[str], *args: object, config: LaunchConfig | None = None, **options: Any
) -> Path:
    """Run a script on several processes, as ``panther launch`` and torchrun do.

    The script finds RANK, WORLD_SIZE and LOCAL_RANK in its environment, and joins the others by
    :func:`panther.distributed.init` or ``torch.distributed.init_process_group``. What its ranks write goes to files;
    what rank 0 writes is shown as well. On one node nothing listens beyond the loopback interface.

    Args:
        script: Path of the script, or the name of a module with ``module=True``.
        *args: Its arguments.
        config: How to start it.
        **options: Fields of :class:`LaunchConfig`, in place of ``config``.

    Returns:
        The folder of this run, with ``attempt-A/rank-R.out`` and ``.err`` for each attempt and rank.

    Raises:
        DistributedError: If the script failed, with the traceback of the rank that failed first; if a node is missing.
        ConfigError: If the options cannot be met.
        TypeError: If ``options`` has a name that LaunchConfig has not, or there is a ``config`` too.

    Cost: the import of torch in each process, about three seconds of a core.

    Example:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = pathlib.Path(folder, "hello.py")
        ...     _ = script.write_text("import os; print('rank', os.environ['RANK'])")
        ...     logs = launch_distributed_training(script, nproc_per_node=2, log_dir=folder)
        ...     print((logs / "attempt-0" / "rank-1.out").read_text())
        rank 0
        rank 1
        <BLANKLINE>
    """
    if config is not None and options:
        raise TypeError(f"pass config or its fields ({', '.join(options)}), not both")
    config = LaunchConfig(**options) if config is None else config
    from panther.distributed.launcher._agent import signals_followed

    with signals_followed():
        return run_script([*config.arguments(), str(script), *map(str, args)])


def run_script(argv: list[str], name: str | None = None) -> Path:
    """Do what ``panther launch`` is asked to, and return the folder of the logs.

    Raises torch's SignalException if a signal ended the launcher, and with it the processes.
    """
    # torch's launcher is as slow to import as torch, and LaunchConfig is needed without it.
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    from panther.distributed.launcher._agent import contained
    from panther.distributed.launcher._arguments import prepare
    from panther.distributed.launcher._logs import RankLogs

    with contained():
        config, command, arguments = prepare(argv, name)
        logs = config.logs_specs
        assert logs is not None  # prepare sets it
        try:
            elastic_launch(config, command)(*arguments)
            return Path(logs.root_log_dir)
        except ChildFailedError as error:
            text = _explain(error, logs)
        except (RendezvousError, dist.DistError, OSError) as error:
            text = f"the launcher failed: {str(error.__cause__ or error).splitlines()[0]}"
            if config.rdzv_endpoint:
                text += f"; see the output of the launchers of the other nodes, which meet at {config.rdzv_endpoint}"
        finally:
            if isinstance(logs, RankLogs):
                logs.stop()
    raise DistributedError(text)  # here, so that no traceback keeps torch's objects


def _explain(error: Any, logs: Any) -> str:
    from panther.distributed.launcher._failures import describe, explain
    from panther.distributed.launcher._logs import RankLogs

    ours = isinstance(logs, RankLogs)
    found, begun = [], min(failure.timestamp for failure in error.failures.values())
    for place, (rank, failure) in enumerate(error.failures.items()):
        # torch lists the processes that failed by themselves first. Then it ends the others by SIGTERM, and much later
        # by SIGKILL.
        stopped = place > 0 and (failure.exitcode == -signal.SIGTERM or failure.timestamp > begun + 2)
        log = logs.destination.stderrs[failure.local_rank] if ours else ""
        found.append(describe(rank, failure.exitcode, failure.error_file, log, stopped))
    known = [failure for failure in found if failure is not None]
    return explain(known, logs.world_size, logs.attempts, logs.folder) if ours else explain(known, None, 1)
