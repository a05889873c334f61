"""Compare SKLinear, fused and not, to nn.Linear, to bare products on its factors, and to a plain pair of nn.Linear.

The *optimum* is two products on factors that were joined beforehand, *products* the four of a layer that is not fused.
Forward runs without gradients; forward+backward computes those of the input and of everything that is trained (for the
optimum, both joined factors). The smallest width shows the overhead of a call, whose products take next to no time.

The first table has the simplest alternative: two nn.Linear without an activation between them, which train as many
numbers as SKLinear. ``resident_bytes`` are those of parameters and buffers, so those of the fixed sketches too, which a
file does not store.
"""

__all__ = ["run"]

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.nn import SKLinear

SHAPES = [(64, 1, 4), (8192, 1, 16), (4096, 2, 64), (1024, 2, 64)]  # width, terms, rank
BATCHES = [1, 8, 32, 128, 512]
DTYPES = [torch.float32, torch.bfloat16]
_NARROW = 64
PAIR = "pair of nn.Linear"
PAIR_BATCHES = [1, 32, 512]


@dataclass(frozen=True)
class Alternative:
    """A way to compute a layer.

    Attributes:
        forward: From ``(batch, width)`` to ``(batch, width)``.
        trained: Tensors whose gradients a backward pass computes.
        stored: Tensors that are stored.
        resident: Tensors that are in memory between steps.
        exact: The same in float64.
    """

    forward: Callable[[Tensor], Tensor]
    trained: list[Tensor]
    stored: list[Tensor]
    resident: list[Tensor]
    exact: Callable[[Tensor], Tensor]


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print each as it comes, and write the CSVs."""
    for subject, build, batches in (("sklinear-pair", _pair, PAIR_BATCHES), ("sklinear", _alternatives, BATCHES)):
        rows: list[dict[str, Any]] = []
        for shape in SHAPES[:1] if quick else SHAPES:
            for dtype in DTYPES:
                for batch in batches[:1] if shape[0] == _NARROW else batches:
                    rows_of_case = _case(build(*shape, dtype, device), shape, dtype, batch, device, budget_s)
                    print_table(rows_of_case)
                    rows += rows_of_case
        if not quick:
            print(f"written to {write_csv(subject, rows, device=device)}")


def _alternatives(width: int, terms: int, rank: int, dtype: torch.dtype, device: str) -> dict[str, Alternative]:
    """Return the layers to compare, by name; add one by a line."""
    torch.manual_seed(0)
    linear = nn.Linear(width, width, device=device, dtype=dtype)
    layer = SKLinear(width, width, terms, rank, sketch="signs", device=device, dtype=dtype)

    def exact_linear(x: Tensor) -> Tensor:
        return functional.linear(x, linear.weight.double(), linear.bias.double())

    exact_layer = functools.partial(_exact, layer)
    return {
        "nn.Linear": _module(linear, exact_linear),
        "optimum": _joined(layer, exact_layer),
        "products": _separate(layer, exact_layer),
        "SKLinear": _module(layer, exact_layer),
        "SKLinear, fused": _module(layer.to_low_rank(), exact_layer),
    }


def _exact(layer: SKLinear, x: Tensor) -> Tensor:
    S1, U1, S2, U2, bias = (t.double() for t in (layer.S1, layer.U1, layer.S2, layer.U2, layer.bias))  # type: ignore[union-attr]
    return (x @ S1 @ U1 + x @ U2 @ S2) * layer.scale + bias


def _pair(width: int, terms: int, rank: int, dtype: torch.dtype, device: str) -> dict[str, Alternative]:
    """Return SKLinear with both kinds of sketches, and two nn.Linear that train as many numbers."""
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    torch.manual_seed(0)
    layer, sparse = (SKLinear(width, width, terms, rank, sketch=sketch, **options) for sketch in ("signs", "sparse"))
    inner, outer = nn.Linear(width, terms * rank, bias=False, **options), nn.Linear(terms * rank, width, **options)

    def exact(x: Tensor) -> Tensor:
        weights = inner.weight.double(), outer.weight.double()
        return functional.linear(x @ weights[0].mT, weights[1], outer.bias.double())

    alternatives = {
        PAIR: _module(nn.Sequential(inner, outer), exact),
        "SKLinear": _module(layer, functools.partial(_exact, layer)),
        "SKLinear, sparse": _module(sparse, functools.partial(_exact, sparse)),
    }
    sizes = {name: sum(tensor.numel() for tensor in one.trained) for name, one in alternatives.items()}
    if len(set(sizes.values())) > 1:
        raise RuntimeError(f"the pair must train as many numbers as SKLinear, but they train {sizes}")
    return alternatives


def _module(module: nn.Module, exact: Callable[[Tensor], Tensor]) -> Alternative:
    trained: list[Tensor] = list(module.parameters())
    return Alternative(module, trained, list(module.state_dict().values()), [*trained, *module.buffers()], exact)


def _joined(layer: SKLinear, exact: Callable[[Tensor], Tensor]) -> Alternative:
    """Return two products on factors that were joined beforehand."""
    A = (torch.cat((layer.S1, layer.U2), 1) * layer.scale).detach().requires_grad_()  # (in, 2R)
    B = torch.cat((layer.U1, layer.S2), 0).detach().requires_grad_()  # (2R, out)
    bias: Tensor = layer.bias  # type: ignore[assignment]

    def forward(x: Tensor) -> Tensor:
        return torch.addmm(bias, x @ A, B)

    return Alternative(forward, [A, B, bias], [A, B, bias], [A, B, bias], exact)


def _separate(layer: SKLinear, exact: Callable[[Tensor], Tensor]) -> Alternative:
    """Return the four products of the formula."""
    S1, U1, S2, U2, bias = layer.S1, layer.U1, layer.S2, layer.U2, layer.bias
    scale = layer.scale

    def forward(x: Tensor) -> Tensor:
        return torch.addmm(torch.addmm(bias, x @ S1, U1, alpha=scale), x @ U2, S2, alpha=scale)  # type: ignore[arg-type]

    resident = [*layer.parameters(), *layer.buffers()]
    return Alternative(forward, list(layer.parameters()), list(layer.state_dict().values()), resident, exact)


def _case(
    alternatives: dict[str, Alternative],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    batch: int,
    device: str,
    budget_s: float,
) -> list[dict[str, Any]]:
    width, terms, rank = shape
    x = torch.randn(batch, width, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(batch, width, device=device, dtype=dtype)
    rows = []
    for mode in ("forward", "forward+backward"):
        calls = {name: _call(mode, one, x, grad) for name, one in alternatives.items()}
        timings = interleave(calls, device=device, budget_s=budget_s)
        for name, one in alternatives.items():
            rows.append(
                {
                    "width": width,
                    "R": terms * rank,
                    "dtype": str(dtype).removeprefix("torch."),
                    "batch": batch,
                    "mode": mode,
                    "layer": name,
                    "time_us": round(timings[name].median_s * 1e6, 1),
                    **{
                        f"x {baseline}": figure(timings[name].ratio_to(timings[baseline]))
                        for baseline in ("nn.Linear", "optimum", PAIR)
                        if baseline in timings
                    },
                    "trained_numbers": sum(tensor.numel() for tensor in one.trained),
                    "stored_bytes": sum(tensor.nbytes for tensor in one.stored),
                    "resident_bytes": sum(tensor.nbytes for tensor in one.resident),
                    "rms_error": f"{_error(one, x):.1e}",
                }
            )
    return rows


def _call(mode: str, one: Alternative, x: Tensor, grad: Tensor) -> Callable[[], object]:
    wanted = [x, *(tensor for tensor in one.trained if tensor.requires_grad)]

    def inference() -> Tensor:
        with torch.no_grad():
            return one.forward(x)

    def training() -> object:
        return torch.autograd.grad(one.forward(x), wanted, grad)

    return inference if mode == "forward" else training


@torch.no_grad()
def _error(one: Alternative, x: Tensor) -> float:
    """Return the RMS error of the output on eight rows, relative to the output in float64."""
    exact = one.exact(x[:8].double())
    return ((one.forward(x[:8]).double() - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    main(run, __doc__, threads=(1, 2), budget_s=2.0)
