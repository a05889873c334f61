r"""Least squares by sketching and preconditioning, to the accuracy of a direct solver.

The R of a QR factorisation of the sketch S A, with d rows, makes :math:`A R^{-1}` well-conditioned: its singular values
lie near :math:`[1/(1 + \rho), 1/(1 - \rho)]` with :math:`\rho = \sqrt{n / d}`, and each iteration multiplies the
error by about :math:`\rho`. After Avron, Maymounkov and Toledo (Blendenpik, 2010), doi:10.1137/090767911; Meng,
Saunders and Mahoney (LSRN, 2014), doi:10.1137/120866580; Epperly, Meier and Nakatsukasa (2024), arXiv:2406.03468.
"""

__all__ = ["LstsqResult", "right_hand_side", "scaled_columns", "sketch_lstsq"]

import math
import warnings
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from panther.errors import DTypeError, NumericalWarning, ShapeError
from panther.kernels.reference import coo_tensor
from panther.linalg._preconditioner import Preconditioner, diagonal, from_columns, from_gram, from_rows
from panther.linalg._ranks import sharded_qr
from panther.linalg._refinement import MAX_STEPS, Solution, System, refine, smallest_singular_value, solve_quickly
from panther.linalg.error import ErrorEstimate
from panther.linalg.operand import (
    Operand,
    as_dense,
    as_operand,
    check_finite,
    check_number,
    check_penalty,
    driver,
    tensor_of,
    times_two_to,
    unsafe_power,
)
from panther.linalg.sharded import ShardedOperand
from panther.sketch import SignSketch, SparseSketch, check_seed

# Cost of reading an entry of A for one right-hand side, in units of its cost in QR for each column (measured).
_PASS = 9
# A sparse or matrix-free A may be converted into a dense matrix of at most this many entries.
_DENSE_LIMIT = 1 << 29
# Entries of a block of the sketch of a matrix-free A.
_BLOCK = 1 << 24
_CONFIDENCE = 0.999
# Costs in units of a product of two entries in A^T A, for a sparse A (measured): an entry of A for a step of conjugate
# gradients and a right-hand side; and how much less an entry of a Cholesky factorisation takes.
_STEP, _CUBE = 0.36, 250
# A fast iteration gains this many digits a step. If it would take most of the time of factoring, it is not tried.
_DIGITS = 0.8
# Warn about a backward error above this multiple of a direct solver's.
_WARN = 100.0


class LstsqResult(NamedTuple):
    """A least-squares solution.

    Attributes:
        x: The solution, (n,) or (n, p) as b is (m,) or (m, p).
        residual_norm: ``||A x - b||`` of each right-hand side, () or (p,).
        iterations: Products with A^T A that were needed; 0 if a direct solver was used.
    """

    x: Tensor
    residual_norm: Tensor
    iterations: int


class _Options(TypedDict, total=False):
    ridge: float
    tol: float | None
    seed: int | None


@overload
def sketch_lstsq(A: Any, b: Any, **options: Unpack[_Options]) -> LstsqResult: ...
@overload
def sketch_lstsq(
    A: Any, b: Any, *, return_error: Literal[True], **options: Unpack[_Options]
) -> tuple[LstsqResult, ErrorEstimate]: ...
@driver
def sketch_lstsq(
    A: Any, b: Any, *, ridge: float = 0.0, tol: float | None = None, seed: int | None = None, return_error: bool = False
) -> LstsqResult | tuple[LstsqResult, ErrorEstimate]:
    r"""Minimise :math:`\|A x - b\|^2 + \text{ridge}\,\|x\|^2`, fast where A is tall.

    By default x is as accurate as the solution of a direct solver: its backward error is at most about
    :math:`\epsilon \|A\|_F`, up to condition numbers of :math:`10^{13}` in float64 and :math:`10^{5}` in float32. Where
    columns of A depend on each other, to :math:`4 \sqrt n\, \epsilon` of the largest singular value, x has least norm.

    Args:
        A: One matrix, (m, n); kinds, dtypes and errors as for :mod:`panther.linalg`.
        b: One right-hand side (m,), or p of them (m, p), with A's dtype and device.
        ridge: Weight of the penalty, 0 or more.
        tol: Stop once the fitted values are within ``tol`` of their optimum, relative to the root of the objective:
            :math:`\|A (x - x^*)\| \le \text{tol}\,\|A x - b\|` as estimated. The residual norm then exceeds the least
            one by a relative ``tol**2 / 2``. None, or a lower tolerance than a direct solver reaches, continues to the
            accuracy of a direct solver.
        seed: The seed of the sketch; None draws one from torch's default CPU generator.
        return_error: Whether to return, as well, how far the fitted values are from their optimum.

    Returns:
        ``(x, residual_norm, iterations)``; with ``return_error`` a pair of this and an :class:`ErrorEstimate`, whose
        ``frobenius`` and ``upper`` are, for each right-hand side, an estimate of :math:`\|A (x - x^*)\|` (with a ridge,
        of :math:`(\|A (x - x^*)\|^2 + \text{ridge} \|x - x^*\|^2)^{1/2}`) and what it is at most with probability
        ``confidence``, ``relative`` is ``frobenius`` over the root of the objective, and ``probes`` is 1: the bound is
        :math:`\|R^{-T} A^T (b - A x)\| / \sigma_{\min}(A R^{-1})`, and :math:`\sigma_{\min}` is bounded below by the
        Lanczos method from one random vector, which is independent of the sketch (J. Kuczyński and H. Woźniakowski,
        SIAM J. Matrix Anal. Appl. 13, 1992, doi:10.1137/0613066). A direct solver needs no vector: ``probes`` is 0 and
        ``confidence`` 1. Either has :math:`4 \epsilon \kappa(R) \|A x - b\|` added for rounding.

    Raises:
        ShapeError: If b does not fit A, or a sparse or matrix-free A is not tall and too large to be made dense.
        DTypeError: If b has another dtype or device than A.
        ValueError: If b is not finite, ``ridge`` or ``tol`` is out of its range, or the solution overflows.

    Warns:
        NumericalWarning: If the iteration ends with a backward error far above a direct solver's. The message states
            it.

    Cost: a sparse sketch of :math:`d \approx 1.1 \sqrt{m n}` rows, its QR factorisation (``2 d n^2`` flops), and one
    pass over A (``4 m n p`` flops, bound by memory for few right-hand sides) an iteration, about
    :math:`2 \log(1/\epsilon) / \log(d / n)` times, some 20 to 40; with a tolerance ``2 log(1/tol) / log(d / n)`` times.
    The error takes 16 passes more, mostly. Memory beyond A and b: ``d n``.

    A sparse A is solved by conjugate gradients with its columns scaled, if the first three steps, for a known solution,
    predict that this takes less time. Otherwise, if A has few columns, the Cholesky factor of A^T A preconditions in
    the place of the sketch, if the condition allows it.

    A dense A is solved by QR of A itself if this is expected to be faster: with fewer than some 300 columns (100 with a
    tolerance or in float32), or with fewer than 10 to 40 rows per column. A wide A is solved by a singular value
    decomposition. A sparse or matrix-free A is sketched if it has at least ``4 n + 64`` rows, and made
    dense otherwise. The sketch of a matrix-free A multiplies A.T by as many vectors as the sketch has rows.

    Example:
        The progress of diabetes from ten measurements of 442 patients, which scikit-learn (extra ``demo``) brings:

        >>> from sklearn.datasets import load_diabetes
        >>> A, b = map(torch.tensor, load_diabetes(return_X_y=True))
        >>> x, residual_norm, iterations = sketch_lstsq(A, b - b.mean())
        >>> reference = torch.linalg.lstsq(A, (b - b.mean())[:, None])
        >>> torch.allclose(x, reference.solution[:, 0])
        True
        >>> round((residual_norm / torch.linalg.norm(b - b.mean())).item(), 2)
        0.69
    """
    operand = as_operand(A, batched=False)
    if isinstance(operand, ShardedOperand):
        seed = operand.ranks.seed(check_seed(seed))
        A, b = _from_shards(operand, b)
        operand = as_operand(A)
    b = right_hand_side(b, operand)
    check_finite("b", b)
    ridge = check_penalty("ridge", ridge)
    if tol is not None:
        fix = "None for the accuracy of a direct solver"
        tol = check_number("tol", tol, "positive and finite", lambda number: 0 < number < math.inf, fix)
    columns = b[:, None] if b.ndim == 1 else b
    result, error = _solve(_explicit(operand), columns, ridge, tol or 0.0, check_seed(seed), return_error)
    if b.ndim == 1:
        result = LstsqResult(result.x[:, 0], result.residual_norm[0], result.iterations)
        if error:
            error = error._replace(frobenius=error.frobenius[0], upper=error.upper[0], relative=error.relative[0])
    return (result, error) if error else result


def scaled_columns(b: Tensor) -> tuple[Tensor, list[int]]:
    """Return b, (m, p), with each column over a power of two near its largest entry, and the exponents."""
    powers = [math.frexp(value)[1] for value in b.abs().amax(dim=0).tolist()] if len(b) else [0] * b.shape[1]
    return times_two_to(b, [-power for power in powers]), powers


def right_hand_side(b: Any, operand: Operand) -> Tensor:
    """Return b as a tensor of the operand's dtype, or raise unless it fits the operand."""
    is_tensor, b = isinstance(b, Tensor), as_dense("b", b)
    m = operand.shape[0]
    if b.ndim not in (1, 2) or b.shape[0] != m:
        raise ShapeError(
            f"b, of shape {tuple(b.shape)}, must have the shape ({m},) or ({m}, p) to go with A, of shape "
            f"{tuple(operand.shape)}: reshape or transpose it"
        )
    if not b.dtype.is_floating_point or torch.promote_types(b.dtype, torch.float32) != operand.dtype:
        name = str(operand.dtype).removeprefix("torch.")
        fix = f"b.to({operand.dtype})" if is_tensor else f"b.astype({name!r})"
        raise DTypeError(f"b is {b.dtype} and A is computed in {operand.dtype}: use {fix}, or cast A")
    if b.device != operand.device:
        raise DTypeError(f"b is on {b.device} and A on {operand.device}: use b.to({str(operand.device)!r})")
    cast: Tensor = b.to(operand.dtype)
    return cast


def _from_shards(operand: ShardedOperand, b: Any) -> tuple[Tensor, Tensor]:
    """Return a small problem of equal solutions and residual norms: R of a QR factorisation of A and b together."""
    b = right_hand_side(b.to_local() if hasattr(b, "to_local") else b, operand.local)
    rows = torch.cat((as_dense("A", operand.local.A), b[:, None] if b.ndim == 1 else b), 1)
    operand.check_finite(rows)
    _, R = sharded_qr(rows, operand.ranks)
    n = operand.shape[1]
    return R[:, :n], R[:, n] if b.ndim == 1 else R[:, n:]


def _explicit(operand: Operand) -> Operand:
    """Return the operand in COO layout if A is a sparse tensor."""
    A = operand.A
    is_other_layout = isinstance(A, Tensor) and A.layout not in (torch.strided, torch.sparse_coo)
    return _like(operand, A.to_sparse_coo()) if is_other_layout else operand


def _like(operand: Operand, A: Any) -> Operand:
    return Operand(A, operand.dtype, operand.device)


def _solve(
    operand: Operand, b: Tensor, ridge: float, tol: float, seed: int, return_error: bool
) -> tuple[LstsqResult, ErrorEstimate | None]:
    (m, n), p = operand.shape, b.shape[1]
    b, powers = scaled_columns(b)
    if 0 in (m, n, p):
        norms = times_two_to(b.norm(dim=0), powers)
        nothing = torch.zeros_like(norms)
        error = ErrorEstimate(nothing, nothing, nothing, 1.0, 0) if return_error else None
        return LstsqResult(b.new_zeros(n, p), norms, 0), error
    root = math.sqrt(ridge)
    if (solved := _quick_solution(operand, b, root, tol, seed)) is not None:
        system, scaling, solution = solved
        error = _error(system, scaling, solution, seed, True, powers) if return_error else None
        return _result(solution.x, solution.residual_norm, solution.steps, powers, powers), error
    sketched = _is_worth_sketching(operand, p, tol)
    operand = operand if sketched else _densified(operand)
    if sketched and (factored := _from_gram(operand, b, root, seed)) is not None:
        (N, x), power, norm = factored, 0, None
    else:
        operand, N, x, norm, power = _factored(operand, b, root, seed, sketched)
        root = math.ldexp(root, -power)
    error, steps = None, 0
    if sketched or return_error or norm is None:  # A direct solver that returns the norms needs no pass over A.
        system = System(operand, b, root**2)
        solution = refine(system, N, x, tol, stages=10 if sketched else 1)
        if sketched:
            _warn(solution, N)
        x, norm, steps = solution.x, solution.residual_norm, solution.steps
        error = _error(system, N, solution, seed, sketched, powers) if return_error else None
    return _result(x, norm, steps, [power_b - power for power_b in powers], powers), error


def _result(x: Tensor, norm: Tensor, steps: int, powers: list[int], norm_powers: list[int]) -> LstsqResult:
    """Return the result from x, (p, n), and residual norms, (p,), times powers of two."""
    x, norm = times_two_to(x.mT, powers).contiguous(), times_two_to(norm, norm_powers)
    if not bool(x.isfinite().all() & norm.isfinite().all()):
        raise ValueError(f"the solution overflows {x.dtype}: divide b by its largest entry, or use float64")
    return LstsqResult(x, norm, steps)


def _quick_solution(
    operand: Operand, b: Tensor, root: float, tol: float, seed: int
) -> tuple[System, Preconditioner, Solution] | None:
    """Solve by conjugate gradients with scaled columns where A is sparse, if this takes less time than factoring."""
    m, n = operand.shape
    A = _csr(operand, root)
    if A is None or not A.nnz or m <= n:
        return None
    step = _STEP * A.nnz * (b.shape[1] + 1)
    limit = int(min((_gram_cost(A) + n**3 / _CUBE) / step, MAX_STEPS))
    squares = np.bincount(A.indices, weights=np.square(A.data, dtype=np.float64), minlength=n)
    goal = max(torch.finfo(b.dtype).eps, min(tol, 1.0) / 10)
    if _DIGITS * limit < -math.log10(goal) or not float(squares.min()) > 0:
        return None
    lengths = torch.from_numpy(np.sqrt(squares + root**2)).to(b.dtype)
    scaling = diagonal(lengths, math.sqrt(float(squares.sum())))
    system = System(operand, b, root**2)
    solution = solve_quickly(system, scaling, tol, goal, limit, seed)
    return None if solution is None else (system, scaling, solution)


def _csr(operand: Operand, root: float) -> Any:
    """Return A if it is sparse, on a CPU, and squares of its entries and of ``root`` are in range, else None."""
    if operand.dense is not None or not operand.has_entries or operand.device.type != "cpu":
        return None
    largest = max(float(np.abs(operand.factor.data).max(initial=0.0)), root)
    return operand.factor if math.isfinite(largest) and not unsafe_power(largest, operand.dtype) else None


def _gram_cost(A: Any) -> float:
    """Return the number of products of two entries in A^T A of a CSR matrix."""
    return float(np.square(np.diff(A.indptr), dtype=np.float64).sum())


def _factored(
    operand: Operand, b: Tensor, root: float, seed: int, sketched: bool
) -> tuple[Operand, Preconditioner, Tensor, Tensor | None, int]:
    """Factor A or its sketch: return A over a power of two, preconditioner, solution, its residual norm, and the power.

    The power is 0 unless squares times the condition would overflow.
    """
    SA, Sb = _sketch(operand, b, seed) if sketched else (operand.A, b)
    low, high = (float(bound) for bound in SA.aminmax())
    if not math.isfinite(low + high):
        operand.check_finite(SA)
    if power := unsafe_power(max(-low, high, root), b.dtype):  # Squares times the condition must not overflow.
        operand, root = _scaled(operand, -power), math.ldexp(root, -power)
        SA, Sb = _sketch(operand, b, seed) if sketched else (operand.A, b)
    if sketched or operand.shape[0] >= operand.shape[1]:
        return operand, *from_columns(SA, Sb, root, seed), power
    return operand, *from_rows(SA, Sb, root), None, power


def _from_gram(operand: Operand, b: Tensor, root: float, seed: int) -> tuple[Preconditioner, Tensor] | None:
    """Factor A^T A where A is sparse and has few columns, which then takes less than a sketch of A and its QR."""
    n, A = operand.shape[1], _csr(operand, root)
    if A is None or _gram_cost(A) + n**3 / 3 > 2 * _sketch_size(operand) * n**2:
        return None
    A = A.astype(np.float64, copy=False)
    return from_gram(tensor_of((A.T @ A).toarray()), tensor_of(A.T @ b.double().numpy()), root, seed, b.dtype)


def _is_worth_sketching(operand: Operand, p: int, tol: float) -> bool:
    """Return whether factoring a sketch of A and iterating costs less than factoring A."""
    (m, n), d = operand.shape, _sketch_size(operand)
    if operand.dense is None:
        return d < m
    digits = -math.log(max(tol, torch.finfo(operand.dtype).eps))
    passes = 3 + 2 * max(digits, 0) / math.log(d / n)
    return d < m and _PASS * passes * (1 + (p - 1) / 2) < n * (1 - d / m)


def _sketch_size(operand: Operand) -> int:
    """Return the number of rows of the sketch, such that its QR costs about as much as the passes over A."""
    values = operand.values
    entries = getattr(operand.A, "nnz", 0) if values is None else values.numel()
    return max(4 * operand.shape[1] + 64, math.ceil(1.1 * math.sqrt(entries)))


def _densified(operand: Operand) -> Operand:
    if operand.dense is not None:
        return operand
    m, n = operand.shape
    _check_memory("A is solved as a dense matrix where it is not tall", m, n, operand)
    return _like(operand, operand.matmul(operand.eye()))


def _check_memory(purpose: str, rows: int, columns: int, operand: Operand) -> None:
    if rows * columns > _DENSE_LIMIT:
        raise ShapeError(
            f"A, of shape {tuple(operand.shape)}, must be small enough: {purpose}, and {rows} x {columns} numbers are "
            f"more than {_DENSE_LIMIT}: use scipy.sparse.linalg.lsmr"
        )


def _sketch(operand: Operand, b: Tensor, seed: int) -> tuple[Tensor, Tensor]:  # (d, n), (d, p)
    (m, n), d, A = operand.shape, _sketch_size(operand), operand.A
    if operand.dense is None:
        _check_memory("its sketch is dense", d, n, operand)
    if operand.has_entries:
        S = SparseSketch(d, m, seed=seed, dtype=b.dtype, device=b.device)
        return S @ (A if isinstance(A, Tensor) else _coo_tensor(A).to(b.device, b.dtype)), S @ b
    signs = SignSketch(d, m, seed=seed, dtype=b.dtype, device=b.device)
    rows = max(1, _BLOCK // m)
    blocks = [signs.block(range(start, min(start + rows, d)), range(m)) for start in range(0, d, rows)]
    return torch.cat([operand.rmatmul(block.mT).mT for block in blocks]), torch.cat([block @ b for block in blocks])


def _coo_tensor(A: Any) -> Tensor:
    """Return a matrix of scipy as a COO tensor, whose entries are in any order: sorting them would take longer."""
    coo = A.tocoo()
    index = torch.as_tensor(np.stack((coo.row, coo.col)), dtype=torch.int64)
    return coo_tensor(index, tensor_of(coo.data), coo.shape)


def _scaled(operand: Operand, power: int) -> Operand:
    if not operand.has_entries:
        raise ValueError(f"the entries of A must be nearer to 1 than 2^{-power}: scale A, and x by the inverse")
    if operand.dense is not None:
        return _like(operand, times_two_to(operand.dense, [power]))
    A = operand.A
    if not isinstance(A, Tensor):
        scaled = times_two_to(tensor_of(A.data), [power]).numpy()
        return _like(operand, type(A)((scaled, A.indices, A.indptr), shape=A.shape))
    values = times_two_to(A.values(), [power])
    return _like(operand, coo_tensor(A.indices(), values, (A.shape[0], A.shape[1]), is_coalesced=True))


def _warn(solution: Solution, N: Preconditioner) -> None:
    size = N.frobenius * (solution.objective + N.frobenius * solution.x.norm(dim=1))
    if N.V is not None:
        # Unless S missed a direction, the gradient outside the row space is rounding.
        outside = solution.gradient - (solution.gradient @ N.V) @ N.V.mT
        excess = float((outside.norm(dim=1) / size / torch.finfo(size.dtype).eps).nan_to_num(0).max())
    else:
        excess = 0.0
    excess = max(solution.excess, excess / len(solution.gradient.mT))
    if excess > _WARN:
        warnings.warn(
            f"after {solution.steps} iterations the backward error is {excess:.1e} times that of a direct solver "
            f"(condition about {N.condition:.1e}): use another seed, a ridge, or torch.linalg.lstsq",
            NumericalWarning,
            stacklevel=5,  # names the caller of the driver
        )


def _error(
    system: System, N: Preconditioner, solution: Solution, seed: int, sketched: bool, powers: list[int]
) -> ErrorEstimate:
    smallest = smallest_singular_value(system, N, seed, 1 - _CONFIDENCE) if sketched else 1.0
    rounding = N.condition * solution.objective + N.size * solution.x.norm(dim=1)
    rounding *= 4 * torch.finfo(solution.x.dtype).eps
    upper = solution.distance / smallest + rounding if smallest else torch.full_like(rounding, math.inf)
    relative = torch.where(solution.distance > 0, solution.distance / solution.objective, 0.0)
    frobenius, upper = (times_two_to(part, powers) for part in (solution.distance, upper))
    return ErrorEstimate(frobenius, upper, relative, _CONFIDENCE if sketched else 1.0, int(sketched))
