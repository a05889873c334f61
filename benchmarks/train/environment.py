"""Compare environment variables for a CPU: the C library's allocator and others, huge pages, and how threads are bound.

Every round starts a fresh process for each setting, in a rotating order, because an allocator cannot be changed in a
process that runs. A ratio is the median over the rounds of the two times of one round. A time is the mean of the calls
after a warm-up: memory that goes back to the system now and then must count. The system's share of it and the page
faults of a call say how much of a difference the allocator makes, for other processes disturb these less than the time.
Peak memory is that of the whole process.
"""

__all__ = ["run"]

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.hardware import MEMORY
from benchmarks.harness import ROOT, main, print_table, write_csv
from benchmarks.trials.text_model import SYMBOLS, Shape, TextModel
from panther.nn import SKConv2d, SKLinear

_LIBRARIES = Path("/usr/lib") / f"{os.uname().machine}-linux-gnu"  # of Debian's packages
JEMALLOC, TCMALLOC = _LIBRARIES / "libjemalloc.so.2", _LIBRARIES / "libtcmalloc_minimal.so.4"
KEPT = MEMORY["kept"]
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "the same again": {},
    "threshold 32 MiB": KEPT | {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)},
    "kept": KEPT,
    "kept, TOP_PAD 64 MiB": KEPT | {"MALLOC_TOP_PAD_": str(64 << 20)},
    "hugetlb=1": HUGE,
    "kept, hugetlb=1": KEPT | HUGE,
    "THP_MEM_ALLOC_ENABLE=1": {"THP_MEM_ALLOC_ENABLE": "1"},
    "kept, THP_MEM_ALLOC_ENABLE=1": KEPT | {"THP_MEM_ALLOC_ENABLE": "1"},
    "jemalloc": {"LD_PRELOAD": str(JEMALLOC)},
    "jemalloc, no decay": {
        "LD_PRELOAD": str(JEMALLOC),
        "MALLOC_CONF": "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1",
    },
    "tcmalloc": {"LD_PRELOAD": str(TCMALLOC)},
}
THREAD_SETTINGS: dict[str, dict[str, str]] = {
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
    "OMP_PROC_BIND=true": {"OMP_PROC_BIND": "true"},
    "OMP_WAIT_POLICY=active": {"OMP_WAIT_POLICY": "active"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
SHAPE, BATCH = Shape(), 16  # of the transformer whose training steps are timed
LAYERS = [(1024, 2, 64), (8192, 1, 16)]  # width, terms, rank
BATCHES = [1, 32, 512]
PARTS = (  # a process each
    "transformer, SKLinear",
    "transformer, nn.Linear",
    "convolutional net, SKConv2d",
    "convolutional net, nn.Conv2d",
    "layers",
)
_STEP_S, _CALL_S, _SLOW_S = 1.5, 0.15, 0.5  # of a training step, of a call, and of a call that is warm after one


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Time every setting in every round, write the CSV after each, and print the table."""
    if device != "cpu":
        print("environment variables are measured on CPUs only")
        return
    threads = torch.get_num_threads()
    settings = SETTINGS if threads == 1 else dict(list(SETTINGS.items())[:2]) | THREAD_SETTINGS
    settings = {name: value for name, value in settings.items() if _available(value)}
    names = list(settings)[:1] if quick else list(settings)
    parts = PARTS[:1] if quick else PARTS
    found: Found = {name: {part: [] for part in parts} for name in names}
    begun, rounds, rows = time.monotonic(), 0, []
    while rounds < (1 if quick else 3) or (time.monotonic() - begun < budget_s and not quick):
        for part in parts:
            for name in names:
                found[name][part].append(_child(settings[name], part, threads, quick))
            names.append(names.pop(0))
        rounds += 1
        rows = [row for part in parts for row in _rows(part, found, settings)]
        place = "nowhere" if quick else write_csv("environment", rows, device=device)
        print(f"round {rounds}, {time.monotonic() - begun:.0f} s, written to {place}", flush=True)
    print_table(rows)


Costs = dict[str, dict[str, float]]  # time_ms, system_ms and faults by case; peak_mib alone under ""
Found = dict[str, dict[str, list[Costs]]]  # of every round, by setting and part


def _available(setting: dict[str, str]) -> bool:
    return "LD_PRELOAD" not in setting or Path(setting["LD_PRELOAD"]).exists()


def _child(setting: dict[str, str], part: str, threads: int, quick: bool) -> Costs:
    """Run one part in a process with the setting."""
    arguments = ["--part", part, str(threads), "quick" if quick else ""]
    command = [sys.executable, "-m", "benchmarks.train.environment", *arguments]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "OMP_", "GOMP_"))}
    done = subprocess.run(command, cwd=ROOT, env=inherited | setting, capture_output=True, text=True, check=True)
    found: Costs = json.loads(done.stdout)
    return found


def _rows(part: str, found: Found, settings: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    rows = []
    default = found["default"][part]
    for case in (case for case in default[0] if case):
        for name in (name for name in settings if name in found):
            rounds = found[name][part]
            ratios = [b[case]["time_ms"] / a[case]["time_ms"] for a, b in zip(rounds, default, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            median = {key: statistics.median(costs[case][key] for costs in rounds) for key in rounds[0][case]}
            rows.append(
                {
                    "case": case,
                    "setting": name,
                    "time_ms": round(median["time_ms"], 3),
                    "x default": round(statistics.median(ratios), 3),
                    "quartiles": f"{low:.3f} to {high:.3f}",
                    "system_ms": round(median["system_ms"], 3),
                    "faults": round(median["faults"], 1),
                    "peak_mib": round(statistics.median(costs[""]["peak_mib"] for costs in rounds)),
                    "rounds": len(rounds),
                    "set": " ".join(
                        f"{key}={value.removeprefix(str(_LIBRARIES) + '/')}" for key, value in settings[name].items()
                    ),
                }
            )
    return rows


def _part(part: str, threads: int, quick: bool) -> None:
    """Print the costs of the part's cases as JSON."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    torch.manual_seed(0)
    kind = part.partition(", ")[2]
    step = _convolutional_step if "Conv" in kind else _transformer_step
    cases = {f"training step, {part}": step(kind, quick)} if kind else _layers()
    found: Costs = {}
    for case, call in cases.items():
        begun, minimum_calls = clock(), 3
        for _ in range(3):
            call()
            if clock() - begun > _SLOW_S:
                minimum_calls = 1
                break
        count, begun, start = 0, clock(), resource.getrusage(resource.RUSAGE_SELF)
        while count < minimum_calls or clock() - begun < (0.0 if quick else _STEP_S if kind else _CALL_S):
            call()
            count += 1
        seconds, end = clock() - begun, resource.getrusage(resource.RUSAGE_SELF)
        found[case] = {
            "time_ms": 1e3 * seconds / count,
            "system_ms": 1e3 * (end.ru_stime - start.ru_stime) / count,
            "faults": (end.ru_minflt - start.ru_minflt) / count,
        }
    print(json.dumps(found | {"": {"peak_mib": _peak_mib()}}))


def _layers() -> dict[str, Callable[[], object]]:
    cases: dict[str, Callable[[], object]] = {}
    for width, terms, rank in LAYERS:
        for layer in (SKLinear(width, width, terms, rank, sketch="signs"), nn.Linear(width, width)):
            for batch in BATCHES:
                kind = f"width {width}, batch {batch}, {'SKLinear' if isinstance(layer, SKLinear) else 'nn.Linear'}"
                cases[f"forward, {kind}"] = _forward(layer, width, batch)
                cases[f"forward+backward, {kind}"] = _backward(layer, width, batch)
    return cases


def _forward(layer: nn.Module, width: int, batch: int) -> Callable[[], object]:
    x = torch.randn(batch, width)

    def call() -> None:
        with torch.no_grad():
            layer(x)

    return call


def _backward(layer: nn.Module, width: int, batch: int) -> Callable[[], object]:
    x, grad = torch.randn(batch, width, requires_grad=True), torch.randn(batch, width)
    trained = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def call() -> None:
        torch.autograd.grad(layer(x), trained, grad)

    return call


def _transformer_step(kind: str, quick: bool) -> Callable[[], object]:
    """Return a training step of a transformer, whose blocks' linear layers keep a quarter of their numbers."""
    shape, batch = (Shape(width=32, hidden=64, layers=1, heads=2, context=16), 2) if quick else (SHAPE, BATCH)
    model = TextModel(shape)
    for block in model.blocks if kind == "SKLinear" else ():
        for name, dense in list(block.named_children()):
            if isinstance(dense, nn.Linear):
                sizes = dense.in_features, dense.out_features
                rank = sizes[0] * sizes[1] // (4 * sum(sizes))
                setattr(block, name, SKLinear(*sizes, 1, rank, bias=dense.bias is not None, sketch="signs"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    pieces = torch.randint(SYMBOLS, (batch, shape.context + 1))

    def step() -> None:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step


def _convolutional_step(kind: str, quick: bool) -> Callable[[], object]:
    """Return a training step of two convolutions, with batch norms, on images of 32 x 32."""
    convolution = partial(SKConv2d, low_rank=8) if kind == "SKConv2d" else nn.Conv2d
    net = nn.Sequential(
        *(convolution(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(convolution(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
    )
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    batch = 2 if quick else 32
    images, labels = torch.randn(batch, 32, 32, 32), torch.randint(10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(net(images), labels).backward()
        optimizer.step()

    return step


def _peak_mib() -> float:
    """Return the peak memory of this program alone, in MiB: what getrusage says outlives exec."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        _part(sys.argv[2], int(sys.argv[3]), bool(sys.argv[4]))
    else:
        main(run, __doc__, threads=1, budget_s=1200.0, memory=["default"])
