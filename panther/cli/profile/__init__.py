"""``panther profile``: where the time of a script goes, and how much of it is communication."""

__all__ = ["add_parser", "run"]

import argparse
import os
from pathlib import Path
from typing import Any

from panther._text import format_table
from panther.cli._arguments import check_folder, non_negative, note, positive
from panther.errors import PantherError


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "profile",
        usage="panther profile [options] script.py [arguments of the script]",
        description="Run a script under torch.profiler; print its operations by time and the share of communication, "
        "and write a trace for chrome://tracing or Perfetto. Of several processes rank 0 is recorded.",
    )
    default = "(default: %(default)s)"
    parser.add_argument("--nproc-per-node", type=positive, default=1, metavar="N", help=f"processes {default}")
    parser.add_argument("--backend", metavar="NAME", help="gloo or nccl, for several processes")
    parser.add_argument("--steps", type=positive, metavar="N", help="optimizer steps to record (default: all)")
    parser.add_argument("--skip", type=non_negative, metavar="N", help="steps before these (default: 1, with --steps)")
    parser.add_argument("--top", type=positive, default=15, metavar="N", help=f"operations to show {default}")
    parser.add_argument("--out", default="panther-profile", metavar="DIR", help=f"folder of trace.json {default}")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="script to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the script, print the profile and return the script's exit status."""
    if args.skip is not None and args.steps is None:
        raise PantherError(f"--skip {args.skip} needs --steps, the number of steps to record after it")
    if not args.module and not Path(args.script).is_file():
        raise PantherError(f"the script {args.script} does not exist: correct its path")
    trace = check_folder(args.out) / "trace.json"
    if args.nproc_per_node > 1 and "RANK" not in os.environ:
        return _launch(args)
    if args.backend is not None:
        os.environ.setdefault("PANTHER_BACKEND", args.backend)
    from panther.cli.profile._recorder import run_script

    if os.environ.get("RANK", "0") != "0":
        return run_script(args.script, args.args, args.module)
    return _record(args, trace)


def _record(args: argparse.Namespace, trace: Path) -> int:
    """Print and write the profile, also if the script failed, and return its exit status or raise its error."""
    from panther.cli.profile._recorder import profile_script

    skip = 0 if args.steps is None else 1 if args.skip is None else args.skip
    ran = profile_script(args.script, args.args, module=args.module, steps=args.steps, skip=skip, trace=trace)
    if ran.profile is not None:
        _print(ran.profile, args.top)
        print(f"\nThe trace is in {trace}: open it in chrome://tracing or ui.perfetto.dev.")
    if ran.error is not None:
        raise ran.error
    if ran.profile is None and ran.status == 0:
        raise PantherError(
            f"{args.script} made {ran.steps} optimizer steps, and --skip {skip} leaves none to record: skip fewer, or "
            "leave --steps out"
        )
    if ran.status == 0 and args.steps is not None and ran.steps < skip + args.steps:
        note(f"{args.script} made {ran.steps} optimizer steps, fewer than --skip {skip} and --steps {args.steps} need")
    return ran.status


def _launch(args: argparse.Namespace) -> int:
    """Start this command on several processes."""
    from panther.cli.launch import start

    options = [f"--out={args.out}", f"--top={args.top}", *(["--module"] if args.module else [])]
    options += [f"--{name}={value}" for name in ("steps", "skip") if (value := getattr(args, name)) is not None]
    backend = [] if args.backend is None else [f"--backend={args.backend}"]
    launcher = [f"--nproc-per-node={args.nproc_per_node}", *backend, "--module", "panther"]
    return start([*launcher, "profile", *options, args.script, *args.args], name=args.script)


def _print(profile: Any, top: int) -> None:
    steps = "the whole script" if profile.steps is None else f"{profile.steps} optimizer steps"
    print(f"\nProfile of {steps}, {profile.wall_ms:,.1f} ms" + (", rank 0" if "RANK" in os.environ else ""))
    where = "on the GPU" if profile.on_gpu else "on the CPU"
    operations = sorted(profile.operations.items(), key=lambda item: -item[1][1])[:top]
    rows = [[f"operations {where}", "calls", "own ms", "share", "total ms"]]
    rows += [
        [name[:48], f"{calls:,}", f"{own:,.2f}", f"{own / profile.wall_ms:.1%}", f"{whole:,.2f}"]
        for name, (calls, own, whole) in operations
    ]
    print(format_table(rows, align="<>"))
    if not profile.communication:
        print("\nNo communication was seen.")
        return
    rows = [["collectives", "calls", "sum of ms"]]
    rows += [[name, f"{calls:,}", f"{ms:,.2f}"] for name, (calls, ms) in sorted(profile.communication.items())]
    print("\n" + format_table(rows, align="<>"))
    print(
        f"Communication: {profile.communication_ms / profile.wall_ms:.1%} of the time, {profile.communication_ms:,.2f} "
        f"of {profile.wall_ms:,.2f} ms, waiting for other ranks included; in {profile.exposed_ms:,.2f} ms of it "
        "nothing was computed."
    )
