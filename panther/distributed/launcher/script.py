"""Start a script on several processes, on one node or several: ``panther launch`` and the same from Python.

The parser, the agent and the rendezvous are torchrun's. Panther adds files for what each rank writes, a check of the
world's size, a store of its own for every attempt, and the first failing rank's traceback.
"""

__all__ = ["LaunchConfig", "LaunchError", "LaunchResult", "launch_distributed_training"]

import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

from panther.distributed.launcher._result import Interrupted, LaunchError, LaunchResult
from panther.errors import DistributedError


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

    rdzv_endpoint: str = ""
    """``"HOST:PORT"`` of node 0, the same on every node. One node needs none."""

    rdzv_id: str = "none"
    """A name of the run, the same on every node, for runs that share an endpoint."""

    rdzv_timeout: int = 600
    """Seconds to wait for the other nodes."""

    max_restarts: int = 0
    """How often to start all processes again after a failure."""

    backend: str | None = None
    """What :func:`panther.distributed.init` uses in the script: ``"gloo"``, ``"nccl"``, or None, by the GPUs."""

    log_dir: str | PathLike[str] = "panther-logs"
    """Folder in which each run gets a folder for what its ranks write."""

    shutdown_timeout: int = 30
    """Seconds that processes have to save and leave after SIGTERM or Ctrl-C, before they are killed."""

    module: bool = False
    """Whether the script is the name of a module, as after ``python -m``."""

    def arguments(self) -> list[str]:
        """These options as ``panther launch`` takes them, without those that have their default."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {field.name for field in fields(self) if given[field.name] != field.default}
        found = []
        for name in (field.name for field in fields(self) if field.name in changed):
            if name == "module":
                found += ["--module"] if self.module else []
            elif name == "rdzv_timeout":
                found.append(f"--rdzv-conf=join_timeout={self.rdzv_timeout}")
            else:
                found.append(f"--{name.replace('_', '-')}={given[name]}")
        return found


def launch_distributed_training(
    script: str | PathLike[str], *args: object, config: LaunchConfig | None = None, **options: Any
) -> LaunchResult:
    """Run a script on several processes, as ``panther launch`` and torchrun do.

    The script finds RANK, WORLD_SIZE and LOCAL_RANK in its environment, and joins the others by
    :func:`panther.distributed.init` or ``torch.distributed.init_process_group``. What its ranks write goes to files;
    what rank 0 writes is shown as well. Each attempt has a store of its own, on the loopback interface if there is one
    node.

    Args:
        script: Path of the script, or the name of a module with ``module=True``.
        *args: Its arguments, passed on as they are.
        config: How to start it.
        **options: Fields of :class:`LaunchConfig`, in place of ``config``.

    Returns:
        The size of the world, the number of restarts and the folder of the logs.

    Raises:
        DistributedError: If the script failed, with the traceback of the rank that failed first and its exit code as
            ``exit_code``; if a node is missing; if the options make no sense.
        TypeError: If ``options`` has a name that LaunchConfig has not, or there is a ``config`` too.

    Cost: the import of torch in each process, about three seconds of a core.

    Example:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = pathlib.Path(folder, "hello.py")
        ...     _ = script.write_text("import os; print('rank', os.environ['RANK'])")
        ...     result = launch_distributed_training(script, nproc_per_node=2, log_dir=folder)
        ...     print((result.log_dir / "attempt-0" / "rank-1.out").read_text())
        rank 0
        rank 1
        <BLANKLINE>
    """
    if config is not None and options:
        raise TypeError(f"pass config or its fields ({', '.join(options)}), not both")
    config = LaunchConfig(**options) if config is None else config
    try:
        return run_launch([*config.arguments(), str(script), *map(str, args)], quiet=True)
    except Interrupted as interrupt:
        number = interrupt.number
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.raise_signal(number)  # as it would have been without the launcher, and with everything cleaned up
    raise DistributedError(f"the launcher was ended by {number.name}, and so were its processes")


def run_launch(argv: list[str], *, name: str | None = None, quiet: bool = False) -> LaunchResult:
    """Do what ``panther launch`` is asked to.

    Args:
        argv: Its arguments.
        name: What to call the run; None is the script's name.
        quiet: Say only what goes wrong.

    Raises:
        LaunchError: If the script failed.
        Interrupted: On a signal, once the processes have ended.
    """
    from panther.distributed.launcher._arguments import parse_arguments, prepare
    from panther.distributed.launcher._run import run_job

    job = prepare(parse_arguments(argv), name)
    say = _say
    if not quiet:
        count = job.config.nproc_per_node
        nodes = "" if job.nodes[1] == 1 else f" here, {job.asked} in all"
        where = f"; logs in {job.folder}" if job.folder else ""
        say(f"{count} process{'es' if count > 1 else ''} of {job.name}{nodes}{where}")
    try:
        return run_job(job, say)
    finally:
        if job.folder is not None:
            with suppress(OSError):  # there is something in it, unless no process was started
                job.folder.rmdir()
                job.folder.parent.rmdir()


def _say(text: str) -> None:
    print(f"panther launch: {text}", file=sys.stderr, flush=True)
