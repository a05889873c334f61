"""The contract of all sketching operators: a random d x m matrix S that is a function of a seed."""

__all__ = ["SketchingOperator", "TransposedSketch", "check_storage"]

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from panther._docstrings import inherit_arguments
from panther._hints import explain_keywords_of_class
from panther._process_settings import check_seed
from panther.errors import DTypeError, FormatError, ShapeError, check_device, check_floating, check_size
from panther.kernels.reference import coo_tensor
from panther.sketch.streams import STREAM_VERSION, check_stream

_Drawn = TypeVar("_Drawn", bound=Tensor | tuple[Tensor, ...])
_Linear = Callable[[Tensor], Tensor]
_LAYOUTS = (
    torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc,
)  # fmt: skip
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LONGEST = (1 << 31) - 1
# Matrices of up to this many entries are kept. A larger sketch draws this many entries at once.
_KEPT = 1 << 24


class SketchingOperator(ABC):
    """A random matrix S of shape (d, m), d the sketch size, defined by a seed.

    ``S @ A`` sketches the columns of A, ``A @ S.T`` its rows; both take batched right-hand sides and are
    differentiable in A, and both take a two-dimensional sparse A and give a dense result. Unless ``scale=False``, S is
    isometric in expectation: E ||S x||^2 = ||x||^2.

    The operator keeps its random numbers after the first product. A dense operator keeps its matrix, up to 2^24 entries
    (every product draws a larger matrix again, in panels). A sparse operator keeps its entries, and an SRHT its rows
    and signs. They are not copied or saved with the operator.

    Args:
        d: Sketch size, the number of rows.
        m: Number of columns, the dimension that is sketched.
        seed: In ``[0, 2^63)``; None draws one from torch's default CPU generator.
        stream: Independent matrices of one seed differ in their stream.
        scale: Whether to scale to an isometry in expectation.
        dtype: float64, float32, float16 or bfloat16; None is torch's default.
        device: Where products take place; None is torch's default.

    Raises:
        ShapeError: If a size is negative or above 2^31 - 1.
        DTypeError: If ``dtype`` is not one of those.
        TypeError: If a size, the seed or the stream is not an integer.
        ValueError: If ``seed`` or ``stream`` is outside its range.
    """

    _options: ClassVar[tuple[str, ...]] = ()  # the arguments of a subclass that its repr shows

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        explain_keywords_of_class(cls)
        inherit_arguments(SketchingOperator)(cls)

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
        _check_dtype(dtype)
        self.shape = torch.Size((_check_length("d", d), _check_length("m", m)))
        self.seed = check_seed(seed)
        self.stream = check_stream(stream)
        self.scale = bool(scale)
        self.version = STREAM_VERSION
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.device = torch.get_default_device() if device is None else as_device(device)
        self._kept: dict[str, Any] = {}

    def block(self, rows: slice | range, cols: slice | range) -> Tensor:
        """Return the entries at ``rows`` and ``cols``, without drawing the rest.

        Args:
            rows: Contiguous slice or range of rows, step 1.
            cols: The same for columns.

        Raises:
            TypeError: If they are neither slices nor ranges.
            ShapeError: If a step is not 1, or a range leaves the matrix.
        """
        return self._block(_as_range(rows, self.shape[0]), _as_range(cols, self.shape[1]))

    @abstractmethod
    def _block(self, rows: range, cols: range) -> Tensor:
        """Return the entries at ranges of step 1 within the matrix."""

    @abstractmethod
    def _apply(self, A: Tensor) -> Tensor:
        """Return ``S @ A`` for dense A of shape (*batch, m, n) and this dtype; the caller handles autograd."""

    @abstractmethod
    def _apply_transposed(self, A: Tensor) -> Tensor:
        """Return ``S.T @ A`` for dense A of shape (*batch, d, n)."""

    def _apply_to_sparse(self, A: Tensor) -> Tensor:
        """Return ``S @ A`` for a COO tensor A of shape (m, n) in float32 or float64, coalesced or not."""
        A = A.coalesce()
        out = torch.zeros(self.shape[0], A.shape[1], dtype=A.dtype, device=A.device)
        row, values = A.indices()[0], A.values()
        for cols in self._panels():
            first, last = torch.searchsorted(row, torch.tensor([cols.start, cols.stop], device=row.device)).tolist()
            if last > first:  # rows without entries need no columns of S
                index = A.indices()[:, first:last] - torch.tensor([[cols.start], [0]], device=row.device)
                shape = (len(cols), A.shape[1])
                part = coo_tensor(index, values[first:last], shape, is_coalesced=True)
                out = out + (part.t() @ self._panel(cols).mT.to(A.dtype)).mT
        return out

    def _apply_transposed_to_sparse(self, A: Tensor) -> Tensor:
        """Return ``S.T @ A`` for a COO tensor A of shape (d, n), coalesced or not."""
        A = A.coalesce()
        return torch.cat([(A.t() @ self._panel(cols).to(A.dtype)).mT for cols in self._panels()])

    def _panels(self) -> list[range]:
        """Return ranges of columns that cover the matrix, each within the memory bound."""
        d, m = self.shape
        width = max(1, _KEPT // max(d, 1))
        return [range(start, min(start + width, m)) for start in range(0, m, width)] or [range(0)]

    def _panel(self, cols: range) -> Tensor:
        if len(cols) < self.shape[1]:
            return self.block(slice(None), cols)
        return self._keep("dense", self.dense)

    def _keep(self, name: str, draw: Callable[[], _Drawn]) -> _Drawn:
        """Return the kept result of ``draw``, which is called if there is none. Fake tensors are not kept."""
        if name in self._kept:
            result: _Drawn = self._kept[name]
            return result
        value = draw()
        if all(type(part) is Tensor for part in (value if isinstance(value, tuple) else (value,))):
            self._kept[name] = value
        return value

    def dense(self) -> Tensor:  # (d, m)
        """Return the whole matrix."""
        return self.block(slice(None), slice(None))

    @property
    def T(self) -> "TransposedSketch":
        """The transpose, as an operator."""
        return TransposedSketch(self)

    mT = T  # noqa: N815  the name that a batch of matrices has for it

    def to(
        self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> "SketchingOperator":
        """Return the sketch on another device or in another dtype, in either order; itself if neither changes."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        _check_dtype(dtype)
        device = self.device if device is None else as_device(device)
        dtype = self.dtype if dtype is None else dtype
        if (device, dtype) == (self.device, self.dtype):
            return self
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__getstate__(), device=device, dtype=dtype)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["version"] != STREAM_VERSION:
            raise FormatError(
                f"the stream version of a sketch, {state['version']!r}, must be {STREAM_VERSION}: upgrade Panther"
            )
        self.__dict__.update(state)

    __array_ufunc__ = None  # NumPy then calls __rmatmul__ for an array times a sketch.

    # There is no __torch_function__: with one, Dynamo turns S @ A into the call that it makes for A @ S.

    def __rmatmul__(self, A: Any) -> Tensor:
        """Return ``A @ S``. Python calls this method when the tensor's product returns NotImplemented."""
        _check_operand(self, A, -1, self.shape[0])
        if A.layout != torch.strided:
            return _multiply(self.T, A.t()).mT
        return _multiply(self.T, A) if A.ndim == 1 else _multiply(self.T, A.mT).mT

    def __matmul__(self, A: Tensor) -> Tensor:
        """Return ``S @ A`` for A of shape (m,) or (*batch, m, n)."""
        return _multiply(self, A)

    def __repr__(self) -> str:
        names = [*self._options, "seed"] + ["stream"] * bool(self.stream) + ["scale"] * (not self.scale)
        options = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        d, m = self.shape
        return f"{type(self).__name__}({d}, {m}, {options}, dtype={self.dtype}, device='{self.device}')"


class TransposedSketch:
    """The transpose of a sketching operator, for products ``A @ S.T``.

    Args:
        base: The operator; ``S.T`` is the usual way to make its transpose.
    """

    def __init__(self, base: SketchingOperator) -> None:
        self.T = self.mT = base
        self.shape = base.shape[::-1]
        self.seed, self.dtype, self.device = base.seed, base.dtype, base.device

    def dense(self) -> Tensor:  # (m, d)
        """Return the whole matrix."""
        return self.T.dense().mT

    def block(self, rows: slice | range, cols: slice | range) -> Tensor:
        """Return the entries at ``rows`` and ``cols``, without drawing the rest."""
        return self.T.block(cols, rows).mT

    def to(
        self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> "TransposedSketch":
        """Return the transpose on another device or in another dtype."""
        return self.T.to(device, dtype).T

    def __matmul__(self, A: Tensor) -> Tensor:
        """Return ``S.T @ A`` for A of shape (d,) or (*batch, d, n)."""
        return _multiply(self, A)

    __array_ufunc__ = None
    __rmatmul__ = SketchingOperator.__rmatmul__

    def __repr__(self) -> str:
        return f"{self.T!r}.T"


def _multiply(S: SketchingOperator | TransposedSketch, A: Tensor) -> Tensor:
    _check_operand(S, A, -2, S.shape[1])
    base, transposed = (S.T, True) if isinstance(S, TransposedSketch) else (S, False)
    if A.is_meta:
        return A.new_empty(S.shape[:1] if A.ndim == 1 else (*A.shape[:-2], S.shape[0], A.shape[-1]))
    if A.layout != torch.strided:
        if A.ndim != 2:
            raise ShapeError(f"a sparse operand, of shape {tuple(A.shape)}, must have two dimensions: use A.to_dense()")
        coo = A.to_sparse_coo().to(torch.promote_types(A.dtype, torch.float32))
        return (base._apply_transposed_to_sparse(coo) if transposed else base._apply_to_sparse(coo)).to(A.dtype)
    product, adjoint = base._apply, base._apply_transposed
    if transposed:
        product, adjoint = adjoint, product
    result: Tensor = _Product.apply(A[:, None] if A.ndim == 1 else A, product, adjoint)  # type: ignore[no-untyped-call]
    return result[:, 0] if A.ndim == 1 else result


class _Product(torch.autograd.Function):
    """``S @ A``, linear in A: every derivative is a product with S or its transpose, and autograd never saves S."""

    @staticmethod
    def forward(A: Tensor, product: _Linear, adjoint: _Linear) -> Tensor:
        with torch.autocast(A.device.type, enabled=False):  # the sketch has the operand's dtype already
            return product(A)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Linear, _Linear], output: Tensor) -> None:
        _, ctx.product, ctx.adjoint = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Product.apply(grad, ctx.adjoint, ctx.product), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        result: Tensor = _Product.apply(tangent, ctx.product, ctx.adjoint)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], A: Tensor, product: _Linear, adjoint: _Linear
    ) -> tuple[Tensor, int]:
        return _Product.apply(A.movedim(in_dims[0], 0), product, adjoint), 0  # type: ignore[no-untyped-call]


def check_storage(name: str, A: Tensor) -> None:
    """Raise TypeError unless a tensor is stored as one matrix or batch, dense or sparse."""
    if A.is_nested:
        raise TypeError(f"{name} is a nested tensor, of matrices of several sizes: pass one matrix at a time")
    if A.layout not in _LAYOUTS:
        raise TypeError(f"{name} has the layout {A.layout}, whose products torch does not have: use {name}.to_dense()")
    if A.layout != torch.strided and A.dense_dim():
        raise TypeError(f"{name} is a hybrid sparse tensor, whose entries are vectors: use {name}.to_dense()")


def _check_operand(S: SketchingOperator | TransposedSketch, A: Tensor, dim: int, size: int) -> None:
    if not isinstance(A, Tensor):
        raise TypeError(f"a sketch multiplies tensors, not {type(A).__name__}: use torch.as_tensor")
    check_storage("A", A)
    if A.ndim == 0:
        raise ShapeError("the operand of a sketch, a tensor without dimensions, must have one or more: use A[None]")
    dim = -1 if A.ndim == 1 else dim
    if A.shape[dim] != size:
        raise ShapeError(
            f"dimension {dim} of the operand, of shape {tuple(A.shape)}, must be {size} to meet a sketch of "
            f"shape {tuple(S.shape)}: transpose the operand or change the sketch's size"
        )
    if A.dtype != S.dtype:
        fix = "sketch A.real and A.imag, and combine them" if A.is_complex() else f"cast the operand, A.to({S.dtype})"
        raise DTypeError(f"the operand is {A.dtype} and the sketch {S.dtype}: {fix}")
    if A.device.type != S.device.type and not A.is_meta:
        raise DTypeError(f"the operand is on {A.device} and the sketch on {S.device}: move the sketch, S.to(A.device)")


def _as_range(part: slice | range, size: int) -> range:
    """Return a user's slice or range as a range within ``[0, size)``."""
    if not isinstance(part, slice | range):
        raise TypeError(
            f"rows and cols of a block must be slices or ranges, not {type(part).__name__}: use slice(i, i + 1)"
        )
    result = range(size)[part] if isinstance(part, slice) else part
    if len(result) and (result.step != 1 or result.start < 0 or result.stop > size):
        raise ShapeError(f"{part} must have step 1 and lie in [0, {size}): draw the block around it and index that")
    return result if len(result) else range(0)


def as_device(device: Any) -> torch.device:
    """Return the device that a user named, or raise TypeError where another argument took its place."""
    if isinstance(device, torch.dtype):
        raise TypeError(f"device={device} must be a device and is a dtype: pass dtype={device} by name")
    check_device(device)
    return torch.device(device)


def _check_dtype(dtype: torch.dtype | None) -> None:
    check_floating("dtype", dtype)
    if dtype is not None and dtype not in _DTYPES:
        raise DTypeError(f"dtype={dtype} of a sketch must be one of {', '.join(map(str, _DTYPES))}: use torch.bfloat16")


def _check_length(name: str, size: int) -> int:
    size = check_size(name, size, least=0)
    if size > _LONGEST:
        raise ShapeError(f"{name}={size} must be at most {_LONGEST}, as a random word of 32 bits places an entry")
    return size
