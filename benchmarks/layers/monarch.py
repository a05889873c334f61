"""Compare MonarchLinear to a narrower nn.Linear that trains as many numbers, which a narrower network would have.

The narrower layer has both sizes multiplied by the square root of the share of the dense numbers. Ratios are to it: 2
is twice as fast. Forward runs without gradients; forward+backward computes those of the input and of all parameters.
"""

__all__ = ["run"]

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.nn import MonarchLinear

SHAPES = [(512, 2048, 0.16), (1024, 1024, 0.25), (1024, 4096, 0.16), (4096, 4096, 0.06)]  # in, out, share
BATCHES = [1, 32, 512]
DTYPES = [torch.float32, torch.bfloat16]
_NARROWER = "narrower nn.Linear"


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print each as it comes, and write the CSV."""
    rows: list[dict[str, Any]] = []
    for shape in SHAPES[:1] if quick else SHAPES:
        for dtype in DTYPES:
            for batch in BATCHES[:1] if quick else BATCHES:
                rows_of_case = _case(*shape, batch, dtype, device, budget_s)
                print_table(rows_of_case)
                rows += rows_of_case
    if not quick:
        print(f"written to {write_csv('monarch', rows, device=device)}")


def _case(
    inputs: int, outputs: int, share: float, batch: int, dtype: torch.dtype, device: str, budget_s: float
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    layer = MonarchLinear(inputs, outputs, fraction=share, **options)
    eight = MonarchLinear(inputs, outputs, fraction=share, num_blocks=8, **options)
    factor = math.sqrt((layer.down.numel() + layer.up.numel()) / (inputs * outputs))
    layers: dict[str, nn.Linear | MonarchLinear] = {
        _NARROWER: nn.Linear(round(factor * inputs), round(factor * outputs), **options),
        "MonarchLinear": layer,
        "MonarchLinear, 8 blocks": eight,
    }
    rows = []
    for mode in ("forward", "forward+backward"):
        calls = {name: _call(mode, each, batch, options) for name, each in layers.items()}
        timings = interleave(calls, device=device, budget_s=budget_s)
        rows += [
            {
                "in": inputs,
                "out": outputs,
                "share": share,
                "dtype": str(dtype).removeprefix("torch."),
                "batch": batch,
                "mode": mode,
                "layer": name,
                "rank": getattr(each, "rank", ""),
                "time_us": round(timings[name].median_s * 1e6, 1),
                f"x {_NARROWER}": figure(timings[name].ratio_to(timings[_NARROWER])),
                "trained_numbers": sum(parameter.numel() for parameter in each.parameters()),
            }
            for name, each in layers.items()
        ]
    return rows


def _call(mode: str, layer: Any, batch: int, options: dict[str, Any]) -> Callable[[], object]:
    x = torch.randn(batch, layer.in_features, requires_grad=True, **options)
    grad = torch.randn(batch, layer.out_features, **options)

    def inference() -> Tensor:
        with torch.no_grad():
            output: Tensor = layer(x)
        return output

    def training() -> object:
        return torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)

    return inference if mode == "forward" else training


if __name__ == "__main__":
    main(run, __doc__, threads=(1,), budget_s=1.0)
