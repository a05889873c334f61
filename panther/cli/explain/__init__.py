"""``panther explain TOPIC``: the concepts of the documentation, printed in a terminal.

The texts are the files ``topics/*.rst``, which the pages of ``docs/concepts`` include: one source for both.
"""

__all__ = ["add_parser", "run", "topics"]

import argparse
import difflib
import re
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
