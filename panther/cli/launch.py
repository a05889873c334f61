"""``panther launch``: a script on several processes, on one node or several."""

__all__ = ["add_parser", "run", "start"]

import argparse
import sys
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    # Every argument is left to torchrun's parser, whose import takes a while: none begins with this prefix.
    parser = commands.add_parser("launch", add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the processes; their exit code."""
    return start(args.arguments)


def start(arguments: list[str], *, name: str | None = None) -> int:
    """Start what a command line asks for, say what goes wrong, and return the exit code.

    Args:
        arguments: Those of ``panther launch``.
        name: What to call it, if not by the script's name.
    """
    from panther.distributed.launcher._result import Interrupted, LaunchError
    from panther.distributed.launcher.script import run_launch

    try:
        run_launch(arguments, name=name)
    except LaunchError as error:
        print(f"panther: error: {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as interrupt:
        return 128 + interrupt.number
    return 0
