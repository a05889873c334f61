"""``panther explain TOPIC``: the concepts of the documentation, printed in a terminal.

The texts are the files ``topics/*.rst``, which the pages of ``docs/concepts`` include: one source for both.
"""

__all__ = ["add_parser", "render", "run", "topics"]

import argparse
import difflib
import json
import re
import shutil
import textwrap
from importlib.resources import files
from typing import Any

from panther._text import format_table
from panther.errors import PantherError

_ORDER = (
    "sketching", "seeds", "metric", "communication", "memory", "parallelism", "ranks", "backends", "ddp",
)  # fmt: skip
_WIDEST = 100  # longer lines are hard to read
_ROLE = re.compile(r":[\w:]+:`~?([^`<]+?)(?:\s*<[^`]*>)?`")
_PROSE = re.compile(r"[\w`\[(].*(?:\n[\w`\[(].*)*")  # neither a heading, a list, a table, an example nor literal text
_FIGURE = re.compile(r"^\.\. figure:: .*\n   :alt: (.*)\n(?:   .*\n)*", re.M)


def topics() -> dict[str, str]:
    """Return the text of every topic by its name, in the order in which they are best read."""
    folder = files("panther.cli.explain") / "topics"
    return {name: (folder / f"{name}.rst").read_text(encoding="utf-8") for name in _ORDER}


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "explain",
        description="Print a page about a concept. Without a topic, list the topics.",
        epilog="Pipe it into a pager to read a page at a time: panther explain seeds | less",
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help=", ".join(_ORDER))
    parser.add_argument("--json", action="store_true", help="print the page's name, title and text as JSON, or a list")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the topic, or the list of all topics."""
    texts = topics()
    titles = {name: text.partition("\n")[0] for name, text in texts.items()}
    if args.topic not in (None, *texts):
        near = difflib.get_close_matches(args.topic, texts, 1)
        guess = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(texts)}"
        raise PantherError(f"{args.topic!r} is not a topic: {guess}")
    if args.json:
        pages = [{"topic": name, "title": title} for name, title in titles.items() if args.topic in (None, name)]
        print(json.dumps(pages if args.topic is None else pages[0] | {"text": texts[args.topic]}, indent=2))
    elif args.topic is None:
        print(format_table([("topic", "about"), *titles.items()]), "\npanther explain TOPIC prints a topic.", sep="\n")
    else:
        print(render(texts[args.topic], width=min(shutil.get_terminal_size().columns, _WIDEST)))
    return 0


def render(text: str, width: int) -> str:
    """Return a topic as it is read in a terminal: roles become names, and paragraphs are filled to the width."""
    text = _ROLE.sub(r"\1", _FIGURE.sub(r"[Figure: \1]\n", text)).replace("``", "`")
    blocks = text.strip().split("\n\n")
    return "\n\n".join(
        textwrap.fill(block, width, break_long_words=False) if _PROSE.fullmatch(block) else block for block in blocks
    )
