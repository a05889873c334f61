"""Quantized layers in ONNX's operators for quantized weights, in the place of Panther's during an export.

ONNX has types of 4 and 8 bits. Other widths are stored in the next larger type, and a zero point moves with its codes,
so that the weights are the same numbers. Three layouts were measured with onnxruntime 1.32 on a CPU, for a layer from
384 to 1536 features, with 1, 16 and 256 rows:

- ``MatMulNBits`` with 4 bits takes 0.05, 0.27 and 3.3 ms, and a dense product 0.04, 0.18 and 3.2 ms.
- ``MatMulNBits`` with 8 bits takes 0.9 to 1.4 ms for one row. ``DequantizeLinear`` with one scale for each of many
  rows, and a product, take 0.15, 0.4 and 3.8 ms. Its blocked form takes 0.65 ms for one row.
- ``MatMulNBits`` that rounds its input to 8 bits (``accuracy_level=4``) takes 0.02, 0.14 and 2.6 ms, with 4 and 8 bits.

onnxruntime replaces a ``DequantizeLinear`` that a product reads directly by a ``MatMulNBits`` that rounds its input,
which changes outputs by 0.5 %. A Reshape that changes the number of dimensions between the two prevents that.
"""

__all__ = ["FOUR_BITS", "onnx_layers"]

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther.nn.conv.product import convolve_dense
from panther.nn.protocol import CompressedModule, compressed_layers

FOUR_BITS = "_uint4"  # ends the names of buffers that hold numbers of 4 bits in bytes, and are written as UINT4
_ATTRIBUTE = "onnx_weight"  # the submodule of a layer that holds its weight in ONNX's layout
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what DequantizeLinear and MatMulNBits compute in
_LEAST_BLOCK, _LARGEST_BLOCK = 16, 256  # blocks of MatMulNBits are powers of two
_ROW_BLOCK = 128  # columns of a block, if a row has one scale
_ROUNDS_INPUT = 4  # the accuracy_level of MatMulNBits that rounds its input to 8 bits


@contextmanager
def onnx_layers(model: nn.Module) -> Iterator[None]:
    """Let the quantized layers of a model compute with ONNX's operators, which only an exporter can trace.

    Layers that share codes share them in the file as well. Layers in float64, whose type the operators lack, and layers
    whose forward somebody replaced are left alone.
    """
    layouts: dict[Any, nn.Module] = {}
    changed: list[nn.Module] = []
    replaceable: list[Any] = [layer for _, layer in compressed_layers(model) if _is_replaceable(layer)]
    try:
        # Embeddings come last, because they can read the layout of every head that is tied to them.
        for module in sorted(replaceable, key=lambda module: module.dense_class is nn.Embedding):
            keys = {layout: (layout, module.codes.data_ptr(), module.dtype) for layout in (_Blocks, _Groups)}
            forward, layout = _forward_and_layout(module)
            if module.dense_class is nn.Embedding and keys[_Blocks] in layouts:
                layout = _Blocks
            if keys[layout] not in layouts:
                layouts[keys[layout]] = layout(module)
            weight = layouts[keys[layout]]
            module.add_module(_ATTRIBUTE, weight)
            module.forward = partial(forward, module, weight)
            changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward
            delattr(module, _ATTRIBUTE)


def _is_replaceable(layer: CompressedModule) -> bool:
    if layer.record_mode != "quantized" or layer.dense_class not in (nn.Linear, nn.Conv2d, nn.Embedding):
        return False
    return layer.bits is not None and layer.dtype in _DTYPES and "forward" not in vars(layer)


def _forward_and_layout(module: Any) -> tuple[Callable[..., Tensor], type["_Blocks | _Groups"]]:
    """Return what computes in the place of a layer, and the layout of the weight that it needs."""
    is_narrow: bool = module.bits <= 4
    if module.dense_class is nn.Embedding:
        return _embed, _Blocks if is_narrow else _Groups
    if module.dense_class is nn.Conv2d:
        return _convolve, _Groups
    has_blocks = _block_size(module) is not None
    return _multiply, _Blocks if has_blocks and (is_narrow or module.activations) else _Groups


def _block_size(layer: Any) -> int | None:
    """Return the columns of a block of MatMulNBits, which divide those of a group; None if no block does."""
    group_size, columns = layer.group_size, layer._columns
    if group_size == columns:
        return min(_ROW_BLOCK, max(_LEAST_BLOCK, 1 << (columns - 1).bit_length()))
    block = min(_LARGEST_BLOCK, group_size & -group_size)
    return block if block >= _LEAST_BLOCK else None


class _Layout(nn.Module):
    """Base of a weight in one of ONNX's layouts: codes of 4 or 8 bits, scales and zero points."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.rows, self.columns = layer._rows, layer._columns
        self.width = 4 if layer.bits <= 4 else 8

    def _numbers(self, layer: Any) -> tuple[Tensor, Tensor, Tensor]:  # (rows, columns), (rows, groups), (rows, groups)
        """Return codes and zero points in the wider type, and scales; symmetric grids are symmetric there too."""
        shift = 2 ** (self.width - 1) - 2 ** (layer.bits - 1)
        codes, scales, zeros = layer.grid_numbers()
        scales = scales.float()
        narrow = scales.to(layer.dtype)
        if torch.equal(narrow.float(), scales):  # Scales below the numbers of float16 stay in float32.
            scales = narrow
        return codes + shift, scales, zeros + shift


class _Blocks(_Layout):
    """Codes as MatMulNBits reads them: (rows, blocks, bytes of a block), two codes of 4 bits in a byte."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        codes, scales, zeros = self._numbers(layer)
        self.block = _block_size(layer) or layer.group_size
        blocks = -(-self.columns // self.block)
        group_of_block = torch.arange(blocks, device=codes.device) * self.block // layer.group_size
        scales, zeros = scales[:, group_of_block], zeros[:, group_of_block]
        codes = F.pad(codes, (0, blocks * self.block - self.columns)).unflatten(1, (blocks, self.block))
        self.register_buffer("codes", codes if self.width == 8 else _in_pairs(codes))
        self.register_buffer("scales", scales.contiguous())
        is_symmetric = bool((zeros == 2 ** (self.width - 1)).all())  # what MatMulNBits assumes without zero points
        if is_symmetric:
            self.zeros = None  # torch.export miscounts buffers that are None.
        else:
            self.register_buffer("zeros", zeros.contiguous() if self.width == 8 else _in_pairs(zeros))

    def product(self, x: Tensor, bias: Tensor | None, rounds_input: bool) -> Tensor:  # (*, in) -> (*, out)
        dtype, work = x.dtype, self.scales.dtype
        output = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            (x.to(work), self.codes, self.scales, self.zeros, None, None if bias is None else bias.to(work)),
            {
                "K": self.columns, "N": self.rows, "bits": self.width, "block_size": self.block,
                "accuracy_level": _ROUNDS_INPUT if rounds_input else 0,
            },
            dtype=work, shape=(*x.shape[:-1], self.rows), version=1,
        )  # fmt: skip
        return output.to(dtype)

    def rows_at(self, indices: Tensor, dtype: torch.dtype) -> Tensor:  # (n,) -> (n, columns)
        """Return rows of the weight; only their bytes are expanded."""
        numbers = self._unpacked(self.codes.index_select(0, indices))[..., : self.block]
        scales = self.scales.index_select(0, indices)[..., None]
        middle: Tensor | float = 2 ** (self.width - 1)
        if self.zeros is not None:
            middle = self._unpacked(self.zeros.index_select(0, indices))[:, : scales.shape[1], None].to(scales.dtype)
        return ((numbers.to(scales.dtype) - middle) * scales).flatten(1)[:, : self.columns].to(dtype)

    def _unpacked(self, numbers: Tensor) -> Tensor:
        return numbers if self.width == 8 else _out_of_pairs(numbers)


class _Groups(_Layout):
    """Codes as DequantizeLinear reads them fastest: (rows * groups, 1, columns of a group), with a scale for each."""

    scales: Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        codes, scales, zeros = self._numbers(layer)
        self.groups, self.group_size = scales.shape[1], layer.group_size
        codes = F.pad(codes, (0, self.groups * self.group_size - self.columns))
        self.suffix = FOUR_BITS if self.width == 4 else ""
        self.register_buffer("codes" + self.suffix, codes.reshape(self.rows * self.groups, 1, self.group_size))
        self.register_buffer("scales", scales.flatten())
        self.register_buffer("zeros" + self.suffix, zeros.flatten())

    def _dequantized(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:  # (n, 1, columns of a group)
        return torch.onnx.ops.symbolic(
            "DequantizeLinear", (codes, scales, zeros), {"axis": 0}, dtype=scales.dtype, shape=codes.shape, version=21
        )

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return getattr(self, "codes" + self.suffix), self.scales, getattr(self, "zeros" + self.suffix)

    def dense(self, dtype: torch.dtype) -> Tensor:  # (rows, columns)
        return self._matrix(self._dequantized(*self._tensors()), dtype)

    def product(self, x: Tensor, bias: Tensor | None, rounds_input: bool) -> Tensor:  # (*, in) -> (*, out)
        del rounds_input  # A product with the numbers of the input is closer than the one that the layer computes.
        return F.linear(x, self.dense(x.dtype), bias)

    def rows_at(self, indices: Tensor, dtype: torch.dtype) -> Tensor:  # (n,) -> (n, columns)
        """Return rows of a weight of 8 bits; only these rows are expanded."""
        if self.groups > 1:
            indices = (indices[:, None] * self.groups + torch.arange(self.groups, device=indices.device)).flatten()
        return self._matrix(self._dequantized(*(part.index_select(0, indices) for part in self._tensors())), dtype)

    def _matrix(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return numbers.reshape(-1, self.groups * self.group_size)[:, : self.columns].to(dtype)


def _in_pairs(numbers: Tensor) -> Tensor:  # (*, n) -> (*, ceil(n / 2))
    """Return two numbers of 4 bits in each byte, the first one in the low bits."""
    pairs = F.pad(numbers, (0, numbers.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def _out_of_pairs(pairs: Tensor) -> Tensor:  # (*, n) -> (*, 2 n)
    # ONNX's exporter writes a shift as ten operators, because it does not know that the numbers are positive.
    shift = torch.full((1,), 4, dtype=torch.uint8, device=pairs.device)
    high = torch.onnx.ops.symbolic(
        "BitShift", (pairs, shift), {"direction": "RIGHT"}, dtype=torch.uint8, shape=pairs.shape, version=11
    )
    return torch.stack((pairs & 15, high), -1).flatten(-2)


def _multiply(layer: Any, weight: Any, input: Tensor) -> Tensor:
    rows = input if input.dim() > 1 else input[None]
    output: Tensor = weight.product(rows, layer.bias, layer.activations is not None)
    if layer.low_rank:
        left, right = layer.wide_factors(input.dtype)
        output = output + F.linear(F.linear(rows, right), left)
    return output if input.dim() > 1 else output[0]


def _embed(layer: Any, weight: Any, input: Tensor) -> Tensor:
    rows: Tensor = weight.rows_at(input.reshape(-1).long(), layer.dtype)
    return rows.view(*input.shape, layer.embedding_dim)


def _convolve(layer: Any, weight: Any, input: Tensor) -> Tensor:
    matrix = weight.dense(input.dtype)
    if layer.low_rank:
        left, right = layer.wide_factors(input.dtype)
        matrix = matrix + left @ right
    geometry = (layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    output: Tensor = convolve_dense(input, layer._unfolded(matrix), *geometry, layer.padding_mode)
    return output
