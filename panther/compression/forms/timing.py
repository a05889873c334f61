"""How long each form of a layer takes for what the layer reads in a held-out batch.

Before anything is fitted: layers of random numbers run as long as fitted ones. Layers of equal shapes that read inputs
of equal shapes share one measurement; between a few ranks the time is linear.
"""

__all__ = ["compared", "timed_layers"]

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

_SAMPLE_S = 5e-4  # between two readings of the clock, which takes time itself: shorter calls are repeated
_REPEATS = 1000  # at most
_PAIR_S = 0.2  # for one form of a layer, but not fewer rounds than
_ROUNDS = (3, 9)  # at least, and at most
_SHARES = (0.0, 0.35, 1.0)  # of the largest rank, where low rank is timed


def timed_layers(runner: Runner, targets: Sequence[Target], forms: Forms) -> dict[Target, Times]:
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
        # One new layer at a time: all together could take several times the memory of the dense one.
        pairs = [
            compared(_call(module, x), _call(random_layer(target, module, option, forms), x), x.device)
            for option in plans[target]
        ]
        dense_s = statistics.median(old for old, _ in pairs)
        measured[key] = [dense_s, *(dense_s / ratio for _, ratio in pairs)]
    table = [torch.zeros(1 + len(plan), dtype=torch.float64) for plan in plans.values()]
    for sums, counts in zip(table, calls.values(), strict=True):
        for key, count in counts.items():
            sums += count * torch.tensor(measured[key], dtype=torch.float64)
    runner.mean_(table)  # one table, so that all ranks choose the same
    figures = zip(plans.items(), table, strict=True)
    return {target: _times(plan, *sums.tolist()) for (target, plan), sums in figures}


def _key(target: Target, module: nn.Module, x: Tensor) -> Any:
    """Return what is the same for two calls that take equally long."""
    weight = target.weight
    geometry = tuple(getattr(module, name, None) for name in GEOMETRY)
    bias = getattr(module, "bias", None) is not None
    return type(module), weight.shape, weight.stride(), weight.dtype, bias, geometry, x.shape, x.stride(), x.dtype


def _plan(target: Target, forms: Forms) -> list[Option]:
    """Return the options of a weight to time: every form, at a few ranks if it has one."""
    by_form: dict[str, list[Option]] = {}
    for option in forms.options(target):
        if option.form != DENSE:
            by_form.setdefault(option.form, []).append(option)
    return [
        several[place]
        for several in by_form.values()
        for place in sorted({round(share * (len(several) - 1)) for share in _SHARES})
    ]


def _times(plan: Sequence[Option], dense_s: float, *seconds: float) -> Times:
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for option, value in zip(plan, seconds, strict=True):
        ranks, values = curves.setdefault(option.form, ([], []))
        ranks.append(option.rank or 0)
        values.append(max(value, values[-1] if values else 0.0))  # more rank takes no less, except for noise
    return Times(dense_s, curves)


def _call(layer: nn.Module, x: Tensor) -> Callable[[], Any]:
    return lambda: layer.forward(x)  # not a call, because hooks of the user's own may stand on the old layer


@torch.no_grad()
def compared(
    old: Callable[[], Any],
    new: Callable[[], Any],
    device: torch.device,
    budget_s: float = _PAIR_S,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[float, float]:
    """Return the seconds of the first call, and how many times faster the second one is, which runs in a context.

    Both are medians over rounds, the ratio that within a round, because a shared machine gets slower and faster over
    them. With one thread on the CPU it is CPU time, which other processes do not lengthen.
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
        call()  # the first one allocates, and compiles kernels on a GPU
        return max(1, min(_REPEATS, round(_SAMPLE_S / timed(call, 1))))

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
