"""Steps of the Trainer and of a loop written by hand, timed in turns inside one run, and what a checkpoint holds up.

A callback stops the Trainer's clock every few steps, lets the loop by hand do as many on a model of its own, and starts
the clock again: all see the same disturbances. Wall time is that of the slower process; CPU time, which other work on
the machine lengthens less, is that of all processes, their helper threads counted.
"""

__all__ = [
    "CASES",
    "MEASURED",
    "QUICK",
    "Samples",
    "beside",
    "checkpoint_rows",
    "clocks",
    "model_and_data",
    "overhead_rows",
]

import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.harness import figure
from panther.cli.demo.training import build
from panther.distributed import checkpoint, data_parallel, get_rank, get_world_size, launch
from panther.train import Callback, TrainConfig, Trainer

MEASURED = {"1 ms": (64, 3, 16, 100), "5 ms": (256, 4, 32, 40), "20 ms": (768, 4, 32, 10), "50 ms": (1024, 4, 96, 2)}
QUICK = "quick"
CASES = {**MEASURED, QUICK: (16, 2, 4, 5)}
"""Width, layers and batch of a perceptron, and the steps of a turn, by the time of a step."""
_HAND, _AGAIN = "loop by hand", "the same again"
_CLASSES, _SAMPLES = 10, 4096
_NEVER = 10**9
Samples = dict[str, tuple[list[float], list[float]]]
"""Wall and CPU seconds a step of one process, by name and turn."""


def overhead_rows(case: str, nproc: int, *, logging: bool, rounds: int) -> list[dict[str, Any]]:
    """Return a row for the loop by hand, its second copy and the Trainer: times a step, and ratios to the first."""
    if nproc == 1:
        samples = [_overhead(case, logging, rounds)]
    else:
        samples = launch(_overhead, case, logging, rounds, nproc=nproc, start_method="fork")
    row = {"case": case, "processes": nproc, "logging": "every 10" if logging else "none"}
    return [
        {**row, "steps by": name, "turns": rounds, "steps a turn": CASES[case][3], **times}
        for name, times in beside(samples, _HAND).items()
    ]


def beside(samples: list[Samples], baseline: str) -> dict[str, dict[str, Any]]:
    """Return, by name, the wall and CPU times of all processes and their ratios to the baseline's of the same turn."""
    found: dict[str, dict[str, Any]] = {name: {} for name in samples[0]}
    kinds: list[tuple[str, int, Callable[[Iterable[float]], float]]] = [("cpu", 1, sum), ("wall", 0, max)]
    for kind, place, combine in kinds:
        times = {name: list(map(combine, zip(*(s[name][place] for s in samples), strict=True))) for name in found}
        for name, columns in found.items():
            ratios = [a / b for a, b in zip(times[name], times[baseline], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            columns[f"{kind}_ms"] = figure(1e3 * statistics.median(times[name]))
            columns[f"{kind}_ratio"] = round(statistics.median(ratios), 4)
            columns[f"{kind}_quartiles"] = f"{low:.3f} to {high:.3f}"
    return found


def _overhead(case: str, logging: bool, rounds: int) -> Samples:
    _, _, batch, turn = CASES[case]
    torch.manual_seed(0)
    model, data = model_and_data(case)
    clock = _Turns({name: _by_hand(copy.deepcopy(model), data, batch) for name in (_HAND, _AGAIN)}, turn)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        kept = _shared(folder) if logging else None
        config = TrainConfig(
            max_steps=(rounds + 1) * turn,
            strategy="ddp",
            learning_rate=1e-3,
            log_every_n_steps=10 if logging else _NEVER,
            checkpoint_dir=kept,
            progress=logging,
        )
        trainer = Trainer(model, torch.optim.AdamW, functional.cross_entropy, config, [clock])
        trainer.fit(DataLoader(data, batch, shuffle=True))
    return {name: clock.samples[name] for name in (_HAND, _AGAIN, "Trainer")}


def model_and_data(case: str) -> tuple[nn.Module, TensorDataset]:
    """Return the perceptron of a case, and samples."""
    width, layers, _, _ = CASES[case]
    middle = [layer for _ in range(layers - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    data = TensorDataset(torch.randn(_SAMPLES, width), torch.randint(_CLASSES, (_SAMPLES,)))
    return nn.Sequential(*middle, nn.Linear(width, _CLASSES)), data


class _Turns(Callback):
    """Times the Trainer from one turn of the others to the next."""

    def __init__(self, others: dict[str, Callable[[], object]], turn: int) -> None:
        self.others, self.turn = others, turn
        self.samples: Samples = {name: ([], []) for name in (*others, "Trainer")}
        self._begun: tuple[float, float] | None = None

    def on_step(self, trainer: Trainer, loss: float) -> None:
        if trainer.step % self.turn:
            return
        if self._begun is not None:  # the first turn warms up
            self._note("Trainer", self._begun)
        for name in list(self.others)[:: 1 if trainer.step // self.turn % 2 else -1]:
            begun = clocks()
            for _ in range(self.turn):
                self.others[name]()
            if self._begun is not None:
                self._note(name, begun)
        self._begun = clocks()

    def _note(self, name: str, begun: tuple[float, float]) -> None:
        for samples, now, start in zip(self.samples[name], clocks(), begun, strict=True):
            samples.append((now - start) / self.turn)


def clocks() -> tuple[float, float]:
    """Return wall and CPU seconds, when all processes have come here."""
    if get_world_size() > 1:
        dist.barrier()
    return time.perf_counter(), time.process_time()


def _by_hand(model: nn.Module, data: TensorDataset, batch: int) -> Callable[[], float]:
    """Take a step of a loop on torch alone, which has the loss as a number at its end."""
    world = get_world_size()
    sampler: DistributedSampler[Any] | None = DistributedSampler(data, world, get_rank()) if world > 1 else None
    loader = DataLoader(data, batch, sampler=sampler, shuffle=sampler is None)
    parallel = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-3)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            if sampler is not None:
                sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    given = batches()

    def step() -> float:
        x, y = next(given)
        optimizer.zero_grad()
        loss = functional.cross_entropy(parallel(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def checkpoint_rows(sizes: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Return the seconds that a checkpoint holds up two processes, written at once and in a thread."""
    rows = []
    for name, size in sizes.items():
        found = launch(_checkpoints, size, repeats, nproc=2, start_method="fork")
        for kind in ("save", "async_save", "async_save, until written"):
            times = [max(pair) for pair in zip(*(of_rank[kind] for of_rank in found), strict=True)]
            rows.append(
                {
                    "model": name,
                    "megabytes": round(found[0]["bytes"] / 1e6, 2),
                    "call": kind,
                    "repeats": repeats,
                    "median_s": figure(statistics.median(times)),
                    "worst_s": figure(max(times)),
                    "first_s": figure(times[0]),
                }
            )
    return rows


def _checkpoints(size: Any, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    kind, width, sketch_size = size
    model = build(kind, width, sketch_size)
    parallel = data_parallel(model)
    optimizer = torch.optim.Adam(parallel.parameters())
    functional.cross_entropy(parallel(torch.randn(32, 64)), torch.randint(10, (32,))).backward()
    optimizer.step()
    found: dict[str, Any] = {"save": [], "async_save": [], "async_save, until written": []}
    states = [*model.state_dict().values(), *(v for state in optimizer.state.values() for v in state.values())]
    found["bytes"] = sum(value.nbytes for value in states)
    with tempfile.TemporaryDirectory() as folder:
        place = _shared(folder)
        for step in range(repeats):
            begun = clocks()[0]
            checkpoint.save(place, parallel, optimizer, step=2 * step, keep=2)
            found["save"].append(time.perf_counter() - begun)
            begun = clocks()[0]
            pending = checkpoint.async_save(place, parallel, optimizer, step=2 * step + 1, keep=2)
            found["async_save"].append(time.perf_counter() - begun)
            pending.result()
            found["async_save, until written"].append(time.perf_counter() - begun)
        dist.barrier()
    return found


def _shared(folder: str) -> str:
    """Return the first rank's folder, on all of them."""
    told = [folder]
    if get_world_size() > 1:
        dist.broadcast_object_list(told)
    return told[0]
