"""Compare windowed linear attention to torch's scaled_dot_product_attention: 8 heads of 64, window 64.

*bound* is how many times fewer floating-point operations it takes: the speed-up of equal efficiency. Backward, SDPA has
gradients of three operands and windowed attention of five.
"""

__all__ = ["run"]

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.nn.functional import windowed_linear_attention

HEADS, DIM, WINDOW = 8, 64, 64
LENGTHS = (1024, 2048, 4096, 8192)
FEATURES = (64, 128)


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every length both ways; print the table, and write the CSV."""
    rows = [
        _case(length, features, causal, backward, device, budget_s)
        for backward in (False, True)
        for features in FEATURES
        for length in ((256,) if quick else LENGTHS)
        for causal in (True, False)
    ]
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('windowed-attention', rows, device=device)}")


def _case(length: int, features: int, causal: bool, backward: bool, device: str, budget_s: float) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, HEADS, length, DIM, device=device).unbind()
    phi_q, phi_k = torch.rand(2, 1, HEADS, length, features, device=device).unbind()
    log_q, log_k = torch.randn(2, 1, HEADS, length, device=device).unbind()
    q = q / DIM**0.5

    def windowed(q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor) -> Tensor:
        return windowed_linear_attention(q, k, v, phi_q, phi_k, log_q, log_k, window=WINDOW, is_causal=causal)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)

    calls = {
        "windowed": _call(windowed, (q, k, v, phi_q, phi_k), grad, backward),
        "SDPA": _call(sdpa, (q, k, v), grad, backward),
    }
    timings = interleave(calls, device=device, budget_s=budget_s, min_rounds=3)
    near = (2 if causal else 3) * WINDOW
    flops = near * 4 * DIM + 4 * features * (DIM + 1)
    dense = length * 4 * DIM / (2 if causal else 1)
    total = HEADS * length * flops
    return {
        "length": length,
        "features": features,
        "causal": causal,
        "direction": "forward+backward" if backward else "forward",
        "windowed_ms": figure(timings["windowed"].median_s * 1e3),
        "SDPA_ms": figure(timings["SDPA"].median_s * 1e3),
        "x SDPA": figure(timings["windowed"].ratio_to(timings["SDPA"])),
        "bound": figure(dense / flops),
        "GFLOP/s": "" if backward else figure(total / timings["windowed"].median_s / 1e9),
    }


def _call(
    function: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor, backward: bool
) -> Callable[[], object]:
    """Return the function without gradients, or its gradients."""

    def inference() -> Tensor:
        with torch.no_grad():
            return function(*operands)

    leaves = [x.detach().requires_grad_() for x in operands]
    return (lambda: torch.autograd.grad(function(*leaves), leaves, grad)) if backward else inference


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=6.0)
