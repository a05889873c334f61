"""Measure the time that a call of a layer takes on the host before its kernels run.

    python -m benchmarks.gpu.host [--device cpu | cuda] [--calls 1000] [--quick]

Without a GPU the kernels do nothing, see ``stub.py``, and tensors on the CPU stand for tensors on the GPU. What torch
itself computes, such as nn.Linear and the gradients of the factors, runs on the CPU then, and its time is included. The
launch in C, which takes one to three microseconds a kernel, is not included. On a GPU the calls are those of a program,
and the device is waited for outside of the measured calls.

A figure is the median over calls of the CPU time of the thread, which other processes do not lengthen. On a GPU it is
the CPU time of all threads, because another thread runs the backward pass there.
"""

__all__ = ["Case", "host_cases", "host_rows"]

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from panther.kernels import causal_linear_attention
from panther.kernels.ops._crossover import using_path
from torch import Tensor, nn

from benchmarks.harness import figure, print_table, write_csv
from panther.nn import QuantizedLinear, RandMultiHeadAttention, SKConv2d, SKLinear

_SIZE, _RANK, _HEAD_DIM, _LENGTH, _FEATURES = 256, 16, 64, 64, 128
_WARM_CALLS = 3
# The device is waited for after this many calls, so that the queue of launches never fills.
_CALLS_AT_ONCE = 20


@dataclass(frozen=True, eq=False)
class Case:
    """A layer, or a function, that a dense one may replace."""

    name: str
    function: Callable[[Tensor], Tensor]
    x: Tensor
    baseline: str = ""
    """The name of the case to compare with."""
    path: str = ""
    """The path to force for the sketched product."""


def host_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the cases, a baseline before what is compared with it."""
    torch.manual_seed(0)
    x = torch.randn(1, _SIZE).to(device, dtype)
    dense = nn.Linear(_SIZE, _SIZE).to(device, dtype)
    shape = f"{_SIZE} x {_SIZE}"
    yield Case(f"nn.Linear, {shape}", dense, x)
    sketched = SKLinear(_SIZE, _SIZE, _RANK, sketch="signs", seed=0).to(device, dtype)
    yield Case(f"SKLinear, {shape}, R = {_RANK}", sketched, x, f"nn.Linear, {shape}")
    for path in ("fused", "joined", "chain"):
        yield Case(f"SKLinear, {shape}, R = {_RANK}, path {path}", sketched, x, f"nn.Linear, {shape}", path=path)
    packed = SKLinear(_SIZE, _SIZE, _RANK, sketch="signs", packed=True, seed=0).to(device, dtype)
    yield Case(f"SKLinear, packed, {shape}, R = {_RANK}", packed, x, f"nn.Linear, {shape}")
    for rank in (0, 8):
        quantized = QuantizedLinear.from_linear(dense, bits=4, low_rank=rank).eval()
        name = f"QuantizedLinear, 4 bits, {shape}" + (f", rank {rank}" if rank else "")
        yield Case(name, quantized, x, f"nn.Linear, {shape}")
    if dtype is torch.float32:

        def under_autocast(layer: nn.Module) -> Callable[[Tensor], Tensor]:
            def call(x: Tensor) -> Tensor:
                with torch.autocast(device, torch.bfloat16):
                    output: Tensor = layer(x)
                return output

            return call

        yield Case("nn.Linear, autocast", under_autocast(dense), x)
        yield Case("SKLinear, autocast", under_autocast(sketched), x, "nn.Linear, autocast")
    image = torch.randn(1, 64, 4, 4).to(device, dtype)
    yield Case("nn.Conv2d, 64 to 64, 3 x 3", nn.Conv2d(64, 64, 3).to(device, dtype), image)
    conv = SKConv2d(64, 64, 3, num_terms=1, low_rank=4, seed=0).to(device, dtype)
    yield Case("SKConv2d, 64 to 64, 3 x 3", conv, image, "nn.Conv2d, 64 to 64, 3 x 3")
    q = torch.rand(1, 1, _LENGTH, _HEAD_DIM).to(device, dtype)
    softmax = "scaled_dot_product_attention, causal"
    yield Case(softmax, lambda q: nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), q)
    yield Case("causal_linear_attention", lambda q: causal_linear_attention(q, q, q), q, softmax)
    log_scale = torch.zeros(q.shape[:-1], device=device)
    name = "causal_linear_attention, exponents"
    yield Case(name, lambda q: causal_linear_attention(q, q, q, log_scale), q, softmax)

    x = q[0]
    mha = nn.MultiheadAttention(_HEAD_DIM, 1, batch_first=True).to(device, dtype)
    mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH, torch.device(device), dtype)

    def attended(x: Tensor) -> Tensor:
        output: Tensor = mha(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return output

    yield Case("nn.MultiheadAttention, causal", attended, x)
    for kernel in ("hermite", "softmax"):
        layer = RandMultiHeadAttention(_HEAD_DIM, 1, _FEATURES, kernel_fn=kernel, iscausal=True, seed=0)
        function = partial(_self_attention, layer.to(device, dtype))
        yield Case(f"RandMultiHeadAttention, {kernel}, causal", function, x, "nn.MultiheadAttention, causal")


def _self_attention(layer: RandMultiHeadAttention, x: Tensor) -> Tensor:
    output: Tensor = layer(x, x, x)[0]
    return output


def host_rows(device: str, dtypes: tuple[torch.dtype, ...], calls: int) -> Iterator[dict[str, Any]]:
    """Measure the cases and yield a row for each case, dtype and mode."""
    for dtype in dtypes:
        cases = list(host_cases(device, dtype))
        for mode in ("no gradients", "forward", "forward and backward"):
            functions = {case: _call(case, mode) for case in cases}
            with torch.set_grad_enabled(mode != "no gradients"):
                medians = _medians_us(functions, device, calls)
            by_name = {case.name: median_us for case, median_us in medians.items()}
            for case, median_us in medians.items():
                reference = by_name.get(case.baseline)
                yield {
                    "case": case.name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "mode": mode,
                    "host_us": round(median_us, 1),
                    "x dense": figure(median_us / reference) if reference else "",
                }


def _call(case: Case, mode: str) -> Callable[[], object]:
    function, x = case.function, case.x
    if mode == "no gradients":
        return lambda: function(x)
    trained = x.clone().requires_grad_()
    if mode == "forward":
        return lambda: function(trained)
    output = function(trained)
    grad = torch.ones_like(output.detach())
    leaves = _leaves(output.grad_fn)

    def step() -> None:
        # As optimizers do. The stubbed kernels leave gradients uninitialized, and adding denormal numbers is slow.
        for leaf in leaves:
            leaf.grad = None
        function(trained).backward(grad)

    return step


def _leaves(node: Any) -> list[Tensor]:
    """Return the tensors whose gradients a backward pass from this node of autograd's graph computes."""
    nodes, leaves, pending = set(), {}, [node]
    while pending:
        node = pending.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        pending += [following for following, _ in node.next_functions]
    return list(leaves.values())


def _medians_us(functions: dict[Case, Callable[[], object]], device: str, calls: int) -> dict[Case, float]:
    """Measure all functions in turn, a few calls of each at a time, so that what disturbs one disturbs all."""
    clock = time.process_time_ns if device == "cuda" else time.thread_time_ns
    times: dict[Case, list[int]] = {case: [] for case in functions}
    for _ in range(-(-calls // _CALLS_AT_ONCE)):
        for case, function in functions.items():
            with using_path(case.path) if case.path else contextlib.nullcontext():
                for _ in range(_WARM_CALLS):
                    function()
                if device == "cuda":
                    torch.cuda.synchronize()
                for _ in range(min(calls, _CALLS_AT_ONCE)):
                    start = clock()
                    function()
                    times[case].append(clock() - start)
    return {case: statistics.median(samples) / 1e3 for case, samples in times.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--calls", type=int, default=1000, help="number of calls that the median is taken of")
    parser.add_argument("--quick", action="store_true", help="a few calls, nothing written")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
        from benchmarks.gpu import stub

        stub.install()
    calls = 3 if options.quick else options.calls
    rows = list(host_rows(options.device, (torch.bfloat16, torch.float32), calls))
    print_table(rows)
    if not options.quick:
        kernels = "stubs" if options.device == "cpu" else "run"
        stamped = [row | {"kernels": kernels, "triton": version("triton")} for row in rows]
        print(f"written to {write_csv('host', stamped, device=options.device)}")


if __name__ == "__main__":
    main()
