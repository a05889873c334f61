"""Loss functions of microbatches and ranks: their reduction, and the division of their values."""

__all__ = ["DividedLoss", "check_reduction", "reduction_of"]

from collections.abc import Callable
from typing import Any

from torch import Tensor


class DividedLoss:
    """A loss function whose value is divided by a number, which may be changed between steps."""

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor], divisor: float = 1.0) -> None:
        # Schedules read `reduction` to weight microbatches.
        self.loss_fn, self.reduction, self.divisor = loss_fn, reduction_of(loss_fn), divisor

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the divided loss."""
        return self.loss_fn(output, target) / self.divisor


def reduction_of(loss_fn: Any) -> str:
    """Return the loss's attribute ``reduction``, or the keyword of a partial; the default is ``"mean"``."""
    keywords = getattr(loss_fn, "keywords", None) or {}
    return getattr(loss_fn, "reduction", None) or keywords.get("reduction", "mean")


def check_reduction(loss_fn: Any, name: str) -> str:
    """Return the loss's reduction, ``"mean"`` or ``"sum"``; ``name`` is the name of the loss in messages.

    Raises:
        TypeError: If the loss is not a function.
        ValueError: If it has a different reduction, such as ``"none"``.
    """
    if isinstance(loss_fn, type):
        raise TypeError(f"the {name} is the class {loss_fn.__name__}: pass an object, {loss_fn.__name__}()")
    if not callable(loss_fn):
        raise TypeError(f"the {name} must be a function of output and target, not {type(loss_fn).__name__}")
    if (reduction := reduction_of(loss_fn)) not in ("mean", "sum"):
        raise ValueError(f"the {name} has reduction={reduction!r}, and must have 'mean' or 'sum'")
    return reduction
