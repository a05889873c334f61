"""The settings to start a script with."""

__all__ = ["LOG_DIR", "LaunchConfig"]

import math
from dataclasses import dataclass, fields
from os import PathLike

from panther._settings import Settings
from panther.errors import ConfigError

LOG_DIR = "panther-logs"
_MINIMA = {
    "nproc_per_node": 1, "nnodes": 1, "node_rank": 0, "rdzv_timeout_s": 1, "max_restarts": 0, "shutdown_timeout_s": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Settings):
    """How to start a script: torchrun's options, under the same names.

    Attributes:
        nproc_per_node: Processes on each node; ``"auto"`` is one for each GPU, or for each core where there is none.
        nnodes: Number of nodes, or ``"MIN:MAX"``.
        node_rank: Number of this node, from 0. Node 0 hosts the rendezvous. None lets torch number the nodes.
        rdzv_backend: ``"static"``, or ``"c10d"``, which restarts all nodes together; None means static if there is a
            node_rank.
        rdzv_endpoint: ``"HOST:PORT"`` of node 0, the same on every node. None is for one node.
        rdzv_id: A name of the run, the same on every node, for runs that share an endpoint.
        rdzv_timeout_s: How long to wait for the other nodes, in whole seconds.
        max_restarts: How often to start all processes again after a failure.
        monitor_interval_s: Time between two checks of the processes.
        backend: The backend of :func:`panther.distributed.init` in the script: ``"gloo"``, ``"nccl"``, or None, which
            chooses by the GPUs.
        log_dir: Folder in which each run gets a folder for the output of its ranks.
        shutdown_timeout_s: Time that processes have to save and leave after SIGTERM or Ctrl-C, before they are killed;
            whole seconds.
        grace_period_s: Time that processes have to save and end after a second signal, before they are killed.
        module: Whether the script is the name of a module, as after ``python -m``.
        monitor_interval: Another name of monitor_interval_s.
        start_timeout: Another name of rdzv_timeout_s.

    Raises:
        ConfigError: If a name is unknown, a value has the wrong type or is out of range, or a setting is given by both
            of its names.

    Example:
        >>> LaunchConfig(nproc_per_node=4, backend="gloo").arguments()
        ['--nproc-per-node=4', '--backend=gloo']
    """

    nproc_per_node: int | str = 1
    nnodes: int | str = 1
    node_rank: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str = "none"
    rdzv_timeout_s: float = 600
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    backend: str | None = None
    log_dir: str | PathLike[str] = LOG_DIR
    shutdown_timeout_s: float = 30
    grace_period_s: float = 15.0
    module: bool = False
    monitor_interval: float | None = None
    start_timeout: float | None = None

    def __post_init__(self) -> None:
        """Convert and check every value."""
        super().__post_init__()
        for other, name in (("monitor_interval", "monitor_interval_s"), ("start_timeout", "rdzv_timeout_s")):
            if (value := getattr(self, other)) is None:
                continue
            if getattr(self, name) != getattr(type(self), name):
                raise ConfigError(f"{other} and {name} are the same setting: give one")
            object.__setattr__(self, name, value)
            # dataclasses.replace would pass the old value beside a new value of the setting.
            object.__setattr__(self, other, None)
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if isinstance(value, int | float) and not minimum <= value < math.inf:
                raise ConfigError(f"{name}={value} must be at least {minimum} and finite")
        for name in ("monitor_interval_s", "grace_period_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive and finite")

    def arguments(self) -> list[str]:
        """Return these settings as arguments of ``panther launch``, without settings that have their default."""
        arguments = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if field.name == "module":
                arguments.append("--module")
            elif field.name == "rdzv_timeout_s":  # timeout is for static, join_timeout for c10d
                arguments.append(f"--rdzv-conf=timeout={int(value)},join_timeout={int(value)}")
            else:
                value = int(value) if field.name == "shutdown_timeout_s" else value
                arguments.append(f"--{field.name.removesuffix('_s').replace('_', '-')}={value}")
        return arguments
