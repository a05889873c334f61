"""``panther demo``: networks of five kinds of layers side by side, trained on several processes."""

__all__ = ["add_parser", "run"]

import argparse
import os
import statistics
import sys
from typing import Any

from panther._text import counted, format_table
from panther.cli._arguments import add_option, check_folder, note_if_wide, positive, seed
from panther.cli._options import add_old_spelling
from panther.errors import FormatError, PantherError, require_extra


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "demo",
        description="Train a dense network on handwritten digits, and four of fewer numbers: narrower, with pairs of "
        "nn.Linear, sketched, and with Monarch layers. Compare them.",
    )
    add_option(parser, "--nproc-per-node", positive, "processes; with --device cuda, each has a GPU", 2)
    add_old_spelling(parser, "--nproc", "--nproc-per-node")
    add_option(parser, "--epochs", positive, "epochs of each network", 20)
    add_option(parser, "--hidden", positive, "width of the hidden layers", 512)
    add_option(parser, "--sketch-size", positive, "rank of sketched layers and of pairs, and number of blocks", 8)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    add_option(parser, "--seed", seed, "seed of the first run", 0)
    add_option(parser, "--runs", positive, "seeds to average over", 4)
    add_option(parser, "--out", str, "folder for the models", "panther-demo", metavar="DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, reload, and print the table."""
    for module in ("sklearn.datasets", "tqdm"):
        require_extra(module, "demo")
    device = _device(args.device, args.nproc_per_node)
    out = check_folder(args.out)
    note_if_wide(args.sketch_size, args.hidden)
    from panther.cli.demo.training import Settings, evaluate_saved, train_all
    from panther.distributed import launch

    names = ("epochs", "hidden", "sketch_size", "seed", "runs")
    settings = Settings(**{name: getattr(args, name) for name in names}, device=device, out=str(out))
    networks = f"{counted(args.runs, 'seed')} of 5 networks, {counted(args.epochs, 'epoch')} each"
    print(f"Training {networks}, on {counted(args.nproc_per_node, 'process', 'processes')} ({device}) ...", flush=True)
    # Forked processes do not import torch again, but CUDA does not survive a fork, which is unsafe on macOS as well.
    start_method = "fork" if device == "cpu" and sys.platform == "linux" else "spawn"
    results = launch(train_all, settings, nproc=args.nproc_per_node, start_method=start_method)[0]
    folders = {result["folder"]: result["kind"] for result in results}
    reloaded = launch(evaluate_saved, folders, settings, nproc=1)[0]  # spawned, so that nothing of training is left
    columns = _summarise(results, reloaded)
    print(_table(columns, args.runs))
    print(_verdict(columns))
    if not all(column["reloaded"] for column in columns.values()):
        raise FormatError(
            "a network has a different accuracy after saving and loading. This is a bug: please report it"
        )
    print(f"The models are in {out}.")
    return 0


def _summarise(results: list[dict[str, Any]], reloaded: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Return a column for each kind of network: its sizes, its mean accuracy, and its median time of an epoch."""
    columns = {}
    for kind in dict.fromkeys(result["kind"] for result in results):
        runs = [result for result in results if result["kind"] == kind]
        accuracies = [100 * result["accuracy"] for result in runs]
        columns[kind] = {
            **{key: runs[0][key] for key in ("parameters", "weight_bytes", "gradient_bytes", "sketch_bytes")},
            "accuracy": statistics.mean(accuracies),
            "accuracies": accuracies,
            "seconds_per_epoch": statistics.median(result["seconds_per_epoch"] for result in runs),
            "reloaded": all(reloaded[result["folder"]] == result["accuracy"] for result in runs),
        }
    return columns


def _table(columns: dict[str, dict[str, Any]], runs: int) -> str:
    rows: list[tuple[str, Any]] = [
        ("parameters", lambda c: f"{c['parameters']:,}"),
        ("bytes of the saved weights", lambda c: f"{c['weight_bytes']:,}"),
        ("gradient bytes per step", lambda c: f"{c['gradient_bytes']:,.0f}"),
        ("sketch bytes, once", lambda c: f"{c['sketch_bytes']:,}"),
        (f"test accuracy, mean of {counted(runs, 'seed')}", lambda c: f"{c['accuracy']:.1f} %"),
        ("  lowest and highest seed", lambda c: f"{min(c['accuracies']):.1f} to {max(c['accuracies']):.1f} %"),
        ("  reloaded in a fresh process", lambda c: "identical" if c["reloaded"] else "DIFFERENT"),
        ("seconds per epoch", lambda c: f"{c['seconds_per_epoch']:.3f}"),
    ]
    cells = [["", *columns], *([name, *(show(column) for column in columns.values())] for name, show in rows)]
    lines = format_table(cells, align="<>").split("\n")
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _verdict(columns: dict[str, dict[str, Any]]) -> str:
    sketched = columns["sketched"]

    def against(other: dict[str, Any], name: str) -> str:
        points = round(sketched["accuracy"], 1) - round(other["accuracy"], 1)  # rounded as in the table
        return f"{abs(points):.1f} points {'above' if points >= 0 else 'below'} {name}"

    share = 100 * sketched["weight_bytes"] / columns["dense"]["weight_bytes"]
    comparisons = ", ".join(against(column, kind) for kind, column in columns.items() if kind != "sketched")
    return f"Sketched: {share:.0f} % of the dense bytes, {comparisons}."


def _device(choice: str, nproc: int) -> str:
    """Return the device to train on; raise if it cannot serve ``nproc`` processes."""
    import torch

    count = torch.cuda.device_count()
    if choice == "cuda" and nproc > count:
        fix = f"{nproc} GPUs and {count} are visible: use --nproc-per-node {count}"
        if count == 0:
            fix = "a CUDA device and none is visible: use --device cpu"
        raise PantherError(f"--nproc-per-node {nproc} with --device cuda needs {fix}")
    if choice != "cpu" and count >= nproc:
        return "cuda"
    limit = max(8, 4 * (os.cpu_count() or 1))
    if nproc > limit:
        raise PantherError(
            f"--nproc-per-node {nproc} must be at most {limit}, four processes per core and at least 8: use fewer"
        )
    return "cpu"
