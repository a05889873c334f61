"""Products with quantized weights in C++, compiled on first use where there is a compiler.

The source has no dependency but OpenMP, whose threads are torch's. It is compiled for this processor, in a second
or two, into the folder of torch's extensions (``TORCH_EXTENSIONS_DIR``, or ``torch_extensions`` in the user's
cache), under a name with a checksum of source, compiler and processor. A new file is complete before it gets its name,
so that processes may compile at the same time. Without a compiler for AVX2 or AVX-512, or with
``PANTHER_KERNELS=torch``, torch computes all products.
"""

__all__ = ["expand", "library", "product", "takes"]

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ops.quantized_operands import QuantizedCodes
from ...selection import uses_torch_alone

_SOURCE = Path(__file__).with_name("quantized.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_FLAGS_OF_CAPABILITY = {"AVX2": ("-mno-avx512f",), "AVX512": ("-mprefer-vector-width=512",)}
_TIMEOUT_S = 300
_FEW_ROWS = 16  # With more rows, a product with expanded blocks of the weight is faster.
_DTYPES = (torch.float32, torch.bfloat16)
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_WEIGHT: tuple[Any, ...] = (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, ctypes.c_int)


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
            "quantized layers run without the compiled CPU kernel, several times slower for few rows: %s. Install a "
            "C++ compiler, or set PANTHER_KERNELS=torch to run without this message",
            str(output).strip().splitlines()[-1],
        )
        return None
    compiled.panther_product.argtypes = [*_WEIGHT, _POINTER, _SIZE, _POINTER, _POINTER]
    compiled.panther_expand.argtypes = [*_WEIGHT, _SIZE, _SIZE, _POINTER, _POINTER]
    compiled.panther_product.restype = compiled.panther_expand.restype = None
    return compiled


def takes(codes: QuantizedCodes, dtype: torch.dtype) -> bool:
    """Return whether the compiled functions are there and take these codes, for an input of this dtype on the CPU."""
    packed, _, scales, zeros, _ = codes
    if not (packed.is_cpu and dtype in _DTYPES and scales.dtype is torch.bfloat16 and packed.numel()):
        return False
    return packed.is_contiguous() and scales.is_contiguous() and zeros.is_contiguous() and library() is not None


def product(x: Tensor, codes: QuantizedCodes, bias: Tensor | None) -> Tensor:  # (n, in) -> (n, out)
    """Return ``x Q^T + bias`` in the dtype of x, with sums in float32, without derivatives; it is for few rows."""
    n, outputs = len(x), len(codes.scales)
    wide = x.float().contiguous()
    wide_bias = None if bias is None else bias.float().contiguous()
    y = torch.empty(n, outputs)
    compiled = library()
    assert compiled is not None  # callers ask for `takes` first
    compiled.panther_product(*_weight(codes, x.shape[1]), wide.data_ptr(), n, _address(wide_bias), y.data_ptr())
    return y.to(x.dtype)


def is_best_for(x: Tensor) -> bool:
    """Return whether :func:`product` is faster than a product with the expanded weight."""
    return 0 < len(x) <= _FEW_ROWS


def expand(codes: QuantizedCodes, rows: slice, out: Tensor) -> Tensor:  # (rows, in)
    """Write ``scales * (codes - zeros)`` of some rows to a contiguous matrix in float32 or bfloat16, and return it."""
    compiled = library()
    assert compiled is not None  # callers ask for `takes` first
    wide, half = (out.data_ptr(), None) if out.dtype is torch.float32 else (None, out.data_ptr())
    compiled.panther_expand(*_weight(codes, out.shape[1]), rows.start, rows.start + len(out), wide, half)
    return out


def _weight(codes: QuantizedCodes, columns: int) -> tuple[int, ...]:
    packed, bits, scales, zeros, group_size = codes
    addresses = packed.data_ptr(), scales.data_ptr(), zeros.data_ptr()
    return *addresses, bits, columns, len(scales), group_size, torch.get_num_threads()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _compiled(anew: bool = False) -> Path:
    """Return the compiled file, which is written first if it is not there, or in any case."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise FileNotFoundError(f"there is no compiler {os.environ.get('CXX') or 'c++'!r}")
    flags = (*_FLAGS, *_FLAGS_OF_CAPABILITY[torch.backends.cpu.get_cpu_capability()])
    identity = repr((flags, compiler, _processor())).encode()
    name = hashlib.sha256(_SOURCE.read_bytes() + identity).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions") / "panther"
    path = folder / f"quantized-{name}.so"
    if anew or not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unnamed:
            partial = Path(unnamed) / path.name
            command = [compiler, *flags, str(_SOURCE), "-o", str(partial)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
            partial.replace(path)
    return path


def _processor() -> str:
    """Return what tells processors apart: a file that was compiled for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith("flags")), platform.machine())
