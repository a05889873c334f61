"""Measure several ways to do one thing on a GPU: with a cold cache, interleaved, with and without the host's part.

Before every sample a buffer of four times the second-level cache is read, so that operands come from memory, as in a
model whose other layers ran in between. *eager* then waits for the device, so that what the host takes to launch counts
where it is longer than the device's work. *graph* replays a captured CUDA graph right behind that read: the device
alone. On the CPU, for rehearsals, eager is wall time and there is no graph.
"""

__all__ = ["Alternative", "DeviceLostError", "Problem", "Timer", "UnavailableError", "measure"]

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Timing, figure

MODES = ("eager", "graph")
_MIN_ROUNDS, _MAX_ROUNDS = 5, 50
_WARM_UP_CALLS = 3


class UnavailableError(Exception):
    """This cannot be measured here; the message says why."""


class DeviceLostError(Exception):
    """The device reports an error that only a new process can clear."""


@dataclass(frozen=True)
class Alternative:
    """One way to do it."""

    call: Callable[[], Any]
    """Does it and returns a tensor or several."""
    bytes: float
    """The least that must be read and written in device memory."""
    flops: float
    exact: Callable[[], Sequence[Tensor]] | None = None
    """What the call should return, in float64."""


@dataclass(frozen=True)
class Problem:
    """Alternatives by name, or why one is missing, and which of them is the baseline."""

    alternatives: Mapping[str, Alternative | str]
    baseline: str
    rate: str
    """The matmul rate that bounds it: ``"bfloat16"``, ``"tf32"`` or ``"float32"``."""


class Timer:
    """Takes interleaved samples on ``device``, for about ``budget_s`` an alternative set."""

    def __init__(self, device: str, budget_s: float = 0.3) -> None:
        self.device, self.budget_s = device, budget_s
        cache = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 0
        self._cold = torch.zeros(cache, dtype=torch.int32, device=device)  # four bytes an entry

    def time(self, calls: Mapping[str, Callable[[], Any]], mode: str) -> dict[str, Timing]:
        """Return the seconds a call, one sample a round, in a rotating order; every call must have run before."""
        sample = {"eager": self._eager, "graph": self._replay}[mode] if self.device == "cuda" else self._wall
        samples: dict[str, list[float]] = {name: [] for name in calls}
        names, start, rounds = list(calls), time.monotonic(), 0
        while rounds < _MIN_ROUNDS or (rounds < _MAX_ROUNDS and time.monotonic() - start < self.budget_s):
            for name in names:
                samples[name].append(sample(calls[name]))
            names.append(names.pop(0))
            rounds += 1
        return {name: Timing(tuple(values)) for name, values in samples.items()}

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Record the call as a CUDA graph to replay."""
        if self.device != "cuda":
            raise UnavailableError("CUDA graphs need a GPU")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        return graph.replay

    def _eager(self, call: Callable[[], Any]) -> float:
        self._cold.amax()
        torch.cuda.synchronize()
        return _between_events(call)

    def _replay(self, call: Callable[[], Any]) -> float:
        self._cold.amax()
        return _between_events(call)

    @staticmethod
    def _wall(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def _between_events(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(problem: Problem, timer: Timer, ceilings: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Return a row for each alternative and mode; one that fails or is missing gets a row that says why.

    Args:
        problem: What to measure.
        timer: Where.
        ceilings: Bytes a second as ``"copy"``, and flops a second by rate.
    """
    errors: dict[str, float | str] = {}
    ready: dict[str, Alternative] = {}
    for name, alternative in problem.alternatives.items():
        if isinstance(alternative, str):
            yield _row(name, "", "skipped", note=alternative)
            continue
        try:
            errors[name] = _error(alternative)
            for _ in range(_WARM_UP_CALLS):
                alternative.call()
            ready[name] = alternative
        except Exception as error:  # one alternative that fails leaves the others
            yield _row(name, "", "failed", note=_reason(error))
            check_device(timer.device)
    for mode in MODES:
        calls: dict[str, Callable[[], Any]] = {}
        for name, alternative in ready.items():
            try:
                calls[name] = alternative.call if mode == "eager" else timer.capture(alternative.call)
            except Exception as error:
                status = "skipped" if isinstance(error, UnavailableError) else "failed"
                yield _row(name, mode, status, note=_reason(error))
                check_device(timer.device)
        timings = timer.time(calls, mode) if calls else {}
        for name, timing in timings.items():
            bound_s = max(ready[name].bytes / ceilings["copy"], ready[name].flops / ceilings[problem.rate])
            base = timings.get(problem.baseline)
            yield _row(
                name,
                mode,
                "measured",
                time_us=round(timing.median_s * 1e6, 2),
                x_baseline=figure(timing.ratio_to(base)) if base else "",
                baseline=problem.baseline,
                roofline_us=round(bound_s * 1e6, 3),
                of_roofline=figure(bound_s / timing.median_s),
                max_rel_error=errors[name],
            )


def _row(name: str, mode: str, status: str, **figures: Any) -> dict[str, Any]:
    return {"alternative": name, "mode": mode, "status": status, **figures}


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, UnavailableError) else f"{type(error).__name__}: {lines[0]}"[:300]


def check_device(device: str) -> None:
    """Raise :class:`DeviceLostError` if the device no longer works."""
    if device != "cuda":
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        raise DeviceLostError(_reason(error)) from error


def _error(alternative: Alternative) -> float | str:
    """Return the largest deviation from float64, relative to the largest entry, over all results."""
    results = alternative.call()
    if alternative.exact is None:
        return ""
    results = [results] if isinstance(results, Tensor) else list(results)
    worst = 0.0
    for result, exact in zip(results, alternative.exact(), strict=True):
        deviation = (result.detach().double() - exact).abs().max() / exact.abs().max()
        if not deviation.isfinite():
            raise ArithmeticError("a result is not finite")
        worst = max(worst, deviation.item())
    return float(f"{worst:.2e}")
