"""What ``panther simulate`` prints: the sections of a run, its checks, and the counts of a dry run."""

__all__ = ["report_dry_run", "report_training"]

import statistics
import sys
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from panther._text import counted, format_table
from panther.cli.demo._training import TRAIN_SAMPLES
from panther.cli.simulate._estimate import dry_run, too_large
from panther.cli.simulate._training import Settings, largest_difference, record_rank, record_single
from panther.errors import PantherError

_ROUNDING = 1e-9  # relative; float64 rounds at 1e-16, and training made 1e-13 of it at most in 40 epochs
_EPOCHS_SHOWN = 10


class _Check(NamedTuple):
    what: str
    passed: bool
    figures: str


def _title(settings: Settings, places: str) -> str:
    widths = "-".join(map(str, (64, *[settings.hidden] * 3, 10)))
    layers = f"{settings.kind}, sketch size {settings.sketch_size}" if settings.kind == "sketched" else "dense"
    return f"Data parallelism on {places}: the network {widths} ({layers}), in float64."


def report_dry_run(settings: Settings) -> tuple[dict[str, Any], int]:
    world = settings.world
    plan = dry_run(settings)
    print(_title(settings, f"{counted(world, 'rank')}, counted and not run"))
    print("\nSamples")
    rows = [["rank", "samples", "repeated", "first of epoch 1"]]
    for rank, shard in plan.shards.items():
        if rank - len(rows) + 1 > 0:
            rows.append(["...", "", "", ""])
        repeated = sum(rank + place * world >= TRAIN_SAMPLES for place in range(len(shard)))
        rows.append([f"{rank:,}", f"{len(shard):,}", f"{repeated:,}", _listed(shard)])
    print(format_table(rows, align="<>"))
    print(_dealt(world, plan.samples_per_rank, plan.repeated))
    ring = 2 * (world - 1) * plan.gradient_bytes // world
    counts = [
        ("samples a step, of each rank", plan.batch_per_rank),
        ("samples a step, of all ranks", plan.batch_per_rank * world),
        ("steps an epoch", plan.steps_per_epoch),
        ("gradient bytes that a rank hands over a step", plan.gradient_bytes),
        *([("  with dense layers", plan.dense_gradient_bytes)] if settings.kind == "sketched" else []),
        ("  on the wire, from each rank of a ring", ring),
        ("bytes of memory a rank", sum(plan.memory.values())),
        *((f"  {name}", size) for name, size in plan.memory.items()),
        ("bytes of memory of all ranks", world * sum(plan.memory.values())),
    ]
    print("\nCounts")
    print(format_table([[name, f"{value:,}"] for name, value in counts], align="<>"))
    print("The memory is that of tensors; each process has torch besides.")
    for note in plan.notes:
        print(f"Note: {note}")
    for obstacle in plan.obstacles:
        print(f"Does not fit: {obstacle}")
    if not plan.obstacles:
        print("All of it fits." if len(plan.notes) == 0 else "It would run.")
    return asdict(plan), 1 if plan.obstacles else 0


def report_training(settings: Settings) -> tuple[dict[str, Any], int]:
    from panther.distributed import launch

    plan = dry_run(settings)
    obstacle = next(iter(plan.obstacles), None) or too_large(settings.world, plan.memory)
    if obstacle:
        raise PantherError(obstacle)
    print(_title(settings, f"{settings.world} processes of this machine"), flush=True)
    start_method = "fork" if sys.platform == "linux" else "spawn"  # elsewhere forking is missing or unsafe
    ranks = launch(record_rank, settings, nproc=settings.world, start_method=start_method)
    single = record_single(
        settings, [torch.cat(parts) for parts in zip(*(rank["seen"] for rank in ranks), strict=True)]
    )
    mean = torch.stack([rank["local"] for rank in ranks]).mean(0)
    checks = _checks(plan, ranks, single, mean)
    _print_samples(settings, plan, ranks)
    _print_gradients(settings, ranks, single, mean)
    _print_training(plan.steps_per_epoch, ranks, single)
    _print_bytes(settings, ranks[0])
    print("\n5. Checks")
    print(format_table([[check.what, "yes" if check.passed else "NO", check.figures] for check in checks], align="<>"))
    figures = {
        "losses": [rank["losses"] for rank in ranks],
        "single_losses": single["losses"],
        "accuracy": [rank["accuracy"] for rank in ranks],
        "single_accuracy": single["accuracy"],
        "gradient_bytes": ranks[0]["gradient_bytes"][0],
        "dense_gradient_bytes": ranks[0]["dense_bytes"],
        "sketch_bytes": ranks[0]["sketch_bytes"],
        "start_bytes": ranks[0]["start_bytes"],
        "checks": [check._asdict() for check in checks],
    }
    return figures, 0 if all(check.passed for check in checks) else 1


def _checks(plan: Any, ranks: list[dict[str, Any]], single: dict[str, Any], mean: torch.Tensor) -> list[_Check]:
    first = [place for rank in ranks for part in rank["seen"][: plan.steps_per_epoch] for place in part.tolist()]
    whole_epoch = len(ranks[0]["seen"]) >= plan.steps_per_epoch
    wanted = TRAIN_SAMPLES if whole_epoch else len(first)
    scale = single["gradient"].abs().max().item()
    averaged = max(largest_difference([rank["averaged"]], [mean]) for rank in ranks) / scale
    whole = largest_difference([mean], [single["gradient"]]) / scale
    alike = {rank["trained"] for rank in ranks}
    apart = largest_difference(ranks[0]["parameters"], single["parameters"]) / single["moved"]
    return [
        _Check(
            "every sample is seen in epoch 1" if whole_epoch else "no sample is seen by two ranks",
            len(set(first)) == wanted,
            f"{len(set(first)):,} of {wanted:,}",
        ),
        _Check("the all-reduce gives the mean of the gradients", averaged <= _ROUNDING, f"apart by {averaged:.1e}"),
        _Check("the mean is the gradient of the whole batch", whole <= _ROUNDING, f"apart by {whole:.1e}"),
        _Check("all ranks end with the same parameters", len(alike) == 1, f"{counted(len(alike), 'fingerprint')}"),
        _Check("they are those of one process", apart <= _ROUNDING, f"apart by {apart:.1e}"),
    ]


def _print_samples(settings: Settings, plan: Any, ranks: list[dict[str, Any]]) -> None:
    print("\n1. Samples: each rank has its own")
    steps = plan.steps_per_epoch
    rows = [["rank", "samples an epoch", "first of epoch 1", "first of epoch 2"]]
    for index, rank in enumerate(ranks):
        epochs = [torch.cat(rank["seen"][begin : begin + steps] or [torch.empty(0)]).tolist() for begin in (0, steps)]
        rows.append([str(index), f"{plan.samples_per_rank:,}", *(_listed(epoch) or "-" for epoch in epochs)])
    print(format_table(rows, align="<>"))
    print(_dealt(settings.world, plan.samples_per_rank, plan.repeated))
    share = min(plan.batch_per_rank, plan.samples_per_rank)
    rest = plan.samples_per_rank % share
    last = f", the last of an epoch {rest * settings.world}" if rest else ""
    print(
        f"A step takes {share * settings.world} samples, {share} of each rank{last}; an epoch has "
        f"{counted(steps, 'step')}."
    )


def _print_gradients(
    settings: Settings, ranks: list[dict[str, Any]], single: dict[str, Any], mean: torch.Tensor
) -> None:
    layer = "S1 of the first SKLinear" if settings.kind == "sketched" else "the weight of the second nn.Linear"
    print(f"\n2. Gradients: of {layer}, in the first step")
    named = [(f"rank {index}, before the all-reduce", rank["local"]) for index, rank in enumerate(ranks)]
    named += [("mean of these", mean), ("every rank, after the all-reduce", ranks[0]["averaged"])]
    named += [("one process, on the whole batch", single["gradient"])]
    row = int(mean.norm(dim=1).argmax())  # where units are active, on most ranks at least
    rows = [["", "norm", f"first entries of row {row}, times 1000"]]
    for name, gradient in named:
        entries = "".join(f"{1000 * value:>9.4f}" for value in gradient[row, :4].tolist())
        rows.append([name, f"{gradient.norm():.6f}", entries])
    print(format_table(rows, align="<>"))
    print("The mean over ranks is the mean over the whole batch, as each rank has as many samples of it.")


def _print_training(steps: int, ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    print("\n3. Training: mean loss of each epoch, on the samples of each rank")
    total = len(single["losses"])
    begins = list(range(0, total, steps))
    shown = sorted({round(i * (len(begins) - 1) / (_EPOCHS_SHOWN - 1)) for i in range(_EPOCHS_SHOWN)})
    rows = [["epoch", *(f"rank {index}" for index in range(len(ranks))), "mean", "one process"]]
    for epoch in shown:
        part = slice(begins[epoch], begins[epoch] + steps)
        losses = [statistics.mean(rank["losses"][part]) for rank in ranks]
        values = [*losses, statistics.mean(losses), statistics.mean(single["losses"][part])]
        rows.append([str(epoch + 1), *(f"{value:.4f}" for value in values)])
    print(format_table(rows, align="<>"))
    print(
        f"Test accuracy after {counted(total, 'step')}: {100 * ranks[0]['accuracy']:.1f} %; with one process "
        f"{100 * single['accuracy']:.1f} %."
    )
    prints = [["fingerprint of rank", *(str(index) for index in range(len(ranks)))]]
    prints += [
        [name, *(rank[key] for rank in ranks)] for name, key in (("as drawn", "drawn"), ("after training", "trained"))
    ]
    print(format_table(prints, align="<>"))
    print("Each rank draws a network of its own; before the first step all take that of rank 0.")


def _print_bytes(settings: Settings, rank: dict[str, Any]) -> None:
    print("\n4. Bytes that each rank hands over, 8 a number")
    sent, dense = rank["gradient_bytes"][0], rank["dense_bytes"]
    rows = [["gradients, every step", f"{sent:,}"]]
    if settings.kind == "sketched":
        rows += [
            ["  with dense layers", f"{dense:,}"],
            ["sketches, as seeds, once", f"{rank['sketch_bytes']:,}"],
        ]
    rows += [["the network itself, once", f"{rank['start_bytes']:,}"]]
    print(format_table(rows, align="<>"))
    if settings.kind == "sketched":
        print(f"A step sends {dense / sent:.1f} times fewer bytes than with dense layers.")
    print("The processes share this machine, so their speed says nothing of several machines.")


def _dealt(world: int, per_rank: int, repeated: int) -> str:
    more = f"; it repeats {repeated:,}, so that each of them has {per_rank:,}" if repeated else ""
    return (
        f"The sampler shuffles the {TRAIN_SAMPLES:,} samples anew in each epoch and deals them to {world:,} ranks in "
        f"turn{more}."
    )


def _listed(places: list[int]) -> str:
    return " ".join(f"{place:4d}" for place in places[:5])
