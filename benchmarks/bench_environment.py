"""Compare environment variables for a CPU: the C library's allocator and others, huge pages, and how threads are bound.

Every round starts a fresh process for each setting, in a rotating order, because an allocator cannot be changed in a
process that runs. A ratio is the median over the rounds of the two times of one round. A time is the mean of the calls
after a warm-up: memory that goes back to the system now and then must count. Peak memory is that of the whole process.
"""

__all__ = ["run"]

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import KEPT, figure, main, print_table, write_csv
from text_model import SYMBOLS, Shape, TextModel
from torch import nn
from torch.nn import functional

from panther.nn import SKLinear

_LIBRARIES = Path("/usr/lib") / f"{os.uname().machine}-linux-gnu"  # of Debian's packages
JEMALLOC, TCMALLOC = _LIBRARIES / "libjemalloc.so.2", _LIBRARIES / "libtcmalloc_minimal.so.4"
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
    "jemalloc, no decay, huge pages": {
        "LD_PRELOAD": str(JEMALLOC),
        "MALLOC_CONF": "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always",
    },
    "tcmalloc": {"LD_PRELOAD": str(TCMALLOC)},
}
THREAD_SETTINGS: dict[str, dict[str, str]] = {
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
    "OMP_PROC_BIND=true": {"OMP_PROC_BIND": "true"},
    "OMP_WAIT_POLICY=active": {"OMP_WAIT_POLICY": "active"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
MODELS = {  # shape and batch of a training step
    "transformer 192": (Shape(), 16),
    "transformer 512": (Shape(width=512, hidden=2048, layers=2, heads=8), 8),
}
LAYERS = [(1024, 2, 64), (8192, 1, 16)]  # width, terms, rank
BATCHES = [1, 32, 512]
KINDS = ("SKLinear", "nn.Linear")
_SAMPLE_S, _SLOW_S = 0.25, 0.5


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Time every setting in every round, print the table, and write the CSV."""
    if device != "cpu":
        print("environment variables are measured on CPUs only")
        return
    threads = torch.get_num_threads()
    settings = SETTINGS if threads == 1 else dict(list(SETTINGS.items())[:2]) | THREAD_SETTINGS
    settings = {name: value for name, value in settings.items() if _available(value)}
    names = list(settings)[:2] if quick else list(settings)
    parts = [f"{model}, {kind}" for model in MODELS for kind in KINDS] + [f"layers, {kind}" for kind in KINDS]
    parts = parts[:1] if quick else parts
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {part: [] for part in parts} for name in names}
    begun, rounds = time.monotonic(), 0
    while rounds < (1 if quick else 3) or (time.monotonic() - begun < budget_s and not quick):
        for part in parts:
            for name in names:
                found[name][part].append(_child(settings[name], part, threads, quick))
            names.append(names.pop(0))
        rounds += 1
        print(f"round {rounds}, {time.monotonic() - begun:.0f} s", flush=True)
    rows = [row for part in parts for row in _rows(part, found, settings)]
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('environment', rows, device=device)}")


def _available(setting: dict[str, str]) -> bool:
    return "LD_PRELOAD" not in setting or Path(setting["LD_PRELOAD"]).exists()


def _child(setting: dict[str, str], part: str, threads: int, quick: bool) -> dict[str, float]:
    """Run one part in a process with the setting; milliseconds by case, and the peak memory in MiB."""
    command = [sys.executable, __file__, "--part", part, str(threads), "quick" if quick else ""]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "OMP_", "GOMP_"))}
    done = subprocess.run(command, env=inherited | setting, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _rows(
    part: str, found: dict[str, dict[str, list[dict[str, float]]]], settings: dict[str, dict[str, str]]
) -> list[dict[str, Any]]:
    rows = []
    default = found["default"][part]
    for case in (case for case in default[0] if case != "peak_mib"):
        for name, setting in settings.items():
            if name not in found:
                continue
            rounds = found[name][part]
            ratios = [b[case] / a[case] for a, b in zip(rounds, default, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            rows.append(
                {
                    "case": case,
                    "setting": name,
                    "time_ms": figure(statistics.median(row[case] for row in rounds)),
                    "x default": figure(statistics.median(ratios)),
                    "quartiles": f"{low:.3f} to {high:.3f}",
                    "rounds": len(rounds),
                    "peak_mib": round(statistics.median(row["peak_mib"] for row in rounds)),
                    "variables": " ".join(
                        f"{key}={value.removeprefix(str(_LIBRARIES) + '/')}" for key, value in setting.items()
                    ),
                }
            )
    return rows


def _part(part: str, threads: int, quick: bool) -> None:
    """Print the milliseconds of the part's cases, by name, as JSON."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    of, kind = part.split(", ")
    torch.manual_seed(0)
    cases = _layers(kind) if of == "layers" else {f"training step, {of}, {kind}": _step(of, kind, quick)}
    found = {}
    for case, call in cases.items():
        begun, least = clock(), 3
        for _ in range(3):
            call()
            if clock() - begun > _SLOW_S:  # warm after one call
                least = 1
                break
        count, begun = 0, clock()
        while count < least or clock() - begun < (_SAMPLE_S if of == "layers" else 8 * _SAMPLE_S):
            call()
            count += 1
        found[case] = 1e3 * (clock() - begun) / count
    print(json.dumps(found | {"peak_mib": _peak_mib()}))


def _layers(kind: str) -> dict[str, Callable[[], object]]:
    cases: dict[str, Callable[[], object]] = {}
    for width, terms, rank in LAYERS:
        layer = SKLinear(width, width, terms, rank) if kind == "SKLinear" else nn.Linear(width, width)
        for batch in BATCHES:
            cases[f"forward, width {width}, batch {batch}, {kind}"] = _forward(layer, width, batch)
            cases[f"forward+backward, width {width}, batch {batch}, {kind}"] = _backward(layer, width, batch)
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


def _step(of: str, kind: str, quick: bool) -> Callable[[], object]:
    """Return a training step of a transformer, whose blocks' linear layers keep a quarter of their numbers."""
    shape, batch = (Shape(width=32, hidden=64, layers=1, heads=2, context=16), 2) if quick else MODELS[of]
    model = TextModel(shape)
    for block in model.blocks if kind == "SKLinear" else ():
        for name, dense in list(block.named_children()):
            if isinstance(dense, nn.Linear):
                sizes = dense.in_features, dense.out_features
                rank = sizes[0] * sizes[1] // (4 * sum(sizes))
                setattr(block, name, SKLinear(*sizes, 1, rank, bias=dense.bias is not None))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    pieces = torch.randint(SYMBOLS, (batch, shape.context + 1))

    def step() -> None:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
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
        main(run, __doc__, threads=1, budget_s=1200.0)
