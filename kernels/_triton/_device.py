"""Properties of the device that kernels are compiled for, and what depends on them."""

__all__ = [
    "INTERPRETED", "cdiv", "dot_operand", "dot_precision", "has_tensor_memory", "has_warpgroups", "is_hip",
    "multiprocessors", "next_power_of_2", "pipeline_stages",
]  # fmt: skip

import functools

import torch
import triton
import triton.language as tl

from .._torch import float32_precision
from ..selection import interpreting
from ._runtime import current_target

INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def dot_operand(tile):
    """Return a tile for tensor cores: in float32 in the interpreter, which computes bfloat16 wrongly."""
    return tile.to(tl.float32) if INTERPRETED else tile


def dot_precision(dtype: torch.dtype) -> str:
    """Return the input precision of a dot product: IEEE or TF32, as torch is set to compute matrix products on the GPU.

    On NVIDIA's tensor cores, three TF32 products replace a float32 product. IEEE products would spill registers.
    """
    if dtype is not torch.float32 or INTERPRETED.value:
        return "ieee"
    target = current_target()
    # torch.get_float32_matmul_precision() raises once this newer setting was used.
    full = float32_precision() != "tf32"
    if target.backend == "hip":
        return "ieee" if full or "gfx94" not in str(target.arch) else "tf32"
    return "tf32x3" if full else "tf32"


def cdiv(dividend: int, divisor: int) -> int:
    """Return the quotient of two positive integers, rounded up.

    Triton's function of this name, and the next one, can also be called in kernels, and take two microseconds a call on
    the host.
    """
    return -(-dividend // divisor)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, which a grid should fill."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def is_hip() -> bool:
    """Return whether kernels are compiled for AMD's GPUs, which have less shared memory."""
    return not INTERPRETED.value and current_target().backend == "hip"


def has_warpgroups() -> bool:
    """Return whether the matrix units take tiles of 64 rows asynchronously from shared memory: sm_90 to sm_103.

    Those of sm_120 take tiles from registers, as before sm_90.
    """
    if INTERPRETED.value:
        return False
    target = current_target()
    return target.backend == "cuda" and 90 <= int(target.arch) < 120


def has_tensor_memory() -> bool:
    """Return whether the matrix units keep sums in a memory beside the registers: sm_100 and sm_103."""
    if INTERPRETED.value:
        return False
    target = current_target()
    return target.backend == "cuda" and int(target.arch) // 10 == 10


def pipeline_stages(stages: int) -> int:
    """Return the depth of the software pipeline: ``stages``, at most 2 on AMD's GPUs, whose shared memory is small."""
    return min(stages, 2) if is_hip() else stages
