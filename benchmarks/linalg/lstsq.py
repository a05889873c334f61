"""Compare sketch_lstsq to LAPACK's drivers in scipy and torch, and to scipy's LSQR where A is sparse: time and error.

b is A x plus a vector orthogonal to the columns of A, so the optimum is known: ``distance`` is that of the fitted
values from it, over the least residual norm, and ``excess`` that of the residual norm, relative. ``forward`` is the
relative error of x. sketch_lstsq runs with several tolerances, so that error can be drawn against time.

The first table has the simplest alternatives: the normal equations, and LinearRegression of scikit-learn.
"""

__all__ = ["run"]

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import scipy.linalg
import scipy.sparse.linalg
import torch
from torch import Tensor

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.errors import MissingExtraError, require_extra
from panther.linalg import LstsqResult, sketch_lstsq

BASELINES = ["scipy gelsd", "torch gelsy", "torch gels", "scipy lsqr 1e-14", "normal equations"]
TOLERANCES = [1e-1, 1e-2, 1e-4, 1e-6, 1e-8]
SPARSE_ENTRIES = 10  # a row


@dataclass(frozen=True)
class Case:
    """One matrix: Gaussian directions, singular values (or, if sparse, norms of columns) from 1 to 1/condition."""

    m: int
    n: int
    dtype: torch.dtype = torch.float64
    condition: float = 1e8
    p: int = 1
    sparse: bool = False
    rounds: int = 5

    @property
    def name(self) -> str:
        """Return the name in tables and plots."""
        kind = "sparse " * self.sparse + str(self.dtype).removeprefix("torch.")
        columns = f", {self.p} right-hand sides" if self.p > 1 else ""
        return f"{self.m} x {self.n} {kind}, condition {self.condition:.0e}{columns}"


CASES = [
    Case(200_000, 1000, rounds=3),
    Case(40_000, 1000, p=8),
    Case(50_000, 500),
    Case(50_000, 500, dtype=torch.float32, condition=1e3),
    Case(20_000, 100, condition=1e4),
    Case(4000, 1000),
    Case(200_000, 1000, condition=1e2, sparse=True),
    Case(200_000, 1000, condition=1e4, sparse=True),
]
SIMPLEST = [Case(m, n, condition=condition) for m, n in ((16_384, 512), (20_000, 100)) for condition in (1e2, 1e8)]
SIMPLEST_METHODS = ("panther", "torch gels", "normal equations", "scikit-learn")
# Only the default and torch's gels: where sketching cannot gain, the default takes the same factorisation.
COLUMNS = [
    Case(m, n, dtype, condition, p, rounds=3)
    for m, n in ((3000, 200), (16_384, 512), (65_536, 256), (4096, 1024))
    for dtype, condition in ((torch.float64, 1e2), (torch.float64, 1e6), (torch.float64, 1e10), (torch.float32, 1e2))
    for p in (1, 8, 32, 128)
]
QUICK = [Case(3000, 200, rounds=1), Case(3000, 50, condition=10, sparse=True, rounds=1)]


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print a table of each as it comes, and write the CSVs."""
    simplest: list[dict[str, Any]] = []
    for case in [Case(3000, 50, condition=1e2, rounds=1)] if quick else SIMPLEST:
        found = [{"case": case.name, **row} for row in _measure(case, device, budget_s / 5, SIMPLEST_METHODS)]
        print_table(found)
        simplest += found
    if not quick:
        print(f"written to {write_csv('lstsq-simple', simplest, device=device)}")
    rows: list[dict[str, Any]] = []
    columns: list[dict[str, Any]] = []
    for case in [Case(3000, 200, p=8, rounds=1)] if quick else COLUMNS:
        found = [{"case": case.name, **row} for row in _measure(case, device, budget_s / 30, ("panther", "torch gels"))]
        print_table(found)
        columns += found
    if not quick:
        print(f"written to {write_csv('lstsq-columns', columns, device=device)}")
    for case in QUICK if quick else CASES:
        found = [{"case": case.name, **row} for row in _measure(case, device, budget_s)]
        print_table(found)
        rows += found
    if not quick:
        print(f"written to {write_csv('lstsq', rows, device=device)}")


def _measure(case: Case, device: str, budget_s: float, methods: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    A, b, x, smallest_residual = _problem(case, device)
    alternatives = _for_sparse(A, b) if case.sparse else _for_dense(A, b, device)
    alternatives = {name: call for name, call in alternatives.items() if methods is None or name in methods}
    results: dict[str, Any] = {}

    def keep(name: str, function: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            results[name] = function()

        return call

    calls = {name: keep(name, function) for name, function in alternatives.items()}
    timings = interleave(calls, device=device, budget_s=budget_s, min_rounds=case.rounds)
    rows = []
    for name, timing in timings.items():
        result = results[name]
        solution = result.x if isinstance(result, LstsqResult) else result
        distance = float(((A @ (solution.double() - x).to(A.dtype)).norm(dim=0) / smallest_residual).max())
        rows.append(
            {
                "method": name,
                "time_ms": figure(timing.median_s * 1e3),
                **{
                    f"x {baseline}": figure(timing.ratio_to(timings[baseline])) if baseline in timings else ""
                    for baseline in BASELINES
                },
                "iterations": result.iterations if isinstance(result, LstsqResult) else "",
                "distance": f"{distance:.1e}",
                "excess": f"{math.expm1(0.5 * math.log1p(distance**2)):.1e}",
                "forward": f"{float((solution - x).norm() / x.norm()):.1e}",
            }
        )
    return rows


def _problem(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return A, b and, in float64, the solution and the norms of its residuals."""
    torch.manual_seed(0)
    m, n, p = case.m, case.n, case.p
    sigma = torch.logspace(0, -math.log10(case.condition), n, dtype=torch.float64)
    w = torch.nn.functional.normalize(torch.randn(m, p, dtype=torch.float64), dim=0)
    if case.sparse:
        entries = m * SPARSE_ENTRIES
        row = torch.arange(m).repeat_interleave(SPARSE_ENTRIES)
        column = torch.randint(n, (entries,))
        values = torch.randn(entries, dtype=torch.float64) * sigma[column] * math.sqrt(n / entries)
        A = torch.sparse_coo_tensor(torch.stack((row, column)), values, (m, n), check_invariants=False).coalesce()
        factor = torch.linalg.cholesky(torch.sparse.mm(A.t(), A).to_dense())
        for _ in range(4):  # what the normal equations leave, repeating them takes away
            w = w - A @ torch.cholesky_solve(A.t() @ w, factor)
        w = torch.nn.functional.normalize(w, dim=0)
    else:
        mixing = sigma[:, None] * torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] / math.sqrt(m)
        A = torch.empty(m, n, dtype=case.dtype)
        for part in A.split(10_000):
            part.copy_(torch.randn(len(part), n, dtype=torch.float64) @ mixing)
        w = torch.linalg.qr(w)[0]
        for _ in range(2):
            inner = w.mT @ A.double()
            for part, rows in zip(A.split(10_000), w.split(10_000), strict=True):
                part -= rows @ inner
    x = torch.randn(n, p, dtype=torch.float64)
    fitted = A @ x if A.dtype == torch.float64 else A.double() @ x
    b = fitted + w * fitted.norm(dim=0)
    return A.to(device), b.to(device, case.dtype), x.to(device), fitted.norm(dim=0).to(device)


def _ours(A: Tensor, b: Tensor) -> dict[str, Callable[[], Any]]:
    def solve(tol: float | None) -> Callable[[], Any]:
        return lambda: sketch_lstsq(A, b, tol=tol, seed=0)

    return {"panther": solve(None)} | {f"panther tol={tol:.0e}": solve(tol) for tol in TOLERANCES}


def _for_dense(A: Tensor, b: Tensor, device: str) -> dict[str, Callable[[], Any]]:
    found = _ours(A, b) | {"normal equations": lambda: torch.linalg.solve(A.mT @ A, A.mT @ b)}
    if device == "cuda":  # the only driver that torch has there
        return found | {"torch gels": lambda: torch.linalg.lstsq(A, b, driver="gels").solution}
    a, rhs = A.numpy(), b.numpy()
    with contextlib.suppress(MissingExtraError):
        regression = require_extra("sklearn.linear_model", "bench").LinearRegression(fit_intercept=False)
        found["scikit-learn"] = lambda: torch.from_numpy(regression.fit(a, rhs).coef_).reshape(-1, a.shape[1]).mT
    return found | {
        "scipy gelsd": lambda: torch.from_numpy(scipy.linalg.lstsq(a, rhs)[0]),
        "torch gelsy": lambda: torch.linalg.lstsq(A, b).solution,
        "torch gels": lambda: torch.linalg.lstsq(A, b, driver="gels").solution,
    }


def _for_sparse(A: Tensor, b: Tensor) -> dict[str, Callable[[], Any]]:
    found = _ours(A, b)
    if A.device.type != "cpu":
        return found
    index, values = A.indices().numpy(), A.values().numpy()
    matrix = scipy.sparse.coo_array((values, index), shape=tuple(A.shape)).tocsr()
    rhs = b[:, 0].numpy()

    def lsqr(tolerance: float) -> Callable[[], Any]:
        def solve() -> Tensor:
            x = scipy.sparse.linalg.lsqr(matrix, rhs, atol=tolerance, btol=tolerance, conlim=0, iter_lim=20_000)[0]
            return torch.from_numpy(x)[:, None]

        return solve

    return found | {f"scipy lsqr {tolerance:.0e}": lsqr(tolerance) for tolerance in (1e-6, 1e-10, 1e-14)}


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=30.0)
