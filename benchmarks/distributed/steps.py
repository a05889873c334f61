"""Training steps of two processes, timed in turns: Panther's against the same written by hand on torch alone.

Every process runs one thread. A round runs each alternative some times, behind a barrier and in a rotating order. Its
wall time is that of the slower process; its CPU time, which other work on the machine lengthens less, is that of both.
"""

__all__ = ["OVERHEADS", "in_turns", "overhead_rows", "scaling_rows"]

import contextlib
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import figure
from panther.distributed import (
    AdvancedDistributedTrainer,
    HybridParallelTrainer,
    data_parallel,
    launch,
    make_schedule,
    split_stages,
)
from panther.nn import SKLinear

Step = Callable[[], object]
_RANKS = 2
_LAYERS, _BATCHES = 4, 4  # of a model; of an epoch of AdvancedDistributedTrainer
_TURN_S = 0.03


def in_turns(steps: Mapping[str, Step], budget_s: float) -> dict[str, list[tuple[float, float]]]:
    """Return the wall and CPU seconds a call on this rank, by alternative and round; all ranks must call it.

    With a budget of 0 there are two rounds, the fewest that have quartiles.
    """
    repeats, min_rounds = {}, 5 if budget_s else 2
    for name, step in steps.items():
        for _ in range(3 if budget_s else 1):
            step()
        once, _ = _measured(step, 1)
        repeats[name] = int(_told(max(1, round(min(_TURN_S, budget_s / 20) / once))))
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names, start, rounds = list(steps), time.monotonic(), 0
    while _told(rounds < min_rounds or time.monotonic() - start < budget_s):
        for name in names:
            samples[name].append(_measured(steps[name], repeats[name]))
        names.append(names.pop(0))
        rounds += 1
    return samples


def overhead_rows(case: str, width: int, batch: int, budget_s: float) -> list[dict[str, Any]]:
    """Return a row for each alternative of a case: its times, their ratios to the first, medians and quartiles."""
    samples = launch(_overhead, case, width, batch, budget_s, nproc=_RANKS, start_method="fork")
    wall = {name: [max(pair) for pair in _pairs(samples, name, 0)] for name in samples[0]}
    cpu = {name: [sum(pair) for pair in _pairs(samples, name, 1)] for name in samples[0]}
    baseline = next(iter(wall))
    return [
        {
            "case": case,
            "width": width,
            "batch": batch,
            "step": name,
            "rounds": len(wall[name]),
            "cpu_ms": figure(1e3 * statistics.median(cpu[name])),
            "cpu_ratio": _ratio(cpu[name], cpu[baseline]),
            "cpu_quartiles": _quartiles(cpu[name], cpu[baseline]),
            "wall_ms": figure(1e3 * statistics.median(wall[name])),
            "wall_ratio": _ratio(wall[name], wall[baseline]),
            "wall_quartiles": _quartiles(wall[name], wall[baseline]),
        }
        for name in wall
    ]


def scaling_rows(width: int, sketch_size: int, batch: int, budget_s: float) -> list[dict[str, Any]]:
    """Count samples a second with one process and with two, each with ``batch`` of them, under DDP."""
    samples = launch(_scaling, width, sketch_size, batch, budget_s, nproc=_RANKS, start_method="fork")
    rows = []
    for kind in ("SKLinear", "nn.Linear"):
        one = [first for first, _ in _pairs(samples, f"{kind} 1", 0)]
        two = [max(pair) for pair in _pairs(samples, f"{kind} 2", 0)]
        rows.append(
            {
                "layer": kind,
                "width": width,
                "batch a process": batch,
                "rounds": len(one),
                "samples/s, 1 process": figure(batch / statistics.median(one)),
                "samples/s, 2 processes": figure(2 * batch / statistics.median(two)),
                "x 1 process": round(2 * statistics.median(a / b for a, b in zip(one, two, strict=True)), 2),
            }
        )
    return rows


def _overhead(case: str, width: int, batch: int, budget_s: float) -> dict[str, list[tuple[float, float]]]:
    torch.manual_seed(0)  # the same model on both ranks, so that what is written by hand need not send it
    model = _model("SKLinear", width, width // 64)
    torch.manual_seed(1 + dist.get_rank())
    return in_turns(OVERHEADS[case](model, torch.randn(batch, width)), budget_s)


def _scaling(width: int, sketch_size: int, batch: int, budget_s: float) -> dict[str, list[tuple[float, float]]]:
    alone = dist.new_group([0])
    x = torch.randn(batch, width)
    steps: dict[str, Step] = {}
    for kind in ("SKLinear", "nn.Linear"):
        model = _model(kind, width, sketch_size)
        steps[f"{kind} 1"] = _step(data_parallel(copy.deepcopy(model), alone), x) if dist.get_rank() == 0 else _idle
        steps[f"{kind} 2"] = _step(data_parallel(model), x)
    return in_turns(steps, budget_s)


def _idle() -> None:
    """Let the second process wait at the next barrier while the first is alone."""


def _ddp(model: nn.Module, x: Tensor) -> dict[str, Step]:
    return {
        "DistributedDataParallel, sketches not sent": _step(_plain(model), x),
        "the same again": _step(_plain(model), x),
        "DistributedDataParallel as it comes": _step(DistributedDataParallel(copy.deepcopy(model)), x),
        "data_parallel": _step(data_parallel(copy.deepcopy(model)), x),
    }


def _fsdp(model: nn.Module, x: Tensor) -> dict[str, Step]:
    return {
        "fully_shard": _step(_sharded(model), x),
        "the same again": _step(_sharded(model), x),
        "data_parallel": _step(data_parallel(copy.deepcopy(model), strategy="fsdp"), x),
    }


def _pipeline(model: nn.Sequential, x: Tensor) -> dict[str, Step]:
    microbatches, rank = 4, dist.get_rank()

    def by_hand() -> Step:
        layers = list(copy.deepcopy(model))
        half = len(layers) // 2
        part = nn.Sequential(*(layers[:half], layers[half:])[rank])
        schedule = Schedule1F1B(PipelineStage(part, rank, _RANKS, x.device), microbatches, _loss)
        optimizer = torch.optim.SGD(part.parameters(), 1e-3)

        def step() -> None:
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x, losses=[])
            optimizer.step()

        return step

    whole = copy.deepcopy(model)
    stages = split_stages(whole, _RANKS, points=[str(len(whole) // 2)])
    schedule = make_schedule("1f1b", stages, microbatches, _loss)
    optimizer = torch.optim.SGD(schedule.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(x, x)
        optimizer.step()

    return {"torch.distributed.pipelining": by_hand(), "the same again": by_hand(), "make_schedule": step}


def _advanced(model: nn.Module, x: Tensor) -> dict[str, Step]:
    """Train an epoch of some batches, clipped; Join, which serves ranks with other numbers of batches, is torch's."""
    batches = [(x, x)] * _BATCHES

    def by_hand(*, join: bool = False) -> Step:
        parallel = _plain(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(parallel.parameters(), 1e-3)

        def epoch() -> float:
            total = 0.0
            with Join([parallel]) if join else contextlib.nullcontext():
                for data, target in batches:
                    optimizer.zero_grad()
                    loss = _loss(parallel(data), target)
                    loss.backward()
                    nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
                    optimizer.step()
                    total += loss.item()
            return total / len(batches)

        return epoch

    trainer = AdvancedDistributedTrainer(copy.deepcopy(model), dist.get_rank(), _RANKS)
    optimizer = torch.optim.SGD(trainer.ddp_model.parameters(), 1e-3)
    return {
        "DistributedDataParallel, a loop": by_hand(),
        "the same again": by_hand(),
        "the loop with Join": by_hand(join=True),
        "AdvancedDistributedTrainer": lambda: trainer.train_epoch(batches, optimizer, _loss),
    }


def _hybrid(model: nn.Module, x: Tensor) -> dict[str, Step]:
    """Step by the trainer; the mean loss over ranks is one message more, for it and for a loop by hand."""
    trainer = HybridParallelTrainer(copy.deepcopy(model), {})
    optimizer = torch.optim.SGD(trainer.model.parameters(), 1e-3)
    return {
        "fully_shard": _step(_sharded(model), x),
        "the same again": _step(_sharded(model), x),
        "fully_shard, mean loss over ranks": _step(_sharded(model), x, over_ranks=True),
        "HybridParallelTrainer": lambda: trainer.train_step((x, x), optimizer, _loss),
    }


OVERHEADS: dict[str, Callable[[nn.Sequential, Tensor], dict[str, Step]]] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "pipeline, 1f1b": _pipeline,
    "epoch of AdvancedDistributedTrainer": _advanced,
    "step of HybridParallelTrainer": _hybrid,
}
"""Alternatives by case, the baseline first; a second copy of it shows what the measurement can tell apart."""


def _model(kind: str, width: int, sketch_size: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layer = SKLinear(width, width, sketch_size, sketch="signs") if kind == "SKLinear" else nn.Linear(width, width)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers)


def _plain(model: nn.Module, **options: Any) -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames the option; 2.11 has only this name
        return DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False, **options)


def _sharded(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for layer in model.children():
        if isinstance(layer, SKLinear):
            fully_shard(layer)
    fully_shard(model)
    return model


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def _step(model: nn.Module, x: Tensor, *, over_ranks: bool = False) -> Step:
    """Take a step of training, ending in the loss as a number, this rank's or the mean over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = _loss(model(x), x)
        loss.backward()
        optimizer.step()
        if not over_ranks:
            return loss.item()
        mean = loss.detach() / _RANKS
        dist.all_reduce(mean)
        return mean.item()

    return step


def _measured(step: Step, repeats: int) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats


def _told(value: float) -> float:
    """Return the value of rank 0 on every rank, for they must continue together."""
    told = torch.tensor(float(value))
    dist.broadcast(told, 0)
    return told.item()


def _pairs(samples: list[dict[str, Any]], name: str, which: int) -> list[tuple[float, float]]:
    """Return the wall (0) or CPU (1) seconds of both ranks, by rounds."""
    return [(a[which], b[which]) for a, b in zip(samples[0][name], samples[1][name], strict=True)]


def _ratios(values: list[float], baseline: list[float]) -> list[float]:
    return [a / b for a, b in zip(values, baseline, strict=True)]


def _ratio(values: list[float], baseline: list[float]) -> float:
    return round(statistics.median(_ratios(values, baseline)), 4)


def _quartiles(values: list[float], baseline: list[float]) -> str:
    low, _, high = statistics.quantiles(_ratios(values, baseline), n=4)
    return f"{low:.3f} to {high:.3f}"
