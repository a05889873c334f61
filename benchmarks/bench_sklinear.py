"""SKLinear against nn.Linear, and against the least a sketched layer can cost: two products on joined factors.

Forward runs without gradients; forward+backward computes those of the input and of everything that is trained (for the
optimum, both joined factors).
"""

__all__ = ["run"]

from collections.abc import Callable
from typing import Any

import torch
from harness import figure, interleave, keep_freed_memory, main, print_table, write_csv
from torch import Tensor, nn

from panther.nn import SKLinear

SHAPES = [(8192, 1, 16), (4096, 2, 64), (1024, 2, 64)]  # width, terms, rank
BATCHES = [1, 32, 512]
DTYPES = [torch.float32, torch.bfloat16]


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print each as it comes, and write the CSV."""
    kept = keep_freed_memory()
    print(f"threads {torch.get_num_threads()}, freed memory {'kept' if kept else 'returned to the system'}")
    rows: list[dict[str, Any]] = []
    for width, terms, rank in SHAPES[-1:] if quick else SHAPES:
        for dtype in DTYPES:
            for batch in BATCHES:
                rows += _case(width, terms, rank, dtype, batch, device, budget_s)
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('sklinear', rows, device=device)}")


def _case(
    width: int, terms: int, rank: int, dtype: torch.dtype, batch: int, device: str, budget_s: float
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    linear = nn.Linear(width, width, device=device, dtype=dtype)
    layer = SKLinear(width, width, terms, rank, device=device, dtype=dtype)
    A = (torch.cat((layer.S1, layer.U2), 1) * layer.scale).detach().requires_grad_()  # (in, 2R)
    B = torch.cat((layer.U1, layer.S2), 0).detach().requires_grad_()  # (2R, out)
    x = torch.randn(batch, width, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(batch, width, device=device, dtype=dtype)

    def optimum(x: Tensor) -> Tensor:
        return torch.addmm(layer.bias, x @ A, B)  # type: ignore[arg-type]

    forwards: dict[str, Callable[[Tensor], Tensor]] = {"nn.Linear": linear, "optimum": optimum, "SKLinear": layer}
    trained: dict[str, list[Any]] = {
        "nn.Linear": [x, *linear.parameters()],
        "optimum": [x, A, B, layer.bias],
        "SKLinear": [x, *layer.parameters()],
    }
    stored = {
        "nn.Linear": sum(p.nbytes for p in linear.parameters()),
        "optimum": A.nbytes + B.nbytes + layer.bias.nbytes,  # type: ignore[union-attr]
        "SKLinear": sum(t.nbytes for t in layer.state_dict().values()),
    }
    rows = []
    for mode in ("forward", "forward+backward"):
        calls = {name: _call(mode, forward, x, trained[name], grad) for name, forward in forwards.items()}
        timings = interleave(calls, device=device, budget_s=budget_s)
        for name, forward in forwards.items():
            rows.append(
                {
                    "width": width,
                    "R": terms * rank,
                    "dtype": str(dtype).removeprefix("torch."),
                    "batch": batch,
                    "mode": mode,
                    "layer": name,
                    "time_us": round(timings[name].median_s * 1e6, 1),
                    "x nn.Linear": figure(timings[name].ratio_to(timings["nn.Linear"])),
                    "x optimum": figure(timings[name].ratio_to(timings["optimum"])),
                    "stored_bytes": stored[name],
                    "rms_error": f"{_error(forward, linear if name == 'nn.Linear' else layer, x):.1e}",
                }
            )
    return rows


def _call(
    mode: str, forward: Callable[[Tensor], Tensor], x: Tensor, trained: list[Any], grad: Tensor
) -> Callable[[], object]:
    def inference() -> Tensor:
        with torch.no_grad():
            return forward(x)

    def training() -> object:
        return torch.autograd.grad(forward(x), trained, grad)

    return inference if mode == "forward" else training


def _error(forward: Callable[[Tensor], Tensor], module: nn.Linear | SKLinear, x: Tensor) -> float:
    """RMS error of the output on eight rows, relative to the float64 product with the same weight."""
    x = x.detach()[:8]
    if isinstance(module, SKLinear):
        S1, U1, S2, U2 = (t.detach().double() for t in (module.S1, module.U1, module.S2, module.U2))
        exact = (x.double() @ S1 @ U1 + x.double() @ U2 @ S2) * module.scale
    else:
        exact = x.double() @ module.weight.detach().double().mT
    exact = exact + module.bias.detach().double()  # type: ignore[union-attr]
    with torch.no_grad():
        return ((forward(x).double() - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=4.0)
