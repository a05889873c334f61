"""QuantizedExperts: the stacked weights of experts in 2 to 8 bits, which expands the experts that are hit."""

__all__ = ["QuantizedExperts"]

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from panther._docstrings import inherit_arguments
from panther.errors import ShapeError, check_device, check_flag, check_floating, check_size
from panther.kernels import QuantizedCodes, QuantizedOperands, quantized_matmul
from panther.kernels.ops.quantized_operands import expanded_codes
from panther.nn.factors import fittable
from panther.nn.protocol import allow_saving
from panther.nn.quantized.linear import QuantizedLinear
from panther.nn.quantized.matrix import QuantizedMatrix
from panther.nn.quantized.stacked import StackedExperts


@inherit_arguments(QuantizedMatrix)
class QuantizedExperts(QuantizedMatrix):
    r"""The weights of E experts, stored in few bits, in the place of a parameter (E, out, in).

    .. math:: W_{eij} = s_{eig}\,(q_{eij} - z_{eig}), \qquad g = \lfloor j / \mathtt{group\_size} \rfloor

    with codes q of 2 to 8 bits, and a scale s and a zero point z for each group of neighbouring columns of an expert's
    row. Tensors, whose rows are those of all experts, casts, files and the training of scales are those of
    :class:`QuantizedLinear`.

    A module of experts of transformers reads this layer as it reads the parameter. ``layer[e]`` and ``layer[ids]``
    expand the experts that are named, each once, as the implementations "eager" and "batched_mm" need. A grouped
    product (``torch.nn.functional.grouped_mm`` with the layer or ``layer.transpose(-2, -1)``) multiplies by one expert
    after another and leaves out experts without rows. Every other function of torch gets the expanded weight of all
    experts, and so does every function in a model that torch.compile compiles.

    A new layer has random weights with nn.Linear's variance; :meth:`from_weight` rounds a dense weight.

    Args:
        num_experts: Number E of experts.
        in_features: Size of an expert's input, the columns of a matrix.
        out_features: Size of an expert's output, the rows of a matrix.
        transposed: Whether the layer stands for a parameter (E, in, out). Codes are the same in both cases.
        bits: Width of a code, 2 to 8.
        dtype: Floating dtype of the expanded weight; None is torch's default.

    Cost: each expert that is hit is expanded once in each forward.

    Example:
        >>> import torch
        >>> layer = QuantizedExperts(8, 64, 32, bits=4, group_size=32)
        >>> layer.shape, layer[3].shape, layer(torch.randn(5, 64), 3).shape
        (torch.Size([8, 32, 64]), torch.Size([32, 64]), torch.Size([5, 32]))
        >>> x, ends = (
        ...     torch.randn(6, 64),
        ...     torch.tensor([0, 4, 4, 4, 6, 6, 6, 6], dtype=torch.int32),
        ... )
        >>> torch.nn.functional.grouped_mm(
        ...     x, layer.transpose(-2, -1), offs=ends
        ... ).shape  # experts 1 and 4
        torch.Size([6, 32])
    """

    dense_class = StackedExperts
    dense_arguments = ("num_experts", "in_features", "out_features", "transposed")
    size_arguments = ("bits", "group_size")
    replaces_parameter = True

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        transposed: bool = False,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = check_size("num_experts", num_experts, least=1)
        self.in_features = check_size("in_features", in_features, least=1)
        self.out_features = check_size("out_features", out_features, least=1)
        check_flag("transposed", transposed)
        check_device(device)
        check_floating("dtype", dtype)
        self.transposed = transposed
        check_size("bits", bits, least=2)  # Without codes a layer would be a correction only.
        self._allocate(
            self.num_experts * self.out_features, self.in_features, bits, group_size, 0, False, device, dtype
        )

    def forward(self, input: Tensor, expert: int, tokens: Any = None) -> Tensor:  # (*, in) -> (*, out)
        """Multiply rows by the weight of one expert; ``tokens`` tells hooks which tokens the rows are."""
        rows = slice(expert * self.out_features, (expert + 1) * self.out_features)
        codes = self._codes_of(lambda part: part[rows])
        output: Tensor = quantized_matmul(input, QuantizedOperands(self.in_features, codes))
        return output

    def _codes_of(self, rows_of: Callable[[Tensor], Tensor]) -> QuantizedCodes:
        self.check_writes()
        return super()._codes_of(rows_of)

    @property
    def weight(self) -> Tensor:  # (E, out, in), or (E, in, out) if transposed
        """The dense effective weight, for inspection: differentiable by the scales, computed at each access."""
        return self[:]

    def __getitem__(self, index: Any) -> Tensor:
        """Return the weights of experts, indexed as a tensor is; each expert is expanded once."""
        if isinstance(index, tuple):
            return self.weight[index]
        if isinstance(index, Tensor) and index.dtype is not torch.bool and index.dim() and not _is_traced():
            experts, places = torch.unique(index, return_inverse=True)
            return self._expanded(experts)[places]
        return self._expanded(index)

    def _expanded(self, index: Any) -> Tensor:
        places = self.record.new_empty(self.num_experts, 0)[index].shape[:-1]

        def rows_of(part: Tensor) -> Tensor:
            rows: Tensor = part.view(self.num_experts, self.out_features, -1)[index].flatten(0, -2)
            return rows

        weight = expanded_codes(self._codes_of(rows_of), self.in_features, self.dtype)
        weight = weight.view(*places, self.out_features, self.in_features)
        return weight.mT if self.transposed else weight

    def __len__(self) -> int:
        """Return the number of experts."""
        return self.num_experts

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter that the layer stands for."""
        sizes = (self.in_features, self.out_features) if self.transposed else (self.out_features, self.in_features)
        return torch.Size((self.num_experts, *sizes))

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.codes.device

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return 3, the number of dimensions."""
        return 3

    ndim = property(dim)

    def data_ptr(self) -> int:
        """Return 0: the expanded weight has no memory yet, and every tensor that is expanded is aligned."""
        return 0

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Return the weight with two dimensions swapped; rows and columns are swapped without expanding the codes."""
        if {dim0 % 3, dim1 % 3} == {1, 2} and not _is_traced():
            return _Transposed(self)
        return self.weight.transpose(dim0, dim1)

    @property
    def mT(self) -> Any:
        """The weight with rows and columns swapped; see :meth:`transpose`."""
        return self.transpose(-2, -1)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Compute a grouped product expert by expert, and any other function with the expanded weight."""
        return _with_weight(func, args, kwargs or {})

    def _grouped_product(self, x: Tensor, ends: Tensor) -> Tensor:  # (rows, in), (E,) -> (rows, out)
        """Multiply rows that are sorted by expert; ``ends`` are the ends of the experts' rows."""
        products, start = [], 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                products.append(self(x[start:end], expert))
                start = end
        return torch.cat((*products, x.new_zeros(len(x) - start, self.out_features)))

    @classmethod
    @inherit_arguments(QuantizedLinear.from_linear)
    def from_weight(
        cls, weight: Tensor, bits: int = 4, *, group_size: int | None = 128, transposed: bool = False
    ) -> Self:
        """Return a quantized approximation of a stacked weight, on its device and in its dtype.

        Weights are rounded to the nearest code of a grid whose range is searched for the least squared error.

        Args:
            weight: The weight (E, out, in), or (E, in, out) with ``transposed``. It is not changed.
            transposed: As in the constructor.

        Raises:
            ShapeError: If the weight does not have three dimensions.
            TypeError: If ``weight`` is not a tensor.

        Example:
            >>> import torch
            >>> weight = torch.randn(4, 32, 64)
            >>> layer = QuantizedExperts.from_weight(weight, bits=8)
            >>> bool((layer.weight - weight).norm() < 0.01 * weight.norm())
            True
        """
        if not isinstance(weight, Tensor):
            raise TypeError(f"from_weight takes a tensor, not {type(weight).__name__}")
        if weight.dim() != 3:
            raise ShapeError(f"the weight must be (experts, out, in), and has shape {tuple(weight.shape)}")
        matrices = weight.detach().mT if transposed else weight.detach()
        layer = cls(
            len(matrices), matrices.shape[2], matrices.shape[1], transposed, bits=bits, group_size=group_size,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        layer._fit_(fittable(matrices.flatten(0, 1)))
        return layer

    def extra_repr(self) -> str:
        """Return sizes and form, as shown by print."""
        layout = ", transposed=True" if self.transposed else ""
        sizes = f"{self.num_experts}, in_features={self.in_features}, out_features={self.out_features}{layout}"
        return f"{sizes}, bits={self.bits}, group_size={self.group_size}"


allow_saving(QuantizedExperts)


class _Transposed:
    """The weight of a QuantizedExperts with rows and columns swapped."""

    def __init__(self, layer: QuantizedExperts) -> None:
        self.layer = layer
        self.device, self.dtype = layer.device, layer.dtype
        self.shape = torch.Size((layer.shape[0], *layer.shape[:0:-1]))

    def __getitem__(self, index: Any) -> Tensor:
        return self.layer.weight.mT[index] if isinstance(index, tuple) else self.layer[index].mT

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 3

    def data_ptr(self) -> int:
        return 0

    def transpose(self, dim0: int, dim1: int) -> Any:
        return self.layer if {dim0 % 3, dim1 % 3} == {1, 2} else self.layer.weight.mT.transpose(dim0, dim1)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _with_weight(func, args, kwargs or {})


def _with_weight(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch with expanded weights, or compute its result expert by expert if it can be."""
    if "grouped_mm" in getattr(func, "__name__", "") and len(args) in (2, 3) and not _is_traced():
        x, weight = args[:2]
        layer = weight.layer if isinstance(weight, _Transposed) else weight
        ends = args[2] if len(args) == 3 else kwargs.get("offs")
        is_plain = all(value is None for name, value in kwargs.items() if name != "offs")
        if (
            is_plain
            and isinstance(ends, Tensor)
            and isinstance(layer, QuantizedExperts)
            and isinstance(weight, _Transposed) != layer.transposed
        ):
            return layer._grouped_product(x, ends)
    kwargs = {name: _expanded(value) for name, value in kwargs.items()}
    return func(*(_expanded(value) for value in args), **kwargs)


def _expanded(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(map(_expanded, value))
    if isinstance(value, _Transposed):
        return value.layer.weight.mT
    return value.weight if isinstance(value, QuantizedExperts) else value


def _is_traced() -> bool:
    """Return whether a graph is recorded, in which sizes must not depend on values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
