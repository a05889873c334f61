"""The job of ``panther init``: options on the command line, and keys of ``[launch]`` in a TOML file."""

__all__ = ["JobConfig"]

import re
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from panther.errors import PantherError


def _option(default: Any, text: str, *, least: int | None = None, form: tuple[str, str] | None = None) -> Any:
    """Return a field with its help text and its rule: a least value, or a pattern and its description."""
    return field(default=default, metadata={"help": text, "least": least, "form": form})


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What to run and on what; fields with a help text are options of ``panther init``."""

    script: str
    """Path of the script where it runs, or the name of a module."""
    args: tuple[str, ...] = ()
    """Arguments of the script."""
    module: bool = False
    """Whether the script is a module, as after ``python -m``."""
    name: str = _option(
        "panther",
        "name of the job",
        form=(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", "lower-case letters, digits and dashes, at most 52"),
    )
    nodes: int = _option(1, "number of nodes", least=1)
    nproc_per_node: int | None = _option(None, "processes on each node (default: one for each GPU, or 1)", least=1)
    gpus_per_node: int = _option(0, "GPUs of each node", least=0)
    cpus_per_node: int | None = _option(None, "cores of each node (default: chosen by the scheduler)", least=1)
    memory: str | None = _option(
        None, "memory of each node, as 64G", form=(r"\d+[KMGT]", "a whole number and K, M, G or T, as in 64G")
    )
    time: str | None = _option(
        None,
        "time limit of Slurm, as 24:00:00",
        form=(
            r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}",
            "Slurm's form: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
        ),
    )
    partition: str | None = _option(
        None, "partition of Slurm", form=(r"[\w.,-]+", "names of letters, digits, dots and dashes")
    )
    image: str | None = _option(
        None,
        "container image with Panther in it, for kubernetes and compose",
        form=(r"[\w./:@-]+", "a container image, as in registry/name:tag"),
    )
    volume: str | None = _option(
        None,
        "PersistentVolumeClaim for checkpoints and its path in the pods, as runs:/runs, for kubernetes",
        form=(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[\w./-]+", "a claim and a path in the container, as in runs:/runs"),
    )
    backend: str | None = _option(
        None, "gloo or nccl (default: chosen by the script)", form=(r"gloo|nccl", "gloo or nccl")
    )
    max_restarts: int = _option(0, "how often all processes are started again after a failure", least=0)
    port: int = _option(29500, "port on which the first node listens", least=1)
    grace: int = _option(120, "seconds to save in, before the time limit and after SIGTERM", least=1)

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            PantherError: If one breaks a rule, named with its option.
        """
        if not isinstance(self.args, list | tuple) or not all(isinstance(word, str) for word in self.args):
            raise PantherError(f"args must be a list of strings, not {self.args!r}")
        hints = get_type_hints(type(self))
        for entry in fields(self):
            value, option, kind = getattr(self, entry.name), f"--{entry.name.replace('_', '-')}", hints[entry.name]
            if entry.name == "args":
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise PantherError(f"{option} {value!r} must be {getattr(kind, '__name__', kind)}")
            least, form = entry.metadata.get("least"), entry.metadata.get("form")
            if value is not None and least is not None and value < least:
                raise PantherError(f"{option} {value} must be at least {least}")
            if value is not None and form is not None and not re.fullmatch(form[0], value):
                raise PantherError(f"{option} {value!r} must be {form[1]}")
        if self.port >= 1 << 16:
            raise PantherError(f"--port {self.port} must be from 1 to 65535")
        if not self.script or not self.script.isprintable() or self.script.startswith("-"):
            raise PantherError(f"the script {self.script!r} must be printable, not empty, and not begin with a dash")

    @property
    def processes(self) -> int:
        """Return the number of processes on each node."""
        return self.nproc_per_node or self.gpus_per_node or 1

    @property
    def command(self) -> list[str]:
        """Return what follows the options of the launcher: the script and its arguments, unquoted."""
        return [*(["--module"] if self.module else []), self.script, *self.args]

    def options(self, host: str, node_rank: str | None = None, rdzv_id: str = "") -> list[str]:
        """Return the options of ``panther launch``, which need no quotes but those in the arguments.

        Args:
            host: Name of the first node, for several nodes.
            node_rank: Number of the node; None leaves the option out.
            rdzv_id: Name of the run; the name of the job if empty.
        """
        several = self.nodes > 1
        given = {
            "nproc-per-node": self.processes,
            "nnodes": self.nodes if several else None,
            "node-rank": node_rank if several else None,
            # The static rendezvous restarts other nodes only when their ranks notice; c10d numbers the nodes itself.
            "rdzv-backend": "c10d" if several and self.max_restarts else None,
            "rdzv-endpoint": f"{host}:{self.port}" if several else None,
            "rdzv-id": (rdzv_id or self.name) if several else None,
            "max-restarts": self.max_restarts or None,
            "backend": self.backend,
            "shutdown-timeout": self.grace,
        }
        return [f"--{name}={value}" for name, value in given.items() if value is not None]
