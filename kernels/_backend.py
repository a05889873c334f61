"""Which kernels run: decided once, from what is installed and from ``PANTHER_KERNELS``.

``PANTHER_KERNELS=auto`` (the default) uses Triton kernels where they exist and can run and the torch reference
elsewhere; ``torch`` always takes the reference; ``triton`` insists, and raises where it cannot be had.
"""

__all__ = ["backend", "triton_available"]

import os
from functools import lru_cache
from importlib.util import find_spec

_CHOICES = ("auto", "torch", "triton")


@lru_cache(maxsize=1)
def triton_available() -> bool:
    """Whether the ``triton`` package is installed; it is not imported to find out."""
    return find_spec("triton") is not None


@lru_cache(maxsize=1)
def backend() -> str:
    """The kernels in use, ``"torch"`` or ``"triton"``.

    Raises:
        ValueError: If ``PANTHER_KERNELS`` has an unknown value.
        RuntimeError: If it is ``triton`` and no Triton kernel can run.
    """
    choice = os.environ.get("PANTHER_KERNELS", "auto")
    if choice not in _CHOICES:
        raise ValueError(f"PANTHER_KERNELS={choice!r} must be one of {', '.join(_CHOICES)}: unset it for auto")
    if choice == "triton":
        # No Triton kernel is part of this version, so the explicit wish cannot be met, whatever is installed.
        raise RuntimeError(
            "PANTHER_KERNELS=triton asks for Triton kernels, and this version has only the torch reference: "
            "use PANTHER_KERNELS=auto"
        )
    return "torch"
