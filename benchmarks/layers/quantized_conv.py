"""Compare QuantizedConv2d to nn.Conv2d at sizes of EfficientNet-lite0, for one image and for 32, without gradients.

Every layer of codes expands its weight in each call and convolves with it. The last form, low rank in int8 at a quarter
of the rank, multiplies less instead; a depthwise convolution, whose groups have a column of outputs each, is measured
with codes alone. Errors are ||W - Q|| / ||W|| for a weight of independent normal numbers. The simplest alternative is
the layer in bfloat16, with its input in bfloat16.
"""

__all__ = ["run"]

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.nn import QuantizedConv2d
from panther.nn.sketch_record import plain_state


@dataclass(frozen=True)
class Case:
    """A layer and its input."""

    name: str
    in_channels: int
    out_channels: int
    kernel: int
    size: int
    stride: int = 1
    groups: int = 1


CASES = [
    Case("first", 3, 32, 3, 224, stride=2),
    Case("widening, early", 24, 144, 1, 56),
    Case("widening, late", 192, 1152, 1, 7),
    Case("narrowing, late", 1152, 192, 1, 7),
    Case("last", 320, 1280, 1, 7),
    Case("depthwise, early", 144, 144, 3, 56, groups=144),
    Case("depthwise, late", 1152, 1152, 5, 7, groups=1152),
]
BATCHES = (1, 32)


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print the table, and write the CSV."""
    rows: list[dict[str, Any]] = []
    for case in CASES[-1:] if quick else CASES:
        for batch in BATCHES[:1] if quick else BATCHES:
            rows += _case(case, batch, device, budget_s)
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('quantized-conv', rows, device=device)}")


@torch.no_grad()
def _case(case: Case, batch: int, device: str, budget_s: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    shape = case.in_channels, case.out_channels, case.kernel, case.stride, case.kernel // 2, 1, case.groups
    dense = nn.Conv2d(*shape, device=device)
    nn.init.normal_(dense.weight)
    forms: dict[str, dict[str, Any]] = {
        "int8": {"bits": 8, "group_size": None},
        "int4": {"bits": 4},
        "int3": {"bits": 3},
    }
    if case.groups == 1:
        forms["int8 low rank"] = {"bits": None, "low_rank": max(1, min(dense.weight.flatten(1).shape) // 4)}
    layers: dict[str, nn.Module] = {"dense": dense}
    layers |= {name: QuantizedConv2d.from_conv(dense, **form) for name, form in forms.items()}
    x = torch.randn(batch, case.in_channels, case.size, case.size, device=device)
    calls: dict[str, Callable[[], object]] = {name: partial(_inference, layer, x) for name, layer in layers.items()}
    layers["bfloat16"] = copy.deepcopy(dense).bfloat16()
    calls["bfloat16"] = partial(_inference, layers["bfloat16"], x.bfloat16())
    timings = interleave(calls, device=device, budget_s=budget_s)
    return [
        {
            "layer": case.name,
            "in": case.in_channels,
            "out": case.out_channels,
            "kernel": case.kernel,
            "groups": case.groups,
            "size": case.size,
            "batch": batch,
            "form": name,
            "time_us": round(timing.median_s * 1e6, 1),
            "x dense": figure(timing.ratio_to(timings["dense"])),
            "stored_bytes": sum(t.nbytes for t in plain_state(layers[name]).values()),
            "error": figure(_error(layers[name], dense)) if name != "dense" else 0,
        }
        for name, timing in timings.items()
    ]


@torch.no_grad()
def _inference(layer: nn.Module, x: torch.Tensor) -> object:
    return layer(x)


def _error(layer: Any, dense: nn.Conv2d) -> float:
    return ((layer.weight - dense.weight).norm() / dense.weight.norm()).item()


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=1.0)
