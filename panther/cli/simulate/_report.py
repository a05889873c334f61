"""The printed sections of ``panther simulate`` and its checks."""

__all__ = ["report_estimate", "report_training"]

import statistics
import sys
from typing import Any, NamedTuple

import torch

from panther._text import counted, format_table
from panther.cli.demo._training import TRAIN_SAMPLES
from panther.cli.simulate._estimate import estimate, too_large
from panther.cli.simulate._training import Settings, largest_difference, record_rank, record_single
from panther.errors import PantherError

_ROUNDING = 1e-9  # relative; float64 rounds at 1e-16, and 40 epochs of training amplified it to 1e-13 at most
_EPOCHS_SHOWN = 10

Record = dict[str, Any]


class _Check(NamedTuple):
    name: str
    passed: bool
    figures: str


def report_estimate(settings: Settings) -> Record:
    """Print and return the counts."""
    world = settings.world
    plan = estimate(settings)
    per_rank, sent, memory = plan["samples_per_rank"], plan["gradient_bytes"], plan["memory"]
    _print_title(settings, f"{counted(world, 'rank')}, counted and not run")
    rows = [["rank", "samples", "repeated", "first of epoch 1"]]
    for rank, places in plan["shards"].items():
        if rank - len(rows) + 1 > 0:
            rows.append(["...", "", "", ""])
        repeated = sum(rank + place * world >= TRAIN_SAMPLES for place in range(len(places)))
        rows.append([f"{rank:,}", f"{len(places):,}", f"{repeated:,}", _listed(places)])
    print("\nSamples\n" + format_table(rows, align="<>"))
    print(_sampling(world, per_rank, plan["repeated"]))
    counts = [
        ("samples per step, of each rank", plan["batch_per_rank"]),
        ("samples per step, of all ranks", plan["batch_per_rank"] * world),
        ("steps per epoch", plan["steps_per_epoch"]),
        ("gradient bytes of a rank per step", sent),
        *([("  with dense layers", plan["dense_gradient_bytes"])] if settings.kind == "sketched" else []),
        ("  sent by each rank in a ring all-reduce", 2 * (world - 1) * sent // world),
        ("bytes of memory per rank", sum(memory.values())),
        *((f"  {name}", size) for name, size in memory.items()),
        ("bytes of memory of all ranks", world * sum(memory.values())),
    ]
    print("\nCounts\n" + format_table([[name, f"{value:,}"] for name, value in counts], align="<>"))
    print("The memory is that of tensors; each process loads torch in addition.")
    print("".join(f"Note: {text}\n" for text in plan["notes"]), end="")
    print("".join(f"Does not fit: {text}\n" for text in plan["obstacles"]) or "It fits.\n", end="")
    return plan


def report_training(settings: Settings) -> Record:
    """Train on several processes and on one, print and check what happened, and return the figures."""
    from panther.distributed import launch

    plan = estimate(settings)
    obstacle = next(iter(plan["obstacles"]), None) or too_large(settings.world, plan["memory"])
    if obstacle:
        raise PantherError(obstacle)
    _print_title(settings, f"{settings.world} processes of this machine")
    start_method = "fork" if sys.platform == "linux" else "spawn"  # elsewhere forking is missing or unsafe
    ranks = launch(record_rank, settings, nproc=settings.world, start_method=start_method)
    seen = [torch.cat(shards) for shards in zip(*(rank["seen"] for rank in ranks), strict=True)]
    single = record_single(settings, seen)
    mean = torch.stack([rank["local"] for rank in ranks]).mean(0)
    checks = _checks(plan, ranks, single, mean)
    _print_samples(settings, plan, ranks)
    _print_gradients(settings, ranks, single, mean)
    _print_training(plan["steps_per_epoch"], ranks, single)
    _print_bytes(settings, plan, ranks[0])
    rows = [[check.name, "yes" if check.passed else "NO", check.figures] for check in checks]
    print("\n5. Checks\n" + format_table(rows, align="<>"))
    return {
        "losses": [rank["losses"] for rank in ranks],
        "single_losses": single["losses"],
        "accuracy": [rank["accuracy"] for rank in ranks],
        "single_accuracy": single["accuracy"],
        "gradient_bytes": ranks[0]["gradient_bytes"],
        "dense_gradient_bytes": plan["dense_gradient_bytes"],
        "sketch_bytes": ranks[0]["sketch_bytes"],
        "start_bytes": ranks[0]["start_bytes"],
        "checks": [check._asdict() for check in checks],
    }


def _checks(plan: Record, ranks: list[Record], single: Record, mean: torch.Tensor) -> list[_Check]:
    first = [place for rank in ranks for step in rank["seen"][: plan["steps_per_epoch"]] for place in step.tolist()]
    whole_epoch = len(ranks[0]["seen"]) >= plan["steps_per_epoch"]
    expected = TRAIN_SAMPLES if whole_epoch else len(first)
    scale = single["local"].abs().max().item()
    averaged = max(largest_difference([rank["averaged"]], [mean]) for rank in ranks) / scale
    whole = largest_difference([mean], [single["local"]]) / scale
    fingerprints = {rank["trained"] for rank in ranks}
    apart = largest_difference(ranks[0]["parameters"], single["parameters"]) / single["moved"]

    def close(name: str, difference: float) -> _Check:
        return _Check(name, difference <= _ROUNDING, f"difference {difference:.1e}")

    return [
        _Check(
            "every sample is seen in epoch 1" if whole_epoch else "no sample is seen by two ranks",
            len(set(first)) == expected,
            f"{len(set(first)):,} of {expected:,}",
        ),
        close("the all-reduce gives the mean of the gradients", averaged),
        close("the mean is the gradient of the whole batch", whole),
        _Check(
            "all ranks end with the same parameters", len(fingerprints) == 1, counted(len(fingerprints), "fingerprint")
        ),
        close("one process ends with the same parameters", apart),
    ]


def _print_title(settings: Settings, places: str) -> None:
    widths = "-".join(map(str, (64, *[settings.hidden] * 3, 10)))
    layers = f"{settings.kind}, sketch size {settings.sketch_size}" if settings.kind == "sketched" else "dense"
    print(f"Data parallelism on {places}: the network {widths} ({layers}), in float64.", flush=True)


def _print_samples(settings: Settings, plan: Record, ranks: list[Record]) -> None:
    steps, per_rank = plan["steps_per_epoch"], plan["samples_per_rank"]
    rows = [["rank", "samples per epoch", "first of epoch 1", "first of epoch 2"]]
    for index, rank in enumerate(ranks):
        epochs = [torch.cat(rank["seen"][begin : begin + steps] or [torch.empty(0)]).tolist() for begin in (0, steps)]
        rows.append([str(index), f"{per_rank:,}", *(_listed(epoch) or "-" for epoch in epochs)])
    print("\n1. Samples: each rank has its own\n" + format_table(rows, align="<>"))
    print(_sampling(settings.world, per_rank, plan["repeated"]))
    size = min(plan["batch_per_rank"], per_rank)
    rest = per_rank % size
    last = f", the last of an epoch {rest * settings.world}" if rest else ""
    print(
        f"A step has {size * settings.world} samples, {size} of each rank{last}; an epoch has {counted(steps, 'step')}."
    )


def _print_gradients(settings: Settings, ranks: list[Record], single: Record, mean: torch.Tensor) -> None:
    layer = "S1 of the first SKLinear" if settings.kind == "sketched" else "the weight of the second nn.Linear"
    named = [(f"rank {index}, before the all-reduce", rank["local"]) for index, rank in enumerate(ranks)]
    named += [("their mean", mean), ("every rank, after the all-reduce", ranks[0]["averaged"])]
    named += [("one process, on the whole batch", single["local"])]
    row = int(mean.norm(dim=1).argmax())  # of a unit that is active on most ranks, so that the row is not zero
    rows = [["", "norm", f"first entries of row {row}, times 1000"]]
    for name, gradient in named:
        entries = "".join(f"{1000 * value:>9.4f}" for value in gradient[row, :4].tolist())
        rows.append([name, f"{gradient.norm():.6f}", entries])
    print(f"\n2. Gradients: of {layer}, in the first step\n" + format_table(rows, align="<>"))
    print("The mean over ranks is the mean over the whole batch, as all ranks have equally many of its samples.")


def _print_training(steps: int, ranks: list[Record], single: Record) -> None:
    total = len(single["losses"])
    begins = list(range(0, total, steps))
    shown = sorted({round(i * (len(begins) - 1) / (_EPOCHS_SHOWN - 1)) for i in range(_EPOCHS_SHOWN)})
    indices = [str(index) for index in range(len(ranks))]
    rows = [["epoch", *(f"rank {index}" for index in indices), "mean", "one process"]]
    for epoch in shown:
        of_epoch = slice(begins[epoch], begins[epoch] + steps)
        losses = [statistics.mean(rank["losses"][of_epoch]) for rank in ranks]
        values = [*losses, statistics.mean(losses), statistics.mean(single["losses"][of_epoch])]
        rows.append([str(epoch + 1), *(f"{value:.4f}" for value in values)])
    print("\n3. Training: mean loss of each epoch, on the samples of each rank\n" + format_table(rows, align="<>"))
    accuracy, alone = 100 * ranks[0]["accuracy"], 100 * single["accuracy"]
    print(f"Test accuracy after {counted(total, 'step')}: {accuracy:.1f} %; with one process {alone:.1f} %.")
    prints = [["fingerprint of rank", *indices]]
    prints += [[name, *(rank[key] for rank in ranks)] for name, key in (("as drawn", "drawn"), ("trained", "trained"))]
    print(format_table(prints, align="<>"))
    print("Each rank draws its own network; before the first step all receive that of rank 0.")


def _print_bytes(settings: Settings, plan: Record, rank: Record) -> None:
    sent, dense = rank["gradient_bytes"], plan["dense_gradient_bytes"]
    rows = [["gradients, every step", f"{sent:,}"]]
    if settings.kind == "sketched":
        rows += [["  with dense layers", f"{dense:,}"], ["sketches, as seeds, once", f"{rank['sketch_bytes']:,}"]]
    rows += [["the network itself, once", f"{rank['start_bytes']:,}"]]
    print("\n4. Bytes of each rank in collectives, 8 per number\n" + format_table(rows, align="<>"))
    if settings.kind == "sketched":
        print(f"A step sends {dense / sent:.1f} times fewer bytes than with dense layers.")
    print("The processes share this machine, so their speed does not predict that of several machines.")


def _sampling(world: int, per_rank: int, repeated: int) -> str:
    more = f"; it repeats {repeated:,}, so that each of them has {per_rank:,}" if repeated else ""
    samples = f"{TRAIN_SAMPLES:,} samples of an epoch"
    return f"The sampler shuffles the {samples} and deals them to {world:,} ranks in turn{more}."


def _listed(places: list[int]) -> str:
    return " ".join(f"{place:4d}" for place in places[:5])
