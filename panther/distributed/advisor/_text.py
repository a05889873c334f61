"""Sentences of a plan: why an option won, and why another lost."""

__all__ = ["explain", "reason"]

from collections.abc import Sequence

from panther._text import format_bytes, format_seconds
from panther.distributed.advisor.cost_model import Estimate

_TIMES = {
    "compute": "computing",
    "bubble": "waiting in the pipeline",
    "tp": "sums over tp",
    "pp": "sending between stages",
    "dp": "sending gradients and parameters along dp",
}


def explain(estimates: Sequence[Estimate], room: float, objective: str) -> str:
    """Why the first of them won."""
    first = estimates[0]
    memory, step = format_bytes(first.memory.total), format_seconds(first.step_seconds)
    if first.memory.total > room:
        over = format_bytes(first.memory.total - room)
        return (
            f"{first.layout} comes closest, and nothing fits: it needs {memory}, {over} more than the "
            f"{format_bytes(room)} that may be used, mostly {_largest(first)}."
        )
    fitting = sum(e.memory.total <= room for e in estimates)
    what = "the shortest step" if objective == "time" else "the least memory"
    won = f"{first.layout} wins: of the {fitting} options that fit it has {what}" if fitting > 1 else None
    won = won or f"{first.layout} wins: it is the only option that fits"
    seconds = max(first.seconds, key=lambda name: first.seconds[name])
    return (
        f"{won}; a step takes {step}, mostly {_TIMES[seconds]}, and a rank holds {memory} of the "
        f"{format_bytes(room)} that may be used, mostly {_largest(first)}."
    )


def reason(lost: Estimate, first: Estimate, room: float, objective: str) -> str:
    """Why an option lost against the first."""
    if lost.memory.total > room:
        over = format_bytes(lost.memory.total - room)
        return (
            f"{lost.layout} does not fit: it needs {format_bytes(lost.memory.total)}, {over} more than the "
            f"{format_bytes(room)} that may be used, mostly {_largest(lost)}."
        )
    if objective == "memory":
        parts, best = lost.memory.parts(), first.memory.parts()
        if lost.memory.total == first.memory.total:
            return f"{lost.layout} holds as much, and a step takes {_longer(lost, first)}."
        name = max(parts, key=lambda part: parts[part] - best[part])
        more = format_bytes(lost.memory.total - first.memory.total)
        return f"{lost.layout} holds {more} more on a rank, mostly {name}."
    if lost.step_seconds == first.step_seconds:
        more = format_bytes(lost.memory.total - first.memory.total)
        return f"{lost.layout} takes as long, and holds {more} more on a rank."
    name = max(lost.seconds, key=lambda part: lost.seconds[part] - first.seconds[part])
    more = format_seconds(lost.seconds[name] - first.seconds[name])
    return f"{lost.layout} takes {_longer(lost, first)}, mostly by {more} more of {_TIMES[name]}."


def _longer(lost: Estimate, first: Estimate) -> str:
    ratio = lost.step_seconds / first.step_seconds
    return f"{ratio:.2f} times as long" if ratio >= 1.005 else "as long but for half a percent"


def _largest(e: Estimate) -> str:
    parts = e.memory.parts()
    name = max(parts, key=lambda part: parts[part])
    return f"{name} ({format_bytes(parts[name])})"
