"""The job of ``panther init``: options on the command line, and keys of ``[launch]`` in a TOML file."""

__all__ = ["OPTIONS", "JobConfig"]

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from panther.cli._arguments import non_negative, positive, whole_number
from panther.errors import PantherError


def _option(default: Any, text: str, kind: Callable[[str], Any]) -> Any:
    """Return a field with its help text and the type that its text is converted to."""
    return field(default=default, metadata={"help": text, "kind": kind})


def _form(pattern: str, description: str) -> Callable[[str], str]:
    """Return the type of texts that match a pattern."""

    def convert(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ArgumentTypeError(f"{text!r} must be {description}")
        return text

    return convert


_NAME = _form(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", "lower-case letters, digits and dashes, at most 52")
_MEMORY = _form(r"\d+[KMGT]", "a whole number and K, M, G or T, as in 64G")
_TIME = _form(
    r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}", "Slurm's form: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
)
_PARTITION = _form(r"[\w.,-]+", "names of letters, digits, dots and dashes")
_IMAGE = _form(r"[\w./:@-]+", "a container image, as in registry/name:tag")
_VOLUME = _form(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[\w./-]+", "a claim and a path in the container, as in runs:/runs")
_BACKEND = _form(r"gloo|nccl", "gloo or nccl")


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A script and the nodes that run it; fields with a help text are options of ``panther init``."""

    script: str
    """Path of the script where it runs, or the name of a module."""
    args: Sequence[str] = ()
    """Arguments of the script."""
    module: bool = False
    """Whether the script is a module, as after ``python -m``."""
    name: str = _option("panther", "name of the job", _NAME)
    nodes: int = _option(1, "number of nodes", positive)
    nproc_per_node: int | None = _option(None, "processes on each node (default: one for each GPU, or 1)", positive)
    gpus_per_node: int = _option(0, "GPUs of each node", non_negative)
    cpus_per_node: int | None = _option(None, "cores of each node (default: chosen by the scheduler)", positive)
    memory: str | None = _option(None, "memory of each node, as 64G", _MEMORY)
    time: str | None = _option(None, "time limit of Slurm, as 24:00:00", _TIME)
    partition: str | None = _option(None, "partition of Slurm", _PARTITION)
    image: str | None = _option(None, "container image with Panther in it, for kubernetes and ray", _IMAGE)
    volume: str | None = _option(
        None,
        "PersistentVolumeClaim for checkpoints and its path in pods, as runs:/runs, for kubernetes and ray",
        _VOLUME,
    )
    backend: str | None = _option(None, "gloo or nccl (default: chosen by the script)", _BACKEND)
    max_restarts: int = _option(0, "how often all processes are started again after a failure", non_negative)
    port: int = _option(29500, "port on which the first node listens", whole_number(1, 65535))
    # Slurm's signal comes at most 65,535 s before the time limit, and the processes need 30 s of that to end.
    grace: int = _option(120, "seconds to save in, before the time limit and after SIGTERM", whole_number(1, 65505))

    def __post_init__(self) -> None:
        script = self.script
        if not isinstance(script, str) or not script or not script.isprintable() or script.startswith("-"):
            raise PantherError(f"the script {script!r} must be printable, not empty, and not begin with a dash")

    @property
    def processes(self) -> int:
        """Return the number of processes on each node."""
        return self.nproc_per_node or self.gpus_per_node or 1

    @property
    def command(self) -> list[str]:
        """Return the words that follow the options of the launcher: the script and its arguments, unquoted."""
        return [*(["--module"] if self.module else []), self.script, *self.args]

    @property
    def ray_workers(self) -> str:
        """Return the ScalingConfig of Ray's workers as it is written in Python."""
        gpus = ", use_gpu=True" if self.gpus_per_node else ""
        return f"ScalingConfig(num_workers={self.nodes * self.processes}{gpus})"

    def options(self, host: str, node_rank: str | None = None, rdzv_id: str = "") -> list[str]:
        """Return the options of ``panther launch``. Only ``host`` and ``rdzv_id`` may need quotes, and contain them.

        ``host`` is the first of several nodes, and ``rdzv_id`` the name of the run if it is not that of the job.
        """
        has_several_nodes = self.nodes > 1
        options = {
            "nproc-per-node": self.processes,
            "nnodes": self.nodes if has_several_nodes else None,
            "node-rank": node_rank if has_several_nodes else None,
            # The static rendezvous restarts other nodes only when their ranks notice; c10d numbers the nodes itself.
            "rdzv-backend": "c10d" if has_several_nodes and self.max_restarts else None,
            "rdzv-endpoint": f"{host}:{self.port}" if has_several_nodes else None,
            "rdzv-id": (rdzv_id or self.name) if has_several_nodes else None,
            "max-restarts": self.max_restarts or None,
            "backend": self.backend,
            "shutdown-timeout": self.grace,
        }
        return [f"--{name}={value}" for name, value in options.items() if value is not None]


OPTIONS = {entry.name: entry for entry in fields(JobConfig) if entry.metadata}
