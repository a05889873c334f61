"""pack_ and unpack_: what each quantized layer of a model runs on, and copies of codes where they make it faster."""

__all__ = ["PackReport", "PackedLayer", "pack_", "unpack_"]

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from panther._text import format_bytes
from panther.errors import check_size
from panther.kernels import has_compiled_kernel
from panther.nn.quantized.linear import QuantizedLinear
from panther.nn.quantized.matrix import QuantizedMatrix
from panther.nn.sketch_record import has_values

COMPILED, TORCH_KERNEL, BLOCKS, FACTORS = "compiled kernel", "torch's kernel for 4 bits", "expanded blocks", "factors"
_TORCH_KERNEL_ROWS = 32


@dataclass(frozen=True)
class PackedLayer:
    """One layer of a :class:`PackReport`."""

    name: str
    """Name of the layer in the model."""
    runs_on: str
    """``"compiled kernel"``, ``"torch's kernel for 4 bits"``, ``"expanded blocks"`` or ``"factors"``."""
    stored_bytes: int
    """Bytes of the tensors that a file holds."""
    added_bytes: int
    """Bytes of the copy that :func:`pack_` made, which no file holds."""


@dataclass(frozen=True)
class PackReport:
    """What the quantized layers of a model run on; print it."""

    layers: tuple[PackedLayer, ...]
    """All quantized layers, in the order of the model."""

    @property
    def added_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(layer.added_bytes for layer in self.layers)

    def __str__(self) -> str:
        """Return a line for each way to run, with its layers and bytes."""
        lines = []
        for way in dict.fromkeys(layer.runs_on for layer in self.layers):
            layers = [layer for layer in self.layers if layer.runs_on == way]
            stored, added = (sum(getattr(layer, name) for layer in layers) for name in ("stored_bytes", "added_bytes"))
            lines.append(
                f"{way}: {len(layers)} layers, {format_bytes(stored)}" + (f" + {format_bytes(added)}" if added else "")
            )
        return "\n".join(lines) or "no quantized layers"


@torch.no_grad()
def pack_(model: nn.Module, *, rows: int = 1) -> PackReport:
    """Prepare the quantized layers of a model for the processor that they are on, and say what each of them runs on.

    On a CPU with AVX2 or AVX-512 and a C++ compiler, the compiled kernel multiplies codes as they are stored, and there
    is nothing to prepare: for few rows, and in bfloat16 on a processor with AMX for up to hundreds, a layer takes less
    time than a dense one. Without a compiler, layers with codes of 4 bits in bfloat16 get a second copy of their codes
    in the order of torch's kernel (:meth:`panther.nn.QuantizedLinear.hold_packed_`), if ``rows`` is at most 32. Values
    and files stay the same.

    ``SKLinear.pack_`` is another thing: it holds the random signs of a sketch as bits.

    Args:
        model: Any module, with layers of :func:`panther.compress` or of ``panther.nn.quantized``.
        rows: Number of rows that a call multiplies, such as the tokens of a batch.

    Returns:
        What each quantized layer runs on.

    Raises:
        TypeError: If ``model`` is not an nn.Module.

    Cost: compiling takes a second, once for each processor; a copy takes one pass over the codes.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(pr.nn.QuantizedLinear(256, 128, bits=4))
        >>> len(pr.pack_(model).layers)
        1
    """
    check_size("rows", rows, least=1)
    return PackReport(tuple(_packed(name, layer, rows) for name, layer in _layers(model)))


def unpack_(model: nn.Module) -> nn.Module:
    """Remove the copies that :func:`pack_` made, and return the model.

    Args:
        model: A module that :func:`pack_` prepared; others stay as they are.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(pr.nn.QuantizedLinear(256, 128, bits=4))
        >>> _ = pr.pack_(model)
        >>> pr.unpack_(model) is model
        True
    """
    for _, layer in _layers(model):
        if isinstance(layer, QuantizedLinear):
            layer.hold_packed_(False)
    return model


def _layers(model: nn.Module) -> Iterator[tuple[str, QuantizedMatrix]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedMatrix))


def _packed(name: str, layer: QuantizedMatrix, rows: int) -> PackedLayer:
    stored = sum(getattr(layer, tensor).nbytes for tensor in layer.stored_names())
    if layer.bits is None:
        return PackedLayer(name, FACTORS, stored, 0)
    codes, dtype = layer._operands().codes, layer.dtype
    assert codes is not None  # because bits is not None
    if has_values(codes.packed) and has_compiled_kernel(codes, dtype):
        return PackedLayer(name, COMPILED, stored, 0)
    is_small = dtype is torch.bfloat16 and rows <= _TORCH_KERNEL_ROWS and codes.packed.is_cpu
    if is_small and isinstance(layer, QuantizedLinear) and layer.why_not_packed() is None:
        layer.hold_packed_()
        return PackedLayer(name, TORCH_KERNEL, stored, codes.packed.nbytes)
    return PackedLayer(name, BLOCKS, stored, 0)
