"""Compare drivers on sparse matrices to scikit-learn, scipy and torch: time and error.

The matrices are of scipy in CSR, and once more a tensor in COO where torch's own function takes one. The error of a
truncated SVD is its Frobenius error over that of the best matrix of this rank, minus 1; that of a sketch the relative
error of the mean squared length of the rows; that of least squares the relative distance of the fitted values from the
optimum.
"""

__all__ = ["run"]

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse
import torch
from scipy.sparse import linalg as sparse_linalg
from torch import Tensor

from benchmarks.harness import figure, interleave, main, print_table, write_csv
from panther.errors import require_extra
from panther.linalg import randomized_svd, sketch_lstsq
from panther.sketch import SparseSketch

Calls = dict[str, Callable[[], Any]]


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every problem and write the CSV; sparse matrices are multiplied on the CPU."""
    if device != "cpu":
        print("Sparse matrices of scipy are on the CPU: nothing is measured.")
        return
    shrink = 20 if quick else 1
    rows = [
        *_svd("Zipf columns", _zipf(15_000 // shrink, 10_000 // shrink, 600_000 // shrink**2), 50 // shrink, budget_s),
        *_svd("uniform", _uniform(20_000 // shrink, 8_000 // shrink, 0.001 * shrink), 30 // shrink, budget_s),
        *_sketch(_uniform(8_000 // shrink, 30_000 // shrink, 0.001 * shrink), 300 // shrink, budget_s),
        *_least_squares(300_000 // shrink, 300 // shrink, budget_s),
    ]
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('sparse', rows, device=device)}")


def _uniform(m: int, n: int, density: float) -> scipy.sparse.csr_array:
    return scipy.sparse.random_array((m, n), density=density, format="csr", dtype=np.float32, rng=0)


def _zipf(m: int, n: int, count: int) -> scipy.sparse.csr_array:
    """Return counts of words as texts have them: few columns hold most entries."""
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(0, m, count), np.minimum(rng.zipf(1.3, count) - 1, n - 1)
    return scipy.sparse.coo_array((rng.random(count, dtype=np.float32), (rows, columns)), shape=(m, n)).tocsr()


def _tensor(A: scipy.sparse.csr_array) -> Tensor:
    coo = A.tocoo()
    index = torch.from_numpy(np.stack(coo.coords).astype(np.int64))
    return torch.sparse_coo_tensor(index, torch.from_numpy(coo.data), A.shape, check_invariants=False).coalesce()


def _measure(problem: str, A: Any, calls: Calls, error_of: Callable[[Any], float], budget_s: float) -> Any:
    timings = interleave(calls, budget_s=budget_s)
    ours = next(iter(calls))
    return [
        {
            "problem": problem,
            "entries": A.nnz,
            "method": name,
            "time_ms": figure(timings[name].median_s * 1e3),
            "x panther": figure(timings[name].ratio_to(timings[ours])),
            "error": f"{error_of(call()):.1e}",
        }
        for name, call in calls.items()
    ]


def _svd(kind: str, A: scipy.sparse.csr_array, k: int, budget_s: float) -> list[dict[str, Any]]:
    k, tensor, total = max(k, 2), _tensor(A), float(np.square(A.data.astype(np.float64)).sum())
    best = total - float(np.square(sparse_linalg.svds(A.astype(np.float64), k, rng=0)[1]).sum())
    theirs = require_extra("sklearn.utils.extmath", "bench").randomized_svd

    def error_of(factors: tuple[Any, ...]) -> float:
        U, S, V = (np.asarray(factor, dtype=np.float64) for factor in factors)
        squared = total - 2 * float((U * (A @ V) * S).sum()) + float(np.square(S).sum())
        return (squared / best) ** 0.5 - 1

    def transposed(factors: tuple[Any, ...]) -> tuple[Any, ...]:
        return factors[0], factors[1], factors[2].T

    calls: Calls = {
        "panther": lambda: randomized_svd(A, k, seed=0),
        "panther, COO tensor": lambda: randomized_svd(tensor, k, seed=0),
        "torch.svd_lowrank, COO tensor": lambda: torch.svd_lowrank(tensor, k + 10),
        "scikit-learn": lambda: transposed(theirs(A, k, random_state=0)),
        "scipy svds (ARPACK)": lambda: transposed(sparse_linalg.svds(A, k, rng=0)),
    }

    def truncated(factors: tuple[Any, ...]) -> float:
        U, S, V = factors
        return error_of((U[:, :k], S[:k], V[:, :k]) if len(S) > k else factors)

    return _measure(f"SVD of {A.shape[0]} x {A.shape[1]}, {kind}, k = {k}", A, calls, truncated, budget_s)


def _sketch(A: scipy.sparse.csr_array, d: int, budget_s: float) -> list[dict[str, Any]]:
    d, tensor, squares = max(d, 8), _tensor(A), np.asarray(A.multiply(A).sum(1)).ravel()
    projection = require_extra("sklearn.random_projection", "bench").SparseRandomProjection
    S = SparseSketch(d, A.shape[1], seed=0, dtype=torch.float32)
    fitted, dense = (projection(d, random_state=0, dense_output=flag).fit(A) for flag in (False, True))

    def error_of(rows: Any) -> float:
        rows = rows.toarray() if scipy.sparse.issparse(rows) else np.asarray(rows)
        return abs(float(np.square(rows).sum()) / float(squares.sum()) - 1)

    calls: Calls = {
        "panther SJLT, 4 entries a column, dense result": lambda: tensor @ S.T,  # type: ignore[operator]
        "scikit-learn, 1.7 entries a column, dense result": partial(dense.transform, A),
        "scikit-learn, 1.7 entries a column, sparse result": partial(fitted.transform, A),
    }
    return _measure(f"sketch of {A.shape[0]} x {A.shape[1]} to {d} columns", A, calls, error_of, budget_s)


def _least_squares(m: int, n: int, budget_s: float) -> list[dict[str, Any]]:
    columns = scipy.sparse.diags_array(np.logspace(0, 4, n))
    A = (scipy.sparse.random_array((m, n), density=10 / n, format="csr", rng=0) @ columns).tocsr()
    b = A @ (1 / np.logspace(0, 4, n)) + 1e-3 * np.random.default_rng(0).standard_normal(m)
    exact = A @ np.linalg.lstsq((A.T @ A).toarray(), A.T @ b, rcond=None)[0]
    for _ in range(3):  # refined, because the normal equations square the condition
        exact += A @ np.linalg.lstsq((A.T @ A).toarray(), A.T @ (b - exact), rcond=None)[0]

    def error_of(x: Any) -> float:
        return float(np.linalg.norm(A @ np.asarray(x) - exact) / np.linalg.norm(b - exact))

    calls: Calls = {
        "panther": lambda: sketch_lstsq(A, b, seed=0).x,
        "panther, tol = 1e-3": lambda: sketch_lstsq(A, b, tol=1e-3, seed=0).x,
        "normal equations": lambda: np.linalg.solve((A.T @ A).toarray(), A.T @ b),
        "scipy lsmr, 1e-8": lambda: sparse_linalg.lsmr(A, b, atol=1e-8, btol=1e-8, maxiter=2000)[0],
    }
    return _measure(f"least squares, {m} x {n}, columns scaled over 1e4", A, calls, error_of, budget_s)


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=20.0)
