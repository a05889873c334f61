"""The matrices that drivers accept: tensors, sparse tensors, arrays, and objects with ``@`` and ``.T``."""

__all__ = [
    "SHARDED_KINDS", "Operand", "as_dense", "as_operand", "as_sharded", "check_finite", "check_number", "check_penalty",
    "driver", "frobenius_norm", "power_of_two", "summed_product", "tensor_of", "times_two_to", "unsafe_power",
]  # fmt: skip

import math
from collections.abc import Callable
from copy import copy
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from panther._hints import check_keywords
from panther._process_settings import exact_products
from panther._torch import FakeTensor, is_transformed
from panther.errors import DTypeError, ShapeError
from panther.linalg._ranks import ALONE, Ranks
from panther.sketch import GaussianSketch
from panther.sketch.operator import check_storage

# Products of _GROUP rows are summed in the dtype of A. At most _SLAB entries of such sums are in memory at once.
_GROUP = 64
_SLAB, _CUDA_SLAB = 1 << 20, 1 << 26
# Sums of squares of entries between 2^-power and 2^power neither overflow nor vanish.
_SAFE_POWER = {torch.float32: 20, torch.float64: 200}

_NARROW = 32

# Functions that return a matrix of a kind as RowSharded, and None of all other kinds; modules above register theirs.
SHARDED_KINDS: list[Callable[[Any], Any]] = []

P = ParamSpec("P")
T = TypeVar("T")


def driver(function: Callable[P, T]) -> Callable[P, T]:
    """Run a driver without autograd, autocast and TF32, whose short mantissas no factorisation survives.

    Its results are arrays if its first argument is an array, a table or a matrix of scipy, and no argument is a tensor.
    """
    first = next(iter(signature(function).parameters))

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        check_keywords(function, kwargs)
        call: Any = function
        keywords = dict[str, Any](kwargs)
        arguments = list[Any](args) or [keywords.pop(name) for name in (first,) if name in keywords]
        A, ranks = arguments[0] if arguments else None, ALONE
        if (sharded := as_sharded(A)) is not None:
            A, ranks = sharded, sharded.ranks
            arguments[0] = A
        with exact_products(), ranks.together():
            if ranks.size > 1:
                described = ["A", *map(_described, arguments[1:])]
                described += [f"{name}={_described(keywords[name])}" for name in sorted(keywords)]
                ranks.agree("calls", f"{function.__name__}({', '.join(described)})")
            result: T = call(*arguments, **keywords)
        has_tensors = any(isinstance(argument, Tensor) for argument in (*args, *kwargs.values()))
        return _as_arrays(result) if not has_tensors and (_is_of_numpy(A) or _is_of_scipy(A)) else result

    return wrapper


def as_sharded(A: Any) -> Any:
    """Return a matrix that is sharded by rows as RowSharded, and None of anything else."""
    return next((sharded for convert in SHARDED_KINDS if (sharded := convert(A)) is not None), None)


def _described(argument: Any) -> str:
    """Return what ranks must agree on: plain values, dtype and all but the rows of arrays, and the types of objects."""
    if hasattr(argument, "shape") and hasattr(argument, "dtype"):
        return f"{argument.dtype} of shape ({', '.join(('rows', *map(str, argument.shape[1:])))})"
    plain = argument is None or isinstance(argument, bool | int | float | str)
    return repr(argument) if plain else type(argument).__name__


def _is_of_numpy(A: Any) -> bool:
    """Return whether A is an array of NumPy or a table, which has a method ``to_numpy``."""
    return isinstance(A, np.ndarray) or (not isinstance(A, Tensor) and callable(getattr(A, "to_numpy", None)))


def _as_arrays(result: Any) -> Any:
    """Return a result with arrays in the place of tensors."""
    if isinstance(result, Tensor):
        return result.cpu().numpy()
    if not isinstance(result, tuple):
        return result
    parts = map(_as_arrays, result)
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)


class Operand:
    """A real matrix A, or a batch of matrices, that drivers use through its products.

    Attributes:
        A: What the user passed; a dense tensor of half precision is held in float32.
        shape: ``(*batch, m, n)``.
        dtype: The dtype of the products and of the factors, float32 or float64.
        device: The device of the products.
        eps: Rounding unit of the entries in the dtype that the user passed.
        dense: A itself if it is a dense tensor, else None.
        ranks: The ranks over which the rows of A are sharded.
        num_rows: Rows of ``A @ X`` that this process has.
    """

    ranks: Ranks = ALONE

    def __init__(self, A: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.A, self.device, self.shape = A, device, torch.Size(A.shape)
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.eps = torch.finfo(dtype).eps
        self.num_rows, self._own_dtype = self.shape[-2], dtype
        self.dense: Tensor | None = None
        if isinstance(A, Tensor):
            self.A = A = A.to(self.dtype)
            self._own_dtype = self.dtype
            self.dense = A if A.layout == torch.strided else None
            if A.layout == torch.sparse_coo:
                self.A = A.coalesce()
        elif _is_of_scipy(A):
            self.A = A.tocsr()  # itself if it is one; the products of all other layouts are slower
        self._factor: Any = None
        self._transposed: Any = None

    def matmul(self, X: Tensor) -> Tensor:  # (*batch, n, l) -> (*batch, m, l)
        """Return ``A @ X``."""
        if self.dense is not None and not self.dense.is_cuda and (self.dtype == torch.float64 or X.shape[-1] < _NARROW):
            # As rows: up to 2.8 times as fast in float64 where X's columns are not a multiple of 24, and 1.3 times in
            # float32 where they are few (MKL on AMD); contiguous ones 1.7 and 3 times for two columns.
            return (X.mT.contiguous() @ self.dense.mT).mT
        return self._product(self.factor, X, self.shape[-2])

    def rmatmul(self, X: Tensor) -> Tensor:  # (*batch, m, l) -> (*batch, n, l)
        """Return ``A.mT @ X``."""
        if self.dense is not None:
            return (X.mT.contiguous() @ self.dense).mT  # up to 1.3 times faster than A.mT @ X (MKL, narrow X)
        if self._transposed is None:
            self._transposed = _transpose(self.factor)
        return self._product(self._transposed, X, self.shape[-1])

    @property
    def mT(self) -> "Operand":
        """The transpose of a matrix that is not sharded."""
        other, dense = copy(self), None if self.dense is None else self.dense.mT
        shape = torch.Size((*self.shape[:-2], self.shape[-1], self.shape[-2]))
        vars(other).update(shape=shape, num_rows=shape[-2], dense=dense, matmul=self.rmatmul, rmatmul=self.matmul)
        return other

    @property
    def factor(self) -> Any:
        """A in the layout that multiplies fastest: of a sparse tensor on a CPU scipy's CSR, whose transpose is free."""
        if self._factor is None:
            is_sparse = self.dense is None and isinstance(self.A, Tensor) and self.A.device.type == "cpu"
            self._factor = _csr_of_scipy(self.A) if is_sparse else self.A
        return self._factor

    def accurate_rmatmul(self, X: Tensor) -> Tensor:  # (*batch, m, l) -> (*batch, n, l)
        """Return ``A.mT @ X`` by :func:`summed_product` where A is dense, so that rounding does not grow with m."""
        return self.rmatmul(X) if self.dense is None else summed_product(X, self.dense).mT.to(self.dtype)

    def eye(self) -> Tensor:  # (*batch, n, n)
        """Return the identity, whose product with A is A."""
        n = self.shape[-1]
        return torch.eye(n, dtype=self.dtype, device=self.device).expand(*self.shape[:-2], n, n)

    def probes(self, count: int, seed: int, stream: int = 1) -> Tensor:  # (*batch, n, count)
        """Return standard normal vectors, which are equal for all entries of a batch."""
        n = self.shape[-1]
        S = GaussianSketch(n, count, seed=seed, stream=stream, scale=False, dtype=self.dtype, device=self.device)
        return S.dense().expand(*self.shape[:-2], n, count)

    def _product(self, A: Any, X: Tensor, rows: int) -> Tensor:
        if X.shape[-1] == 0 or X.shape[-2] == 0:  # Not all sparse layouts and classes of scipy support empty operands.
            return X.new_zeros(*X.shape[:-2], rows, X.shape[-1])
        if isinstance(A, Tensor):
            return A @ X
        product = A @ (X.numpy() if _is_of_scipy(A) and X.device.type == "cpu" else X.to(self._own_dtype))
        Y = tensor_of(product) if isinstance(product, np.ndarray) else torch.as_tensor(product)
        Y = Y.to(self.device, self.dtype)
        if Y.shape != (*X.shape[:-2], rows, X.shape[-1]):
            raise ShapeError(
                f"the product of A, of shape {tuple(self.shape)}, with a matrix of shape {tuple(X.shape)} must have "
                f"{rows} rows and came out as {tuple(Y.shape)}: check the @ and .T of {type(self.A).__name__}"
            )
        return Y

    @property
    def values(self) -> Tensor | None:
        """The entries (of a sparse matrix, the stored ones), or None if A only has products or stores entries twice."""
        if self.dense is not None:
            return self.dense
        if isinstance(self.A, Tensor):
            return self.A.values()
        return tensor_of(self.A.data) if _is_of_scipy(self.A) and self.A.has_canonical_format else None

    @property
    def has_entries(self) -> bool:
        """Whether A stores its entries, and not only has products."""
        return isinstance(self.A, Tensor) or _is_of_scipy(self.A)

    def check_finite(self, product: Tensor) -> None:
        """Raise ValueError if a product has NaN or infinity, saying whether A has them too.

        Sketches here have no zero row, so NaN and infinity in A reach ``A @ S.T``, and A need not be read.
        """
        if math.isfinite(float(product.sum())) or bool(product.isfinite().all()):  # See the function check_finite.
            return
        check_finite("A", product if self.values is None else self.values)
        raise self._overflow()

    def _overflow(self) -> ValueError:
        return ValueError(f"products of A overflow {self.dtype}: divide A by its largest entry, or use float64")


def summed_product(X: Tensor, Y: Tensor) -> Tensor:  # (*batch, m, k), (*batch, m, n) -> (*batch, k, n)
    """Return ``X^T Y``: products of 64 rows in the dtype of X and Y, and their sum in float64.

    A float32 product adds its m terms one after the other. If all terms have the same sign, as for nonnegative data,
    the measured error of the sum is 19 eps at m = 187 and 1500 eps at m = 30,000. The error here is at most 8 eps. The
    product takes 1.1 to 1.4 times as long; a product in float64 would take 2 to 3 times as long.
    """
    if X.dtype == torch.float64:
        return X.mT @ Y
    k, (m, n) = X.shape[-1], Y.shape[-2:]
    grouped_rows = m - m % _GROUP
    out = (X[..., grouped_rows:, :].mT @ Y[..., grouped_rows:, :]).double()
    entries = _CUDA_SLAB if X.is_cuda else _SLAB
    step = _GROUP * max(1, entries // max(1, k * n))
    for start in range(0, grouped_rows, step):
        rows = slice(start, min(start + step, grouped_rows))
        left, right = (Z[..., rows, :].unflatten(-2, (-1, _GROUP)) for Z in (X, Y))
        out += (left.mT @ right).sum(-3, dtype=torch.float64)
    return out


def as_operand(A: Any, name: str = "A", *, batched: bool = True) -> Operand:
    """Return A as an operand, or raise if it is not a real matrix or, if ``batched``, a batch of matrices.

    An A that is neither a tensor nor an array multiplies tensors of its dtype.
    """
    if (sharded := as_sharded(A)) is not None:
        operand: Operand = sharded.operand()
        return operand
    A = _from_array(name, A)
    if isinstance(A, Tensor):
        _check_readable(name, A)
    elif not (hasattr(A, "shape") and hasattr(A, "__matmul__")):
        raise TypeError(
            f"{name} must be a tensor or have .shape, .dtype, @ and .T, not {type(A).__name__}: "
            f"use torch.as_tensor({name})"
        )
    if isinstance(A, Tensor) and A.layout in (torch.sparse_bsr, torch.sparse_bsc):  # torch has few products.
        A = A.to_sparse_coo()
    if len(A.shape) < 2:
        raise ShapeError(f"{name}, of shape {tuple(A.shape)}, must have two dimensions or more: use {name}[:, None]")
    if len(A.shape) > 2 and (not batched or not isinstance(A, Tensor) or A.layout != torch.strided):
        subject = name if not batched else f"an {name} that is not a dense tensor"
        raise ShapeError(f"{subject}, of shape {tuple(A.shape)}, must have two dimensions: pass one matrix at a time")
    dtype = _dtype_of(name, A)
    if not dtype.is_floating_point or dtype.itemsize == 1:
        cast = "double()" if isinstance(A, Tensor) else "astype(float)"
        fix = "pass its real and imaginary parts" if dtype.is_complex else f"use {name}.{cast}"
        if not dtype.is_complex and not hasattr(A, cast[:-2].partition("(")[0]):
            fix = "make it from a matrix of floats"  # such as a LinearOperator of scipy, which has no cast
        raise DTypeError(f"{name} is {dtype} and must be real and floating, of 16 bits or more: {fix}")
    return Operand(A, dtype, torch.device(getattr(A, "device", None) or torch.get_default_device()))


def as_dense(name: str, A: Any) -> Tensor:
    """Return a dense tensor or NumPy array as a tensor, or raise TypeError."""
    A = _from_array(name, A)
    if not isinstance(A, Tensor) or A.layout != torch.strided:
        kind, how = type(A).__name__, "" if hasattr(A, "shape") else f", torch.as_tensor({name})"
        if isinstance(A, Tensor):
            kind, how = f"a tensor of layout {A.layout}", f", {name}.to_dense()"
        raise TypeError(f"{name} must be a dense tensor or a NumPy array, not {kind}: pass its dense form{how}")
    _check_readable(name, A)
    return A


def _check_readable(name: str, A: Tensor) -> None:
    """Raise unless the entries of a tensor can be read, which drivers do to stop and to scale."""
    check_storage(name, A)
    if A.is_meta or isinstance(A, FakeTensor):
        raise ValueError(f"{name} has a shape and no entries (meta or fake), and drivers read entries: pass values")
    if is_transformed(A):
        raise ValueError(
            f"{name} belongs to vmap or another transform of torch.func, in which no entry can be read, and drivers "
            "have no derivatives: pass a batch (*batch, m, n) to the driver itself"
        )


def check_finite(name: str, A: Tensor) -> None:
    """Raise ValueError if a tensor has NaN or infinity."""
    if not (math.isfinite(float(A.sum())) or bool(A.isfinite().all())):  # The sum is 3 times as fast as isfinite.
        kind = "NaN" if bool(A.isnan().any()) else "infinity"
        raise ValueError(f"{name} must be finite and has {kind}: use torch.nan_to_num({name})")


def frobenius_norm(values: Tensor) -> Tensor:  # (*batch, m, n), or (entries,) of a sparse matrix -> (*batch,)
    """Return the Frobenius norm in float64, whose square is wrong by a few eps of the dtype.

    torch adds the squares of a norm one after the other, which for 2e7 entries is wrong by 7000 eps. Norms of rows are
    therefore taken first, in their dtype, which takes a 25th of the time, and ``sum`` adds in pairs.
    """
    if values.ndim == 1:
        rows = torch.stack([torch.linalg.vector_norm(part) for part in values.split(1 << 12)])
    else:
        rows = torch.linalg.vector_norm(values, dim=-1 if values.shape[-1] <= max(values.shape[-2], 1 << 14) else -2)
    return rows.double().square().sum(-1).sqrt()


def check_number(name: str, value: Any, rule: str, holds: Callable[[float], bool], fix: str) -> float:
    """Return a user's number as a float, or raise TypeError, or ValueError unless ``holds(number)``."""
    try:
        number = None if isinstance(value, bool | str) else float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise TypeError(f"{name} must be a number, not {type(value).__name__}: use {fix}")
    if not holds(number):
        raise ValueError(f"{name}={value!s:.50} must be {rule}: use {fix}")
    return number


def power_of_two(x: Tensor, ranks: Ranks = ALONE) -> Tensor:  # (*batch, m, l) -> (*batch, 1, 1)
    """Return a power of two that divides x exactly, to entries of order 1 on all ranks; 1 where x is zero."""
    size = x.abs().amax(dim=(-2, -1), keepdim=True) if min(x.shape[-2:]) else x.new_zeros(*x.shape[:-2], 1, 1)
    lowest_exponent = -100 if x.dtype == torch.float32 else -1000
    exponent = (torch.frexp(size).exponent - 1).clamp(min=lowest_exponent)
    return ranks.gather(torch.where(size > 0, torch.ldexp(torch.ones_like(size), exponent), 1.0)).amax(0)


def unsafe_power(largest: float, dtype: torch.dtype) -> int:
    """Return the exponent of a matrix's largest entry if squares of such entries may overflow or vanish, else 0."""
    power = math.frexp(largest)[1] if 0 < largest < math.inf else 0
    return power if abs(power) > _SAFE_POWER[dtype] else 0


def times_two_to(A: Tensor, powers: list[int]) -> Tensor:
    """Multiply the last dimension by powers of two, in steps: a power may overflow where the product does not."""
    step = 120 if A.dtype == torch.float32 else 1000
    while any(powers):
        now = [max(-step, min(power, step)) for power in powers]
        A = A * torch.tensor([math.ldexp(1.0, power) for power in now], dtype=A.dtype, device=A.device)
        powers = [power - part for power, part in zip(powers, now, strict=True)]
    return A


def check_penalty(name: str, value: Any) -> float:
    """Return a number that is added to squares or diagonals as a float, or raise unless it is 0 or more and finite."""
    return check_number(name, value, "0 or more and finite", lambda number: 0 <= number < math.inf, "0")


class _Writable:
    """An array's memory, presented as writable.

    torch warns of read-only arrays, such as most arrays of pandas 3 and np.memmap. No driver writes its operands, and a
    filter of the warning would change the filters of all threads.
    """

    def __init__(self, A: np.ndarray[Any, Any]) -> None:
        self.array = A  # This keeps the memory alive.
        self.__array_interface__ = A.__array_interface__ | {"data": (A.__array_interface__["data"][0], False)}


def _from_array(name: str, A: Any) -> Any:
    """Return an array or a table as a tensor, copied where torch cannot share its memory, and anything else unchanged.

    A table has a method ``to_numpy``, as the frames of pandas and polars have.
    """
    if not _is_of_numpy(A):
        return A
    if not isinstance(A, np.ndarray):
        A = A.to_numpy()
    if isinstance(A, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, and all of its entries would count: fill it with {name}.filled(0)")
    if A.dtype.newbyteorder("=") not in (np.float64, np.float32, np.float16):
        fix = "pass its real and imaginary parts" if A.dtype.kind == "c" else f"use {name}.astype(float)"
        raise DTypeError(f"{name} is a NumPy array of {A.dtype} and must be real and floating: {fix}")
    return tensor_of(A)


def tensor_of(A: np.ndarray[Any, Any]) -> Tensor:
    """Return an array as a tensor that shares its memory, which nobody may write; copied where torch cannot share."""
    is_shareable = A.dtype.isnative and A.flags.aligned and all(s >= 0 and s % A.itemsize == 0 for s in A.strides)
    if not is_shareable:
        return torch.from_numpy(np.array(A, A.dtype.newbyteorder("="), order="C"))
    return torch.from_numpy(A if A.flags.writeable else np.asarray(_Writable(A)))


def _dtype_of(name: str, A: Any) -> torch.dtype:
    dtype = getattr(A, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        raise TypeError(
            f"{name}, a {type(A).__name__}, must have .dtype, the dtype of the matrices that it multiplies: give it "
            "one, such as torch.float64"
        )
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        fix = f"use {name}.astype(float)" if hasattr(A, "astype") else "make it from a matrix of floats"
        raise DTypeError(f"{name} is {dtype}, which torch does not have: {fix}") from None


def _is_of_scipy(A: Any) -> bool:
    """Return whether A is a sparse matrix or array of scipy, which is not imported for that."""
    return hasattr(A, "nnz") and hasattr(A, "tocsr") and type(A).__module__.startswith("scipy.sparse")


def _csr_of_scipy(A: Tensor) -> Any:
    """Return a sparse tensor as a CSR array of scipy."""
    from scipy.sparse import coo_array

    coo = A if A.layout == torch.sparse_coo else A.to_sparse_coo().coalesce()
    return coo_array((coo.values().numpy(), coo.indices().numpy()), shape=tuple(A.shape)).tocsr()


def _transpose(A: Any) -> Any:
    if isinstance(A, Tensor) and A.layout != torch.strided:
        return A.t()
    for name in ("mT", "T"):
        if hasattr(A, name):
            return getattr(A, name)
    raise TypeError(f"A must have an attribute .mT or .T, and a {type(A).__name__} has neither: give it one")
