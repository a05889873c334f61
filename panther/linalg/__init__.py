"""Randomized linear algebra: building blocks, drivers on top of them, and the error they made."""

from .error import ErrorEstimate, estimate_error

__all__ = ["ErrorEstimate", "estimate_error"]
