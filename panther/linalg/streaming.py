r"""SVD and PCA of rows that arrive in batches or on several ranks, by frequent directions.

A summary B of l rows stands for all rows A. When l more rows have come, the 2 l rows are rotated into l, and the next
squared singular value is subtracted from the trailing squares, so that no direction that keeps coming is dropped every
time: :math:`0 \preceq A^T A - B^T B \preceq \Delta I`, with :math:`\Delta` the sum of what was subtracted. The k
leading squares stay: subtracting from all l gave up to 1.032 times the least error where this gave 1.0001. By the
argument of the paper, :math:`\Delta \le \|A - A_k\|_F^2 / (l + 1 - 2 k)` for any order of rows and any merges.

Rows are kept less their mean, with one more row for each change of the mean, so that the centred and the uncentred
matrix follow from one summary. M. Ghashami, E. Liberty, J. M. Phillips and D. P. Woodruff, "Frequent directions:
simple and deterministic matrix sketching", SIAM J. Comput. 45 (2016), arXiv:1501.01711; A. Desai, M. Ghashami and J. M.
Phillips, "Improved practical matrix sketching with guarantees", 2016, arXiv:1501.06561 (trailing squares).
"""

__all__ = ["PCAResult", "StreamedSVD", "StreamingSVD"]

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from panther.errors import DTypeError, FormatError, ShapeError, check_device, check_floating, check_size
from panther.linalg._ranks import Group, Ranks
from panther.linalg.error import ErrorEstimate
from panther.linalg.operand import Operand, as_operand, check_finite, driver, tensor_of
from panther.linalg.orthogonal import core_svd, fix_signs, near_qr, rotate

# Eigenvalues of a Gram matrix above this fraction of the largest one are accurate enough to drop rows by them, in half
# the time of a QR and an SVD.
_GRAM_REACH = 1e-12
# Rows of larger entries could have singular values beyond float32, and squares beyond float64.
_LARGEST = 2.0**100
_FORMAT = 1


class StreamedSVD(NamedTuple):
    """Singular values S (k,), descending, and right singular vectors V (n, k) of rows that are not kept."""

    S: Tensor
    V: Tensor


class PCAResult(NamedTuple):
    """Principal components of rows.

    Attributes:
        V: Components, ``(n, k)``, orthonormal columns.
        variance: Variance along each component, descending, ``(k,)``, with the divisor ``num_rows - 1``.
        ratio: ``variance`` over the variance in all directions, ``(k,)``.
        mean: Mean of all rows, ``(n,)``.
    """

    V: Tensor
    variance: Tensor
    ratio: Tensor
    mean: Tensor


class StreamingSVD:
    r"""SVD and PCA of a matrix whose rows come in batches, in any number and on any number of ranks.

    With the default of 2 k kept rows, :math:`\|A - A V V^T\|_F` was within 1.003 of the least error on a photograph,
    digits and six spectra, in one pass and after merges, and within 1.0002 with 4 k rows; where the subspace drifted
    with the rows, 1.013 and 1.006. How rows are split into batches has no influence. Their order and merges change
    results by rounding and by at most the bound of :meth:`error`. Nothing is random.

    Args:
        n: Number of columns.
        k: Largest number of singular vectors or components that will be asked for, from 1 to n.
        sketch_size: Number l of rows that are kept, 2 k or more; None is 2 k.
        dtype: float32 or float64, of the summary and of results; None is torch's default. Rows in half precision are
            summarised in float32.
        device: Where the summary is; rows are moved there. None is torch's default.

    Attributes:
        num_rows: Number of rows so far.
        shrinkage: The sum :math:`\Delta`: squared singular values of A are at least the squares that :meth:`svd`
            returns and at most :math:`\Delta` more, to rounding.

    Raises:
        ShapeError: If a size is out of its range.
        DTypeError: If ``dtype`` is neither float32 nor float64.

    Cost: memory of ``2 l n`` numbers, and about ``8 l n`` more in float64 while the summary is reduced; about
    ``12 l n`` flops a row, in products of matrices.

    Example:
        >>> import panther as pr
        >>> rows = torch.arange(60.0).reshape(20, 3).sin()
        >>> stream = pr.linalg.StreamingSVD(3, k=1)
        >>> for batch in rows.split(7):
        ...     stream.update(batch)
        >>> V, variance, ratio, mean = stream.pca()
        >>> torch.allclose(mean, rows.mean(0), atol=1e-6)
        True
        >>> best = torch.linalg.svdvals(rows - mean)[1:].norm()
        >>> bool(stream.error(centred=True).upper < 1.01 * best)
        True
        >>> stream.transform(rows).shape
        torch.Size([20, 1])

    Reference: Ghashami, Liberty, Phillips and Woodruff (2016), arXiv:1501.01711.
    """

    def __init__(
        self,
        n: int,
        k: int,
        *,
        sketch_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.n, self.k = check_size("n", n, least=1), check_size("k", k, least=1)
        if self.k > self.n:
            raise ShapeError(f"k={k} must be at most n={n}, the number of columns: use k={n}")
        self.sketch_size = 2 * self.k if sketch_size is None else check_size("sketch_size", sketch_size, least=1)
        if self.sketch_size < 2 * self.k:
            raise ShapeError(f"sketch_size={sketch_size} must be at least 2 k = {2 * self.k}: use {2 * self.k}")
        check_floating("dtype", dtype)
        check_device(device)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if self.dtype not in (torch.float32, torch.float64):
            raise DTypeError(f"dtype={self.dtype} must be float32 or float64: use torch.float32")
        self.device = torch.get_default_device() if device is None else torch.device(device)
        self._sketch = torch.empty(0, self.n, dtype=self.dtype, device=self.device)
        self._pending = self._sketch.new_empty(self.sketch_size, self.n)
        self._num_pending, self._count, self.shrinkage, self._lost = 0, 0, 0.0, 0.0
        self._mean = torch.zeros(self.n, dtype=torch.float64, device=self.device)
        self._components: PCAResult | None = None

    @property
    def num_rows(self) -> int:
        """Return the number of rows so far."""
        return self._count + self._num_pending

    @driver
    def update(self, rows: Any) -> None:  # (m, n)
        """Add rows (m, n), any number, dense or sparse, on any device. If an error is raised, nothing has changed.

        Args:
            rows: A dense or sparse tensor, a NumPy array, a scipy.sparse matrix or a table.

        Raises:
            ShapeError: If rows is not a matrix of n columns.
            DTypeError: If rows is not real and floating, or in float64 where the summary is in float32.
            TypeError: If rows has products and no entries.
            ValueError: If rows has NaN, infinity or entries above 2^100.
        """
        operand = self._checked(rows)
        values = tensor_of(operand.A.data) if operand.values is None else operand.values
        if values.numel():
            low, high = (float(bound) for bound in values.aminmax())
            if not math.isfinite(low + high):
                check_finite("rows", values)
            if max(-low, high) > _LARGEST:
                raise ValueError(
                    f"rows has an entry of {max(-low, high):.3g}, and its square must not overflow: divide all rows "
                    "by one number, so that no entry is above 2^100"
                )
        self._components = None
        start, m = 0, operand.shape[0]
        while start < m:
            stop = min(m, start + self.sketch_size - self._num_pending)
            first, self._num_pending = self._num_pending, self._num_pending + stop - start
            self._pending[first : self._num_pending] = _dense_rows(operand, start, stop)
            if self._num_pending == self.sketch_size:
                self._reduce(*self._stacked())
            start = stop

    def _checked(self, rows: Any) -> Operand:
        operand = as_operand(rows, "rows", batched=False)
        if operand.shape[1] != self.n:
            raise ShapeError(
                f"rows, of shape {tuple(operand.shape)}, must have the {self.n} columns of the summary: check its "
                "layout, or make StreamingSVD with this number"
            )
        if torch.promote_types(operand.dtype, self.dtype) != self.dtype:
            fix = f"use StreamingSVD(..., dtype={operand.dtype}), or cast rows"
            raise DTypeError(f"rows is {operand.dtype} and the summary {self.dtype}: {fix}")
        if not operand.has_entries:
            raise TypeError(f"rows, a {type(rows).__name__}, has products and no entries: pass its entries in batches")
        return operand

    @driver
    def merge(self, other: "StreamingSVD") -> None:
        """Add the rows that another summary stands for, which does not change; the cost is as of ``3 l`` rows.

        Args:
            other: A summary of equal n, k, sketch size and dtype, on any device.

        Raises:
            TypeError: If other is not a StreamingSVD.
            ShapeError: If a size differs.
            DTypeError: If the dtype differs.
        """
        if not isinstance(other, StreamingSVD):
            raise TypeError(f"other must be a StreamingSVD, not {type(other).__name__}: use update for rows")
        sizes, others = ((s.n, s.k, s.sketch_size) for s in (self, other))
        if sizes != others:
            raise ShapeError(f"n, k and sketch_size are {sizes} here and {others} in other: make both with equal sizes")
        if self.dtype != other.dtype:
            raise DTypeError(f"the summary is {self.dtype} and other {other.dtype}: make both with one dtype")
        rows, mean, count = other._stacked()
        stacked = _combined(*self._stacked(), rows.to(self.device), mean.to(self.device), count)
        self._reduce(*stacked)
        self.shrinkage, self._lost = self.shrinkage + other.shrinkage, self._lost + other._lost

    @driver
    def all_reduce(self, group: Group = None) -> "StreamingSVD":
        """Return a summary of the rows of all ranks, bitwise equal on every rank, and leave this one as it is.

        A later call after more updates has the earlier rows once, because this summary stays that of one rank.

        Args:
            group: A process group of torch.distributed, whose every rank calls this, also a rank without rows; None is
                the default group, or this process alone where there is none.

        Raises:
            ShapeError: On every rank, if sizes or dtypes differ between ranks.
            DistributedError: If this rank is not in the group.

        Cost: a rank sends its ``l n`` numbers once and receives at most log2(ranks) summaries, one at a time; then one
        is broadcast.
        """
        ranks = Ranks(group)
        settings = torch.tensor([self.n, self.k, self.sketch_size, self.dtype.itemsize])
        settings_of_ranks = ranks.gather(settings).tolist()
        if any(other != settings_of_ranks[0] for other in settings_of_ranks):
            raise ShapeError(
                f"n, k, sketch_size and bytes per number must be equal on all ranks, and are {settings_of_ranks}: make "
                "StreamingSVD with equal arguments on every rank"
            )
        total = copy.copy(self)
        total._pending = torch.empty_like(self._pending)
        total._reduce(*self._stacked())
        distance = 1
        while distance < ranks.size:  # Pairs of ranks, then of pairs, so that log2(ranks) merges follow each other.
            if ranks.rank % (2 * distance):
                for part in total._message():
                    ranks.send(part, ranks.rank - distance)
                break
            if ranks.rank + distance < ranks.size:
                received = copy.copy(total)
                received._set(*(ranks.receive(like, ranks.rank + distance) for like in total._message()))
                total.merge(received)
            distance *= 2
        total._set(*(ranks.broadcast(part) for part in total._message()))
        return total

    def _message(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state of a summary without pending rows, of fixed shapes."""
        state = self.state_dict()
        rows = torch.nn.functional.pad(state["rows"], (0, 0, 0, self.sketch_size - len(self._sketch)))
        return rows, state["mean"], state["numbers"]

    @driver
    def svd(self, k: int | None = None) -> StreamedSVD:
        """Return the k leading singular values and right singular vectors of the rows; None is the k of the summary.

        In each column of V the entry of largest magnitude is positive (the first of equal entries).

        Raises:
            ShapeError: If k is above the k of the summary or the number of rows.
        """
        k = self._check_rank(k)
        S, V = self._factors(centred=False)
        return StreamedSVD(S[:k], V[:, :k] * fix_signs(V[:, :k]))

    @driver
    def pca(self, k: int | None = None) -> PCAResult:
        """Return the k leading principal components of the rows, centred by the mean of all rows; k as in :meth:`svd`.

        Raises:
            ShapeError: If k is above the k of the summary or the number of rows.
        """
        k = self._check_rank(k)
        S, V = self._factors(centred=True)
        squares = S.double().square()
        variance, total = squares[:k] / max(1, self.num_rows - 1), float(squares.sum()) + self._lost
        ratio = squares[:k] / (total or 1.0)
        parts = (V[:, :k] * fix_signs(V[:, :k]), variance, ratio, self._stacked()[1])
        return PCAResult(*(part.to(self.dtype) for part in parts))

    @driver
    def error(self, k: int | None = None, *, centred: bool = False) -> ErrorEstimate:
        r"""Bound :math:`\|A - A V V^T\|_F` for the k vectors of :meth:`svd`, or of :meth:`pca` if ``centred``.

        ``frobenius`` and ``upper`` are both :math:`(\|A\|_F^2 - \|B V\|_F^2)^{1/2}`, which bounds the error always
        (``confidence`` 1, ``probes`` 0), to rounding, and was within 1.03 of it; ``relative`` is it over
        :math:`\|A\|_F`. The square of the least error of rank k is at least ``upper**2 - k * shrinkage``.

        Raises:
            ShapeError: If k is above the k of the summary or the number of rows.
        """
        k = self._check_rank(k)
        squares = self._factors(centred)[0].double().square()
        error, norm = (math.sqrt(float(part.sum()) + self._lost) for part in (squares[k:], squares))
        numbers = torch.tensor([error, error / (norm or 1.0)], dtype=self.dtype, device=self.device)
        return ErrorEstimate(numbers[0], numbers[0], numbers[1], 1.0, 0)

    @driver
    def transform(self, rows: Any, k: int | None = None) -> Tensor:  # (m, n) -> (m, k)
        """Return the coordinates of rows along the principal components, ``(rows - mean) @ V``.

        Rows, k and errors are as for :meth:`update` and :meth:`pca`. The components are kept until the next update.
        """
        operand = self._checked(rows)
        k = self._check_rank(k)
        if self._components is None:
            self._components = self.pca(min(self.k, self.num_rows))
        V, _, _, mean = self._components
        V, mean = V[:, :k].to(operand.device), mean.to(operand.device)
        if operand.dense is not None:  # Subtracting first loses no digits where the mean is large.
            return (operand.dense.to(self.dtype) - mean) @ V
        return operand.matmul(V.to(operand.dtype)).to(self.dtype) - mean @ V

    def state_dict(self) -> dict[str, Tensor]:
        """Return the summary as tensors. A summary that loads it continues with bitwise equal results."""
        sizes = _FORMAT, self.n, self.k, self.sketch_size, len(self._sketch), self._num_pending, self._count
        return {
            "rows": torch.cat((self._sketch, self._pending[: self._num_pending])),
            "mean": self._mean.clone(),
            "numbers": torch.tensor([*sizes, self.shrinkage, self._lost], dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace the summary by what :meth:`state_dict` returned, on any device.

        Raises:
            FormatError: If the state is not of this form, or has other sizes or another dtype; nothing has changed.
        """
        expected = self.state_dict()
        is_valid = isinstance(state, dict) and state.keys() == expected.keys()
        for name, like in expected.items() if is_valid else ():
            part = state[name]
            is_valid &= isinstance(part, Tensor) and part.dtype == like.dtype and part.ndim == like.ndim
            is_valid = is_valid and part.shape[-1] == like.shape[-1] and bool(part.isfinite().all())
        numbers = state["numbers"].tolist() if is_valid else []
        is_valid = is_valid and numbers[:4] == expected["numbers"][:4].tolist() and min(numbers) >= 0
        if (
            not is_valid
            or numbers[4] + numbers[5] != len(state["rows"])
            or max(numbers[4], numbers[5] + 1) > numbers[3]
        ):
            raise FormatError(
                f"the state must be that of a StreamingSVD({self.n}, {self.k}, sketch_size={self.sketch_size}, "
                f"dtype={self.dtype}), of version {_FORMAT}, and has the numbers {numbers}: use its state_dict()"
            )
        self._set(**state)

    def _set(self, rows: Tensor, mean: Tensor, numbers: Tensor) -> None:
        *_, kept, pending, self._count = (int(size) for size in numbers[:7].tolist())
        self.shrinkage, self._lost = numbers[7:].tolist()
        self._sketch, self._mean = rows[:kept].to(self.device, copy=True), mean.to(self.device, copy=True)
        self._pending[:pending], self._num_pending = rows[kept : kept + pending], pending
        self._components = None

    def _stacked(self) -> tuple[Tensor, Tensor, int]:
        """Return rows whose Gram matrix is that of the centred rows, less what was subtracted; mean; number of rows."""
        if not self._num_pending:
            return self._sketch, self._mean, self._count
        pending = self._pending[: self._num_pending].double()
        mean = pending.mean(0)
        centred = (pending - mean).to(self.dtype)
        return _combined(self._sketch, self._mean, self._count, centred, mean, self._num_pending)

    def _reduce(self, rows: Tensor, mean: Tensor, count: int) -> None:
        """Replace the summary, with the pending rows, by the sketch of stacked rows."""
        self._sketch, subtracted, lost = _reduced(rows, self.sketch_size, self.k)
        self._mean, self._count, self._num_pending = mean, count, 0
        self.shrinkage, self._lost = self.shrinkage + subtracted, self._lost + lost
        self._components = None

    def _check_rank(self, k: int | None) -> int:
        k = self.k if k is None else check_size("k", k, least=0)
        if k > min(self.k, self.num_rows):
            sizes = f"the summary was made for k={self.k} and has {self.num_rows} rows"
            raise ShapeError(f"k={k} must be at most {min(self.k, self.num_rows)}, as {sizes}: use a smaller k")
        return k

    def _factors(self, centred: bool) -> tuple[Tensor, Tensor]:
        """Return all singular values and right singular vectors of the summary."""
        rows, mean, count = self._stacked()
        return _right_svd(rows if centred else torch.cat((rows, (math.sqrt(count) * mean).to(self.dtype)[None])))


def _combined(
    rows: Tensor, mean: Tensor, count: int, other_rows: Tensor, other_mean: Tensor, other_count: int
) -> tuple[Tensor, Tensor, int]:
    """Return centred rows, mean and number of the union of two sets of rows, each centred by its own mean."""
    if not count or not other_count:
        return (rows, mean, count) if count else (other_rows, other_mean, other_count)
    total, change = count + other_count, other_mean - mean
    between = (math.sqrt(count * other_count / total) * change).to(rows.dtype)
    return torch.cat((rows, other_rows, between[None])), mean + change * (other_count / total), total


def _reduced(rows: Tensor, size: int, protected: int) -> tuple[Tensor, float, float]:
    """Return at most ``size`` rows for (p, n) rows, the square that was subtracted, and the loss of squared norm."""
    if len(rows) <= size:
        return rows, 0.0, 0.0
    wide = rows.double()
    squares, W = torch.linalg.eigh(wide @ wide.mT)
    squares, W = squares.flip(0), W.flip(1)
    if bool(squares[size] > _GRAM_REACH * squares[0]):
        subtracted = squares[size]
        kept = (W[:, :size].mT @ wide).to(rows.dtype)
    else:  # also where rows have at most the rank ``size``, of which QR loses nothing
        S, V = _right_svd(rows)
        squares = S.double().square()
        subtracted = squares[size] if len(S) > size else squares.new_zeros(())
        kept = S[:size, None] * V[:, :size].mT
    factors = (1 - subtracted / squares[:size].clamp_min(torch.finfo(torch.float64).tiny)).clamp_min(0).sqrt()
    factors[:protected] = 1
    lost = subtracted * max(0, size - protected) + squares[size:].sum()
    return kept * factors.to(kept.dtype)[: len(kept), None], float(subtracted), float(lost)


def _right_svd(rows: Tensor) -> tuple[Tensor, Tensor]:  # (p, n) -> (min(p, n),), (n, min(p, n))
    """Return singular values and right singular vectors, whose columns are orthonormal for any rank."""
    if rows.shape[0] >= rows.shape[1]:
        _, S, Vh = core_svd(near_qr(rows)[2])
        return S, Vh.mT
    Q, T, R = near_qr(rows.mT)
    left, S, _ = core_svd(R)
    return S, rotate(Q, T @ left)


def _dense_rows(operand: Operand, start: int, stop: int) -> Tensor:
    """Return some rows of a matrix that has entries, dense."""
    if operand.dense is not None:
        return operand.dense[start:stop]
    if operand.device.type == "cpu":
        return tensor_of(operand.factor[start:stop].toarray())
    index = torch.arange(start, stop, device=operand.device)
    rows: Tensor = operand.A.to_sparse_coo().index_select(0, index).to_dense()
    return rows
