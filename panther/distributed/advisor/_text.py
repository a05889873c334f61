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
    reason = f"{quality} of the {fitting} options that fit" if fitting > 1 else "is the only option that fits"
    part = max(best.seconds, key=lambda name: best.seconds[name])
    return (
        f"{best.layout} is best: it {reason}. A step takes {format_seconds(best.step_seconds)}, mostly {_TIMES[part]}, "
        f"and a rank needs {format_bytes(best.memory.total)} of the {format_bytes(room)} that may be used, mostly "
        f"{_largest(best)}."
    )


def explain_other(other: Estimate, best: Estimate, room: float, objective: str) -> str:
    """Say why an estimate is not the best one: by the objective, or else by what breaks ties."""
    if other.memory.total > room:
        return f"{other.layout} does not fit. {_needs(other, room)}."
    seconds = "takes {:.2f} times as long as", other.seconds, best.seconds, format_seconds
    memory = "needs {:.2f} times the memory of", other.memory.parts(), best.memory.parts(), format_bytes
    for words, parts, least, format_ in (seconds, memory) if objective == "time" else (memory, seconds):
        ratio = sum(parts.values()) / sum(least.values())
        if ratio != 1:
            part = max(parts, key=lambda name: parts[name] - least[name])
            more = format_(parts[part] - least[part])
            return f"{other.layout} {words.format(ratio)} the best: {more} more for {_TIMES.get(part, part)}."
    return f"{other.layout} takes as long as the best and needs as much memory."


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
