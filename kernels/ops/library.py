"""Registration of Panther's operators with torch, under the namespace ``panther``."""

__all__ = [
    "KERNEL_DTYPES",
    "are_transforms_active",
    "autocast",
    "can_autocast",
    "check_one_device",
    "define",
    "is_autocasting",
    "is_exporting",
    "is_plain_call",
    "needs_torch",
    "on_its_device",
    "refused_dtype",
    "runs_eagerly_on_gpu",
]

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .._torch import (
    are_transforms_active,
    can_autocast,
    is_differentiated_forward,
    is_in_export,
    is_plain_call,
    only_vmap_is_active,
)
from ..selection import runs_kernels

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LIBRARY = torch.library.Library("panther", "DEF")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def define(
    schema: str,
    implementation: Callable[_Arguments, _Result],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    vmap: Callable[..., Any] | None = None,
) -> Callable[_Arguments, _Result]:
    """Define an operator for every device and return a function that calls it or, where it can, its implementation.

    A call of the operator takes about 16 microseconds on the host beside its implementation, a third of what
    ``torch.library.custom_op`` takes. It serves compilers, modes, transforms and subclasses of tensors. A call on a GPU
    that nothing observes goes to the implementation, through a ``torch.autograd.Function`` if an operand requires a
    gradient.

    The arguments are as in ``torch.library``. The implementation chooses between Triton and torch by its operands, and
    ``backward`` uses differentiable operations, so that it can be differentiated again.
    """
    name = schema.partition("(")[0]
    implementation = on_its_device(implementation)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"panther::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"panther::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    if vmap is not None:
        torch.library.register_vmap(f"panther::{name}", vmap, lib=_LIBRARY)
    operator: Callable[_Arguments, _Result] = getattr(torch.ops.panther, name).default
    return _without_dispatch(operator, implementation, setup_context, backward)


def _without_dispatch(
    operator: Callable[_Arguments, _Result],
    implementation: Callable[_Arguments, _Result],
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any] | None,
) -> Callable[_Arguments, _Result]:
    """Return a function that calls the operator, or its implementation where no rule of the operator is needed."""

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = implementation(*args)  # type: ignore[call-arg]
            if setup_context is not None:
                setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            assert backward is not None
            return backward(ctx, *grads)

    def call(*args: Any) -> Any:
        # The order of the conditions matters to the compiler of torch: it must not trace what follows the first one.
        if torch.compiler.is_compiling() or not (runs_kernels(args[0]) and is_plain_call()):
            return operator(*args)  # type: ignore[call-arg]
        is_differentiated = False
        for arg in args:  # A generator would take three times the time of this loop.
            if type(arg) not in _PLAIN_TYPES:
                return operator(*args)  # type: ignore[call-arg]
            if type(arg) in _TENSOR_TYPES and arg.requires_grad:
                is_differentiated = True
        if not (is_differentiated and torch.is_grad_enabled()):
            return implementation(*args)  # type: ignore[call-arg]
        if backward is None:  # The operator says that it has no derivative.
            return operator(*args)  # type: ignore[call-arg]
        return Differentiable.apply(*args)  # type: ignore[no-untyped-call]

    return call  # type: ignore[return-value]


_TENSOR_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN_TYPES = _TENSOR_TYPES | {int, float, bool, type(None)}


def autocast(device: torch.device, *operands: torch.Tensor | None) -> list[Any]:
    """Return the operands in autocast's dtype for a matrix product, except for float64 and integers."""
    if not is_autocasting(device):
        return list(operands)
    dtype = torch.get_autocast_dtype(device.type)
    return [x if x is None or not x.is_floating_point() or x.dtype is torch.float64 else x.to(dtype) for x in operands]


def is_autocasting(device: torch.device) -> bool:
    """Return whether products on a device are computed in autocast's dtype."""
    return can_autocast(device.type) and torch.is_autocast_enabled(device.type)


def refused_dtype(dtype: torch.dtype) -> str | None:
    """Return the rule of the Triton kernels that a dtype breaks, as ``use_triton`` takes it, or None."""
    return None if dtype in KERNEL_DTYPES else f"takes float32, float16 and bfloat16, not {dtype}"


def check_one_device(name: str, operands: dict[str, torch.Tensor]) -> None:
    """Raise ValueError unless the operands of an operation are on one device."""
    if len({operand.device for operand in operands.values()}) > 1:
        places = ", ".join(f"{key} on {operand.device}" for key, operand in operands.items())
        raise ValueError(f"{name} takes operands on one device, not {places}: move them")


def is_exporting() -> bool:
    """Return whether a graph for other programs is recorded, by torch.export or torch.jit.trace.

    It should hold operators that these programs know, and no branch on the size of a batch.
    """
    return is_in_export() or torch.jit.is_tracing()


def needs_torch() -> bool:
    """Return whether derivatives are needed that custom operators lack: forward-mode and torch.func's derivatives.

    A batched operand may need a gradient too, and the operators have none beneath ``torch.func.vmap``.
    """
    if is_differentiated_forward():
        return True
    return are_transforms_active() and (torch.is_grad_enabled() or not only_vmap_is_active())


def runs_eagerly_on_gpu(x: torch.Tensor) -> bool:
    """Return whether an operation on x launches its kernels now, so that each of them takes time of the host.

    It does not where a compiler records the operation, a mode replaces it, or torch.func transforms it.
    """
    return not torch.compiler.is_compiling() and runs_kernels(x) and is_plain_call()


def on_its_device(implementation: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make the operands' device current, because Triton launches on the current one."""

    def call(first: Any, *args: Any) -> Any:
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return implementation(first, *args)  # type: ignore[call-arg]
        return implementation(first, *args)  # type: ignore[call-arg]

    return call  # type: ignore[return-value]
