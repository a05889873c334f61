"""Second moments of the layers' inputs and gradients: the sums, and the passes over the batches that fill them."""

from panther.compression.moments.gather import (
    Gathered,
    Summary,
    check_calibration,
    gather_moments,
    moments_bytes,
    split_passes,
)
from panther.compression.moments.sums import Moments

__all__ = [
    "Gathered", "Moments", "Summary", "check_calibration", "gather_moments", "moments_bytes",
    "split_passes",
]  # fmt: skip
