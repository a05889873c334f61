"""Compare drivers of linear algebra with the best other way to do the same: time and error, in one process.

Streaming PCA, SVD, eigenvalues, interpolative decompositions, kernels by a few columns, kernel systems, trace and
diagonal, and least squares. Errors of approximations are over the least possible one, minus 1; ``measure`` names the
error of a problem. scikit-learn and scipy keep to as many threads as torch.
"""

__all__ = ["run"]

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import torch
from scipy.linalg import interpolative as scipy_interpolative
from torch import Tensor

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther import linalg
from panther.errors import require_extra

Calls = dict[str, Callable[[int], Any]]  # take a seed
# The error is a median over so many seeds where a call takes less time than this.
_SEEDS, _SHORT_S = 3, 0.3


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every problem and write the CSV; scikit-learn and scipy compute on the CPU."""
    if device != "cpu":
        print("scikit-learn and scipy are on the CPU: nothing is measured.")
        return
    rows: list[dict[str, Any]] = []
    for problem in (_streaming, _trace, _diagonal, _columns, _kernel, _svd, _system, _eigenvalues, _least_squares):
        problem_rows = _measure(*problem(quick), budget_s)
        print_table(problem_rows)
        rows += problem_rows
        if not quick:
            print(f"written to {write_csv('linalg-drivers', rows, device=device)}")


def _measure(problem: str, measure: str, calls: Calls, error_of: Callable[[Any], float], budget_s: float) -> Any:
    timings = interleave({name: partial(call, 0) for name, call in calls.items()}, budget_s=budget_s, min_rounds=3)
    first = next(iter(calls))
    seeds = {name: _SEEDS if budget_s and timings[name].median_s < _SHORT_S else 1 for name in calls}
    return [
        {
            "problem": problem,
            "method": name,
            "time_ms": figure(timings[name].median_s * 1e3),
            "x panther": figure(timings[name].ratio_to(timings[first])),
            "measure": measure,
            "error": f"{float(np.median([error_of(call(seed)) for seed in range(seeds[name])])):.2e}",
        }
        for name, call in calls.items()
    ]


def _photographs(quick: bool) -> Tensor:  # (rows, 640) float64
    images = require_extra("sklearn.datasets", "bench").load_sample_images().images
    rows = torch.cat([torch.tensor(image).double().mean(dim=2) / 255 for image in images])
    return rows[::8, ::8] if quick else rows


def _digits(quick: bool) -> Tensor:  # (n, 64)
    X = torch.tensor(require_extra("sklearn.datasets", "bench").load_digits().data)
    return X[: 200 if quick else 800]


def _rbf(X: Tensor, Y: Tensor, width: float) -> Tensor:
    return torch.exp(-torch.cdist(X, Y).square() / (2 * width**2))


def _spectrum(m: int, n: int, sizes: Tensor) -> Tensor:
    """Return a matrix (m, n) with singular values ``sizes``, (n,)."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(k, n, generator=generator, dtype=torch.float64))[0] for k in (m, n))
    return U * sizes @ V.mT


def _streaming(quick: bool) -> tuple[str, str, Calls, Callable[[Any], float]]:
    X, k = _photographs(quick), 5 if quick else 40
    centred = X - X.mean(dim=0)
    least = float(torch.linalg.svdvals(centred)[k:].norm())
    decomposition = require_extra("sklearn.decomposition", "bench")
    extmath = require_extra("sklearn.utils.extmath", "bench")

    def stream(factor: int, seed: int) -> Tensor:
        summary = linalg.StreamingSVD(X.shape[1], k, sketch_size=factor * k, dtype=X.dtype)
        for batch in X.split(factor * k):
            summary.update(batch)
        return summary.pca().V

    def incremental(factor: int, seed: int) -> Any:
        model = decomposition.IncrementalPCA(k)
        for batch in X.split(factor * k):
            model.partial_fit(batch.numpy())
        return model.components_.T

    def in_memory(seed: int) -> Any:
        rows = X.numpy()
        return extmath.randomized_svd(rows - rows.mean(axis=0), k, random_state=seed)[2].T

    def error_of(V: Any) -> float:
        V = torch.as_tensor(np.ascontiguousarray(V))
        return float((centred - centred @ V @ V.mT).norm()) / least - 1

    calls: Calls = {
        "StreamingSVD, 2k rows kept": partial(stream, 2),
        "StreamingSVD, 4k rows kept": partial(stream, 4),
        "IncrementalPCA, batches of 2k": partial(incremental, 2),
        "IncrementalPCA, batches of 4k": partial(incremental, 4),
        "sklearn randomized_svd, all rows": in_memory,
    }
    return f"PCA of a stream, {len(X)} x {X.shape[1]}, k = {k}", "error over the least, less 1", calls, error_of


def _svd(quick: bool) -> tuple[str, str, Calls, Callable[[Any], float]]:
    m, n, k = (200, 100, 5) if quick else (1000, 500, 25)
    sizes = 1 / torch.arange(1.0, n + 1, dtype=torch.float64)
    A, least = _spectrum(m, n, sizes), float(sizes[k:].norm())
    extmath = require_extra("sklearn.utils.extmath", "bench")

    def lowrank(niter: int, seed: int) -> Any:
        torch.manual_seed(seed)
        U, S, V = torch.svd_lowrank(A, q=k + 10, niter=niter)
        return U[:, :k], S[:k], V[:, :k].mT

    def panther_svd(n_iter: Any, seed: int) -> Any:
        U, S, V = linalg.randomized_svd(A, k, n_iter=n_iter, seed=seed)
        return U, S, V.mT

    def error_of(factors: Any) -> float:
        U, S, Vh = (torch.as_tensor(np.ascontiguousarray(factor)) for factor in factors)
        return float((A - U * S @ Vh).norm()) / least - 1

    calls: Calls = {
        "randomized_svd": partial(panther_svd, "auto"),
        "randomized_svd, n_iter=8": partial(panther_svd, 8),
        "torch.svd_lowrank, niter=2": partial(lowrank, 2),
        "torch.svd_lowrank, niter=4": partial(lowrank, 4),
        "sklearn randomized_svd": lambda seed: extmath.randomized_svd(A.numpy(), k, random_state=seed),
    }
    return f"SVD of {m} x {n}, values 1/i, k = {k}", "error over the least, less 1", calls, error_of


def _eigenvalues(quick: bool) -> tuple[str, str, Calls, Callable[[Any], float]]:
    X, k = _digits(quick), 10
    K = _rbf(X, X, 20.0)
    exact = torch.linalg.eigvalsh(K).flip(0)[:k]

    def lobpcg(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.lobpcg(K, k=k)[0]

    def arpack(seed: int) -> Any:
        return scipy.sparse.linalg.eigsh(K.numpy(), k, rng=seed)[0][::-1].copy()

    calls: Calls = {
        "nystrom": lambda seed: linalg.nystrom(K, k, seed=seed).L,
        "randomized_eigh": lambda seed: linalg.randomized_eigh(K, k, seed=seed).L,
        "randomized_eigh, n_iter=8": lambda seed: linalg.randomized_eigh(K, k, n_iter=8, seed=seed).L,
        "torch.lobpcg": lobpcg,
        "scipy eigsh (ARPACK)": arpack,
    }
    name = f"{k} eigenvalues of a kernel, {len(X)} digits"
    return name, "largest relative error", calls, lambda L: float(((torch.as_tensor(L) - exact) / exact).abs().max())


def _columns(quick: bool) -> tuple[str, str, Calls, Callable[[Any], float]]:
    A, k = _photographs(quick), 5 if quick else 40
    A = A[: len(A) // 2].contiguous()
    least = float(torch.linalg.svdvals(A)[k:].norm())

    def selected(seed: int) -> Any:
        J, T, *_ = linalg.interpolative(A, k, seed=seed)
        return J, T

    def sampled(seed: int) -> Any:
        order, coefficients = scipy_interpolative.interp_decomp(A.numpy(), k, rand=True, rng=seed)
        T = np.hstack((np.eye(k), coefficients))[:, np.argsort(order)]
        return order[:k], T

    def pivoted(seed: int) -> Any:
        _, R, order = scipy.linalg.qr(A.numpy(), mode="economic", pivoting=True)
        T = scipy.linalg.solve_triangular(R[:k, :k], R[:k])[:, np.argsort(order)]
        return order[:k], T

    def error_of(parts: Any) -> float:
        J, T = (torch.as_tensor(part) for part in parts)
        return float((A - A[:, J.long()] @ T).norm()) / least - 1

    calls: Calls = {
        "interpolative": selected,
        "scipy interp_decomp, randomized": sampled,
        "scipy qr(pivoting=True)": pivoted,
    }
    m, n = A.shape
    return f"{k} columns of a photograph, {m} x {n}", "error over the least, less 1", calls, error_of


def _kernel(quick: bool) -> tuple[str, str, Calls, Callable[[Any], float]]:
    image = require_extra("sklearn.datasets", "bench").load_sample_image("flower.jpg")
    pixels = torch.tensor(image).double().reshape(-1, 3) / 255
    X = pixels[:: len(pixels) // (200 if quick else 1000)]
    k, ones = 20 if quick else 100, torch.ones(len(X), dtype=X.dtype)

    def column(index: Tensor) -> Tensor:
        return _rbf(X, X[index], 0.1)

    def uniform(seed: int) -> Tensor:
        index = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))[:k]
        C = column(index)
        L, V = torch.linalg.eigh(C[index])
        return C @ (V / L.clamp_min(1e-13 * float(L[-1])).sqrt())

    def from_products(seed: int) -> Tensor:
        U, L = linalg.nystrom(_rbf(X, X, 0.1), k, seed=seed)
        return U * L.sqrt()

    calls: Calls = {
        "rp_cholesky": lambda seed: linalg.rp_cholesky(column, k, diagonal=ones, seed=seed).F,
        "nystrom, of the whole kernel": from_products,
        "uniformly drawn columns": uniform,
    }
    name = f"Kernel of {len(X)} pixels' colours, rank {k}"
    return name, "trace of the error, relative", calls, lambda F: 1 - float(F.square().sum()) / len(X)


def _system(quick: bool) -> tuple[str, str, Calls, Callable[[Any], float]]:
    image = require_extra("sklearn.datasets", "bench").load_sample_image("china.jpg")
    pixels = torch.tensor(image).double().reshape(-1, 3) / 255
    X = pixels[:: len(pixels) // (200 if quick else 1000)]
    K, shift = _rbf(X, X, 0.2), 1e-2
    b = torch.randn(len(X), 2, generator=torch.Generator().manual_seed(0), dtype=K.dtype)
    rank = 20 if quick else 100

    def preconditioned(seed: int) -> Tensor:
        M = linalg.nystrom_preconditioner(K, rank, shift, seed=seed)
        return linalg.pcg(K, b, M, shift=shift, tol=1e-8).x

    def sampled(seed: int) -> Tensor:
        F = linalg.rp_cholesky(K, rank, seed=seed)
        return linalg.pcg(K, b, linalg.nystrom_preconditioner(F, rank, shift), shift=shift, tol=1e-8).x

    def scipy_cg(seed: int) -> Any:
        matrix = K.numpy() + shift * np.eye(len(X))
        columns = [scipy.sparse.linalg.cg(matrix, column, rtol=1e-8)[0] for column in b.numpy().T]
        return torch.as_tensor(np.stack(columns, axis=1))

    def direct(seed: int) -> Tensor:
        return torch.cholesky_solve(b, torch.linalg.cholesky(K + shift * torch.eye(len(X), dtype=K.dtype)))

    calls: Calls = {
        "pcg, nystrom_preconditioner": preconditioned,
        "pcg, from rp_cholesky": sampled,
        "pcg alone": lambda seed: linalg.pcg(K, b, shift=shift, tol=1e-8).x,
        "scipy cg": scipy_cg,
        "torch cholesky": direct,
    }
    name = f"Kernel system of {len(X)} pixels, 2 right-hand sides"
    return name, "residual, relative", calls, lambda x: float((K @ x + shift * x - b).norm() / b.norm())


def _hutchinson(A: Tensor, m: int, seed: int) -> Tensor:
    """Return the mean of z * (A z) over m vectors of random signs."""
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randint(0, 2, (len(A), m), generator=generator).double() * 2 - 1
    return (Z * (A @ Z)).mean(dim=1)


def _trace(quick: bool) -> tuple[str, str, Calls, Callable[[Any], float]]:
    n, m = (200, 30) if quick else (1000, 120)
    A = _symmetric(n)
    exact = float(A.trace())
    calls: Calls = {
        "trace": lambda seed: linalg.trace(A, m, seed=seed).value,
        "trace, semidefinite": lambda seed: linalg.trace(A, m, semidefinite=True, seed=seed).value,
        "Hutchinson": lambda seed: _hutchinson(A, m, seed).sum(),
    }
    name = f"Trace, eigenvalues i^-2, n = {n}, {m} products"
    return name, "relative error", calls, lambda value: abs(float(value) / exact - 1)


def _diagonal(quick: bool) -> tuple[str, str, Calls, Callable[[Any], float]]:
    n, m = (200, 30) if quick else (1000, 120)
    A = _symmetric(n)
    exact = A.diagonal()
    calls: Calls = {
        "diag, symmetric": lambda seed: linalg.diag(A, m, symmetric=True, seed=seed).value,
        "Hutchinson": lambda seed: _hutchinson(A, m, seed),
    }
    name = f"Diagonal, eigenvalues i^-2, n = {n}, {m} products"
    return name, "relative error", calls, lambda value: float((value - exact).norm() / exact.norm())


def _symmetric(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    V = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    return V * torch.arange(1.0, n + 1, dtype=V.dtype) ** -2 @ V.mT


def _least_squares(quick: bool) -> tuple[str, str, Calls, Callable[[Any], float]]:
    m, n = (2000, 40) if quick else (16_000, 320)
    A = _spectrum(m, n, torch.logspace(0, -2, n, dtype=torch.float64))
    b = A.sum(dim=1) + 0.01 * torch.randn(m, generator=torch.Generator().manual_seed(1), dtype=A.dtype)
    best = A @ torch.linalg.lstsq(A, b[:, None], driver="gelsd").solution[:, 0]

    def lsqr(seed: int) -> Tensor:
        return torch.as_tensor(scipy.sparse.linalg.lsqr(A.numpy(), b.numpy(), atol=1e-12, btol=1e-12)[0])

    calls: Calls = {
        "sketch_lstsq": lambda seed: linalg.sketch_lstsq(A, b, seed=seed).x,
        "torch.linalg.lstsq, gels": lambda seed: torch.linalg.lstsq(A, b[:, None], driver="gels").solution[:, 0],
        "scipy LSQR": lsqr,
        "normal equations": lambda seed: torch.linalg.solve(A.mT @ A, A.mT @ b),
    }
    name = f"Least squares, {m} x {n}, condition 1e2"
    return name, "error of the fit, relative", calls, lambda x: float((A @ x - best).norm() / best.norm())


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=1.0, memory=("default",))
