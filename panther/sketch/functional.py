r"""Function forms: sketches as tensors, and a tensor sketched along one dimension.

Except for :func:`sparse_sketch_operator`, sketches are isometries in expectation; ``scale=False`` gives the variance
that panther-ml has. To apply a sketch without forming its matrix, or to draw a block of it, use the operator that each
form names; its errors are the form's errors.
"""

__all__ = [
    "DistributionFamily", "count_skop", "dense_sketch_operator", "gaussian_skop", "scaled_sign_sketch", "sjlt_skop",
    "sketch_tensor", "sparse_sketch_operator", "srht",
]  # fmt: skip

import math
from enum import StrEnum
from typing import overload

import torch
from torch import Tensor

from panther._docstrings import inherit_arguments
from panther.errors import ShapeError, check_flag, check_floating, check_size
from panther.sketch.dense import GaussianSketch, SignSketch, UniformSketch
from panther.sketch.operator import SketchingOperator, TransposedSketch, as_device, check_storage
from panther.sketch.sparse import Axis, SparseSketch
from panther.sketch.trig import SRHT

_Matrix = Tensor | SketchingOperator | TransposedSketch


class DistributionFamily(StrEnum):
    """How the entries of a dense sketch are distributed."""

    Gaussian = "gaussian"
    """Normal."""
    Uniform = "uniform"
    """Uniform in an interval around 0."""


def scaled_sign_sketch(
    m: int,
    n: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    seed: int | None = None,
) -> Tensor:  # (m, n)
    r"""Return a random sign matrix of shape (m, n), entries :math:`\pm 1/\sqrt m`: :class:`SignSketch` as a tensor.

    Args:
        m: Number of rows, the sketch size.
        n: Number of columns, the dimension that is sketched.
        device: None is torch's default.
        dtype: float64, float32, float16 or bfloat16; None is torch's default.
        seed: In ``[0, 2^63)``; None draws one from torch's default CPU generator.

    Returns:
        A dense tensor of shape (m, n), with entries :math:`\pm 1/\sqrt m`.

    Raises:
        ShapeError: If a size is negative.
        DTypeError: If ``dtype`` is not one of those.
        ValueError: If ``seed`` is outside its range.

    Cost: ``m n / 128`` Philox calls (D. Achlioptas, 2003, doi:10.1016/S0022-0000(03)00025-4).

    Example:
        >>> scaled_sign_sketch(4, 3, seed=0).abs().unique()
        tensor([0.5000])
    """
    return SignSketch(m, n, seed=seed, device=device, dtype=dtype).dense()


@inherit_arguments(scaled_sign_sketch)
def dense_sketch_operator(
    m: int,
    n: int,
    distribution: DistributionFamily | str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    scale: bool = True,
    seed: int | None = None,
) -> Tensor:  # (m, n)
    r"""Return a random matrix of shape (m, n) and independent entries of variance 1/m.

    :class:`GaussianSketch` or :class:`UniformSketch` (entries in :math:`\pm\sqrt{3/m}`) as a tensor.

    Args:
        distribution: The distribution of the entries, or its name in lower case.
        scale: False gives entries of variance 1, as panther-ml has them (uniform ones in :math:`\pm\sqrt 3`).

    Raises:
        ValueError: If ``distribution`` is unknown, or ``seed`` is outside its range.

    Cost: ``m n / 4`` Philox calls; the references are in the classes.

    Example:
        >>> S = dense_sketch_operator(
        ...     100, 50, DistributionFamily.Uniform, seed=0
        ... )
        >>> bool(S.abs().max() <= 0.03**0.5)
        True
    """
    check_flag("scale", scale)
    try:
        family = DistributionFamily(distribution)
    except ValueError:
        raise ValueError(
            f"distribution={distribution!r} must be DistributionFamily.Gaussian or DistributionFamily.Uniform"
        ) from None
    kind = GaussianSketch if family is DistributionFamily.Gaussian else UniformSketch
    S = kind(m, n, seed=seed, scale=scale, device=device, dtype=dtype).dense()
    return S.mul_(math.sqrt(3)) if kind is UniformSketch and not scale else S


@inherit_arguments(scaled_sign_sketch)
def gaussian_skop(
    m: int,
    d: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    seed: int | None = None,
) -> Tensor:  # (m, d)
    """Return a Gaussian matrix of shape (m, d) and variance 1/m, m the sketch size: a :class:`GaussianSketch`.

    Args:
        d: Number of columns, the dimension that is sketched.

    Returns:
        A dense tensor of shape (m, d), with independent normal entries of variance 1/m.

    Cost: ``m d / 4`` Philox calls (W. B. Johnson and J. Lindenstrauss, 1984, doi:10.1090/conm/026/737400).

    Example:
        >>> gaussian_skop(4, 3, seed=0).shape
        torch.Size([4, 3])
    """
    d = check_size("d", d, least=0)
    return GaussianSketch(check_size("m", m, least=0), d, seed=seed, device=device, dtype=dtype).dense()


@inherit_arguments(gaussian_skop)
def count_skop(
    m: int,
    d: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    seed: int | None = None,
) -> Tensor:  # (m, d)
    """Return a CountSketch of shape (m, d), as a dense tensor: one entry of each column is +1 or -1, the rest are 0.

    To apply it in O(nnz), use :class:`SparseSketch` with ``vec_nnz=1``.

    Returns:
        A dense tensor of shape (m, d) with d entries that are not zero.

    Cost: d Philox calls and ``m d`` numbers of memory (M. Charikar, K. Chen and M. Farach-Colton, 2004,
    doi:10.1016/S0304-3975(03)00400-6).

    Example:
        >>> count_skop(4, 6, seed=0).abs().sum(dim=0)
        tensor([1., 1., 1., 1., 1., 1.])
    """
    return sjlt_skop(m, d, 1, device, dtype, seed=seed)


@inherit_arguments(gaussian_skop)
def sjlt_skop(
    m: int,
    d: int,
    sparsity: int = 2,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    seed: int | None = None,
) -> Tensor:  # (m, d)
    r"""Return a sparse Johnson-Lindenstrauss transform of shape (m, d), as a dense tensor.

    ``sparsity`` entries of each column are :math:`\pm 1/\sqrt{\mathrm{sparsity}}` and the rest are 0, for any m and d.
    To apply it in O(nnz), use :class:`SparseSketch`.

    Args:
        sparsity: Entries of each column that are not zero, from 1 to m.

    Returns:
        A dense tensor of shape (m, d).

    Raises:
        ShapeError: If a size is negative, or ``sparsity`` is below 1 or above m.

    Cost: ``(sparsity + 1) / 4`` Philox calls a column, rounded up, and ``m d`` numbers of memory (D. M. Kane and J.
    Nelson, 2014, doi:10.1145/2559902).

    Example:
        >>> (sjlt_skop(4, 6, 2, seed=0) != 0).sum(dim=0)
        tensor([2, 2, 2, 2, 2, 2])
    """
    m, d = check_size("m", m, least=0), check_size("d", d, least=0)
    sparsity = check_size("sparsity", sparsity, least=1)
    if sparsity > m > 0:
        raise ShapeError(f"sparsity={sparsity} must be at most m={m}, the length of a column: use sparsity={min(2, m)}")
    axis = Axis.Short if m <= d else Axis.Long  # whichever has its vectors in columns
    return SparseSketch(m, d, sparsity, axis, seed=seed, device=device, dtype=dtype).dense()


@inherit_arguments(scaled_sign_sketch)
def sparse_sketch_operator(
    m: int,
    n: int,
    vec_nnz: int,
    axis: Axis | str = Axis.Short,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    seed: int | None = None,
) -> Tensor:  # (m, n), COO
    """Return a sparse sketch as a coalesced COO tensor of shape (m, n), entries +1 and -1, not scaled.

    Along the short axis each vector of the shorter dimension (a column where m <= n, a row otherwise) has exactly
    ``vec_nnz`` entries, along the long axis each vector of the longer dimension. :class:`SparseSketch` is the operator.

    Args:
        vec_nnz: Entries of each vector, from 1 to its length.
        axis: ``Axis.Short`` or ``Axis.Long``, or their names in lower case.

    Returns:
        A sparse tensor of shape (m, n) in COO layout, coalesced, with entries +1 and -1.

    Raises:
        ShapeError: If a size is negative, or ``vec_nnz`` is below 1 or above the length of the vectors.
        ValueError: If ``seed`` is outside its range, or ``axis`` is neither.

    Cost: ``(vec_nnz + 1) / 4`` Philox calls a vector, rounded up, and a sort of the entries; memory for these alone (D.
    M. Kane and J. Nelson, 2014, doi:10.1145/2559902).

    Example:
        >>> S = sparse_sketch_operator(4, 6, 2, Axis.Short, seed=0)
        >>> S.to_dense().abs().sum(dim=0)
        tensor([2., 2., 2., 2., 2., 2.])
    """
    return SparseSketch(m, n, vec_nnz, axis, scale=False, seed=seed, device=device, dtype=dtype).to_sparse()


@inherit_arguments(scaled_sign_sketch)
def srht(
    x: Tensor,  # (*batch, n)
    m: int,
    *,
    scale: bool = True,
    seed: int | None = None,
) -> Tensor:  # (*batch, m)
    r"""Sketch the last dimension of x to m numbers by the subsampled randomised Hadamard transform, :class:`SRHT`.

    Args:
        x: Vectors of any length, on any device, of any floating dtype; differentiable.
        m: Sketch size.
        scale: Whether entries are :math:`\pm 1/\sqrt m`, an isometry in expectation; False gives orthonormal rows of
            entries :math:`\pm 1/\sqrt N`, as panther-ml has them, N the least power of two no smaller than both sizes.

    Returns:
        A tensor of shape ``(*batch, m)``, in the dtype of x.

    Raises:
        ShapeError: If x has no dimension, or m is negative.
        DTypeError: If x is not floating.

    Cost: as :class:`SRHT`, whose docstring has the references.

    Example:
        >>> x = torch.randn(5, 300)
        >>> srht(x, 64, seed=0).shape
        torch.Size([5, 64])
    """
    m, n = check_size("m", m, least=0), _size_along(x, -1)
    S = SRHT(m, n, seed=seed, scale=scale, dtype=x.dtype, device=x.device)
    y = _sketch_along(S, x, -1)
    return y if scale else y / math.sqrt(S._padded())


@overload
def sketch_tensor(
    input: Tensor,
    axis: int,
    new_size: int,
    distribution: DistributionFamily | str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    scale: bool = True,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def sketch_tensor(
    input: Tensor,
    axis: int,
    new_size: int,
    distribution: _Matrix | None = None,  # the sketch_matrix by position
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    sketch_matrix: _Matrix | None = None,
) -> Tensor: ...


@inherit_arguments(dense_sketch_operator)
def sketch_tensor(
    input: Tensor,
    axis: int,
    new_size: int,
    distribution: DistributionFamily | str | _Matrix | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    sketch_matrix: _Matrix | None = None,
    scale: bool = True,
    seed: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sketch one dimension of a tensor to ``new_size``; differentiable in ``input``.

    Args:
        input: A tensor of any floating dtype.
        axis: The dimension to sketch.
        new_size: Its new size.
        distribution: The distribution of the entries of a matrix to draw; or a ``sketch_matrix``.
        device: Where to compute; None is where ``input`` is.
        dtype: Floating dtype to compute and return; None is the dtype of ``input``.
        sketch_matrix: The matrix to apply, (new_size, input.shape[axis]): a tensor, sparse or not, or an operator.

    Returns:
        The sketched tensor and the matrix S of shape (new_size, input.shape[axis]) if ``distribution`` is given; only
        the sketched tensor if the matrix is given.

    Raises:
        ShapeError: If the axis does not exist, or the matrix has another shape.
        DTypeError: If a dtype is not floating.
        TypeError: If both or neither of ``distribution`` and ``sketch_matrix`` are given, or ``seed`` or
            ``scale=False`` is given with the matrix.
        ValueError: If ``distribution`` is unknown.

    Cost: a product with the matrix, and :func:`dense_sketch_operator` if it is drawn.

    Example:
        >>> x = torch.randn(5, 300, 2)
        >>> y, S = sketch_tensor(x, 1, 40, DistributionFamily.Gaussian, seed=0)
        >>> y.shape, S.shape
        (torch.Size([5, 40, 2]), torch.Size([40, 300]))
        >>> torch.allclose(sketch_tensor(x, 1, 40, S), y)
        True
    """
    size = _size_along(input, axis)
    check_floating("dtype", dtype)
    input = input.to(device=None if device is None else as_device(device), dtype=dtype)
    check_floating("input.dtype", input.dtype)
    new_size = check_size("new_size", new_size, least=0)
    if isinstance(distribution, _Matrix):
        if sketch_matrix is not None:
            raise TypeError("sketch_tensor takes one sketch matrix and was given two: leave out the fourth argument")
        distribution, sketch_matrix = None, distribution
    if (distribution is None) == (sketch_matrix is None):
        raise TypeError("sketch_tensor takes either distribution= or sketch_matrix=: give one of them")
    if distribution is not None:
        S = dense_sketch_operator(new_size, size, distribution, input.device, input.dtype, scale=scale, seed=seed)
        return _sketch_along(S, input, axis), S
    if not isinstance(sketch_matrix, _Matrix):
        raise TypeError(f"sketch_matrix must be a tensor or a sketch, not {type(sketch_matrix).__name__}")
    check_floating("sketch_matrix.dtype", sketch_matrix.dtype)
    if seed is not None or not scale:
        raise TypeError("seed and scale have no meaning for a given sketch_matrix: leave them out")
    if tuple(sketch_matrix.shape) != (new_size, size):
        raise ShapeError(
            f"sketch_matrix, of shape {tuple(sketch_matrix.shape)}, must have the shape (new_size, input.shape[{axis}])"
            f" = ({new_size}, {size}): change new_size or draw another matrix"
        )
    return _sketch_along(sketch_matrix.to(device=input.device, dtype=input.dtype), input, axis)


def _sketch_along(S: _Matrix, x: Tensor, axis: int) -> Tensor:
    columns = x.movedim(axis, 0)  # (size, the rest)
    rest = columns.shape[1:]
    return (S @ columns.reshape(columns.shape[0], rest.numel())).reshape(S.shape[0], *rest).movedim(0, axis)


def _size_along(x: Tensor, axis: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"input must be a tensor, not {type(x).__name__}: use torch.as_tensor")
    check_storage("input", x)
    if x.layout != torch.strided:
        raise TypeError(f"input, of layout {x.layout}, must be dense: multiply a sketch and a sparse matrix by @")
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(f"axis must be an integer, not {type(axis).__name__}")
    if x.ndim == 0:
        raise ShapeError("input is a scalar, and must have an axis to sketch along: pass input[None]")
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"axis={axis} must be between {-x.ndim} and {x.ndim - 1} for a tensor of {x.ndim} dimensions")
    return x.shape[axis]
