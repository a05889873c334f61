"""Start a script on several processes, on one node or several: ``panther launch`` and the same from Python.

torch's own launcher does it, with torchrun's options.
"""

__all__ = ["LaunchConfig", "launch_distributed_training"]

import signal
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from panther.errors import ConfigError, DistributedError, PantherError


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How to start a script: torchrun's options, under the same names.

    Example:
        >>> LaunchConfig(nproc_per_node=4, backend="gloo").arguments()
        ['--nproc-per-node=4', '--backend=gloo']
    """

    nproc_per_node: int | str = 1
    """Processes on each node; ``"auto"`` is one for each GPU, or for each core where there is none."""

    nnodes: int | str = 1
    """Number of nodes, or ``"MIN:MAX"``."""

    node_rank: int | None = None
    """Number of this node, from 0. Node 0 hosts the rendezvous. None lets torch number the nodes."""

    rdzv_backend: str | None = None
    """``"static"``, or ``"c10d"``, which restarts all nodes together; None means static if there is a node_rank."""

    rdzv_endpoint: str = ""
    """``"HOST:PORT"`` of node 0, the same on every node. One node needs none."""

    rdzv_id: str = "none"
    """A name of the run, the same on every node, for runs that share an endpoint."""

    rdzv_timeout_s: float = 600
    """How long to wait for the other nodes."""

    max_restarts: int = 0
    """How often to start all processes again after a failure."""

    monitor_interval_s: float = 0.1
    """Time between two looks at the processes."""

    backend: str | None = None
    """What :func:`panther.distributed.init` uses in the script: ``"gloo"``, ``"nccl"``, or None, by the GPUs."""

    log_dir: str | PathLike[str] = "panther-logs"
    """Folder in which each run gets a folder for what its ranks write."""

    shutdown_timeout_s: float = 30
    """Time that processes have to save and leave after SIGTERM or Ctrl-C, before they are killed; whole seconds."""

    module: bool = False
    """Whether the script is the name of a module, as after ``python -m``."""

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
    number, folder = run_script([*config.arguments(), str(script), *map(str, args)])
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        signal.raise_signal(number)  # as it would have been without the launcher, and with everything cleaned up
        raise DistributedError(f"the launcher was ended by {number.name}, and so were its processes")
    return folder


def run_script(argv: list[str], name: str | None = None) -> tuple[signal.Signals | None, Path]:
    """Do what ``panther launch`` is asked to.

    Args:
        argv: Its arguments.
        name: What to call the run; None means the script's name.

    Returns:
        The signal that ended the launcher and with it the processes, None if they ended by themselves; the folder of
        the logs.

    Raises:
        DistributedError: If the script failed, or could not be started.
        ConfigError: If the options cannot be met.
    """
    # torch's launcher is as slow to import as torch, and LaunchConfig is needed without it.
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    from panther.distributed.launcher._agent import contained
    from panther.distributed.launcher._arguments import prepare

    job = prepare(argv, name)
    folder = Path(job.config.logs_specs.root_log_dir if job.logs is None else job.logs.folder)  # type: ignore[union-attr]
    if job.logs is not None:
        job.config.logs_specs = job.logs
    failure: PantherError | None = None
    number = None
    with contained(job.environment):
        try:
            elastic_launch(job.config, job.command)(*job.arguments)
        except ChildFailedError as error:
            failure = _explain(error, job.logs)
        except SignalException as interrupt:
            number = interrupt.sigval
        except ConfigError as error:  # of the logs, which refuse a restart
            failure = error.with_traceback(None)
        except (RendezvousError, dist.DistError, OSError) as error:
            text = f"the launcher failed: {str(error.__cause__ or error).splitlines()[0]}"
            endpoint = job.config.rdzv_endpoint
            hint = f"; see the output of the launchers of the other nodes, which meet at {endpoint}" if endpoint else ""
            failure = DistributedError(text + hint)
        finally:
            if job.logs is not None:
                job.logs.stop()
                folder = job.logs.folder
    if failure is not None:  # raised here, so that no traceback keeps torch's objects
        raise failure
    return number, folder


def _explain(error: Any, logs: Any) -> DistributedError:
    from panther.distributed.launcher._failures import describe, explain

    found, begun = [], min(failure.timestamp for failure in error.failures.values())
    for place, (rank, failure) in enumerate(error.failures.items()):
        # torch lists the processes that failed by themselves first. Then it ends the others by SIGTERM, and much later
        # by SIGKILL.
        stopped = place > 0 and (failure.exitcode == -signal.SIGTERM or failure.timestamp > begun + 2)
        log = "" if logs is None else logs.destination.stderrs[failure.local_rank]
        found.append(describe(rank, failure.exitcode, failure.error_file, log, stopped))
    known = [failure for failure in found if failure is not None]
    if logs is None:
        return DistributedError(explain(known, None, 1))
    return DistributedError(explain(known, logs.world_size, logs.attempts, logs.folder))
