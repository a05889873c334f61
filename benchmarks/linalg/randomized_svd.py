"""Compare randomized_svd to torch.svd_lowrank, scikit-learn's randomized_svd and the full SVD: time and error.

Errors are over those of the best matrix of rank k, the worst of several seeds; every alternative runs at several
numbers of iterations, so that error can be drawn against time. A first table has the default against svd_lowrank over
shapes, ranks, dtypes and spectra, those where it loses too, with the mean error of three seeds. scikit-learn keeps to
as many threads as torch.
"""

__all__ = ["run"]

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.errors import MissingExtraError, require_extra
from panther.linalg import randomized_svd

SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "1/i": lambda i: 1 / i,
    "0.97^i": lambda i: 0.97**i,
    "i^-0.3": lambda i: i**-0.3,
}
# Of the second table; a step falls after k.
MORE_SPECTRA: dict[str, Callable[[Tensor, int], Tensor]] = {
    "0.97^i": lambda i, k: 0.97**i,
    "i^-0.3": lambda i, k: i**-0.3,
    "step": lambda i, k: torch.where(i <= k, 1.0, 0.01),
    "low rank and noise": lambda i, k: torch.where(i <= k / 2, 10 / i, 0.0) + 0.05 * (1 - i / (2 * len(i))),
    "flat": lambda i, k: torch.ones_like(i),
}
SHAPES = [
    (100, 100, (5, 30)),
    (200, 100, (1, 10, 40, 90)),
    (500, 400, (10, 60, 200)),
    (1000, 1000, (5, 100, 400, 900)),
    (20_000, 500, (1, 20, 100, 250)),
    (500, 8000, (5, 20, 100)),
    (4096, 2048, (10, 100, 300)),
]
OVERSAMPLE = 10
SEEDS = 10
BASELINE = "svd_lowrank niter=2"
Factors = tuple[Tensor, Tensor, Tensor]  # U (m, k), S (k,), V (n, k)


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every spectrum, print a table of each as it comes, and write the CSV."""
    m, n, k = (400, 200, 20) if quick else (4096, 2048, 100)
    torch.manual_seed(0)
    left = torch.linalg.qr(torch.randn(m, n))[0].to(device)
    right = torch.linalg.qr(torch.randn(n, n))[0].to(device)
    compared = _compare(device, budget_s, [(200, 100, (10,))] if quick else SHAPES)
    if not quick:
        print(f"written to {write_csv('randomized-svd-shapes', compared, device=device)}")
    rows: list[dict[str, Any]] = []
    for name, spectrum in SPECTRA.items():
        sigma = spectrum(torch.arange(1, n + 1, dtype=torch.float64)).to(device)
        A = (left * sigma.float()) @ right.mT
        found = [{"spectrum": name, **row} for row in _case(A, sigma, k, device, budget_s, 1 if quick else SEEDS)]
        print_table(found)
        rows += found
    if not quick:
        print(f"written to {write_csv('randomized-svd', rows, device=device)}")


def _compare(device: str, budget_s: float, shapes: list[tuple[int, int, tuple[int, ...]]]) -> list[dict[str, Any]]:
    """Compare the default with svd_lowrank(niter=2): the ratio of the times, and the errors of both."""
    rows: list[dict[str, Any]] = []
    for m, n, ranks in shapes:
        full_rank = min(m, n)
        i = torch.arange(1, full_rank + 1, dtype=torch.float64)
        left, right = (torch.linalg.qr(torch.randn(size, full_rank, dtype=torch.float64))[0] for size in (m, n))
        for dtype in (torch.float32, torch.float64):
            found = []
            for k, (name, spectrum) in itertools.product(ranks, MORE_SPECTRA.items()):
                sigma = spectrum(i, k).to(device)
                A = ((left * sigma.cpu()) @ right.mT).to(device, dtype)
                ours, theirs = (_alternatives(A, k, device)[name] for name in ("panther n_iter=auto", BASELINE))
                calls: dict[str, Callable[[], object]] = {"ours": lambda f=ours: f(0), "theirs": lambda f=theirs: f(0)}  # type: ignore[misc]
                timings = interleave(calls, device=device, budget_s=budget_s / 30, min_rounds=3)
                errors = [
                    statistics.mean(_frobenius(A, sigma, k, *f(seed)) for seed in range(3)) for f in (ours, theirs)
                ]
                found.append(
                    {
                        "m": m,
                        "n": n,
                        "k": k,
                        "dtype": str(dtype).removeprefix("torch."),
                        "spectrum": name,
                        "time_ms": figure(timings["ours"].median_s * 1e3),
                        f"x {BASELINE}": figure(timings["ours"].ratio_to(timings["theirs"])),
                        "frobenius": f"{errors[0]:.5f}",
                        "frobenius of svd_lowrank": f"{errors[1]:.5f}",
                    }
                )
            print_table(found)
            rows += found
    return rows


def _case(A: Tensor, sigma: Tensor, k: int, device: str, budget_s: float, seeds: int) -> list[dict[str, Any]]:
    alternatives = _alternatives(A, k, device)
    calls: dict[str, Callable[[], object]] = {name: (lambda f=f: f(0)) for name, f in alternatives.items()}  # type: ignore[misc]
    timings = interleave(calls, device=device, budget_s=budget_s)
    rows = []
    for name, function in alternatives.items():
        rows.append(
            {
                "method": name,
                "time_ms": figure(timings[name].median_s * 1e3),
                **{
                    f"x {baseline}": figure(timings[name].ratio_to(timings[baseline])) if baseline in timings else ""
                    for baseline in ("svd_lowrank niter=2", "sklearn auto")
                },
                **_errors(A, sigma, k, [function(seed) for seed in range(seeds)]),
            }
        )
    start = time.perf_counter()
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    full = U[:, :k], S[:k], Vh[:k].mT
    baselines = {"x svd_lowrank niter=2": "", "x sklearn auto": ""}
    return [
        *rows,
        {"method": "linalg.svd", "time_ms": figure(elapsed * 1e3), **baselines, **_errors(A, sigma, k, [full])},
    ]


def _alternatives(A: Tensor, k: int, device: str) -> dict[str, Callable[[int], Factors]]:
    def ours(n_iter: Any) -> Callable[[int], Factors]:
        return lambda seed: randomized_svd(A, k, oversample=OVERSAMPLE, n_iter=n_iter, seed=seed)

    def lowrank(niter: int) -> Callable[[int], Factors]:
        def call(seed: int) -> Factors:
            torch.manual_seed(seed)
            U, S, V = torch.svd_lowrank(A, q=min(k + OVERSAMPLE, *A.shape), niter=niter)
            return U[:, :k], S[:k], V[:, :k]

        return call

    found = {f"panther n_iter={n_iter}": ours(n_iter) for n_iter in (0, 1, 2, 3, "auto", 6, 8)}
    found |= {f"svd_lowrank niter={niter}": lowrank(niter) for niter in (0, 1, 2, 4)}
    if device == "cuda":
        return found
    try:
        extmath = require_extra("sklearn.utils.extmath", "bench")
    except MissingExtraError as error:
        print(error)
        return found
    array = A.numpy()

    def sklearn(n_iter: Any) -> Callable[[int], Factors]:
        def call(seed: int) -> Factors:
            U, S, Vh = extmath.randomized_svd(array, k, n_oversamples=OVERSAMPLE, n_iter=n_iter, random_state=seed)
            return torch.from_numpy(U), torch.from_numpy(S), torch.from_numpy(Vh).mT

        return call

    return found | {f"sklearn {'auto' if n == 'auto' else f'n_iter={n}'}": sklearn(n) for n in (0, 2, 4, "auto")}


def _errors(A: Tensor, sigma: Tensor, k: int, found: list[Factors]) -> dict[str, str]:
    """Return the errors over the least possible ones, and the loss of orthogonality: the largest of all results."""
    frobenius, spectral, orthogonality = zip(*(_error(A, sigma, k, *factors) for factors in found), strict=True)
    return {
        "frobenius": f"{max(frobenius):.5f}",
        "spectral": f"{max(spectral):.4f}",
        "orthogonality": f"{max(orthogonality):.1e}",
    }


def _error(A: Tensor, sigma: Tensor, k: int, U: Tensor, S: Tensor, V: Tensor) -> tuple[float, float, float]:
    A, U, S, V = (part.double() for part in (A, U, S, V))  # the error may be rounding itself
    E = torch.addmm(A, U * S, V.mT, alpha=-1)
    x = torch.linalg.qr(torch.randn(A.shape[1], 8, generator=torch.Generator().manual_seed(1)).to(E))[0]
    for _ in range(20):  # subspace iteration for the spectral norm of the error
        x = torch.linalg.qr(E.mT @ (E @ x))[0]
    eye = torch.eye(k, dtype=A.dtype, device=A.device)
    loss = max(float((X.mT @ X - eye).abs().max()) for X in (U, V))
    spectral = float(torch.linalg.matrix_norm(E @ x, 2) / sigma[k])
    return float(torch.linalg.vector_norm(E, dtype=torch.float64) / sigma[k:].norm()), spectral, loss


def _frobenius(A: Tensor, sigma: Tensor, k: int, U: Tensor, S: Tensor, V: Tensor) -> float:
    E = torch.addmm(A.double(), U.double() * S.double(), V.double().mT, alpha=-1)
    return float(E.norm() / sigma[k:].norm())


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=30.0)
