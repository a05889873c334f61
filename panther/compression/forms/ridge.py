"""Fits with a larger ridge, where the calibration batches show too little for the usual one."""

__all__ = ["DOUBTFUL", "fitted_with_care"]

from collections.abc import Callable
from dataclasses import replace

from panther.compression.fits import RIDGE
from panther.compression.forms.allocation import Allocation
from panther.compression.forms.fitting import Fits

DOUBTFUL = 0.05
"""A held-out error above so much, and far above the predicted one, is of batches that differ from the others."""

# Times the predicted error from which on weights are fitted again, with a ridge for batches that show too little. A
# convolutional network in 4.25 bits, fitted to 12 photographs, had an error of 0.93 on others with the usual ridge, of
# 0.33 with 0.03 and of 0.235 with 0.3.
_MISLED, _CAUTIOUS_RIDGE = 3.0, 0.3


def fitted_with_care(
    fitted: Callable[[float], Fits], allocation_of: Callable[[Fits], Allocation]
) -> tuple[Fits, Allocation]:
    """Fit with the usual ridge, and with a larger one too where held-out batches show that the usual one misleads.

    Args:
        fitted: Returns the fits with a ridge.
        allocation_of: Returns the choice that the fits lead to.
    """
    fits = fitted(RIDGE)
    allocation = allocation_of(fits)
    if _is_misled(fits, allocation):
        cautious = fitted(_CAUTIOUS_RIDGE)
        fits, allocation = _better(fits, allocation, cautious, allocation_of(cautious))
    return fits, allocation


def _is_misled(fits: Fits, allocation: Allocation) -> bool:
    """Return whether the held-out error is so much above the predicted one that the moments cannot be trusted.

    That of the choice by predictions: uniform forms, which are taken where it is worse, may hide what it lost.
    """
    if allocation.of_predicted is None or not fits.comparable:
        return False
    error, predicted = allocation.of_predicted
    return error > max(DOUBTFUL, _MISLED * predicted)


def _better(fits: Fits, first: Allocation, cautious: Fits, second: Allocation) -> tuple[Fits, Allocation]:
    """Return the fits and the choice with the smaller held-out error, with a note if they are the cautious ones."""
    if first.error is None or second.error is None or not second.error < first.error:
        return fits, first
    note = (
        f"weights are fitted with a larger ridge, by which the error on the held-out batches is {second.error:.3g} and "
        f"not {first.error:.3g}: more and other batches would do more"
    )
    return cautious, replace(second, notes=(*second.notes, note))
