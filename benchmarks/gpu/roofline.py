"""The ceilings of a card, measured: what a copy moves, what a matrix product computes, what a launch costs."""

__all__ = ["ceilings"]

import statistics
import time
from collections.abc import Callable

import torch

_COPY_BYTES = 1 << 31
_MATMUL_SIZE = 8192
_SAMPLES = 9
_GRAPH_LAUNCHES = 50


def ceilings(device: str, tiny: bool = False) -> dict[str, float]:
    """Return the bytes a second of ``"copy"``, and the flops a second of ``"bfloat16"``, ``"tf32"``, ``"float32"``.

    float32 is the better of the library's product and a third of TF32, which three products in TF32 stand for.
    ``"launch_us"`` and ``"graph_launch_us"`` are microseconds a trivial kernel, one after another.
    """
    source = torch.randint(0, 255, (_COPY_BYTES >> (11 if tiny else 0),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"copy": 2 * source.nbytes / _median_s(lambda: target.copy_(source), device)}
    n = _MATMUL_SIZE >> (6 if tiny else 0)
    previous_precision = torch.get_float32_matmul_precision()
    try:
        for name, dtype, precision in (
            ("bfloat16", torch.bfloat16, "highest"),
            ("tf32", torch.float32, "high"),
            ("float32", torch.float32, "highest"),
        ):
            torch.set_float32_matmul_precision(precision)
            A, B = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            found[name] = 2 * n**3 / _median_s(lambda A=A, B=B: A @ B, device)  # type: ignore[misc]
    finally:
        torch.set_float32_matmul_precision(previous_precision)
    found["float32"] = max(found["float32"], found["tf32"] / 3)
    one = torch.zeros(1, device=device)

    def launch_many() -> None:
        for _ in range(_GRAPH_LAUNCHES):
            one.add_(1)

    found["launch_us"] = _median_s(launch_many, device) / _GRAPH_LAUNCHES * 1e6
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch_many()
        found["graph_launch_us"] = _median_s(graph.replay, device) / _GRAPH_LAUNCHES * 1e6
    return found


def _median_s(call: Callable[[], object], device: str) -> float:
    for _ in range(2):
        call()
    samples = []
    for _ in range(_SAMPLES):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begin)
    return statistics.median(samples)
