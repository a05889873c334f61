"""Compare QuantizedLinear, in each form, to nn.Linear in float32 and bfloat16 and to torch's own int8 linear layers.

Forward without gradients, of layers with random weights. Ratios are to nn.Linear of the layer's dtype and to nn.Linear
in float32: 2 is twice as fast. *rounded* is ``activations="int8"``; *packed copy* is the layer after ``hold_packed_``;
*torch dynamic int8* is the layer of ``torch.ao.quantization.quantize_dynamic``, which takes float32. Errors are those
of the product: relative to that of the same weight in float64, without what quantizing the weight costs, for Gaussian
inputs and for heavy-tailed ones with a few columns ten times as large, as transformers have them.

The page on it has some of the rows, as :func:`write_page` puts them into docs/benchmarks/quantized.inc.
"""

__all__ = ["run", "write_page"]

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.harness import ROOT, figure, interleave, main, print_table, read_csv, write_csv
from panther.nn import QuantizedLinear
from panther.nn.sketch_record import plain_state

SHAPES = [(384, 384), (384, 1536), (1536, 384), (4096, 4096)]  # in, out
BATCHES = [1, 8, 32, 128, 512]
FORMS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "group_size": None},
    "int4": {"bits": 4, "group_size": 128},
    "int3": {"bits": 3, "group_size": 128},
    "int4 + rank 32": {"bits": 4, "group_size": 128, "low_rank": 32},
    "rank in / 4": {"bits": None},  # in int8; of half the parameters where the weight is square
    "int8, rounded": {"bits": 8, "group_size": None, "activations": "int8"},
    "int4, rounded": {"bits": 4, "group_size": 128, "activations": "int8"},
    "int3, rounded": {"bits": 3, "group_size": 128, "activations": "int8"},
    "rank in / 4, rounded": {"bits": None, "activations": "int8"},
}
DYNAMIC = "torch dynamic int8"
PAGE = ROOT / "docs" / "benchmarks" / "quantized.inc"
PAGE_FORMS = {  # as the page calls them
    "int8": "int8", "int8, rounded": "int8, rounded inputs", DYNAMIC: "int8, torch's dynamic layer", "int4": "int4",
    "int4, rounded": "int4, rounded inputs", "int3": "int3", "rank in / 4": "low rank in int8, a quarter",
}  # fmt: skip
PAGE_LAYERS = ((384, 1536, "float32"), (4096, 4096, "float32"), (4096, 4096, "bfloat16"))
PAGE_BATCHES = (1, 32, 128, 512)


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print each as it comes, and write the CSV."""
    rows: list[dict[str, Any]] = []
    for shape in SHAPES[:1] if quick else SHAPES:
        for batch in BATCHES[:1] if quick else BATCHES:
            found = _case(*shape, batch, device, budget_s)
            print_table(found)
            rows += found
    if not quick:
        path = write_csv("quantized", rows, device=device)
        print(f"written to {path}")
        if device == "cpu" and torch.get_num_threads() == 1:
            write_page(read_csv(path))


def write_page(rows: list[dict[str, str]]) -> None:
    """Write the table of the page: some shapes and batches, with the default settings of the allocator."""
    found = {
        tuple(row[key] for key in ("in", "out", "batch", "dtype", "form")): row
        for row in rows
        if row["memory"] == "default" and row["threads"] == "1"
    }
    lines = [
        ".. list-table:: Times as fast as nn.Linear of the same dtype, by rows of the batch, and errors of the product",
        "   :header-rows: 1",
        "",
    ]

    def line(*cells: str) -> None:
        lines.extend(f"   {'* -' if not number else '  -'} {cell}" for number, cell in enumerate(cells))

    line("in, out, dtype", "form", *map(str, PAGE_BATCHES), "error", "heavy-tailed")
    for columns, outputs, dtype in PAGE_LAYERS:
        for form, name in PAGE_FORMS.items():
            several = [found.get((str(columns), str(outputs), str(n), dtype, form)) for n in PAGE_BATCHES]
            if None not in several:
                ratios = [f"{float(row['x nn.Linear']):.2f}" for row in several if row]
                errors = [several[-1][key] for key in ("rms_error", "heavy_error")]  # type: ignore[index]
                line(f"{columns}, {outputs}, {dtype}", name, *ratios, *errors)
        if dtype == "float32":  # the simplest alternative: the layer in bfloat16
            halves = [found[str(columns), str(outputs), str(n), "bfloat16", "nn.Linear"] for n in PAGE_BATCHES]
            ratios = [f"{float(row['x float32']):.2f}" for row in halves]
            errors = [halves[-1][key] for key in ("rms_error", "heavy_error")]
            line(f"{columns}, {outputs}, {dtype}", "nn.Linear in bfloat16", *ratios, *errors)
    PAGE.write_text("\n".join(lines) + "\n")


@torch.no_grad()
def _case(columns: int, outputs: int, batch: int, device: str, budget_s: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    x = torch.randn(batch, columns, device=device)
    calls: dict[str, Callable[[], Tensor]] = {}
    stored: dict[str, int] = {}
    layers_of: dict[str, Callable[[Tensor], Tensor]] = {}
    exact: dict[str, Callable[[Tensor], Tensor]] = {}
    heavy = _heavy_tailed(x)
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
            stored[name] = sum(tensor.nbytes for tensor in plain_state(layer).values())
            layers_of[name] = layer
            wide = copy.deepcopy(layer).double()
            exact[name] = functools.partial(_exact, cast(Tensor, wide.weight), cast(Tensor, wide.bias))
    if device == "cpu":
        dense = nn.Linear(columns, outputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated for torchao
            dynamic = torch.ao.quantization.quantize_dynamic(nn.Sequential(dense))[0]
        name = f"float32 {DYNAMIC}"
        calls[name] = functools.partial(dynamic, x)
        layers_of[name] = dynamic
        stored[name] = dynamic.weight().int_repr().nbytes + 8 + outputs * 4
        exact[name] = functools.partial(_exact, dynamic.weight().dequantize(), dynamic.bias())
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
                "stored_bytes": stored[name],
                "rms_error": _error(layers_of[name], exact[name], x, dtype_name),
                "heavy_error": _error(layers_of[name], exact[name], heavy, dtype_name),
            }
        )
    return rows


def _heavy_tailed(x: Tensor) -> Tensor:
    """Return inputs as transformers have them: Student's t with 4 degrees of freedom, and 1 % of columns ten times."""
    tails = torch.distributions.StudentT(4.0).sample(x.shape).to(x.device)
    tails[:, ::100] *= 10
    return tails


def _exact(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), bias.double())


def _error(layer: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], x: Tensor, dtype: str) -> str:
    given = x.to(getattr(torch, dtype))
    wanted = exact(given)
    return f"{((layer(given).double() - wanted).norm() / wanted.norm()).item():.1e}"


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=1.0)
