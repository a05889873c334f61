"""Products with quantized weights, and the fold of sparse sketches, in C++ that is compiled on first use.

The source has no dependency but OpenMP, whose threads are torch's. It is compiled for this processor, in a second
or two, into the folder of torch's extensions (``TORCH_EXTENSIONS_DIR``, or ``torch_extensions`` in the user's
cache), under a name with a checksum of source, compiler and processor. A new file is complete before it gets its name,
so that processes may compile at the same time. Without a compiler for AVX2 or AVX-512, or with
``PANTHER_KERNELS=torch``, torch computes all products.
"""

__all__ = ["Product", "expand", "library", "prepared", "takes"]

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from ...ops.quantized_operands import QuantizedCodes, QuantizedOperands
from ...selection import multiplies_by_instruction, uses_torch_alone

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_FLAGS_OF_CAPABILITY = {"AVX2": ("-mno-avx512f",), "AVX512": ("-mprefer-vector-width=512",)}
_TIMEOUT_S = 300
# With more rows, a product with expanded blocks of the weight is faster, and instructions for bfloat16 speed that up.
# Where AMX multiplies tiles of bfloat16, these serve any number of rows from two on.
_FEW_ROWS, _FEW_ROWS_BY_INSTRUCTION, _FEW_ROWS_BESIDE_TILES = 16, 4, 1
_DTYPES = (torch.float32, torch.bfloat16)
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Weight(ctypes.Structure):
    """The C++ struct of this name."""

    _fields_ = (
        *((name, _POINTER) for name in ("packed", "scales", "zeros")),
        *((name, _SIZE) for name in ("bits", "inputs", "outputs", "group_size")),
        *((name, _POINTER) for name in ("left", "right", "factor_scales")),
        ("rank", _SIZE),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, after compiling them if no process of this user has, or None.

    The reason for None is logged, once in a process, unless the setting or the processor is the reason.
    """
    if uses_torch_alone() or torch.backends.cpu.get_cpu_capability() not in _FLAGS_OF_CAPABILITY:
        return None
    try:
        try:
            compiled = ctypes.CDLL(str(_compiled()))
        except OSError:  # The file is damaged, or there is no compiler, which the second attempt says again.
            compiled = ctypes.CDLL(str(_compiled(anew=True)))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or error
        logging.getLogger(__name__).warning(
            "quantized layers run without the compiled CPU kernel, several times slower for few rows, and sparse "
            "sketches up to twice as slowly: %s. Install a C++ compiler, or set PANTHER_KERNELS=torch to run without "
            "this message",
            str(output).strip().splitlines()[-1],
        )
        return None
    compiled.panther_has_tiles.argtypes = [_POINTER]
    for function in (compiled.panther_product, compiled.panther_half_product, compiled.panther_tile_product):
        function.argtypes = [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, ctypes.c_int]
        function.restype = None
    compiled.panther_expand.argtypes = [_POINTER, _SIZE, _SIZE, _POINTER, ctypes.c_int, ctypes.c_int]
    compiled.panther_expand.restype = None
    for function in (compiled.panther_fold_and_tile, compiled.panther_half_fold_and_tile):
        function.argtypes = [_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER,
                             ctypes.c_float, _POINTER, _SIZE, _SIZE, ctypes.c_int]  # fmt: skip
        function.restype = None
    return compiled


def takes(codes: QuantizedCodes, dtype: torch.dtype) -> bool:
    """Return whether the compiled functions are there and take these codes, for an input of this dtype on the CPU."""
    packed, _, scales, zeros, _ = codes
    if not (packed.is_cpu and dtype in _DTYPES and scales.dtype is torch.bfloat16 and packed.numel()):
        return False
    return packed.is_contiguous() and scales.is_contiguous() and zeros.is_contiguous() and library() is not None


class Product:
    """The product with one weight, in one call of C++; it reads the tensors of the weight where they are.

    It takes few rows, and any number of rows in bfloat16 where the processor has AMX.

    Args:
        weight: A weight that :func:`prepared` found to be taken.
        bias: Added to every row, contiguous and of ``dtype``.
        dtype: The dtype of input and output.
    """

    def __init__(self, weight: QuantizedOperands, bias: Tensor | None, dtype: torch.dtype) -> None:
        columns, codes, factors = weight
        packed, bits, scales, zeros, group_size = codes or (None, 0, None, None, 0)
        left, right, factor_scales = factors or (None, None, None)
        operands = packed, scales, zeros, left, right, factor_scales
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in operands]
        rows = packed if packed is not None else left
        assert rows is not None  # a weight has codes or factors
        rank = 0 if right is None else len(right)
        members = _Weight(*addresses[:3], bits, columns, len(rows), group_size, *addresses[3:], rank)
        compiled = library()
        assert compiled is not None  # `prepared` asks for it
        function = compiled.panther_product if dtype is torch.float32 else compiled.panther_half_product
        arguments = ctypes.byref(members), None if bias is None else bias.data_ptr()
        self._sizes = dtype, columns, len(rows)
        self._by_rows = partial(function, *arguments)
        self._by_tiles: partial[None] | None = None
        self._few_rows = _FEW_ROWS
        if dtype is torch.bfloat16 and compiled.panther_has_tiles(ctypes.byref(members)):
            self._by_tiles, self._few_rows = partial(compiled.panther_tile_product, *arguments), _FEW_ROWS_BESIDE_TILES
        elif dtype is torch.bfloat16 and multiplies_by_instruction(dtype):
            self._few_rows = _FEW_ROWS_BY_INSTRUCTION
        self._operands = operands, bias  # Memory that is kept cannot become the memory of other tensors.

    def __call__(self, x: Tensor) -> Tensor | None:  # (*, in) -> (*, out)
        """Return the product, with sums in float32 and without derivatives, or None if this is not the way for x."""
        dtype, columns, outputs = self._sizes
        shape = x.shape
        rows = x.numel() // columns
        call = self._by_rows if rows <= self._few_rows else self._by_tiles
        if call is None or x.dtype is not dtype or not rows or shape[-1] != columns:
            return None
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty(*shape[:-1], outputs)
        call(x.data_ptr(), rows, y.data_ptr(), torch.get_num_threads())
        return y


def prepared(weight: QuantizedOperands, bias: Tensor | None, dtype: torch.dtype) -> Product | None:
    """Return the product with a weight, or None if the compiled functions are not there or do not take the operands."""
    columns, codes, factors = weight
    if (codes is not None and not takes(codes, dtype)) or not (bias is None or bias.is_cpu):
        return None
    if factors is not None:
        left, right, scales = factors
        if not (left.is_cpu and dtype in _DTYPES and scales.dtype is torch.bfloat16 and left.numel() and columns):
            return None
        if not (left.is_contiguous() and right.is_contiguous() and scales.is_contiguous()) or library() is None:
            return None
    if bias is not None and not (bias.dtype is dtype and bias.is_contiguous()):
        bias = bias.to(dtype).contiguous()
    return Product(weight, bias, dtype)


def expand(codes: QuantizedCodes, rows: slice, out: Tensor) -> Tensor:  # (rows, in)
    """Write ``scales * (codes - zeros)`` of some rows to a contiguous matrix in float32 or bfloat16, and return it."""
    packed, bits, scales, zeros, group_size = codes
    addresses = packed.data_ptr(), scales.data_ptr(), zeros.data_ptr()
    weight = _Weight(*addresses, bits, out.shape[1], len(scales), group_size)
    compiled = library()
    assert compiled is not None  # callers ask for `takes` first
    is_half = out.dtype is torch.bfloat16
    start, threads = rows.start, torch.get_num_threads()
    compiled.panther_expand(ctypes.byref(weight), start, start + len(out), out.data_ptr(), is_half, threads)
    return out


def _compiled(anew: bool = False) -> Path:
    """Return the compiled file, which is written first if it is not there, or in any case."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise FileNotFoundError(f"there is no compiler {os.environ.get('CXX') or 'c++'!r}")
    flags = (*_FLAGS, *_FLAGS_OF_CAPABILITY[torch.backends.cpu.get_cpu_capability()])
    identity = repr((flags, compiler, _processor())).encode()
    name = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES) + identity).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions") / "panther"
    path = folder / f"kernels-{name}.so"
    if anew or not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unnamed:
            unfinished = Path(unnamed) / path.name
            command = [compiler, *flags, *map(str, _SOURCES), "-o", str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
            unfinished.replace(path)
    return path


def _processor() -> str:
    """Return what tells processors apart: a file that was compiled for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith("flags")), platform.machine())
