"""Which kernels run: decided once, by ``PANTHER_KERNELS`` and by what there is.

``PANTHER_KERNELS=auto`` (the default) uses Triton kernels where they exist and can run and the torch reference
elsewhere; ``torch`` always takes the reference; ``triton`` insists, and raises where it cannot be had.
"""

__all__ = ["backend"]

import os
from functools import lru_cache

_CHOICES = ("auto", "torch", "triton")


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
