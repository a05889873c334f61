"""Second moments of the layers' inputs and gradients: the sums, and the passes over the batches that fill them."""

from panther.compression.moments.gather import (
    Moments,
    check_calibration,
    gather_drift,
    gather_moments,
    moments_bytes,
    split_passes,
)

__all__ = ["Moments", "check_calibration", "gather_drift", "gather_moments", "moments_bytes", "split_passes"]
