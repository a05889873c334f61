"""The advisor's predictions against steps of two nodes over a slow link, measured as advisor.py does on one node.

Two network namespaces with a token bucket at each end (tests/support/two_nodes.py), one process of one thread in each,
measure their speeds by ClusterSpec.measure before and after they train with six layouts in turns. It needs root on
Linux, and iproute2. The speeds are kept beside the results, as ``cluster-link-RATE.json``.
"""

__all__ = ["run"]

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.distributed import advisor
from benchmarks.distributed.advisor import BATCH, LAYOUTS, SIZES, SKETCH, SMALL, chosen_plan
from benchmarks.harness import RESULTS, ROOT, figure, print_table, test_support, write_csv
from panther.distributed import ClusterSpec, ModelStats, get_rank, init, shutdown
from panther.distributed.advisor.cost import estimate

two_nodes = test_support("two_nodes")

LINKS = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Mbit/s": 1e8}  # which takes longest
_SECONDS = 600.0  # that a link may take


def run(links: dict[str, float], budget_s: float, quick: bool = False) -> list[dict[str, Any]]:
    """Return a row for each layout of a dense and a sketched model over each link.

    Raises:
        UnavailableError: If this machine cannot have two nodes.
        RuntimeError: If a launcher fails.
    """
    rows = []
    with two_nodes.two_nodes() as nodes, tempfile.TemporaryDirectory(prefix="panther-advisor-") as folder:
        for link, rate in links.items():
            nodes.limit(rate)
            given = {"folder": folder, "budget_s": budget_s, "quick": quick, "slow": rate < 5e8}
            for sketch in (None, 2 if quick else SKETCH):
                sizes = {**(SMALL if quick else SIZES), "sketch": sketch}
                seconds, minima = _train(nodes, Path(folder), {**given, "sizes": sizes})
                cluster = ClusterSpec.load(Path(folder) / "cluster.json")
                rows += _rows(link, sizes, cluster, seconds, minima)
                if not quick:
                    cluster.save(RESULTS / f"cluster-link-{link.lower().replace(' ', '-').replace('/s', '')}.json")
            print(f"{link}: load {os.getloadavg()[0]:.1f}", flush=True)
            print_table(rows)
            if not quick:
                write_csv("advisor-link", rows, device="cpu")
    return rows


def _rows(
    link: str, sizes: dict[str, Any], cluster: ClusterSpec, seconds: list[float], minima: list[float]
) -> list[dict[str, Any]]:
    stats = ModelStats.transformer(**sizes)
    # Plans leave tensor parallelism between nodes out.
    layouts = (option.layout for option in chosen_plan(stats, 2, LAYOUTS[2]).options)
    options = {str(layout): estimate(stats, cluster, layout, BATCH) for layout in layouts}
    return [
        {
            "link": link,
            "model": "dense" if sizes["sketch"] is None else f"sketched R={sizes['sketch']}",
            "layout": layout,
            "step_ms": figure(1e3 * measured),
            "predicted_ms": figure(1e3 * options[layout].step_seconds),
            "time_ratio": figure(options[layout].step_seconds / measured),
            "fastest_ms": figure(1e3 * fastest),
            "fastest_ratio": figure(options[layout].step_seconds / fastest),
            **{f"{part}_ms": round(1e3 * value, 2) for part, value in options[layout].seconds.items()},
        }
        for layout, measured, fastest in zip(LAYOUTS[2], seconds, minima, strict=True)
    ]


def _train(nodes: Any, folder: Path, given: dict[str, Any]) -> list[list[float]]:
    (folder / "given.json").write_text(json.dumps(given), encoding="utf-8")
    launch = [sys.executable, "-m", "panther", "launch", "--nnodes=2", "--nproc-per-node=1"]
    launch += [f"--master-addr={nodes.addresses[0]}", "--master-port=29500", f"--log-dir={folder / 'logs'}"]
    command = ["--module", "benchmarks.distributed.advisor_link", "--worker", str(folder / "given.json")]
    launchers = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *launch, f"--node-rank={node}", *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node, name in enumerate(nodes.names)
    ]
    deadline = time.monotonic() + _SECONDS
    try:
        codes = [launcher.wait(max(1.0, deadline - time.monotonic())) for launcher in launchers]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.terminate()  # which ends its workers too
                launcher.wait()
    if any(codes):
        raise RuntimeError(f"panther launch ended with {codes[0]} on node 0 and {codes[1]} on node 1: see above")
    return list(json.loads((folder / "seconds.json").read_text(encoding="utf-8")))


def _work(path: str) -> None:
    """Measure and train as the file says, as one of the two ranks."""
    given = json.loads(Path(path).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    init()
    plan = chosen_plan(ModelStats.transformer(**given["sizes"]), 2, LAYOUTS[2])
    repetitions = 2 if given["slow"] else 10
    cluster, *seconds = advisor.seconds_of(plan, given["sizes"], given["budget_s"], repetitions)
    if get_rank() == 0:
        cluster.save(Path(given["folder"]) / "cluster.json")
        (Path(given["folder"]) / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
    shutdown()


def main() -> None:
    """Run the benchmark, or one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model over one link, nothing written")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of a layout")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.worker)
        return
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the nodes are removed on the way out
    links = {"1 Gbit/s": LINKS["1 Gbit/s"]} if options.quick else LINKS
    try:
        run(links, 0.5 if options.quick else options.budget, options.quick)
    except two_nodes.UnavailableError as error:
        print(f"the advisor's benchmark over a slow link is left out: {error}")


if __name__ == "__main__":
    main()
