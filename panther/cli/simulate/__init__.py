"""``panther simulate``: data parallelism, shown and checked on processes of this machine."""

__all__ = ["add_parser", "run"]

import argparse
import json
from pathlib import Path
from typing import Any

from panther.cli._arguments import check_file, note_if_wide, positive, seed
from panther.errors import DistributedError, PantherError, require_extra

_RANKS = (2, 8)  # that are started
_MOST_RANKS = 1 << 20  # that are counted
_BATCH, _EPOCHS = 64, 10


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "simulate",
        description="Train handwritten digits on several processes of this machine; show each rank's samples, the "
        "gradients before and after the all-reduce and the bytes sent, and check the result against one process.",
    )
    default = "(default: %(default)s)"
    parser.add_argument("--world", type=positive, default=2, metavar="N", help=f"ranks, 2 to 8 {default}")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--sketched", dest="kind", action="store_const", const="sketched", help="sketched layers (default)"
    )
    kind.add_argument("--dense", dest="kind", action="store_const", const="dense", help="dense layers")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive, metavar="N", help=f"epochs to train (default: {_EPOCHS})")
    length.add_argument("--steps", type=positive, metavar="N", help="steps to train, in place of whole epochs")
    parser.add_argument(
        "--batch", type=positive, metavar="N", help=f"samples per step, of all ranks together (default: about {_BATCH})"
    )
    parser.add_argument("--hidden", type=positive, default=512, metavar="N", help=f"width of hidden layers {default}")
    parser.add_argument(
        "--sketch-size", type=positive, default=8, metavar="R", help=f"rank of sketched layers {default}"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help=f"seed of weights and shuffling {default}")
    parser.add_argument("--dry-run", action="store_true", help="only count, for any number of ranks")
    parser.add_argument("--report", metavar="FILE", help="also write the figures as JSON")
    parser.set_defaults(run=run, kind="sketched")


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and return 0 if all checks pass and everything fits."""
    check_file(args.report, "--report")
    least, most = (1, _MOST_RANKS) if args.dry_run else _RANKS
    if not least <= args.world <= most:
        fix = "" if args.dry_run else f", or add --dry-run, which counts for up to {_MOST_RANKS:,}"
        raise PantherError(f"--world {args.world} must be from {least} to {most}: use --world {_RANKS[1]}{fix}")
    if not args.dry_run:
        require_extra("sklearn.datasets", "demo")
    if args.kind == "sketched":
        note_if_wide(args.sketch_size, args.hidden)
    from panther.cli.simulate._report import report_estimate, report_training
    from panther.cli.simulate._training import Settings

    options = {
        **{name: getattr(args, name) for name in ("kind", "world", "steps", "hidden", "sketch_size", "seed")},
        "batch": args.batch or max(1, _BATCH // args.world) * args.world,
        "epochs": args.epochs or _EPOCHS,
    }
    figures = (report_estimate if args.dry_run else report_training)(Settings(**options))
    if args.report:
        Path(args.report).write_text(json.dumps({"settings": options, **figures}, indent=1) + "\n")
    failed = [check["name"] for check in figures.get("checks", ()) if not check["passed"]]
    if failed:
        raise DistributedError(f"checks failed: {'; '.join(failed)}. This is a bug: please report it")
    return 1 if figures.get("obstacles") else 0
