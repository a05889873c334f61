"""The sentences of a plan: why an option is best, and why another is not."""

__all__ = ["explain_best", "explain_other"]

from collections.abc import Sequence

from panther._text import format_bytes, format_seconds
from panther.distributed.advisor.cost_model import Estimate

_TIMES = {
    "compute": "computing",
    "bubble": "idle time of the pipeline",
    "tp": "communication over tp",
    "pp": "communication between stages",
    "dp": "gradient and parameter communication over dp",
}


def explain_best(estimates: Sequence[Estimate], room: float, objective: str) -> str:
    """Say why the first estimate is the best one; ``room`` is the memory that a rank may use."""
    best = estimates[0]
    if best.memory.total > room:
        return f"No layout fits. {_needs(best, room)}, which is the closest."
    fitting = sum(e.memory.total <= room for e in estimates)
    quality = "has the shortest step" if objective == "time" else "needs the least memory"
    won = f"{best.layout} is best: it {quality} of the {fitting} options that fit"
    if fitting == 1:
        won = f"{best.layout} is best: it is the only option that fits"
    part = max(best.seconds, key=lambda name: best.seconds[name])
    return (
        f"{won}. A step takes {format_seconds(best.step_seconds)}, mostly {_TIMES[part]}, and a rank needs "
        f"{format_bytes(best.memory.total)} of the {format_bytes(room)} that may be used, mostly {_largest(best)}."
    )


def explain_other(other: Estimate, best: Estimate, room: float, objective: str) -> str:
    """Say why an estimate is not the best one."""
    more_memory = other.memory.total - best.memory.total
    if other.memory.total > room:
        return f"{other.layout} does not fit. {_needs(other, room)}."
    if objective == "memory" and more_memory:
        parts, least = other.memory.parts(), best.memory.parts()
        part = max(parts, key=lambda name: parts[name] - least[name])
        return f"{other.layout} needs {format_bytes(more_memory)} more memory per rank, mostly for {part}."
    if other.step_seconds == best.step_seconds:
        return f"{other.layout} takes as long, and needs {format_bytes(more_memory)} more memory per rank."
    part = max(other.seconds, key=lambda name: other.seconds[name] - best.seconds[name])
    more_time = format_seconds(other.seconds[part] - best.seconds[part])
    ratio = other.step_seconds / best.step_seconds
    longer = f"takes {ratio:.2f} times as long as" if ratio >= 1.005 else "is within 0.5 % of"
    equal = "needs as much memory and " if objective == "memory" else ""
    return f"{other.layout} {equal}{longer} the best: {more_time} more for {_TIMES[part]}."


def _needs(e: Estimate, room: float) -> str:
    over = format_bytes(e.memory.total - room)
    return (
        f"{e.layout} needs {format_bytes(e.memory.total)}, {over} more than the {format_bytes(room)} that may be used, "
        f"mostly for {_largest(e)}"
    )


def _largest(e: Estimate) -> str:
    parts = e.memory.parts()
    name = max(parts, key=lambda part: parts[part])
    return f"{name} ({format_bytes(parts[name])})"
