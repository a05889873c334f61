"""Compare cqrrpt to scipy's pivoted QR and torch's unpivoted one: time, residual and orthogonality.

Several gammas, so that error can be drawn against time. scipy keeps to as many threads as torch; on a GPU only torch's
is a baseline.
"""

__all__ = ["run"]

from collections.abc import Callable
from typing import Any

import scipy.linalg
import torch
from torch import Tensor

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.linalg import cqrrpt

# Rows, columns, dtype, logarithm of the condition. The last three are ours to lose.
CASES = [
    (4096, 512, torch.float64, 10),
    (16384, 512, torch.float64, 10),
    (65536, 512, torch.float64, 10),
    (65536, 128, torch.float64, 10),
    (16384, 512, torch.float32, 2),
    (2048, 512, torch.float64, 10),
    (16384, 128, torch.float32, 2),
    (100000, 16, torch.float64, 10),
]
GAMMAS = [1.0, 1.25, 1.5, 2.0, 3.0]
PIVOTED, PLAIN = "scipy pivoted", "torch unpivoted"
Factors = tuple[Tensor, Tensor, Tensor]  # Q (m, r), R (r, n), P (n,)


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print a table of each as it comes, and write the CSV."""
    rows: list[dict[str, Any]] = []
    for m, n, dtype, condition in [(8192, 64, torch.float64, 10)] if quick else CASES:
        found = _case(m, n, dtype, condition, device, budget_s)
        print_table(found)
        rows += found
    if not quick:
        print(f"written to {write_csv('cqrrpt', rows, device=device)}")


def _case(m: int, n: int, dtype: torch.dtype, condition: int, device: str, budget_s: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    V = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    M = torch.randn(m, n, dtype=torch.float64) * torch.logspace(0, -condition, n, dtype=torch.float64)
    M = (M @ V).to(device, dtype)
    alternatives = _alternatives(M, device)
    timings = interleave(alternatives, device=device, budget_s=budget_s, min_rounds=5)
    rows = []
    for name, function in alternatives.items():
        Q, R, P = function()
        rows.append(
            {
                "m": m,
                "n": n,
                "dtype": str(dtype).removeprefix("torch."),
                "condition": f"1e{condition}",
                "method": name,
                "time_ms": figure(timings[name].median_s * 1e3),
                **{
                    f"x {baseline}": figure(timings[name].ratio_to(timings[baseline])) if baseline in timings else ""
                    for baseline in (PIVOTED, PLAIN)
                },
                "rank": len(R),
                **_errors(M, Q, R, P),
            }
        )
    return rows


def _alternatives(M: Tensor, device: str) -> dict[str, Callable[[], Factors]]:
    def ours(gamma: float) -> Callable[[], Factors]:
        return lambda: cqrrpt(M, gamma, seed=0)

    def pivoted() -> Factors:
        Q, R, P = scipy.linalg.qr(array, mode="economic", pivoting=True)
        return torch.from_numpy(Q), torch.from_numpy(R), torch.from_numpy(P).long()

    def plain() -> Factors:
        return *torch.linalg.qr(M), torch.arange(M.shape[1], device=device)

    array = M.cpu().numpy()
    baselines: dict[str, Callable[[], Factors]] = {PLAIN: plain}
    if device != "cuda":
        baselines[PIVOTED] = pivoted
    return baselines | {f"panther gamma={gamma}": ours(gamma) for gamma in GAMMAS}


def _errors(M: Tensor, Q: Tensor, R: Tensor, P: Tensor) -> dict[str, Any]:
    """Return the relative residual, loss of orthogonality, the bound for both, and how far the diagonal of R rises."""
    eps = torch.finfo(M.dtype).eps
    M, Q, R = M.double(), Q.double(), R.double()
    eye = torch.eye(len(R), dtype=Q.dtype, device=Q.device)
    diagonal = R.diagonal().abs()
    return {
        "residual": f"{float((M[:, P] - Q @ R).norm() / M.norm()):.1e}",
        "orthogonality": f"{float(torch.linalg.matrix_norm(Q.mT @ Q - eye, 2)):.1e}",
        "bound": f"{eps**0.75:.1e}",
        "rise": figure(float((diagonal.flip(0).cummax(0)[0].flip(0) / diagonal).max())),
    }


if __name__ == "__main__":
    main(run, __doc__, threads=2, budget_s=20.0)
