"""The contract of all sketching operators: a random d x m matrix S that is a function of a seed."""

__all__ = ["SketchingOperator", "TransposedSketch"]

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from panther.errors import DTypeError, ShapeError, check_floating, check_size
from panther.sketch.streams import check_seed


class SketchingOperator(ABC):
    """A random matrix S of shape (d, m), d the sketch size, defined by a seed.

    ``S @ A`` sketches the columns of A, ``A @ S.T`` its rows; both take batched right-hand sides and are
    differentiable in A. Unless ``scale=False``, S is isometric in expectation: E ||S x||^2 = ||x||^2.

    Args:
        d: Sketch size, the number of rows.
        m: Number of columns, the dimension that is sketched.
        seed: In ``[0, 2^63)``; None draws one from torch's default CPU generator.
        stream: Independent matrices of one seed differ in their stream.
        scale: Whether to scale to an isometry in expectation.
        dtype: Floating dtype; None is torch's default.
        device: Where products take place; None is torch's default.

    Raises:
        ShapeError: If a size is negative.
        DTypeError: If ``dtype`` is not a floating one.
    """

    def __init__(
        self,
        d: int,
        m: int,
        *,
        seed: int | None = None,
        stream: int = 0,
        scale: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_floating("dtype", dtype)
        self.shape = torch.Size((check_size("d", d, least=0), check_size("m", m, least=0)))
        self.seed = check_seed(seed)
        self.stream = stream
        self.scale = scale
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.device = torch.get_default_device() if device is None else torch.device(device)

    @abstractmethod
    def block(self, rows: slice | range, cols: slice | range) -> Tensor:
        """The entries at ``rows`` and ``cols`` (contiguous), drawn without the others."""

    def dense(self) -> Tensor:  # (d, m)
        """The whole matrix."""
        return self.block(slice(None), slice(None))

    @property
    def T(self) -> "TransposedSketch":
        """The transpose, as an operator."""
        return TransposedSketch(self)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same sketch on another device or in another dtype."""
        check_floating("dtype", dtype)
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.device = self.device if device is None else torch.device(device)
        twin.dtype = self.dtype if dtype is None else dtype
        return twin

    def __matmul__(self, A: Tensor) -> Tensor:
        """``S @ A`` for A of shape (m,) or (*batch, m, n)."""
        _check_operand(self, A, -2, self.shape[1])
        return self._apply(A)

    def _apply(self, A: Tensor) -> Tensor:
        return self.dense() @ A

    def _apply_transposed(self, A: Tensor) -> Tensor:
        return self.dense().mT @ A

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``A @ S`` and ``torch.matmul`` with a sketch on either side."""
        if func not in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul) or kwargs or len(args) != 2:
            return NotImplemented
        left, right = args
        if not isinstance(left, Tensor):
            return left @ right
        _check_operand(right, left, -1, right.shape[0])
        return right._apply_transposed(left) if left.ndim == 1 else right._apply_transposed(left.mT).mT

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.shape[0]}, {self.shape[1]}, seed={self.seed}, dtype={self.dtype}, "
            f"device='{self.device}')"
        )


def _check_operand(S: "SketchingOperator | TransposedSketch", A: Tensor, dim: int, size: int) -> None:
    if not isinstance(A, Tensor) or A.ndim == 0:
        raise TypeError(f"a sketch multiplies tensors of one or more dimensions, not {type(A).__name__}")
    dim = -1 if A.ndim == 1 else dim
    if A.shape[dim] != size:
        raise ShapeError(
            f"dimension {dim} of the operand, of shape {tuple(A.shape)}, must be {size} to meet a sketch of "
            f"shape {tuple(S.shape)}: transpose the operand or change the sketch's size"
        )
    if A.dtype != S.dtype:
        raise DTypeError(f"the operand is {A.dtype} and the sketch {S.dtype}: cast the operand, A.to({S.dtype})")


class TransposedSketch:
    """The transpose of a sketching operator; ``A @ S.T`` is its reason to be."""

    def __init__(self, base: SketchingOperator) -> None:
        self.T = base
        self.shape = base.shape[::-1]
        self.seed, self.dtype, self.device = base.seed, base.dtype, base.device

    def dense(self) -> Tensor:  # (m, d)
        """The whole matrix."""
        return self.T.dense().mT

    def block(self, rows: slice | range, cols: slice | range) -> Tensor:
        """The entries at ``rows`` and ``cols``, drawn without the others."""
        return self.T.block(cols, rows).mT

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "TransposedSketch":
        """The same on another device or in another dtype."""
        return self.T.to(device, dtype).T

    def __matmul__(self, A: Tensor) -> Tensor:
        """``S.T @ A`` for A of shape (d,) or (*batch, d, n)."""
        _check_operand(self, A, -2, self.shape[1])
        return self.T._apply_transposed(A)

    def _apply_transposed(self, A: Tensor) -> Tensor:
        return self.T._apply(A)

    __torch_function__ = SketchingOperator.__torch_function__

    def __repr__(self) -> str:
        return f"{self.T!r}.T"
