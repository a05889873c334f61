"""Measure how long each form of a layer takes for the layer's input in a held-out batch.

Nothing has to be fitted for this, because layers of random numbers take as long as fitted ones. Layers of equal shapes
that read inputs of equal shapes share one measurement. Times are measured at a few ranks and interpolated linearly.
"""

__all__ = ["compare_speed", "time_layers"]

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.conversion import random_layer
from panther.compression.forms.options import DENSE, Forms, Option, Times
from panther.compression.runner import Runner
from panther.compression.survey import hooked
from panther.compression.targets import GEOMETRY, Target

_SAMPLE_S = 5e-4  # calls are repeated for this time between two readings of the clock, because readings take time
_MAX_REPEATS = 1000
_PAIR_S = 0.2  # time for one form of a layer, unless the smallest number of rounds takes longer
_ROUNDS = (3, 9)  # smallest and largest number of rounds
_SHARES = (0.0, 0.35, 1.0)  # places in the list of ranks at which a form is timed


def time_layers(runner: Runner, targets: Sequence[Target], forms: Forms) -> dict[Target, Times]:
    """Return the times of all forms of each target in the first held-out batch, the mean over the ranks of a group."""
    samples: dict[Any, tuple[Target, nn.Module, Tensor]] = {}
    calls: dict[Target, Counter[Any]] = {target: Counter() for target in targets}

    def note(target: Target, module: nn.Module, x: Tensor, output: Tensor) -> None:
        key = _key(target, module, x)
        samples.setdefault(key, (target, module, x.detach()))
        calls[target][key] += 1

    with torch.no_grad(), hooked(targets, note):
        runner.output(runner.held_out[0])
    plans = {target: _plan(target, forms) for target in targets}
    measured: dict[Any, list[float]] = {}
    for key, (target, module, x) in runner.over(samples.items(), "time of forms"):
        # One new layer at a time, because all of them could take more memory than the dense model.
        pairs = [
            compare_speed(_call(module, x), _call(random_layer(target, module, option, forms), x), x.device)
            for option in plans[target]
        ]
        dense_s = statistics.median(old for old, _ in pairs)
        measured[key] = [dense_s, *(dense_s / ratio for _, ratio in pairs)]
    table = [torch.zeros(1 + len(plan), dtype=torch.float64) for plan in plans.values()]
    for sums, counts in zip(table, calls.values(), strict=True):
        for key, count in counts.items():
            sums += count * torch.tensor(measured[key], dtype=torch.float64)
    runner.mean_(table)  # averaged, so that all ranks choose the same forms
    figures = zip(plans.items(), table, strict=True)
    return {target: _times(plan, *sums.tolist()) for (target, plan), sums in figures}


def _key(target: Target, module: nn.Module, x: Tensor) -> Any:
    """Return a key that is equal for calls that take equally long."""
    weight = target.weight
    geometry = tuple(getattr(module, name, None) for name in GEOMETRY)
    bias = getattr(module, "bias", None) is not None
    return type(module), weight.shape, weight.stride(), weight.dtype, bias, geometry, x.shape, x.stride(), x.dtype


def _plan(target: Target, forms: Forms) -> list[Option]:
    """Return the options of a weight to time: every form, at a few ranks if the form has ranks."""
    by_form: dict[str, list[Option]] = {}
    for option in forms.options(target):
        if option.form != DENSE:
            by_form.setdefault(option.form, []).append(option)
    return [
        options[place]
        for options in by_form.values()
        for place in sorted({round(share * (len(options) - 1)) for share in _SHARES})
    ]


def _times(plan: Sequence[Option], dense_s: float, *seconds: float) -> Times:
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for option, value in zip(plan, seconds, strict=True):
        ranks, values = curves.setdefault(option.form, ([], []))
        ranks.append(option.rank or 0)
        # A higher rank does not take less time; a smaller value is noise.
        values.append(max(value, values[-1] if values else 0.0))
    return Times(dense_s, curves)


def _call(layer: nn.Module, x: Tensor) -> Callable[[], Any]:
    return lambda: layer.forward(x)  # `forward`, because the old layer may have hooks of the user


@torch.no_grad()
def compare_speed(
    old: Callable[[], Any],
    new: Callable[[], Any],
    device: torch.device,
    budget_s: float = _PAIR_S,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[float, float]:
    """Return the seconds of the old function, and how many times faster the new one is, which runs in a context.

    Both are medians over rounds. The ratio is taken within each round, because a shared machine becomes slower and
    faster over time. With one thread on the CPU, CPU time is measured, which other processes do not lengthen.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.process_time() if alone else time.perf_counter()

    def timed(call: Callable[[], Any], repeats: int) -> float:
        begin = now()
        for _ in range(repeats):
            call()
        return max(now() - begin, 1e-9) / repeats

    def repeats(call: Callable[[], Any]) -> int:
        call()  # the first call allocates memory, and compiles kernels on a GPU
        return max(1, min(_MAX_REPEATS, round(_SAMPLE_S / timed(call, 1))))

    old_repeats = repeats(old)
    with within():
        new_repeats = repeats(new)
    rounds: list[tuple[float, float]] = []
    end = time.monotonic() + budget_s
    while len(rounds) < _ROUNDS[0] or (len(rounds) < _ROUNDS[1] and time.monotonic() < end):
        before = timed(old, old_repeats)
        with within():
            rounds.append((before, timed(new, new_repeats)))
    return statistics.median(before for before, _ in rounds), statistics.median(b / a for b, a in rounds)
