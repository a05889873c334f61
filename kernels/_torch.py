"""Private names of torch that the kernels need, each with its reason and its public fallback.

No other module of the kernels uses a private name of torch. ``panther/_torch`` has the private names for the rest
of Panther, which the kernels do not import.
"""

__all__ = [
    "are_transforms_active",
    "can_autocast",
    "convert_to_int4",
    "float32_precision",
    "int4_weight_mm",
    "int8_weight_mm",
    "int_mm",
    "is_differentiated_forward",
    "is_in_export",
    "is_plain_call",
    "is_tracing",
    "only_vmap_is_active",
    "version_of",
]

import torch
from torch import Tensor

# True inside of torch.func.grad, jvp, vmap and similar functions. torch has no public function that tells it. The
# fallback is to refuse torch.func, or to take the slower path of the transforms in every call.
from torch._C import _are_functorch_transforms_active as are_transforms_active

# Modes intercept operators and functions: fake tensors, traces, checkpointing, counters of operations. The numbers of
# active modes are not public. The fallback is to call operators, which consult the modes, in every call.
from torch._C import _get_function_stack_at as function_mode_at
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as count_dispatch_modes
from torch._C import _len_torch_function_stack as count_function_modes
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_AUTOCAST_DEVICES = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def can_autocast(device_type: str) -> bool:
    """Return whether torch has autocast for a type of device.

    The compiler of torch 2.11 cannot trace the public ``torch.amp.is_autocast_available``, which serves other devices.
    """
    if device_type in _AUTOCAST_DEVICES:
        return True
    return torch.amp.is_autocast_available(device_type)


def float32_precision() -> str:
    """Return the precision of matrix products in float32 on a GPU, ``torch.backends.cuda.matmul.fp32_precision``.

    The public attribute takes 0.8 microseconds, and what it calls takes 0.1.
    """
    precision: str = torch._C._get_fp32_precision_getter("cuda", "matmul")
    return precision


def is_in_export() -> bool:
    """Return whether torch.export records.

    The public ``torch.compiler.is_exporting``, which is the fallback, reads this too, but the compiler of torch 2.11
    takes it for true, so that compiled models would run without the kernels.
    """
    return torch.compiler._is_exporting_flag


def only_vmap_is_active() -> bool:
    """Return whether every active transform of torch.func is a vmap.

    The custom operators have a rule for vmap and none for the derivatives of torch.func. torch has no public list of
    the active transforms. The fallback is to treat every transform as a derivative, which takes the slower path.
    """
    return all(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())


def is_differentiated_forward() -> bool:
    """Return whether a level of forward-mode differentiation is open, by torch.autograd.forward_ad or torch.func.jvp.

    The public ``forward_ad.unpack_dual`` answers for one tensor and takes a microsecond for each operand.
    """
    return forward_ad._current_level >= 0


def is_plain_call() -> bool:
    """Return whether nothing records, replaces or transforms the operations that are called now.

    An operator with autograd and all rules of dispatch takes about 16 microseconds more than its implementation.
    A call that nothing observes can do without. The mode of ``torch.set_default_device`` only adds a device to calls
    that make tensors from nothing.
    """
    if count_dispatch_modes() or are_transforms_active() or forward_ad._current_level >= 0 or is_tracing():
        return False
    modes = count_function_modes()
    return modes == 0 or (modes == 1 and type(function_mode_at(0)) is DeviceContext)


def int_mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:  # (m, k) int8, (k, n) int8 -> (m, n) int32
    """Return the product of two matrices of int8 in int32.

    ``torch.mm`` refuses int8. The public fallback is a product in float32, which is exact up to 2^24 and takes four
    times the memory.
    """
    return torch._int_mm(a, b) if out is None else torch._int_mm(a, b, out=out)


def int8_weight_mm(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:  # (m, k), (n, k) int8, (n,) -> (m, n)
    """Return ``x weight^T * scales`` for a weight of int8, without a copy of the weight in the dtype of x.

    The public fallback is ``x @ weight.to(x.dtype).mT * scales``, which writes that copy.
    """
    return torch._weight_int8pack_mm(x, weight, scales)


def convert_to_int4(integers: Tensor) -> Tensor:  # (out, in) int32
    """Return integers of 4 bits in the order of :func:`int4_weight_mm`. The operator has no public name."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
    return packed


def int4_weight_mm(x: Tensor, packed: Tensor, group_size: int, scales: Tensor) -> Tensor:  # (n, in) -> (n, out)
    """Return the product with a weight of 4 bits. The public fallback is a product with the weight in bfloat16."""
    product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group_size, scales)
    return product


def version_of(x: Tensor) -> int:
    """Return the number of writes to the memory of a tensor, which must not be an inference tensor.

    Autograd counts writes. The public fallback is a checksum of the values.
    """
    return x._version
