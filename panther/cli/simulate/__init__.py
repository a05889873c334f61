"""``panther simulate``: what data-parallel training does, shown on processes of this machine."""

__all__ = ["add_parser", "run"]

import argparse
import json
from dataclasses import asdict
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
    parser.add_argument("--world", type=positive, default=2, metavar="N", help="ranks, 2 to 8 (default: %(default)s)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sketched", dest="kind", action="store_const", const="sketched", help="the default")
    kind.add_argument("--dense", dest="kind", action="store_const", const="dense", help="a network of dense layers")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive, metavar="N", help=f"(default: {_EPOCHS})")
    length.add_argument("--steps", type=positive, metavar="N", help="steps, in place of whole epochs")
    parser.add_argument(
        "--batch", type=positive, metavar="N", help=f"samples a step, of all ranks together (default: about {_BATCH})"
    )
    parser.add_argument("--hidden", type=positive, default=512, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--sketch-size", type=positive, default=8, metavar="R", help="(default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="count only, for any number of ranks")
    parser.add_argument("--report", metavar="FILE", help="write the figures as JSON as well")
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
    from panther.cli.simulate._report import report_dry_run, report_training
    from panther.cli.simulate._training import Settings

    settings = Settings(
        kind=args.kind,
        world=args.world,
        batch=args.batch or max(1, _BATCH // args.world) * args.world,
        epochs=args.epochs or _EPOCHS,
        steps=args.steps,
        hidden=args.hidden,
        sketch_size=args.sketch_size,
        seed=args.seed,
    )
    figures, code = report_dry_run(settings) if args.dry_run else report_training(settings)
    if args.report:
        Path(args.report).write_text(json.dumps({"settings": asdict(settings), **figures}, indent=1) + "\n")
    if code and not args.dry_run:
        failed = [check["what"] for check in figures["checks"] if not check["passed"]]
        raise DistributedError(f"what must hold does not ({'; '.join(failed)}): this is a bug, report it")
    return code
