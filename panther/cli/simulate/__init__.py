"""``panther simulate``: data parallelism, counted for any number of ranks, and run and checked on up to eight."""

__all__ = ["add_parser", "run"]

import argparse
import contextlib
import io
import json
from typing import Any

from panther.cli._arguments import add_option, note_if_wide, positive, positive_float, seed
from panther.cli._options import add_old_spelling
from panther.errors import DistributedError, PantherError, require_extra

_MAX_RANKS = 8  # processes of a run
_MAX_COUNTED_RANKS = 1 << 20
_BATCH = 64


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "simulate",
        description="Train handwritten digits on several processes of this machine; show each rank's samples, the "
        "gradients before and after the all-reduce and the bytes sent, and check the result against one process.",
    )
    add_option(parser, "--world-size", positive, f"ranks, 2 to {_MAX_RANKS}, or any number with --dry-run", 2)
    add_old_spelling(parser, "--world", "--world-size")
    parser.add_argument("--dense", action="store_true", help="train dense layers in place of sketched ones")
    add_option(parser, "--epochs", positive, "epochs to train", 10)
    add_option(parser, "--batch", positive, f"samples per step, of all ranks together (default: about {_BATCH})")
    add_option(parser, "--hidden", positive, "width of hidden layers", 512)
    add_option(parser, "--sketch-size", positive, "rank of sketched layers", 8)
    add_option(parser, "--lr", positive_float, "learning rate of SGD with momentum", 0.02, metavar="X")
    add_option(parser, "--seed", seed, "seed of weights and shuffling", 0)
    parser.add_argument("--dry-run", action="store_true", help="count samples, bytes and memory, and start nothing")
    parser.add_argument("--json", action="store_true", help="print counts, losses and checks as one object of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the counts; unless this is a dry run, train, print what the ranks do, and check the result."""
    max_ranks, world = _MAX_COUNTED_RANKS if args.dry_run else _MAX_RANKS, args.world_size
    if not 2 <= world <= max_ranks:
        fix = "" if args.dry_run else f", or add --dry-run, which counts for up to {_MAX_COUNTED_RANKS:,}"
        raise PantherError(f"--world-size {world} must be from 2 to {max_ranks}: use --world-size {_MAX_RANKS}{fix}")
    batch = args.batch or max(1, _BATCH // world) * world
    if rest := batch % world:
        fix = f"{batch - rest} or {batch - rest + world}" if batch > world else f"{world}"
        raise PantherError(f"--batch {batch} cannot be divided evenly by --world-size {world}: use --batch {fix}")
    if not args.dry_run:
        require_extra("sklearn.datasets", "demo")
    if not args.dense:
        note_if_wide(args.sketch_size, args.hidden)
    from panther.cli.simulate import simulation

    settings = simulation.Settings(
        kind="dense" if args.dense else "sketched",
        batch=batch,
        world=world,
        **{name: getattr(args, name) for name in ("epochs", "hidden", "sketch_size", "lr", "seed")},
    )
    report: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) if args.json else contextlib.nullcontext():
        simulation.print_samples(settings)
        report["counts"] = simulation.print_counts(settings, processes=1 if args.dry_run else world)
        if not args.dry_run:
            report |= simulation.print_training(settings, report["counts"]["gradient bytes of a rank per step"])
    if args.json:
        print(json.dumps(report, indent=2))
    if failed := [name for name, passed in report.get("checks", {}).items() if not passed]:
        raise DistributedError(f"checks failed: {'; '.join(failed)}. This is a bug: please report it")
    return 0
