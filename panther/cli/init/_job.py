"""What ``panther init`` writes: one description of a job, and its launch files for a scheduler or a shell.

Every file ends in the same ``panther launch``, but for the one that is for torchrun.
"""

__all__ = ["JobConfig", "slurm", "torchrun"]

import re
import shlex
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from panther.distributed import LaunchConfig
from panther.errors import PantherError

_PATTERNS = {
    "name": (r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", "lower-case letters, digits and dashes, at most 52"),
    "time": (
        r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}",
        "Slurm's form: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
    ),
    "memory": (r"\d+[KMGT]", "a whole number and K, M, G or T, as in 64G"),
    "partition": (r"[\w.,-]+", "names of letters, digits, dots and dashes"),
    "image": (r"[\w./:@-]+", "a container image, as in registry/name:tag"),
    "volume": (r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[\w./-]+", "a claim and a path in the container, as in runs:/runs"),
}
_TO_LEAVE_S = 30  # on top of the grace, for the processes to end and the job to be queued again
_LONGEST_NOTICE_S = 65535  # of sbatch's --signal
_LEAST = {"nodes": 1, "nproc_per_node": 1, "gpus_per_node": 0, "cpus_per_node": 1, "max_restarts": 0, "grace": 1}


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What to run and on what: the options of ``panther init``, and the keys of ``[launch]`` in its TOML file."""

    script: str
    """Path of the script where it runs, or the name of a module."""

    args: tuple[str, ...] = ()
    """Its arguments."""

    module: bool = False
    """Whether the script is a module, as after ``python -m``."""

    name: str = "panther"
    """Of the job."""

    nodes: int = 1
    """Number of nodes."""

    nproc_per_node: int | None = None
    """Processes on each node; None is one for each GPU, or one."""

    gpus_per_node: int = 0
    """GPUs on each node."""

    cpus_per_node: int | None = None
    """Cores on each node; None leaves them to the scheduler."""

    memory: str | None = None
    """Of each node, as ``64G``."""

    time: str | None = None
    """Time limit of Slurm, as ``24:00:00``."""

    partition: str | None = None
    """Of Slurm."""

    image: str | None = None
    """Container image with Panther and the script, for Kubernetes and compose."""

    volume: str | None = None
    """For Kubernetes: the PersistentVolumeClaim that outlives the pods, and where they have it, as ``runs:/runs``."""

    backend: str | None = None
    """``gloo`` or ``nccl``; None leaves it to the script."""

    max_restarts: int = 0
    """How often all processes are started again after a failure."""

    port: int = 29500
    """On which the first node listens for the others."""

    grace: int = 120
    """Seconds to save in, before the time limit and after SIGTERM."""

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            PantherError: If one breaks a rule, named with its option.
        """
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if field.name == "args":
                if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
                    raise PantherError(f"args must be a list of strings, not {value!r}")
                object.__setattr__(self, "args", tuple(value))
                continue
            kind = hints[field.name]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise PantherError(f"{option} {value!r} must be {getattr(kind, '__name__', kind)}")
            if value is None:
                continue
            if value < _LEAST[field.name] if field.name in _LEAST else False:
                raise PantherError(f"{option} {value} must be at least {_LEAST[field.name]}")
            if field.name in _PATTERNS and not re.fullmatch(_PATTERNS[field.name][0], value):
                raise PantherError(f"{option} {value!r} must be {_PATTERNS[field.name][1]}")
            if isinstance(value, str) and (not value or not value.isprintable()):
                raise PantherError(f"{option} {value!r} must be printable, and not empty")
        if not 0 < self.port < 1 << 16:
            raise PantherError(f"--port {self.port} must be from 1 to 65535")
        if self.backend not in (None, "gloo", "nccl"):
            raise PantherError(f"--backend {self.backend} must be gloo or nccl")
        if self.script.startswith("-"):
            raise PantherError(f"the script {self.script} must not begin with a dash: write ./{self.script}")

    @property
    def processes(self) -> int:
        """Processes on each node."""
        return self.nproc_per_node or self.gpus_per_node or 1

    def arguments(self, host: str, node_rank: str | None) -> list[str]:
        """What follows ``panther launch``.

        Args:
            host: Where the first node can be found.
            node_rank: What stands for the number of a node; None leaves the option out.
        """
        several = self.nodes > 1
        options = LaunchConfig(
            nproc_per_node=self.processes,
            nnodes=self.nodes,
            rdzv_endpoint=f"{host}:{self.port}" if several else "",
            rdzv_id=self.name if several else "none",
            max_restarts=self.max_restarts,
            backend=self.backend,
            shutdown_timeout=self.grace,
        ).arguments()
        if several and node_rank is not None:
            options.append(f"--node-rank={node_rank}")
        return [*options, *(["--module"] if self.module else []), self.script, *self.args]


def slurm(job: JobConfig) -> str:
    """An sbatch script: one launcher on each node, with time to save and a requeue before the time limit.

    Raises:
        PantherError: If the signal before the time limit would come before the start, or Slurm cannot send it so early.
    """
    notice = job.grace + _TO_LEAVE_S
    if notice > _LONGEST_NOTICE_S:
        raise PantherError(
            f"--grace {job.grace} must be at most {_LONGEST_NOTICE_S - _TO_LEAVE_S}: Slurm's signal comes at most "
            f"{_LONGEST_NOTICE_S} s before the time limit, and {_TO_LEAVE_S} s are for leaving"
        )
    limit = 0 if job.time is None else _seconds(job.time)
    if 0 < limit <= notice:  # Slurm takes 0 for no limit
        raise PantherError(
            f"--time {job.time} is {limit} s and must be more than --grace {job.grace} and {_TO_LEAVE_S} s for "
            f"leaving, {notice} s in all: give a longer --time, or a shorter --grace"
        )
    directives: list[tuple[str, Any]] = [
        ("job-name", job.name),
        ("nodes", job.nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", job.cpus_per_node),
        ("gpus-per-node", job.gpus_per_node or None),
        ("mem", job.memory),
        ("time", job.time),
        ("partition", job.partition),
        ("output", "%x-%j.out"),
        ("open-mode", "append"),
        ("requeue", ""),
        ("signal", f"B:USR1@{notice}"),
    ]
    head = [f"#SBATCH --{name}={value}".rstrip("=") for name, value in directives if value is not None]
    words = [shlex.quote(word) for word in job.arguments("HEAD_NODE", None)]
    words = [
        word.replace("HEAD_NODE", '"$head_node"', 1) if word.startswith("--rdzv-endpoint=") else word for word in words
    ]
    words = [f'{word}"-$SLURM_JOB_ID"' if word.startswith("--rdzv-id=") and job.nodes > 1 else word for word in words]
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by panther init. Submit with: sbatch slurm.sbatch",
            *head,
            "",
            "set -u",
            'head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            'echo "first node: $head_node"',
            *(
                ['export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not take it over']
                if job.cpus_per_node
                else []
            ),
            "",
            "# Slurm sends USR1 to this shell before the time limit: the processes get SIGTERM and time to save, and",
            "# the job is queued again, to go on from what they saved.",
            "requeue=no",
            "step=",
            "# srun itself would answer TERM by killing the processes, so scancel sends it to those of the step.",
            'pass_on() { [ -z "$step" ] || scancel --signal=TERM "$SLURM_JOB_ID.0"; }',
            "trap 'requeue=yes; pass_on' USR1",
            "trap pass_on TERM",
            "",
            "arguments=(",
            *(f"    {word}" for word in words),
            ")",
            "# One launcher on each node; $SLURM_NODEID is that of the node where it runs.",
            "# shellcheck disable=SC2016",
            'srun --kill-on-bad-exit=0 bash -c \'exec panther launch --node-rank="$SLURM_NODEID" "$@"\' launch \\',
            '    "${arguments[@]}" &',
            "step=$!",
            "code=0",
            'wait "$step" || code=$?',
            'while kill -0 "$step" 2>/dev/null; do  # the wait was ended by a signal',
            "    code=0",
            '    wait "$step" || code=$?',
            "done",
            'if [ "$requeue" = yes ] && [ "$code" -ne 0 ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _seconds(time: str) -> int:
    """A time limit as Slurm reads it: two numbers are minutes and seconds, but hours and minutes after days."""
    days, _, rest = time.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(n * unit for n, unit in zip(numbers, units, strict=False))


def torchrun(job: JobConfig) -> str:
    """A shell script that starts torchrun on a node."""
    options = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.processes}", f"--max-restarts={job.max_restarts}"]
    usage = "bash torchrun.sh"
    if job.nodes > 1:
        usage = f"MASTER_ADDR=HOST bash torchrun.sh, on each of {job.nodes} nodes, HOST being one of them"
        endpoint = f'--rdzv-endpoint="${{MASTER_ADDR:?set it to the name of one node, on all}}:{job.port}"'
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-id={job.name}", endpoint]
    else:
        rendezvous = ["--standalone"]
    # torchrun takes ${local_rank} in arguments for a macro, and $$ for a $.
    script = [shlex.quote(word.replace("$", "$$")) for word in (job.script, *job.args)]
    words = [*options, *rendezvous, *(["--module"] if job.module else []), *script]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Written by panther init. Start with: {usage}",
            "set -eu",
            "# A store that torchrun reuses keeps the addresses of an earlier attempt, and some restarts hang on them.",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.grace}",
            *([f"export PANTHER_BACKEND={job.backend}"] if job.backend else []),
            "exec torchrun \\",
            *(f"    {word} \\" for word in words[:-1]),
            f"    {words[-1]}",
            "",
        ]
    )
