"""Compare SKConv2d to nn.Conv2d in the same memory format, and in the faster of the two: time, bytes and error.

Forward runs without gradients; forward+backward computes those of the input and of everything that is trained. The
error is the error of LowRankConv2d.from_conv for a kernel whose unfolded singular values fall as 1/j, as ||W - A|| /
||A||. In the last cases the layer does not run faster than the dense one.

The first table has the simplest alternatives: a pair of nn.Conv2d, the second one of 1 x 1, which trains at most as
many numbers as SKConv2d; and a depthwise convolution before one of 1 x 1, whose number of parameters is fixed.
SKConv2d is compared to nn.Conv2d in the second table.
"""

__all__ = ["run"]

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.errors import PerformanceWarning
from panther.nn import LowRankConv2d, SKConv2d
from panther.nn.conv.product import runs_dense
from panther.nn.sketch_record import plain_state


@dataclass(frozen=True)
class Case:
    """A layer and its input; ``low_rank=None`` is the default."""

    in_channels: int
    out_channels: int
    kernel: int
    size: int
    batch: int
    groups: int = 1
    stride: int = 1
    low_rank: int | None = None


CASES = [
    Case(64, 128, 3, 64, 16, low_rank=8),
    Case(64, 128, 5, 64, 16, low_rank=8),
    Case(64, 128, 3, 64, 16),
    Case(64, 128, 5, 64, 16),
    Case(256, 256, 3, 14, 8),
    Case(512, 512, 3, 7, 8),
    Case(3, 64, 7, 224, 4, stride=2),
    Case(256, 64, 1, 28, 8),
    Case(512, 512, 1, 14, 8),
    Case(256, 256, 3, 28, 4, groups=2),
    Case(64, 64, 1, 56, 8),
    Case(32, 32, 3, 32, 16),
    Case(128, 128, 3, 28, 8, groups=4),
    Case(64, 64, 3, 8, 1),
    Case(32, 32, 3, 32, 16, groups=32),
    Case(3, 16, 3, 32, 16),
    Case(8, 8, 3, 32, 16),
    Case(16, 16, 3, 8, 1),
]
PAIR, SEPARABLE = "pair of nn.Conv2d", "depthwise separable"
FORMATS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print the tables, and write the CSVs."""
    pairs: list[dict[str, Any]] = []
    for case in CASES[-1:] if quick else [case for case in CASES if case.groups == 1]:
        pairs += _pair_case(case, device, budget_s)
    print_table(pairs)
    if not quick:
        print(f"written to {write_csv('conv-pair', pairs, device=device)}")
    rows: list[dict[str, Any]] = []
    for case in CASES[-1:] if quick else CASES:
        rows += _case(case, device, budget_s)
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('conv', rows, device=device)}")


def _pair_case(case: Case, device: str, budget_s: float) -> list[dict[str, Any]]:
    """Compare SKConv2d to the simplest alternatives, all in NCHW."""
    torch.manual_seed(0)
    shape = case.in_channels, case.out_channels, case.kernel, case.stride, case.kernel // 2
    options: dict[str, Any] = {"stride": case.stride, "padding": case.kernel // 2, "bias": False, "device": device}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        layer = SKConv2d(*shape, low_rank=case.low_rank, device=device)
    inner = max(1, layer.S.numel() // (case.in_channels * case.kernel**2 + case.out_channels))
    layers: dict[str, nn.Module] = {
        PAIR: nn.Sequential(
            nn.Conv2d(case.in_channels, inner, case.kernel, **options),
            nn.Conv2d(inner, case.out_channels, 1, device=device),
        ),
        "SKConv2d": layer,
    }
    if case.kernel > 1:
        layers[SEPARABLE] = nn.Sequential(
            nn.Conv2d(case.in_channels, case.in_channels, case.kernel, groups=case.in_channels, **options),
            nn.Conv2d(case.in_channels, case.out_channels, 1, device=device),
        )
    x = torch.randn(case.batch, case.in_channels, case.size, case.size, device=device)
    rows = []
    for mode in ("forward", "forward+backward"):
        calls = {name: _call(mode, module, x) for name, module in layers.items()}
        timings = interleave(calls, device=device, budget_s=budget_s)
        for name, timing in timings.items():
            module = layers[name]
            rows.append(
                {
                    **_columns(case, layer),
                    "mode": mode,
                    "layer": name,
                    "time_us": round(timing.median_s * 1e6, 1),
                    f"x {PAIR}": figure(timing.ratio_to(timings[PAIR])),
                    "trained_numbers": sum(parameter.numel() for parameter in module.parameters()),
                    "resident_bytes": sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
                }
            )
    return rows


def _columns(case: Case, layer: SKConv2d) -> dict[str, Any]:
    """Return the columns that name a case."""
    return {
        "in": case.in_channels,
        "out": case.out_channels,
        "kernel": case.kernel,
        "groups": case.groups,
        "stride": case.stride,
        "size": case.size,
        "batch": case.batch,
        "low_rank": f"{layer.low_rank}{' (default)' if case.low_rank is None else ''}",
    }


def _case(case: Case, device: str, budget_s: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    shape = case.in_channels, case.out_channels, case.kernel, case.stride, case.kernel // 2
    dense = nn.Conv2d(*shape, groups=case.groups, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # depthwise layers are measured because they lose
        layer = SKConv2d(*shape, groups=case.groups, low_rank=case.low_rank, device=device)
        error = _fitted_error(dense, layer.low_rank)
    x = torch.randn(case.batch, case.in_channels, case.size, case.size, device=device)
    way = "dense kernel" if runs_dense(layer.S, layer.U, layer.groups) else "two convolutions"
    rows = []
    for mode in ("forward", "forward+backward"):
        calls: dict[str, Callable[[], object]] = {}
        for name, memory_format in FORMATS.items():
            for module in (dense, layer):
                twin = copy.deepcopy(module).to(memory_format=memory_format)  # type: ignore[call-overload]
                calls[f"{type(module).__name__} {name}"] = _call(mode, twin, x.to(memory_format=memory_format))
        timings = interleave(calls, device=device, budget_s=budget_s)
        best = min((name for name in calls if name.startswith("Conv2d")), key=lambda name: timings[name].median_s)
        for name, timing in timings.items():
            sketched = name.startswith("SK")
            rows.append(
                {
                    **_columns(case, layer),
                    "mode": mode,
                    "layer": name,
                    "way": way if sketched else "",
                    "time_us": round(timing.median_s * 1e6, 1),
                    "x Conv2d": figure(timing.ratio_to(timings[name.removeprefix("SK")])),
                    "x best Conv2d": figure(timing.ratio_to(timings[best])),
                    "stored_bytes": sum(t.nbytes for t in plain_state(layer if sketched else dense).values()),
                    "svd_error": f"{error:.3f}" if sketched else "",
                }
            )
    return rows


def _call(mode: str, module: nn.Module, x: Tensor) -> Callable[[], object]:
    x = x.detach().requires_grad_()
    grad = torch.randn_like(module(x))
    trained = [x, *module.parameters()]

    def inference() -> Tensor:
        with torch.no_grad():
            return module(x)

    def training() -> object:
        return torch.autograd.grad(module(x), trained, grad)

    return inference if mode == "forward" else training


def _fitted_error(conv: nn.Conv2d, low_rank: int) -> float:
    """Return the relative error of from_conv for a kernel with singular values 1/j in each group."""
    with torch.no_grad():
        unfolded = conv.weight.flatten(1).unflatten(0, (conv.groups, -1))
        P, sigma, Qt = torch.linalg.svd(unfolded, full_matrices=False)
        A = P / torch.arange(1, sigma.shape[-1] + 1, device=sigma.device) @ Qt
        conv.weight.copy_(A.reshape(conv.weight.shape))
        fitted = LowRankConv2d.from_conv(conv, 2 * low_rank)
        return ((fitted.weight - conv.weight).norm() / conv.weight.norm()).item()


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=2.0)
