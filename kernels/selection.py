"""Choice of kernels, by ``PANTHER_KERNELS`` and by the available hardware and software.

``PANTHER_KERNELS=auto`` (the default) uses Triton kernels on a GPU, where Triton is installed and the kernel takes the
operands, and torch elsewhere; ``torch`` always uses torch; ``triton`` raises an error where Triton cannot run. With
``TRITON_INTERPRET=1``, ``triton`` runs the kernels on the CPU in Triton's interpreter, slowly, for debugging.
"""

__all__ = ["backend", "interpreting", "multiplies_by_instruction", "runs_kernels", "use_triton", "uses_torch_alone"]

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

_CHOICES = ("auto", "torch", "triton")


def interpreting() -> bool:
    """Return whether Triton interprets its kernels. Triton reads ``TRITON_INTERPRET`` when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@lru_cache(maxsize=1)
def backend() -> str:
    """Return the kernels in use, ``"torch"`` or ``"triton"``.

    Raises:
        ValueError: If ``PANTHER_KERNELS`` has an unknown value.
        RuntimeError: If it is ``triton`` and no Triton kernel can run.

    Example:
        >>> backend() in ("torch", "triton")
        True
    """
    choice = _choice()
    if choice == "torch":
        return "torch"
    has_triton = find_spec("triton") is not None
    if choice == "auto":
        return "triton" if has_triton and torch.cuda.is_available() and not interpreting() else "torch"
    if not has_triton:
        raise RuntimeError(
            "PANTHER_KERNELS=triton asks for Triton, and it is not installed: run pip install triton, or use "
            "PANTHER_KERNELS=auto"
        )
    if not torch.cuda.is_available() and not interpreting():
        raise RuntimeError(
            "PANTHER_KERNELS=triton asks for Triton kernels, and torch finds no GPU: use PANTHER_KERNELS=auto, or set "
            "TRITON_INTERPRET=1 too to interpret them, slowly, on the CPU"
        )
    return "triton"


def use_triton(kernel: str, device: torch.device, refusal: str | None = None) -> bool:
    """Return whether the Triton kernel takes this call, or raise RuntimeError if Triton is required and cannot.

    ``refusal`` says which rule of the kernel the operands break, as the end of a sentence whose subject is the kernel.
    """
    if backend() == "torch" or device.type == "meta":
        return False
    if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
        refusal = f"runs on a GPU, and the operands are on {device.type!r}"
    if refusal is None:
        return True
    if _choice() == "triton":
        raise RuntimeError(f"PANTHER_KERNELS=triton, but the kernel of {kernel} {refusal}: use PANTHER_KERNELS=auto")
    return False


def runs_kernels(x: Tensor) -> bool:
    """Return whether Triton kernels run on the device of a tensor, if they take the operands."""
    return backend() == "triton" and (x.is_cuda or (x.is_cpu and interpreting()))


def multiplies_by_instruction(dtype: torch.dtype) -> bool:
    """Return whether the processor has instructions that multiply matrices of bfloat16 or float16."""
    ending = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return any(name.endswith(ending) and bool(value) for name, value in torch.cpu.get_capabilities().items())


def uses_torch_alone() -> bool:
    """Return whether kernels of every kind are turned off, by ``PANTHER_KERNELS=torch``."""
    return _choice() == "torch"


def _choice() -> str:
    choice = os.environ.get("PANTHER_KERNELS") or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"PANTHER_KERNELS={choice!r} must be one of {', '.join(_CHOICES)}: unset it for auto")
    return choice
