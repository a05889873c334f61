"""The settings with which a script is started."""

__all__ = ["LOG_DIR", "LaunchConfig"]

from dataclasses import InitVar, dataclass, fields
from os import PathLike

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
        monitor_interval: Another name of monitor_interval_s.
        start_timeout: Another name of rdzv_timeout_s.

    Raises:
        TypeError: If a setting is given by both of its names.

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
    monitor_interval: InitVar[float | None] = None
    start_timeout: InitVar[float | None] = None

    def __post_init__(self, monitor_interval: float | None, start_timeout: float | None) -> None:
        """Take a setting that is given by its other name."""
        given = {"monitor_interval": monitor_interval, "start_timeout": start_timeout}
        for other, name in (("monitor_interval", "monitor_interval_s"), ("start_timeout", "rdzv_timeout_s")):
            if given[other] is None:
                continue
            if getattr(self, name) != getattr(type(self), name):
                raise TypeError(f"{other} and {name} are the same setting: give one")
            # The only way to set a value of a frozen dataclass.
            object.__setattr__(self, name, given[other])

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
