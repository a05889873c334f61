"""The four kinds of tolerance the tests use, and why.

*Exact*: seeds, synchronisation, saving and loading move numbers without computing; compare with ``torch.equal``.
*Factorisations*: normalised residuals and orthogonality within eps^0.75, as RandLAPACK asks of its drivers. On any one
machine they keep a factor of 4 to that bound, because other instruction sets round otherwise: ``.ci/run`` and ``make
verify`` set ``PANTHER_TOLERANCE_MARGIN=4``, which divides it.
*Kernels*: root-mean-square error over that of the float64 result; sums of a few thousand products stay well below.
*Statistical*: bounds derived in the test from a stated failure probability, with fixed seeds.
"""

import os

import torch

KERNEL_RMS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 6e-3 * 4}
"""bfloat16 keeps 8 bits to float16's 11; its results are rounded once more on the way out of the first product."""


def kernel_rms(dtype: torch.dtype, device: torch.device) -> float:
    """Return the bound of a Triton kernel: its interpreter truncates to bfloat16 where a GPU rounds."""
    return 2e-2 if dtype is torch.bfloat16 and device.type == "cpu" else KERNEL_RMS[dtype]


_MARGIN = float(os.environ.get("PANTHER_TOLERANCE_MARGIN", "1"))


def factorisation(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps ** 0.75 / _MARGIN


def rms_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Root-mean-square error relative to the root-mean-square of the exact result."""
    if exact.numel() == 0:
        return 0.0
    scale = exact.double().square().mean().sqrt().clamp_min(1e-300)
    return ((result.double() - exact.double()).square().mean().sqrt() / scale).item()


def assert_close(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    assert result.shape == exact.shape
    error = rms_error(result.detach(), exact.detach())
    bound = KERNEL_RMS[dtype or result.dtype]
    assert error <= bound, f"RMS error {error:.2e} above {bound:.0e}"
