"""Compare QuantizedLinear, in each form, to nn.Linear in float32 and bfloat16 and to torch's dynamic int8 linear.

Forward without gradients, of layers with random weights. Ratios are to nn.Linear of the layer's dtype and to nn.Linear
in float32: 2 is twice as fast. *int4, packed copy* is the layer after ``hold_packed_``. *int8 dense* quantizes each row
of the input and multiplies integers (``torch._int_mm``). Errors are those of the product: relative to that of the same
weight in float64, without what quantizing the weight costs.
"""

__all__ = ["run"]

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from harness import figure, interleave, main, print_table, write_csv
from torch import Tensor, nn

from panther.nn import QuantizedLinear

SHAPES = [(384, 384), (384, 1536), (1536, 384), (4096, 4096)]  # in, out
BATCHES = [1, 8, 32, 128, 512]
FORMS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "group_size": None},
    "int4": {"bits": 4, "group_size": 128},
    "int3": {"bits": 3, "group_size": 128},
    "int4 + rank 32": {"bits": 4, "group_size": 128, "low_rank": 32},
    "rank in / 4": {"bits": None},  # in int8; of half the parameters where the weight is square
}


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print each as it comes, and write the CSV."""
    rows: list[dict[str, Any]] = []
    for shape in SHAPES[:1] if quick else SHAPES:
        for batch in BATCHES[:1] if quick else BATCHES:
            found = _case(*shape, batch, device, budget_s)
            print_table(found)
            rows += found
    if not quick:
        print(f"written to {write_csv('quantized', rows, device=device)}")


@torch.no_grad()
def _case(columns: int, outputs: int, batch: int, device: str, budget_s: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    x = torch.randn(batch, columns, device=device)
    calls: dict[str, Callable[[], Tensor]] = {}
    stored: dict[str, int] = {}
    exact: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        layers: dict[str, nn.Module] = {"nn.Linear": nn.Linear(columns, outputs, device=device, dtype=dtype)}
        for form, arguments in FORMS.items():
            rank = min(columns, outputs) // 4 if arguments["bits"] is None else arguments.get("low_rank", 0)
            layers[form] = QuantizedLinear(
                columns, outputs, **arguments | {"low_rank": rank}, device=device, dtype=dtype
            )
        if dtype is torch.bfloat16 and device == "cpu":
            packed = QuantizedLinear(columns, outputs, **FORMS["int4"], dtype=dtype)
            layers["int4, packed copy"] = packed.hold_packed_()
        for form, layer in layers.items():
            name, given = f"{str(dtype).removeprefix('torch.')} {form}", x.to(dtype)
            calls[name] = functools.partial(layer, given)
            stored[name] = sum(tensor.nbytes for tensor in layer.state_dict().values())
            exact[name] = copy.deepcopy(layer).double()(given.double())
    weight, bias = (tensor.float() for tensor in layers["nn.Linear"].parameters())
    step = weight.abs().amax(1) / 127
    integers = (weight / step[:, None]).round().to(torch.int8)
    name = "float32 int8 dense"
    calls[name] = functools.partial(_dynamic_int8, x, integers, step, bias)
    stored[name] = integers.nbytes + step.nbytes + bias.numel() * 4
    exact[name] = x.double() @ (integers * step[:, None].double()).mT + bias
    timings = interleave(calls, device=device, budget_s=budget_s)
    rows = []
    for name, timing in timings.items():
        dtype_name, _, form = name.partition(" ")
        rows.append(
            {
                "in": columns,
                "out": outputs,
                "batch": batch,
                "dtype": dtype_name,
                "form": form,
                "time_us": round(timing.median_s * 1e6, 1),
                "x nn.Linear": figure(timing.ratio_to(timings[f"{dtype_name} nn.Linear"])),
                "x float32": figure(timing.ratio_to(timings["float32 nn.Linear"])),
                "x int8 dense": figure(timing.ratio_to(timings["float32 int8 dense"])),
                "stored_bytes": stored[name],
                "rms_error": f"{((calls[name]().double() - exact[name]).norm() / exact[name].norm()).item():.1e}",
            }
        )
    return rows


def _dynamic_int8(x: Tensor, weight: Tensor, step: Tensor, bias: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    rounded = (x / scale).round_().to(torch.int8)
    return torch._int_mm(rounded, weight.mT).to(x.dtype).mul_(scale).mul_(step).add_(bias)


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=1.0)
