"""``panther init``: launch files for Slurm, Kubernetes, Ray or torchrun."""

__all__ = ["add_parser", "run"]

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from panther.cli._arguments import add_option, check_folder, note
from panther.cli._options import flag_of
from panther.cli.init._files import write_files
from panther.cli.init._job import OPTIONS, JobConfig
from panther.cli.train import read_config
from panther.errors import PantherError
from panther.files import write_text

_KINDS = {
    "slurm": "an sbatch script",
    "kubernetes": "an indexed Job with its Service, a PyTorchJob and a TrainJob",
    "ray": "a RayJob for KubeRay",
    "torchrun": "a shell script for torchrun",
}


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    example = "example: panther init slurm --nodes 2 --gpus-per-node 8 train.py"
    parser = commands.add_parser("init", description="Write files that start a script on many nodes.", epilog=example)
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
    for kind, text in _KINDS.items():
        options = kinds.add_parser(
            kind,
            help=text,
            usage=f"panther init {kind} [options] script.py [arguments of the script]\n"
            f"       panther init {kind} --config FILE.toml [options]",
            description=f"Write {text} that starts a script, or panther train if FILE.toml names a model. "
            "Options come before the script.",
        )
        for name, entry in OPTIONS.items():
            default_text = "" if entry.default is None else f" (default: {entry.default})"
            # The parser's own default is None, because --config may have a value.
            meaning = entry.metadata["help"] + default_text
            options.add_argument(flag_of(name), type=entry.metadata["kind"], metavar="VALUE", help=meaning)
        module = "the script is a module's name"
        options.add_argument("-m", "--module", action="store_true", default=None, help=module)
        add_option(options, "--config", str, "TOML file with the same names in a table [launch]", metavar="FILE")
        options.add_argument("--out", default=".", metavar="DIR", help="folder to write to (default: the current one)")
        options.add_argument("--force", action="store_true", help="overwrite existing files")
        options.add_argument("script", nargs="?", help="script to run: its path where it runs")
        options.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the files and print how to start them."""
    _check_order(args)
    options = {field.name: getattr(args, field.name) for field in fields(JobConfig)}
    values = (_read_config(args) if args.config else {}) | {
        name: value for name, value in options.items() if value not in (None, [])
    }
    if not values.get("script"):
        raise PantherError(
            "nothing to run: name a script after the options, or give a --config whose table [launch] has a script, "
            "or a model and data for panther train"
        )
    job = JobConfig(**values)
    texts = write_files(args.kind, job)
    folder = check_folder(args.out)
    existing = [name for name in texts if (folder / name).exists()]
    if existing and not args.force:
        raise PantherError(
            f"{', '.join(existing)} in {folder} would be overwritten: add --force, or another --out, before the script"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(folder / name, text)
        usage = text.partition("panther init. ")[2].partition("\n")[0]
        print(f"{folder / name}: {usage}{'' if folder == Path() else f' (in {folder})'}")
    _print_notes(args.kind, job)
    return 0


def _check_order(args: argparse.Namespace) -> None:
    """Raise if options of ``panther init`` follow the script, which would silently get them."""
    if args.args[:1] == ["--"]:
        del args.args[0]
    names = {*map(flag_of, OPTIONS), "--module", "--config", "--out", "--force"}
    late = [word for word in args.args if word.partition("=")[0] in names]
    if late and "--" not in args.argv:
        raise PantherError(
            f"{', '.join(late)} after {args.script} would be an argument of the script: put options of panther init "
            f"before the script, or -- after the script if {'it is' if len(late) == 1 else 'they are'} for the script"
        )


def _print_notes(kind: str, job: JobConfig) -> None:
    """Print notes about what is probably not intended: a script that does not exist, a Slurm job without cores."""
    # The files of an image are not known here.
    if not (job.module or kind in ("kubernetes", "ray") or Path(job.script).exists()):
        note(f"{job.script} does not exist here: check its path if the job runs on this file system")
    if kind == "ray":
        note(f"the script trains with panther.integrations.ray.RayTrainer, on {job.ray_workers}")
    if kind == "slurm" and job.cpus_per_node is None:
        for_processes = f" for its {job.processes} processes" if job.processes > 1 else ""
        note(
            "slurm.sbatch asks for no cores, and Slurm then gives the cluster's default, usually one core on each "
            f"node{for_processes}: add --cpus-per-node N"
        )


def _read_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of --config: its table [launch], and ``panther train`` as the script if it names a model."""
    file = args.config
    settings, table = read_config(file)
    trains = "model" in settings and "script" not in table
    if not table and not trains:
        raise PantherError(f'--config {file} has no table [launch]: begin with [launch] and script = "train.py"')
    keys = [field.name for field in fields(JobConfig)]
    if unknown := sorted(set(table) - set(keys)):
        raise PantherError(
            f"--config {file} has unknown keys in [launch], {', '.join(unknown)}: use some of {', '.join(sorted(keys))}"
        )
    args_there = table.get("args", [])
    if not isinstance(args_there, list) or not all(isinstance(word, str) for word in args_there):
        raise PantherError(f"--config {file}: args must be a list of strings, not {args_there!r}")
    if not isinstance(table.get("module", False), bool):
        raise PantherError(f"--config {file}: module must be true or false, not {table['module']!r}")
    values = {}
    for name in OPTIONS.keys() & table.keys():
        try:
            values[name] = OPTIONS[name].metadata["kind"](str(table[name]))
        except argparse.ArgumentTypeError as error:
            raise PantherError(f"--config {file}: {name}: {error}") from None
    if args.script is not None and ("model" in settings or "script" in table):
        return values  # module and args of the table are for a different script
    if not trains:
        return table | values
    if args.kind == "ray":
        raise PantherError(
            f"--config {file} is for panther train, which does not use Ray: name a script with a RayTrainer"
        )
    if "data" not in settings and not any(word.partition("=")[0] == "--data" for word in args_there):
        raise PantherError(
            f'--config {file} has a model and no data: add data = "module:function" for panther train, or name a script'
        )
    arguments = ["train", "--config", str(args.config), *args_there]
    return values | {"script": "panther", "module": True, "args": arguments}
