"""``panther init``: launch files for Slurm, Kubernetes, torchrun or docker compose."""

__all__ = ["add_parser", "run"]

import argparse
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from panther.cli._arguments import check_folder, positive
from panther.errors import PantherError

_KINDS = {
    "slurm": "an sbatch script",
    "kubernetes": "an indexed Job with its Service, and a PyTorchJob",
    "torchrun": "a shell script for torchrun",
    "compose": "a docker compose file with two nodes or more on one machine",
}
_LISTED = ("name", "nodes", "nproc_per_node", "gpus_per_node", "cpus_per_node", "memory", "time", "partition", "image",
           "volume", "backend", "max_restarts", "port", "grace")  # fmt: skip
_HELP = {
    "name": "of the job (default: panther)",
    "nodes": "number of nodes (default: 1; for compose 2)",
    "nproc_per_node": "processes on each node (default: one for each GPU, or 1)",
    "gpus_per_node": "GPUs on each node (default: 0)",
    "cpus_per_node": "cores on each node",
    "memory": "of each node, as 64G",
    "time": "time limit of Slurm, as 24:00:00",
    "partition": "of Slurm",
    "image": "container image with Panther in it, for Kubernetes and compose",
    "volume": "Kubernetes' claim for checkpoints and data, and its path in the pods, as runs:/runs",
    "backend": "gloo or nccl (default: by the GPUs)",
    "max_restarts": "how often to start all processes again after a failure (default: 0)",
    "port": "on which the first node listens (default: 29500)",
    "grace": "seconds to save in, before the time limit and after SIGTERM (default: 120)",
}
_NUMBERS = {"nodes", "nproc_per_node", "gpus_per_node", "cpus_per_node", "max_restarts", "port", "grace"}


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser("init", description="Write launch files.")
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
    for kind, text in _KINDS.items():
        _add_options(
            kinds.add_parser(
                kind,
                help=text,
                usage=f"panther init {kind} [options] script.py [arguments of the script]\n"
                f"       panther init {kind} --config FILE.toml [options]",
                description=f"Write {text} that starts a script, or panther train where FILE.toml names a model. "
                "Options stand before the script.",
            )
        )
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    for name in _LISTED:
        number = name in _NUMBERS
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_number if number else str,
            metavar="N" if number else "TEXT",
            help=_HELP[name],
        )
    parser.add_argument("-m", "--module", action="store_true", default=None, help="the script is a module's name")
    parser.add_argument("--config", metavar="FILE", help="TOML file whose table [launch] has the same names, and args")
    parser.add_argument("--out", default=".", metavar="DIR", help="where to write (default: here)")
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")
    parser.add_argument("script", nargs="?", help="what to run, where it runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def _number(text: str) -> int:
    return 0 if text == "0" else positive(text)


def run(args: argparse.Namespace) -> int:
    """Write the files and say how to start them."""
    from panther.cli.init._job import JobConfig, slurm, torchrun
    from panther.cli.init._launch_yaml import compose, job, pytorchjob

    values = _read(args) if args.config else {}
    values |= {name: value for name in (*_LISTED, "module", "script") if (value := getattr(args, name)) is not None}
    if args.args:
        values["args"] = args.args
    if not values.get("script"):
        raise PantherError(
            "nothing to run: name a script after the options, or in the table [launch] of --config, or there a model "
            "and data, for panther train"
        )
    if args.kind == "compose":
        values.setdefault("nodes", 2)
    config = JobConfig(**values)
    if args.kind in ("kubernetes", "compose") and config.image is None:
        raise PantherError(f"{args.kind} needs --image: name a container image with Panther in it")
    kinds: dict[str, dict[str, Callable[[JobConfig], str]]] = {
        "slurm": {"slurm.sbatch": slurm},
        "kubernetes": {"job.yaml": job, "pytorchjob.yaml": pytorchjob},
        "torchrun": {"torchrun.sh": torchrun},
        "compose": {"compose.yaml": compose},
    }
    writers = kinds[args.kind]
    texts = {name: write(config) for name, write in writers.items()}
    folder = check_folder(args.out)
    there = [name for name in texts if (folder / name).exists()]
    if there and not args.force:
        raise PantherError(f"{', '.join(there)} in {folder} would be overwritten: add --force, or give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / name
        path.write_text(text)
        print(f"{path}: {next(line for line in text.splitlines() if 'panther init. ' in line).partition('init. ')[2]}")
    if args.kind == "slurm" and config.cpus_per_node is None:
        several = f" for its {config.processes} processes" if config.processes > 1 else ""
        print(
            "panther: note: slurm.sbatch asks for no cores, and Slurm then gives what the cluster is set to, usually "
            f"one core on each node{several}: add --cpus-per-node N",
            file=sys.stderr,
        )
    return 0


def _read(args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import fields

    from panther.cli.init._job import JobConfig

    file = args.config
    try:
        with Path(file).open("rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise PantherError(f"--config {file} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PantherError(f"--config {file} is not TOML: {error}") from None
    settings = {key for part in (content, content.get("train")) if isinstance(part, dict) for key in part}
    trains = "model" in settings
    table = content.get("launch", {} if trains else None)
    if not isinstance(table, dict):
        raise PantherError(f'--config {file} has no table [launch]: begin with [launch] and script = "train.py"')
    known = {field.name for field in fields(JobConfig)}
    unknown = sorted(set(table) - known)
    if unknown:
        raise PantherError(
            f"--config {file} has {', '.join(unknown)} in [launch], and known are {', '.join(sorted(known))}"
        )
    if args.script is not None and (trains or "script" in table):  # whose module and args are not of this script
        return {key: value for key, value in table.items() if key not in ("script", "module", "args")}
    if trains and "script" not in table:
        more = table.get("args", [])
        if not isinstance(more, list):
            return table | {"script": "panther"}  # which is refused, with its reason
        if "data" not in settings and not any(str(part).startswith("data=") for part in more):
            raise PantherError(
                f'--config {file} has a model and no data: add data = "module:function" for panther train, or name a '
                "script"
            )
        table = table | {"script": "panther", "module": True, "args": ["train", "--config", _path_there(args), *more]}
    return table


def _path_there(args: argparse.Namespace) -> str:
    """The path of --config where the job runs: containers of compose have nothing but the folder of their file."""
    if args.kind != "compose":
        return str(args.config)
    path, folder = Path(args.config).resolve(), Path(args.out).resolve()
    if not path.is_relative_to(folder):
        away = ", or leave --out away" if path.is_relative_to(Path.cwd()) else ""
        raise PantherError(
            f"--config {args.config} is not below --out {args.out}, of which alone the containers know: keep the "
            f"configuration in the folder that --out names{away}"
        )
    return path.relative_to(folder).as_posix()
