"""How the learning rate goes over a run."""

__all__ = ["rate_factor"]

import math


def rate_factor(schedule: str, step: int, total: int | None, warmup: int) -> float:
    """Factor of the learning rate in a step: up in a line over the warm-up, then constant, or down to 0 at the end.

    Args:
        schedule: ``"linear"`` or ``"cosine"``; another is constant.
        step: Steps that are over.
        total: Steps of the run; None only where it is constant.
        warmup: Steps of the rise.

    Example:
        >>> [rate_factor("linear", step, 6, 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule not in ("linear", "cosine") or total is None:
        return 1.0
    share = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - share if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
