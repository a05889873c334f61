"""``panther explain TOPIC``: the concepts of the documentation, printed in a terminal.

The texts are the files ``topics/*.rst``, which the pages of ``docs/concepts`` include: one source for both.
"""

__all__ = ["add_parser", "render", "run", "topics"]

import argparse
import difflib
import re
import shutil
import textwrap
from importlib.resources import files
from typing import Any

from panther._text import format_table
from panther.errors import PantherError


def topics() -> dict[str, str]:
    """Return the text of every topic by its name, in the order in which they are best read."""
    folder = files("panther.cli.explain") / "topics"
    return {name: (folder / f"{name}.rst").read_text(encoding="utf-8") for name in _ORDER}


_ORDER = (
    "sketching", "seeds", "metric", "communication", "memory", "parallelism", "ranks", "backends", "ddp",
)  # fmt: skip
# Words that people ask for, by the topic that explains them.
_SYNONYMS = {
    "sketching": ("sketch", "sketches", "sklinear", "layers"),
    "seeds": ("seed", "philox", "random", "rng"),
    "metric": ("compress", "compression", "error", "quantization"),
    "communication": ("bytes", "traffic", "bandwidth", "network", "all-reduce", "collectives", "gradients"),
    "memory": ("oom", "activations", "optimizer", "activation-checkpointing"),
    "parallelism": (
        "tensor", "tensor-parallelism", "tp", "pipeline", "pipeline-parallelism", "pp", "microbatches", "hybrid",
        "hybrid-parallelism", "3d", "fsdp", "zero", "sharding", "strategy", "mesh",
    ),
    "ranks": ("rank", "world-size", "local-rank", "torchrun", "environment", "nodes"),
    "backends": ("backend", "gloo", "nccl"),
    "ddp": (
        "compare", "compare-ddp-vs-single", "comparison", "data", "data-parallelism", "distributed",
        "distributedsampler", "sampler", "set-epoch", "simulate", "simulation", "single", "single-process", "step",
        "timeline",
    ),
}  # fmt: skip
_WIDEST = 100  # longer lines are hard to read

_ROLE = re.compile(r":[\w:]+:`([^`]+)`")
_EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}(?=\S)([^*\n]+)(?<=\S)\*{1,2}(?![\w*])")
_FIGURE = re.compile(r"^\.\. figure:: .*\n((?:   .*\n|\n)*)", re.M)
_ITEM = re.compile(r"- |\d+\. ")


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "explain",
        description="Print a page about a concept. Without a topic, list the topics.",
        epilog="Pipe it into a pager to read a page at a time: panther explain seeds | less",
    )
    parser.add_argument(
        "topic", nargs="?", metavar="TOPIC", help=f"{', '.join(_ORDER)}; or a related word, such as fsdp"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the topic, or the list of all topics."""
    texts = topics()
    if args.topic is None:
        print(format_table([("topic", "about"), *((name, text.partition("\n")[0]) for name, text in texts.items())]))
        print("\npanther explain TOPIC prints a topic.")
    else:
        print(render(texts[_topic_of(args.topic)], width=min(shutil.get_terminal_size().columns, _WIDEST)))
    return 0


def _topic_of(text: str) -> str:
    """Return the topic that a text names, or that explains a related word."""
    names = {word: name for name in _ORDER for word in (name, *_SYNONYMS[name])}
    word = re.sub("[ _]", "-", text.lower())
    if word in names:
        return names[word]
    near = difflib.get_close_matches(word, names, 1)
    guess = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(_ORDER)}"
    raise PantherError(f"{text!r} is not a topic: {guess}")


def render(text: str, width: int) -> str:
    """Return a topic as plain text, in lines of at most ``width`` characters except for code and tables.

    Headings, tables, literal blocks and examples can be read as they are. Markup within lines is removed, paragraphs
    and lists are filled to the width, and a figure becomes its description.
    """
    text = _FIGURE.sub(_describe, text)
    blocks, literal = [], False
    for block in re.split(r"\n{2,}", text.strip()):
        literal = literal and block.startswith("    ")
        if block == "::":
            literal = True
            continue
        verbatim = literal or block.startswith(">>>")
        blocks.append(block if verbatim else _filled(block, width))
        literal |= not verbatim and block.endswith("::")
    return "\n\n".join(blocks)


def _describe(match: re.Match[str]) -> str:
    alt = re.search(r"^   :alt: (.*)$", match[1], re.M)
    return f"[Figure: {alt[1]}]\n\n" if alt else ""


def _filled(block: str, width: int) -> str:
    """Return a paragraph, a list, a heading or a table without markup; the latter two keep their lines."""
    if block.startswith("==="):  # each literal loses two backticks and gets two spaces, so that columns stay aligned
        padded = re.sub(r"``([^`]+)``", r"`\1`  ", block)
        return "\n".join(line.rstrip() for line in padded.split("\n"))
    block = _ROLE.sub(lambda role: re.sub(r"^~|\s*<.*>$", "", role[1]), re.sub(r"::$", ":", block))
    block = _EMPHASIS.sub(r"\1", block.replace("``", "`"))
    lines = block.split("\n")
    if len(lines) == 2 and set(lines[1]) <= set("=-"):
        return block
    paragraphs: list[list[str]] = []
    for line in lines:
        # A paragraph begins at an item of a list, at the definition after a term and at the term after a definition.
        if not paragraphs or _ITEM.match(line) or _other_indent(line, paragraphs[-1]):
            paragraphs.append([])
        paragraphs[-1].append(line)
    return "\n".join(_fill(paragraph, width) for paragraph in paragraphs)


def _other_indent(line: str, paragraph: list[str]) -> bool:
    """Return whether a paragraph is not an item of a list, and the line is indented differently from it."""
    return not _ITEM.match(paragraph[0]) and line.startswith(" ") != paragraph[0].startswith(" ")


def _fill(lines: list[str], width: int) -> str:
    item = _ITEM.match(lines[0])
    first = "    " if lines[0].startswith(" ") else ""
    rest = " " * len(item[0]) if item else first
    text = " ".join(line.strip() for line in lines)
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
