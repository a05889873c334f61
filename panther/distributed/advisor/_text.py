"""The sentences of a plan: why an option is the best, or why it is not."""

__all__ = ["explain"]

from collections.abc import Sequence

from panther._text import format_bytes, format_seconds
from panther.distributed.advisor.cost_model import Estimate

_TIMES = {
    "compute": "computing",
    "optimizer": "the optimizer's step",
    "bubble": "idle time of the pipeline",
    "tp": "communication over tp",
    "pp": "communication between stages",
    "dp": "gradient and parameter communication over dp",
}


def explain(estimates: Sequence[Estimate], index: int, room: float, objective: str) -> str:
    """Return a sentence that explains why the estimate at ``index`` is the best, or why it is not.

    ``room`` is the memory that a rank may use, in bytes.
    """
    best, other = estimates[0], estimates[index]
    if other.peak > room:
        start, closest = (f"{other.layout} does not fit.", "") if index else ("No layout fits.", ", the closest,")
        over = f"{format_bytes(other.peak - room)} more than the {format_bytes(room)} that may be used"
        needs = f"{start} {other.layout}{closest} needs {format_bytes(other.peak)}"
        if other.memory.total > room:
            return f"{needs}, {over}, mostly for {_largest(other)}."
        if other.start > other.start_on_meta:
            return (
                f"{needs} at the start, {over}, because every rank holds all of a model with values: build it on the "
                f"meta device or in a function, to start with {format_bytes(other.start_on_meta)}."
            )
        return f"{needs} at the start, {over}, for its shards and its largest module in full."
    if index == 0:
        fitting = sum(e.peak <= room for e in estimates)
        quality = "has the shortest step" if objective == "time" else "needs the least memory"
        reason = f"{quality} of the {fitting} options that fit" if fitting > 1 else "is the only option that fits"
        part = max(best.seconds, key=lambda name: best.seconds[name])
        return (
            f"{best.layout} is best: it {reason}. A step takes {format_seconds(best.step_seconds)}, mostly "
            f"{_TIMES[part]}, and a rank needs {format_bytes(best.memory.total)} of the {format_bytes(room)} that may "
            f"be used, mostly {_largest(best)}."
        )
    # Compare by the objective, and by the other measure in case of a tie.
    seconds = "takes {:.4g} times as long as", other.seconds, best.seconds, format_seconds
    memory = "needs {:.4g} times the memory of", other.memory.parts(), best.memory.parts(), format_bytes
    for words, parts, least, format_ in (seconds, memory) if objective == "time" else (memory, seconds):
        ratio = sum(parts.values()) / sum(least.values())
        if ratio != 1:
            part = max(parts, key=lambda name: parts[name] - least[name])
            more = format_(parts[part] - least[part])
            return f"{other.layout} {words.format(ratio)} the best: {more} more for {_TIMES.get(part, part)}."
    return f"{other.layout} takes as long as the best and needs as much memory."


def _largest(e: Estimate) -> str:
    parts = e.memory.parts()
    name = max(parts, key=lambda part: parts[part])
    return f"{name} ({format_bytes(parts[name])})"
