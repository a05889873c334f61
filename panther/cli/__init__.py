"""The ``panther`` command: one module a subcommand, each with ``add_parser`` and a function that runs it."""

__all__ = ["main"]

import argparse
import os
import sys
from collections.abc import Sequence

from panther._version import __version__
from panther.cli import advise, compress, demo, doctor, init, launch, profile, simulate, train
from panther.errors import PantherError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``panther`` command and return its exit code.

    Args:
        argv: Arguments without the program's name; None takes them from the command line.

    Returns:
        0 on success, 1 on an error that is explained on standard error, 130 when interrupted.

    Example:
        >>> main(["doctor"])  # doctest: +ELLIPSIS
        panther ...
        0
    """
    parser = argparse.ArgumentParser(prog="panther", description="Sketched layers for PyTorch.")
    parser.add_argument("--version", action="version", version=f"panther {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for command in (advise, compress, demo, doctor, init, launch, profile, simulate, train):
        command.add_parser(commands)
    args, rest = parser.parse_known_args(argv)
    if args.command == "train" and all("=" in text and not text.startswith("-") for text in rest):
        args.settings += rest  # argparse takes no more of them once an option came between
    elif rest:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has left, as `head` does; Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PantherError as error:
        print(f"panther: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("panther: interrupted", file=sys.stderr)
        return 130
