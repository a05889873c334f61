"""Compare sketches to the product with a dense matrix and to scipy's CountSketch: time and distortion of lengths.

Times are those of a sketch that is drawn already, and, for the sparse one, of drawing and applying a fresh one too;
scipy draws in every call. The distortion is the largest deviation from 1 of a singular value of S Q, Q orthonormal, for
a random Q and for the coherent one, the first columns of the identity.

The first table has the simplest alternatives: rows of A drawn without replacement, and the projections of scikit-learn,
which are drawn when they are fitted. They project the rows of a matrix, so they get the transpose of A.
"""

__all__ = ["run"]

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from benchmarks.harness import interleave, main, print_table, write_csv
from panther.errors import MissingExtraError, require_extra
from panther.sketch import SRHT, Axis, GaussianSketch, SignSketch, SketchingOperator, SparseSketch

SHAPES = [(65536, 512, 1024), (65536, 512, 2048), (65536, 64, 256), (4096, 64, 256)]  # m, n, d
DTYPES = [torch.float32, torch.float64]
REFERENCE = "dense product"


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case and write the CSVs."""
    simplest: list[dict[str, Any]] = []
    for m, n, d in [(512, 8, 64)] if quick else SHAPES[:1]:
        if device == "cpu":
            found = _simplest(m, n, d, torch.float32, budget_s)
            print_table(found)
            simplest += found
    if not quick and simplest:
        print(f"written to {write_csv('sketch-simple', simplest, device=device)}")
    rows: list[dict[str, Any]] = []
    for m, n, d in [(512, 8, 64)] if quick else SHAPES:
        for dtype in DTYPES:
            found = _case(m, n, d, dtype, device, budget_s)
            print_table(found)
            rows += found
    if not quick:
        print(f"written to {write_csv('sketch', rows, device=device)}")


def _simplest(m: int, n: int, d: int, dtype: torch.dtype, budget_s: float) -> list[dict[str, Any]]:
    """Compare sparse sketches to a dense product, to drawn rows and to scikit-learn's projections."""
    torch.manual_seed(0)
    A = torch.randn(m, n, dtype=dtype)
    sketches: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, S in {
        REFERENCE: SignSketch(d, m, dtype=dtype, seed=1),
        "SJLT, vec_nnz 4": SparseSketch(d, m, 4, dtype=dtype, seed=1),
        "CountSketch": SparseSketch(d, m, 1, dtype=dtype, seed=1),
    }.items():
        sketches[name] = partial(torch.matmul, S.dense()) if name == REFERENCE else partial(_apply, S)
    drawn = torch.randperm(m, generator=torch.Generator().manual_seed(1))[:d]
    sketches["drawn rows"] = lambda x: x[drawn] * (m / d) ** 0.5
    try:
        projections = require_extra("sklearn.random_projection", "bench")
        for kind, options in (("Gaussian", {}), ("Sparse", {"dense_output": True})):
            projection = getattr(projections, f"{kind}RandomProjection")(d, random_state=1, **options)
            projection.fit(np.ones((1, m), dtype=A.numpy().dtype))
            sketches[f"scikit-learn, {kind}RandomProjection"] = partial(_project, projection)
    except MissingExtraError as error:
        print(error)
    timings = interleave({name: partial(apply, A) for name, apply in sketches.items()}, budget_s=budget_s)
    random, coherent = torch.linalg.qr(A.double()).Q.to(dtype), torch.eye(m, n, dtype=dtype)
    return [
        {
            "m": m,
            "n": n,
            "d": d,
            "dtype": str(dtype).removeprefix("torch."),
            "sketch": name,
            "time_ms": f"{timings[name].median_s * 1e3:.3g}",
            "x dense product": f"{timings[name].ratio_to(timings[REFERENCE]):.3g}",
            **{
                column: f"{(torch.linalg.svdvals(apply(Q).double()) - 1).abs().max().item():.3f}"
                for column, Q in (("distortion", random), ("distortion_coherent", coherent))
            },
        }
        for name, apply in sketches.items()
    ]


def _project(projection: Any, A: Tensor) -> Tensor:
    return torch.from_numpy(projection.transform(A.numpy().T)).mT


def _case(m: int, n: int, d: int, dtype: torch.dtype, device: str, budget_s: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    A = torch.randn(m, n, dtype=dtype, device=device)
    kinds: dict[str, Callable[..., SketchingOperator]] = {
        REFERENCE: partial(SignSketch, d, m),
        "Gaussian": partial(GaussianSketch, d, m),
        "SJLT, vec_nnz 8": partial(SparseSketch, d, m, 8),
        "SJLT, vec_nnz 4": partial(SparseSketch, d, m, 4),
        "SJLT, vec_nnz 2": partial(SparseSketch, d, m, 2),
        "CountSketch": partial(SparseSketch, d, m, 1),
        "long axis, vec_nnz 64": partial(SparseSketch, d, m, 64, Axis.Long),
        "SRHT": partial(SRHT, d, m),
    }
    kinds = {name: partial(kind, dtype=dtype, device=device) for name, kind in kinds.items()}
    drawn = {name: kind(seed=0) for name, kind in kinds.items() if name != "Gaussian"}  # the product is that of signs
    matrix = drawn.pop(REFERENCE).dense()
    fresh = "SJLT, vec_nnz 4, drawn afresh"
    calls: dict[str, Callable[[], object]] = {REFERENCE: lambda: matrix @ A}
    calls |= {name: partial(_apply, S, A) for name, S in drawn.items()}
    calls[fresh] = lambda: kinds["SJLT, vec_nnz 4"](seed=0) @ A
    if device == "cpu":
        array = A.numpy()
        calls["scipy clarkson_woodruff"] = lambda: scipy.linalg.clarkson_woodruff_transform(array, d, seed=0)
    timings = interleave(calls, device=device, budget_s=budget_s)
    timings["Gaussian"] = timings[REFERENCE]
    random = torch.linalg.qr(A.double()).Q
    coherent = torch.eye(m, n, dtype=torch.float64, device=device)
    rows = []
    for name, timing in timings.items():
        kind = kinds.get(name)
        rows.append(
            {
                "m": m,
                "n": n,
                "d": d,
                "dtype": str(dtype).removeprefix("torch."),
                "sketch": name,
                "time_ms": f"{timing.median_s * 1e3:.3g}",
                "x dense product": f"{timing.ratio_to(timings[REFERENCE]):.3g}",
                "distortion": _distortion(kind, random) if kind else "",
                "distortion_coherent": _distortion(kind, coherent) if kind else "",
            }
        )
    return rows


def _apply(S: SketchingOperator, A: Tensor) -> Tensor:
    return S @ A


def _distortion(kind: Callable[..., SketchingOperator], Q: Tensor) -> str:
    S = kind(seed=1).to(dtype=torch.float64)
    return f"{(torch.linalg.svdvals(S @ Q) - 1).abs().max().item():.3f}"


if __name__ == "__main__":
    main(run, __doc__, threads=2, budget_s=10.0)
