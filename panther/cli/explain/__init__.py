"""``panther explain TOPIC``: the concepts of the documentation, printed in a terminal.

The texts are the files ``topics/*.rst``, which the pages of ``docs/concepts`` include: one source for both.
"""

__all__ = ["add_parser", "run", "topics"]

import argparse
import difflib
import shutil
from importlib.resources import files
from typing import Any

from panther._text import format_table
from panther.cli.explain._render import render
from panther.errors import PantherError


def topics() -> dict[str, str]:
    """Return the text of every topic by its name, in the order in which they are best read."""
    folder = files("panther.cli.explain") / "topics"
    return {name: (folder / f"{name}.rst").read_text(encoding="utf-8") for name in _ORDER}


_ORDER = (
    "sketching", "seeds", "metric", "communication", "memory", "parallelism", "ranks", "backends", "ddp",
)  # fmt: skip
_WIDEST = 100  # longer lines are hard to read


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "explain",
        description="Print a page about a concept. Without a topic, list the topics.",
        epilog="Pipe it into a pager to read a page at a time: panther explain seeds | less",
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help=", ".join(_ORDER))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the topic, or the list of all topics."""
    texts = topics()
    if args.topic is None:
        print(format_table([("topic", "about"), *((name, text.partition("\n")[0]) for name, text in texts.items())]))
        print("\npanther explain TOPIC prints one of them.")
    elif args.topic in texts:
        print(render(texts[args.topic], width=min(shutil.get_terminal_size().columns, _WIDEST)))
    else:
        near = difflib.get_close_matches(args.topic.lower(), texts, 1)
        guess = f"did you mean {near[0]!r}" if near else f"use one of {', '.join(texts)}"
        raise PantherError(f"{args.topic!r} is not a topic: {guess}")
    return 0
