"""Copies in half precision of sketches, which never change, for layers that run under autocast."""

__all__ = ["reduced_copy"]

import weakref

import torch
from torch import Tensor

from .._torch import is_plain_call, version_of

_Copy = tuple["weakref.ref[Tensor]", int, Tensor]
_copies: dict[tuple[int, torch.dtype], _Copy] = {}


def reduced_copy(sketch: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a sketch in another dtype, copied once as long as nobody writes to the sketch.

    The copy lives as long as the sketch. It is made again after a write that torch counts, such as loading a checkpoint
    or drawing from another seed. After copying the host waits once for the device, so that other streams may read the
    copy too.
    """
    if sketch.dtype is dtype:
        return sketch
    if torch.compiler.is_compiling() or not is_plain_call() or type(sketch) is not Tensor:
        return sketch.to(dtype)
    if sketch.requires_grad or sketch.is_inference():
        return sketch.to(dtype)
    key = (id(sketch), dtype)
    entry = _copies.get(key)
    if entry is not None and entry[0]() is sketch and entry[1] == version_of(sketch):
        return entry[2]
    with torch.inference_mode(False), torch.no_grad():
        copy = sketch.to(dtype)
    if sketch.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return copy  # Its values exist only after the graph has run.
        torch.cuda.current_stream(sketch.device).synchronize()
    # The address of a tensor may be used again after its end, so its end removes the entry.
    _copies[key] = weakref.ref(sketch, lambda _: _copies.pop(key, None)), version_of(sketch), copy
    return copy
