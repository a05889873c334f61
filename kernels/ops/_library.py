"""Registration of Panther's operators with torch, under the namespace ``panther``."""

__all__ = ["check_one_device", "define", "needs_torch"]

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("panther", "DEF")
_AUTOCAST = {"AutocastCUDA": "cuda", "AutocastCPU": "cpu"}


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    vmap: Callable[..., Any] | None = None,
    autocast: bool = False,
) -> Any:
    """Define an operator for every device and return it: a third of the cost a call of ``torch.library.custom_op``.

    The parts are those of ``torch.library``. The implementation chooses between Triton and torch by its operands,
    ``backward`` is made of differentiable operations, so that it can be differentiated again, and with ``autocast``
    floating operands are cast under autocast, as a matrix product's are.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _on_its_device(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"panther::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"panther::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    if vmap is not None:
        torch.library.register_vmap(f"panther::{name}", vmap, lib=_LIBRARY)
    operator = getattr(torch.ops.panther, name).default
    if autocast:
        for key, device in _AUTOCAST.items():
            _LIBRARY.impl(name, _casting(operator, key, device), key)
    return operator


def check_one_device(name: str, operands: dict[str, torch.Tensor]) -> None:
    """Raise ValueError unless the operands of an operation are on one device."""
    if len({operand.device for operand in operands.values()}) > 1:
        places = ", ".join(f"{key} on {operand.device}" for key, operand in operands.items())
        raise ValueError(f"{name} takes operands on one device, not {places}: move them")


def needs_torch() -> bool:
    """Return whether derivatives are taken that custom operators lack: forward-mode ones, and those of torch.func.

    A batched operand may need a gradient too, and the operators have none beneath ``torch.func.vmap``.
    """
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    levels = retrieve_all_functorch_interpreters()
    return torch.is_grad_enabled() or any(level.key() != TransformType.Vmap for level in levels)


def _on_its_device(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Make the operands' device current, because Triton launches on the current one."""

    def call(first: torch.Tensor, *args: Any) -> Any:
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return implementation(first, *args)
        return implementation(first, *args)

    return call


def _casting(operator: Any, key: str, device: str) -> Callable[..., Any]:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*(_cast(arg, dtype) for arg in args))

    return call


def _cast(value: Any, dtype: torch.dtype) -> Any:
    castable = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return value.to(dtype) if castable else value
