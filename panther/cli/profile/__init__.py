"""``panther profile``: where the time of a script goes, and how much of it is communication."""

__all__ = ["add_parser", "run"]

import argparse
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from panther.cli._arguments import add_option, check_folder, non_negative, note, positive
from panther.cli._user_function import current_folder_importable
from panther.errors import PantherError


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "profile",
        usage="panther profile [options] script.py [arguments of the script]",
        description="Run a script under torch.profiler; print its operations by time and the share of communication, "
        "and write a trace for chrome://tracing or Perfetto. Of several processes rank 0 is recorded.",
    )
    add_option(parser, "--nproc-per-node", positive, "processes", 1)
    add_option(parser, "--backend", str, "gloo or nccl, for several processes", metavar="NAME")
    add_option(parser, "--steps", positive, "optimizer steps to record (default: all)")
    add_option(parser, "--skip", non_negative, "steps before these (default: 1, with --steps)")
    add_option(parser, "--top", positive, "operations to show", 15)
    add_option(parser, "--out", str, "folder of trace.json", "panther-profile", metavar="DIR")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="script to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the script, print the profile and return the script's exit status."""
    if args.skip is not None and args.steps is None:
        raise PantherError(f"--skip {args.skip} needs --steps, the number of steps to record after it")
    if args.module:
        _check_module(args.script)
    elif not Path(args.script).is_file():
        raise PantherError(f"the script {args.script} does not exist: correct its path")
    trace = check_folder(args.out) / "trace.json"
    if args.nproc_per_node > 1 and "RANK" not in os.environ:
        return _launch(args)
    if args.backend is not None:
        os.environ.setdefault("PANTHER_BACKEND", args.backend)
    return _record(args, trace) if os.environ.get("RANK", "0") == "0" else _run_script(args)


def _check_module(name: str) -> None:
    with current_folder_importable():
        try:
            spec = find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = find_spec(f"{name}.__main__")
        except ImportError as error:
            if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
                raise  # A package around the module needs a module that is not installed.
            spec = None
    if spec is None:
        raise PantherError(f"the module {name} cannot be run: it, or its __main__, does not exist: correct its name")


def _launch(args: argparse.Namespace) -> int:
    """Start this command on several processes."""
    from panther.cli.launch import start

    options = [f"--out={args.out}", f"--top={args.top}", *(["--module"] if args.module else [])]
    options += [f"--{name}={value}" for name in ("steps", "skip") if (value := getattr(args, name)) is not None]
    backend = [] if args.backend is None else [f"--backend={args.backend}"]
    launcher = [f"--nproc-per-node={args.nproc_per_node}", *backend, "--module", "panther"]
    return start([*launcher, "profile", *options, args.script, *args.args], name=args.script)


def _record(args: argparse.Namespace, trace: Path) -> int:
    """Print and write the profile, also if the script failed, and return its exit status or raise its error."""
    from panther.cli.profile._recorder import Recorder

    skip = 0 if args.steps is None else 1 if args.skip is None else args.skip
    recorder = Recorder(args.steps, skip)
    try:
        with recorder:
            status = _run_script(args)
    finally:
        if recorder.has_recorded:
            recorder.print(args.top)
            recorder.write(trace)
            print(f"\nThe trace is in {trace}: open it in chrome://tracing or ui.perfetto.dev.")
    if status == 0 and not recorder.has_recorded:
        raise PantherError(
            f"{args.script} made {recorder.count} optimizer steps, and --skip {skip} leaves none to record: skip "
            "fewer, or leave --steps out"
        )
    if status == 0 and args.steps is not None and recorder.count < skip + args.steps:
        note(
            f"{args.script} made {recorder.count} optimizer steps, fewer than --skip {skip} and --steps {args.steps} "
            "need"
        )
    return status


def _run_script(args: argparse.Namespace) -> int:
    """Run a script in this process with the arguments and the search path that Python gives; return its exit status."""
    previous_state = sys.argv, list(sys.path)
    sys.argv = [args.script, *args.args]
    sys.path.insert(0, os.getcwd() if args.module else str(Path(args.script).resolve().parent))
    try:
        if args.module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(args.script, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.argv, sys.path[:] = previous_state
    return 0
