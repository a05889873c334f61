"""The launch files of ``panther init``: templates, filled with the values of a job.

Every file except the one for torchrun ends in the same ``panther launch`` command. Values in YAML files are written as
JSON, which YAML reads the same way; arguments in shell scripts are quoted by shlex.
"""

__all__ = ["write_files"]

import json
import shlex
import string
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from panther.cli.init._job import JobConfig
from panther.errors import PantherError

_EXIT_S = 30  # after the grace time, the processes end and the job is queued again in this time


def write_files(kind: str, job: JobConfig) -> dict[str, str]:
    """Return the text of each file of a kind: slurm, torchrun, kubernetes or ray."""
    if kind in ("kubernetes", "ray") and job.image is None:
        raise PantherError(f"{kind} needs --image: name a container image with Panther in it")
    writers: dict[str, dict[str, Callable[[JobConfig], str]]] = {
        "slurm": {"slurm.sbatch": _slurm},
        "torchrun": {"torchrun.sh": _torchrun},
        "kubernetes": {"job.yaml": _job, "pytorchjob.yaml": _pytorchjob, "trainjob.yaml": _trainjob},
        "ray": {"rayjob.yaml": _rayjob},
    }
    return {name: write(job) for name, write in writers[kind].items()}


class _Template(string.Template):
    delimiter = "@@"  # $, @ and % have meanings in bash and sbatch


def _fill(template: str, /, **values: Any) -> str:
    return _Template(files(__package__).joinpath("templates", template).read_text("utf-8")).substitute(values)


def _slurm(job: JobConfig) -> str:
    """Return an sbatch script: a launcher on each node, with time to save and a requeue before the time limit."""
    notice = job.grace + _EXIT_S
    limit = 0 if job.time is None else _seconds(job.time)
    if 0 < limit <= notice:  # Slurm takes 0 for no limit
        raise PantherError(
            f"--time {job.time} is {limit} s and must be more than --grace {job.grace} and {_EXIT_S} s for "
            f"the processes to end, {notice} s in all: give a longer --time, or a shorter --grace"
        )
    directives = {
        "cpus-per-task": job.cpus_per_node,
        "gpus-per-node": job.gpus_per_node or None,
        "mem": job.memory,
        "time": job.time,
        "partition": job.partition,
    }
    launch_arguments = job.options('"$head_node"', rdzv_id=f'{job.name}-"$SLURM_JOB_ID"')
    return _fill(
        "slurm.sbatch",
        name=job.name,
        nodes=job.nodes,
        signal=f"USR1@{notice}",
        directives="".join(f"#SBATCH --{name}={value}\n" for name, value in directives.items() if value is not None),
        arguments="\n".join(f"    {word}" for word in (*launch_arguments, *map(shlex.quote, job.command))),
    )


def _seconds(time: str) -> int:
    """Return a time limit as Slurm reads it: two numbers are minutes and seconds, but hours and minutes after days."""
    days, _, rest = time.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(n * unit for n, unit in zip(numbers, units, strict=False))


def _torchrun(job: JobConfig) -> str:
    """Return a shell script that starts torchrun on a node."""
    usage, rendezvous = "bash torchrun.sh", ["--standalone"]
    if job.nodes > 1:
        usage = f"MASTER_ADDR=HOST bash torchrun.sh, on each of {job.nodes} nodes, HOST being one of them"
        endpoint = f'--rdzv-endpoint="${{MASTER_ADDR:?set it to the name of one node, on all}}:{job.port}"'
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-id={job.name}", endpoint]
    sizes = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.processes}", f"--max-restarts={job.max_restarts}"]
    # torchrun reads ${local_rank} in arguments as a macro, and $$ as a dollar sign.
    command = [shlex.quote(word.replace("$", "$$")) for word in job.command]
    return _fill(
        "torchrun.sh",
        usage=usage,
        grace=job.grace,
        backend=f"export PANTHER_BACKEND={job.backend}\n" if job.backend else "",
        arguments=" \\\n".join(f"    {word}" for word in (*sizes, *rendezvous, *command)),
    )


def _job(job: JobConfig) -> str:
    """Return an Indexed Job, in which each index is a node, and the Service by which the nodes find each other."""
    return _fill("job.yaml", **_pod(job, f"{job.name}-0.{job.name}", "NODE_RANK", indent=8))


def _pytorchjob(job: JobConfig) -> str:
    """Return a PyTorchJob, for clusters with Kubeflow's training operator."""
    workers = f"\n    Worker:\n      replicas: {job.nodes - 1}\n      restartPolicy: OnFailure\n      template: *pod"
    return _fill(
        "pytorchjob.yaml",
        processes=json.dumps(str(job.processes)),
        workers=workers if job.nodes > 1 else "",
        **_pod(job, f"{job.name}-master-0", "RANK", indent=12),
    )


def _trainjob(job: JobConfig) -> str:
    """Return a TrainJob, for clusters with Kubeflow Trainer, the training operator's successor."""
    return _fill("trainjob.yaml", processes=job.processes, **_pod(job, "$(PET_MASTER_ADDR)", "PET_NODE_RANK", indent=4))


def _rayjob(job: JobConfig) -> str:
    """Return a RayJob, for clusters with KubeRay: a cluster of a head and of workers that lives as long as the job."""
    script = {"name": "command", "mountPath": "/etc/panther"}
    volume = {"name": "command", "configMap": {"name": job.name}}
    values = _pod(job, "", "", indent=0)
    command = shlex.join(["exec", "python", *(["-m"] if job.module else []), job.script, *job.args])
    return _fill(
        "rayjob.yaml",
        **values
        | {
            "workers": job.ray_workers,
            "command": _quoted(command),
            "max_restarts": job.max_restarts,
            "head_mounts": json.dumps([*json.loads(values["mounts"]), script]),
            "head_volumes": json.dumps([*json.loads(values["volumes"]), volume]),
        },
    )


def _pod(job: JobConfig, host: str, rank_variable: str, indent: int) -> dict[str, Any]:
    """Return the values of the templates for Kubernetes; fields of a container are indented by ``indent`` spaces."""
    # $(NAME) is a variable to Kubernetes, and $$ a dollar sign.
    launch_arguments = job.options(host, f"$({rank_variable})") + [word.replace("$", "$$") for word in job.command]
    limits = {
        "nvidia.com/gpu": job.gpus_per_node or None,
        "cpu": job.cpus_per_node,
        "memory": f"{job.memory}i" if job.memory else None,
    }
    # The shared memory that a container has by default is too small for the workers of data loaders.
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if job.volume:
        claim, _, path = job.volume.partition(":")
        mounts.append({"name": "kept", "mountPath": path})
        volumes.append({"name": "kept", "persistentVolumeClaim": {"claimName": claim}})
    return {
        "name": json.dumps(job.name),
        "image": json.dumps(job.image),
        "nodes": job.nodes,
        "port": job.port,
        "failures": job.nodes * job.max_restarts,
        "stop_s": job.grace + _EXIT_S,
        "arguments": _sequence(launch_arguments, indent),
        # Kubernetes reads quantities as strings.
        "limits": json.dumps({name: str(value) for name, value in limits.items() if value is not None}),
        "mounts": json.dumps(mounts),
        "volumes": json.dumps(volumes),
    }


def _sequence(texts: Sequence[str], indent: int) -> str:
    """Return strings as a YAML sequence, each on a line."""
    return "".join(f"\n{' ' * indent}- {_quoted(text)}" for text in texts)


def _quoted(text: str) -> str:
    """Return a string as YAML."""
    # In ASCII, JSON writes a character beyond U+FFFF as two escapes, which YAML does not combine.
    return json.dumps(text, ensure_ascii=not text.isprintable())
