"""Two nodes with a slow link: a transformer of characters, dense and sketched, by several strategies, for equal times.

The nodes are network namespaces joined by a virtual cable with a token bucket at each end (tests/support/two_nodes.py).
Every node runs ``panther launch``, and its processes train by pr.Trainer (link_worker.py). Every round trains every run
at every rate for some seconds, from its checkpoint of the round before, so that what disturbs the machine for a while
disturbs all. Bytes are those of the interface's counter. It needs root on Linux, and iproute2.
"""

__all__ = ["LINKS", "run"]

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.distributed.link_worker import HOOK_RUNS, RUNS, Run
from benchmarks.harness import ROOT, figure, print_table, test_support, write_csv
from benchmarks.train.trial_text import QUICK, gather_once
from benchmarks.trials.text_model import Shape

two_nodes = test_support("two_nodes")

SHAPE = Shape(width=256, hidden=1024, layers=4, heads=4, context=64)
BATCH = 16  # samples of a step, of all ranks together
LINKS: dict[str, float | None] = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "unlimited": None}
_POINTS = 30  # of a curve
_START_S = 300.0  # that processes may take beyond their training
_FEWEST = 12  # steps of a round; 24 with --quick, where PowerSGD's first ten of whole gradients must be less than half
_SAME_STEPS, _SAME = 10, 1e-3  # losses of the first steps agree so far between layouts

Tables = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def run(
    links: Mapping[str, float | None],
    *,
    seconds: float,
    rounds: int,
    nproc: int = 1,
    trained_runs: Sequence[Run] = RUNS,
    quick: bool = False,
    keep: Callable[[Tables], object] | None = None,
) -> Tables:
    """Train every run over every link; return a row for each, and a row for each point of their curves.

    ``keep`` gets what there is whenever all runs were trained over a link: an interrupted trial keeps its rounds.

    Raises:
        UnavailableError: If this machine cannot have two nodes.
        RuntimeError: If a launcher fails, or layouts of one model have different losses.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with two_nodes.two_nodes() as nodes, tempfile.TemporaryDirectory(prefix="panther-link-") as folder:
        gather_once(Path(folder) / "text.pt", QUICK if quick else SHAPE, quick=quick)
        for number in range(rounds):
            for link, rate in links.items():
                nodes.limit(rate)
                place = Path(folder) / link.replace("/", " a ").replace(" ", "-")
                place.mkdir(exist_ok=True)
                runs = [trained_runs[(i + number) % len(trained_runs)] for i in range(len(trained_runs))]
                _train(nodes, place, runs, number, seconds, nproc, 24 if quick else _FEWEST)
                for one in runs:
                    (path,) = place.glob(f"{one.name.replace(', ', '-').replace(' ', '-')}-{number}.json")
                    found.setdefault((link, one.name), []).append(json.loads(path.read_text(encoding="utf-8")))
                print(f"round {number + 1} of {rounds}, {link}: load {os.getloadavg()[0]:.1f}", flush=True)
                _check_losses(found, trained_runs)
                if keep is not None:
                    keep(_tables(found, links, trained_runs, seconds, nproc))
    return _tables(found, links, trained_runs, seconds, nproc)


def _tables(
    found: Mapping[tuple[str, str], list[dict[str, Any]]],
    links: Mapping[str, float | None],
    trained_runs: Sequence[Run],
    seconds: float,
    nproc: int,
) -> Tables:
    trained = [
        (link, one, found[link, one.name]) for link in links for one in trained_runs if (link, one.name) in found
    ]
    rows = [
        _row(link, one, rounds, seconds, nproc) | {"same_steps": steps, "loss_same_steps": loss}
        for (link, one, rounds), (steps, loss) in zip(trained, _losses_after_equal_steps(trained), strict=True)
    ]
    return rows, [point for link, one, rounds in trained for point in _curve(link, one, rounds)]


def _losses_after_equal_steps(
    trained: Sequence[tuple[str, Run, list[dict[str, Any]]]],
) -> list[tuple[int, float]]:
    """Return the steps that all runs over a link have taken, and the mean loss of each run in their last fifth."""
    results = []
    for link, _, rounds in trained:
        steps = min(other[-1]["steps"][-1]["step"] for place, _, other in trained if place == link)
        losses = [step["loss"] for one in rounds for step in one["steps"] if 0.8 * steps < step["step"] <= steps]
        results.append((steps, round(statistics.mean(losses), 4)))
    return results


def _train(nodes: Any, folder: Path, runs: list[Run], number: int, seconds: float, nproc: int, fewest: int) -> None:
    """Train in turns for some seconds each, on both nodes."""
    given = {
        "folder": str(folder),
        "runs": [one.name for one in runs],
        "round": number,
        "seconds": seconds,
        "fewest": fewest,
        "batch": BATCH,
        "interface": nodes.interfaces[0],
    }
    (folder / "given.json").write_text(json.dumps(given), encoding="utf-8")
    launch = [sys.executable, "-m", "panther", "launch", "--nnodes=2", f"--nproc-per-node={nproc}"]
    launch += [f"--master-addr={nodes.addresses[0]}", "--master-port=29500", f"--log-dir={folder / 'logs'}"]
    command = ["--module", "benchmarks.distributed.link_worker", str(folder / "given.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launchers = [
        # It also mounts the /sys of the namespace, which has its counters.
        subprocess.Popen(
            ["ip", "netns", "exec", name, *launch, f"--node-rank={node}", *command], cwd=ROOT, env=environment
        )
        for node, name in enumerate(nodes.names)
    ]
    deadline = time.monotonic() + _START_S + 8 * seconds * len(runs)
    try:
        codes = [launcher.wait(max(1.0, deadline - time.monotonic())) for launcher in launchers]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.terminate()  # which ends its workers too
                launcher.wait()
    if any(codes):
        raise RuntimeError(f"panther launch ended with {codes[0]} on node 0 and {codes[1]} on node 1: see above")


def _check_losses(found: Mapping[tuple[str, str], list[dict[str, Any]]], runs: Sequence[Run]) -> None:
    """Raise RuntimeError unless every layout of a model has the same losses in its first steps, over every link."""
    for model in {one.model for one in runs}:
        exact = [one.name for one in runs if one.model == model and "comm_hook" not in one.settings]
        for (link, name), rounds in found.items():
            for step, expected in zip(
                rounds[0]["steps"], found[link, exact[0]][0]["steps"][:_SAME_STEPS], strict=False
            ):
                if name in exact and abs(step["loss"] - expected["loss"]) > _SAME * expected["loss"]:
                    raise RuntimeError(
                        f"{name} over {link} has the loss {step['loss']} in step {step['step']}, and {exact[0]} has "
                        f"{expected['loss']}"
                    )


def _row(link: str, one: Run, rounds: list[dict[str, Any]], seconds: float, nproc: int) -> dict[str, Any]:
    """Return what a step takes and sends, and the losses after equal times."""
    wall, cpu, sent = [], [], []
    for found in rounds:
        # PowerSGD's first ten steps send whole gradients.
        steps = found["steps"][len(found["steps"]) // 2 :]
        pairs = list(itertools.pairwise(steps))
        wall.append(statistics.median(later["s"] - earlier["s"] for earlier, later in pairs))
        cpu.append(statistics.median(later["cpu_s"] - earlier["cpu_s"] for earlier, later in pairs))
        sent.append((steps[-1]["sent"] - steps[0]["sent"]) / len(pairs))
    last = rounds[-1]["steps"]
    end = last[-1]["s"] - seconds / 2
    return {
        "link": link,
        "run": one.name,
        "nodes": 2,
        "processes": 2 * nproc,
        "numbers": rounds[0]["numbers"],
        "step_ms": figure(1e3 * statistics.median(wall)),
        "fastest_ms": figure(1e3 * min(wall)),
        "slowest_ms": figure(1e3 * max(wall)),
        "cpu_ms": figure(1e3 * statistics.median(cpu)),
        "sent_bytes": round(statistics.median(sent)),
        "rounds": len(rounds),
        "seconds": seconds * len(rounds),
        "steps": last[-1]["step"],
        "loss": round(statistics.mean(step["loss"] for step in last if step["s"] >= end), 4),
        "held_out": round(rounds[-1]["held_out"], 4),
    }


def _curve(link: str, one: Run, rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean losses of equal shares of the time; the warm-up of each round is not counted as time."""
    times: list[tuple[float, float, dict[str, float]]] = []
    passed = sent = 0.0
    for found in rounds:
        begun, *steps = found["steps"]
        times += [(passed + step["s"] - begun["s"], sent + step["sent"] - begun["sent"], step) for step in steps]
        passed, sent, _ = times[-1]
    points = []
    for number in range(_POINTS):
        low, high = passed * number / _POINTS, passed * (number + 1) / _POINTS
        here = [(bytes_, step) for at, bytes_, step in times if low < at <= high]
        if here:
            loss = round(statistics.mean(step["loss"] for _, step in here), 4)
            total, last = here[-1]
            known = {"s": round(high, 2), "sent_bytes": round(total), "step": last["step"], "loss": loss}
            points.append({"link": link, "run": one.name, **known})
    return points


def main() -> None:
    """Run the trial, and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, a second each, nothing written")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a run in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nproc", type=int, default=1, help="processes of a node")
    parser.add_argument("--hooks", action="store_true", help="compressed gradients, with two processes on each node")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    nproc, trained_runs = (2, HOOK_RUNS) if options.hooks else (options.nproc, RUNS)
    suffix = "" if nproc == 1 else f"-{2 * nproc}-processes"
    subjects = ("link-hooks", "link-hooks-curves") if options.hooks else ("link-runs", "link-curves")

    def keep(tables: Tables) -> None:
        for subject, table in zip(subjects, tables, strict=True):
            write_csv(f"{subject}{suffix}", table, device="cpu")

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the nodes are removed on the way out
    try:
        if options.quick:
            rows, _ = run(
                {"100 Mbit/s": 1e8}, seconds=1.0, rounds=1, nproc=nproc, trained_runs=trained_runs, quick=True
            )
        else:
            rows, _ = run(
                {name: LINKS[name] for name in options.links},
                seconds=options.seconds,
                rounds=options.rounds,
                nproc=nproc,
                trained_runs=trained_runs,
                keep=keep,
            )
    except two_nodes.UnavailableError as error:
        print(f"the trial of a slow link is left out: {error}")
        return
    print_table(rows)


if __name__ == "__main__":
    main()
