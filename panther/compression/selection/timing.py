"""Measure how long each form of a layer takes for the layer's input in a held-out batch.

Nothing has to be fitted for this, because layers of random numbers take as long as fitted ones. Layers of equal shapes
that read inputs of equal shapes share one measurement. Times are measured at a few ranks and interpolated linearly.

Measurements of torch's layers are kept on disk, because they take a quarter of the time of a compression. Each has a
file of its own in the user's cache, which is replaced as a whole, and signed: a file that is damaged, or was written
on another machine, is measured again.
"""

__all__ = ["SLOWER", "Times", "Timing", "compare_speed", "speed_of", "time_layers"]

import hashlib
import math
import os
import platform
import statistics
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.calibration.runner import Runner
from panther.compression.calibration.steps import hooked
from panther.compression.calibration.targets import Further, Target
from panther.compression.forms import DENSE, FormSettings, Option, form_named
from panther.errors import FormatError
from panther.files.signed import cache_folder, read_signed, write_signed
from panther.kernels import backend, has_compiled_kernel

_SAMPLE_S = 5e-4  # calls are repeated for this time between two readings of the clock, because readings take time
_MAX_REPEATS = 1000
_PAIR_S = 0.2  # time for one form of a layer, unless the smallest number of rounds takes longer
_ROUNDS = (3, 9)  # smallest and largest number of rounds
_SHARES = (0.0, 0.35, 1.0)  # places in the list of ranks at which a form is timed
SLOWER = 0.8  # a form is slower if it has less than this share of the dense layer's speed; a ratio near 1 can be noise
_CPU_LINES = ("model", "cpu family", "stepping", "cache size", "flags", "Features", "CPU")  # of /proc/cpuinfo
_KNOWN = ("torch.nn.", "panther.nn.")
_SAME_TIME = 1.02  # times of two widths that differ by less than this factor are equal up to noise


@dataclass(frozen=True)
class Times:
    """Measured times of a weight's layers in one batch.

    Attributes:
        dense_s: Seconds of the dense layers.
        curves: For each form, the ranks at which it was timed, in rising order (0 for a form without a rank), and the
            seconds at these ranks.
    """

    dense_s: float
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]

    def of(self, option: Option) -> float:
        """Return the seconds of an option, interpolated linearly between the ranks that were timed."""
        if option.form == DENSE:
            return self.dense_s
        ranks, times = self.curves[option.form]
        rank = option.rank or 0
        place = min(max(bisect_left(ranks, rank), 1), len(ranks) - 1)
        if not place:
            return times[0]
        share = (rank - ranks[place - 1]) / (ranks[place] - ranks[place - 1])
        return times[place - 1] + share * (times[place] - times[place - 1])


@dataclass(frozen=True)
class Timing:
    """The times of all weights' forms, and which options are fast enough.

    Attributes:
        times: Times of each target.
        allow_slower: Whether forms that were measured below ``SLOWER`` of the dense layer's speed are options.
        by_time: Whether the choice is by time. An option is then useful only if it is faster than dense, and a width
            only if no larger width is as fast.
    """

    times: Mapping[Target, Times]
    allow_slower: bool = True
    by_time: bool = False

    def fast_options(self, target: Target, options: Sequence[Option]) -> list[Option]:
        """Return the options that are fast enough, with their times; the dense weight alone if there is none."""
        times = self.times[target]
        timed = [replace(option, time_s=times.of(option)) for option in options]
        if not self.allow_slower:
            timed = self.without_slower(target, timed)
        if self.by_time:
            timed = [option for option in timed if option.form == DENSE or (option.time_s or 0.0) < times.dense_s]
            fastest: dict[type, float] = {}  # of the larger widths, by the class of the form
            for name in sorted({option.form for option in timed if option.bits is not None}, reverse=True):
                kind, time_s = type(form_named(name)), times.curves[name][1][0]
                if time_s * _SAME_TIME >= fastest.get(kind, math.inf):
                    timed = [option for option in timed if option.form != name]
                fastest[kind] = min(time_s, fastest.get(kind, math.inf))
        return timed or [self._dense(target)]

    def is_slower(self, target: Target, option: Option) -> bool:
        """Return whether an option was measured below ``SLOWER`` of the dense layer's speed.

        Embeddings do not count, unless slower forms are forbidden: a lookup is a small part of a model's time.
        """
        if self.allow_slower and not target.is_multiplied:
            return False
        return option.time_s is not None and option.time_s * SLOWER > self.times[target].dense_s

    def without_slower(self, target: Target, options: Sequence[Option]) -> list[Option]:
        """Return the options that are not slower than dense; the dense weight alone if there is none."""
        return [option for option in options if not self.is_slower(target, option)] or [self._dense(target)]

    def _dense(self, target: Target) -> Option:
        return Option(DENSE, target.dense_bytes, error=0.0, time_s=self.times[target].dense_s)


def time_layers(
    runner: Runner, targets: Sequence[Target], settings: FormSettings, *, anew: bool = True
) -> dict[Target, Times]:
    """Return the times of all forms of each target in the first held-out batch, the mean over the ranks of a group.

    Only if not ``anew``, measurements on disk are used, because their ratios hold for longer than their seconds.
    """
    samples: dict[Any, tuple[Target, nn.Module, Tensor, Further]] = {}
    calls: dict[Target, Counter[Any]] = {target: Counter() for target in targets}

    def note(target: Target, module: nn.Module, x: Tensor, output: Tensor, further: Further) -> None:
        key = _key(target, module, x)
        samples.setdefault(key, (target, module, x.detach(), further))
        calls[target][key] += 1

    with torch.no_grad(), hooked(targets, note):
        runner.output(runner.held_out[0])
    plans = {target: _plan(target, settings) for target in targets}
    measured: dict[Any, list[float]] = {}
    for key, (target, module, x, further) in runner.over(samples.items(), "time of forms"):
        # One new layer at a time, because all of them could take more memory than the dense model.
        layers = (form_named(option.form).random_layer(target, module, option, settings) for option in plans[target])
        pairs = [speed_of(target, module, layer, x, further, anew=anew) for layer in layers]
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
    if target.is_stacked:  # one sample for all experts, whose rows are different in number
        return type(module), weight.shape, weight.stride(), weight.dtype, x.dtype
    bias, geometry = getattr(module, "bias", None) is not None, target.kind.geometry(module)
    return type(module), weight.shape, weight.stride(), weight.dtype, bias, geometry, x.shape, x.stride(), x.dtype


def _plan(target: Target, settings: FormSettings) -> list[Option]:
    """Return the options of a weight to time: every form, at a few ranks if the form has ranks."""
    by_form: dict[str, list[Option]] = {}
    for option in settings.options(target):
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


def speed_of(
    target: Target, module: nn.Module, layer: nn.Module, x: Tensor, further: Further, *, anew: bool = False
) -> tuple[float, float]:
    """Return the seconds of a layer of the target for an input, and how many times faster the new layer is.

    Unless ``anew``, the measurement of an equal call is read from disk, if there is one. ``PANTHER_SPEEDS=off`` neither
    reads nor writes files.
    """
    args, kwargs = further
    # `forward`, because calling the old layer would call its hooks.
    old, new = (partial(each.forward, x, *args, **kwargs) for each in (module, layer))
    # The key has neither the code of other classes nor what further arguments hold.
    is_known = not any(further) and all(type(each).__module__.startswith(_KNOWN) for each in (module, layer))
    path = None
    with suppress(OSError, RuntimeError, FormatError):  # There is no home, or the file is damaged.
        if is_known and os.environ.get("PANTHER_SPEEDS") != "off":
            tensors = [(name, value.shape, value.dtype) for name, value in layer.state_dict().items()]
            key = _key(target, module, x), module, layer, tensors, _processor(x.device), torch.get_num_threads()
            settings = has_compiled_kernel(), backend(), torch.get_float32_matmul_precision()
            path = cache_folder() / "speeds" / hashlib.sha256(repr((key, settings)).encode()).hexdigest()[:32]
            if not anew and path.exists():
                dense_s, ratio = read_signed(path)
                return dense_s, ratio
    speed = compare_speed(old, new, x.device)
    if path is not None:
        with suppress(OSError, FormatError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_signed(path, speed)
    return speed


@lru_cache
def _processor(device: torch.device) -> str:
    """Return the name of a processor, and a checksum of all that it runs."""
    name: Any = torch.cuda.get_device_name(device) if device.type == "cuda" else (platform.processor(), platform.node())
    if device.type == "cpu":
        with suppress(OSError):  # Only Linux has this file.
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            name = list(dict.fromkeys(line for line in lines if line.startswith(_CPU_LINES)))
    folders = [Path(str(sys.modules[name].__file__)).parent for name in ("panther.kernels", "panther.nn")]
    sources = [path for folder in folders for path in sorted(folder.rglob("*.*")) if path.suffix in (".py", ".cpp")]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, Path(__file__))))
    return repr((name, torch.__version__, torch.backends.cpu.get_cpu_capability(), code.hexdigest()))


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
