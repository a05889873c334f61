"""``panther launch``: a script on several processes, on one node or several."""

__all__ = ["add_parser", "run", "start"]

import argparse
import sys
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    # torchrun's parser, whose import is slow, reads all arguments: no argument begins with this prefix.
    parser = commands.add_parser("launch", add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the processes; return the exit code."""
    return start(args.arguments)


def start(arguments: list[str], name: str | None = None) -> int:
    """Start the processes that the arguments of ``panther launch`` ask for; return the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException

    from panther.distributed.launcher.script import run_script

    try:
        run_script(arguments, name)
    except SignalException as error:
        print(f"panther: {error.sigval.name} was passed on, and the processes have ended", file=sys.stderr, flush=True)
        return 128 + error.sigval  # as a shell reports a process that a signal ended
    return 0
