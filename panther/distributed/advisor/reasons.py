"""The options of a plan and their reasons: why one is the best or not, and which one ``strategy="auto"`` takes."""

__all__ = ["REQUIRED_SPEEDUP", "UNCALIBRATED", "Option", "Preference", "explain", "memory_clause", "preferred"]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from panther._text import format_bytes, format_seconds
from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.parallelize.layout import Layout

if TYPE_CHECKING:  # measuring models takes half a second to import, and every Trainer imports this module
    from panther.distributed.advisor.cost import Estimate

_TIMES = {
    "compute": "computing",
    "optimizer": "the optimizer's step",
    "bubble": "idle time of the pipeline",
    "tp": "communication over tp",
    "pp": "communication between stages",
    "dp": "gradient and parameter communication over dp",
}
REQUIRED_SPEEDUP = 1.2
"""How many times as fast as the simplest layout another one must be, by measured speeds. Predicted steps are off by up
to 30 %, and a layout that is harder to work with should gain about as much as their error."""
UNCALIBRATED = "speeds are uncalibrated, so no other layout was preferred for its predicted speed"


@dataclass(frozen=True)
class Option:
    """A layout with its predicted cost, and the reason of its rank."""

    estimate: "Estimate"
    fits: bool
    """Whether the layout's memory fits, at the start and in a step."""
    reason: str

    @property
    def layout(self) -> Layout:
        """The mesh and its strategies."""
        return self.estimate.layout


class Preference(NamedTuple):
    """A layout, and why it is preferred to the others."""

    option: Option
    reason: str


def preferred(options: Sequence[Option], cluster: ClusterSpec) -> Preference:
    """Return the layout of a plan that ``strategy="auto"`` builds.

    Layouts that fit are ordered by simplicity: ``"ddp"``, then data parallelism of other kinds, then tensor and
    pipeline parallelism. The first one is taken, unless the speeds of the cluster were measured and the fastest layout
    is at least :data:`REQUIRED_SPEEDUP` times as fast.
    """
    possible = [option for option in options if option.fits]
    if not possible:
        return Preference(options[0], "no layout fits, and this is the closest")
    simplest = min(possible, key=lambda option: _complexity(option.layout))  # the first of equals, in the plan's order
    fastest = min(possible, key=lambda option: option.estimate.step_seconds)
    speedup = simplest.estimate.step_seconds / fastest.estimate.step_seconds
    if cluster.calibrated and speedup >= REQUIRED_SPEEDUP:
        return Preference(fastest, f"by measured speeds it is {speedup:.3g} times as fast as {simplest.layout}")
    why = UNCALIBRATED
    if cluster.calibrated:
        why = f"by measured speeds no other layout is {REQUIRED_SPEEDUP} times as fast"
    simpler = [option for option in options if _complexity(option.layout) < _complexity(simplest.layout)]
    if simpler:
        missed = min(simpler, key=lambda option: _complexity(option.layout))
        return Preference(simplest, f"{missed.layout} does not fit ({_needs(missed, cluster)}); {why}")
    return Preference(simplest, f"{_needs(simplest, cluster)}; {why}")


def memory_clause(subject: str, needed: float, room: float) -> str:
    """Return how many bytes something needs of those that a rank may use; ``subject`` ends in the verb."""
    return f"{subject} {_of_room(needed, room)}"


def _needs(option: Option, cluster: ClusterSpec) -> str:
    return memory_clause("it needs", option.estimate.peak, cluster.memory_bytes * cluster.usable)


def _complexity(layout: Layout) -> tuple[bool, bool]:
    """Return a key that orders layouts by how much they differ from one process that trains the whole model."""
    return layout.tp * layout.pp > 1, layout.strategy != "ddp"


def explain(estimates: "Sequence[Estimate]", index: int, room: float, objective: str) -> str:
    """Return a sentence that explains why the estimate at ``index`` is the best, or why it is not.

    ``room`` is the memory that a rank may use, in bytes.
    """
    best, other = estimates[0], estimates[index]
    if other.peak > room:
        subject = f"{other.layout} does not fit" if index else f"No layout fits. {other.layout}, the closest,"
        needs = f"{subject}: it needs" if index else f"{subject} needs"
        if other.memory.total > room:
            return f"{needs} {_of_room(other.memory.total, room)}, mostly for {_largest(other)}."
        reason = ""
        if other.start > other.start_on_meta:
            reason = (
                ", because every rank holds all of a model with values: build it on the meta device or in a function, "
                f"to start with {format_bytes(other.start_on_meta)}"
            )
        return f"{needs} {_of_room(other.start, room)} at the start{reason}."
    if index == 0:
        fitting = sum(e.peak <= room for e in estimates)
        quality = "has the shortest step" if objective == "time" else "needs the least memory"
        part = max(best.seconds, key=lambda name: best.seconds[name])
        return (
            f"{best.layout} is best: it {quality} of the {fitting} options that fit. A step takes "
            f"{format_seconds(best.step_seconds)}, mostly {_TIMES[part]}, and a rank needs "
            f"{_of_room(best.memory.total, room)}, mostly for {_largest(best)}."
        )
    if objective == "memory":
        return f"{other.layout} needs {other.memory.total / best.memory.total:.4g} times the memory of the best."
    part = max(other.seconds, key=lambda name: other.seconds[name] - best.seconds[name])
    more = format_seconds(other.seconds[part] - best.seconds[part])
    ratio = other.step_seconds / best.step_seconds
    return f"{other.layout} takes {ratio:.4g} times as long as the best: {more} more for {_TIMES[part]}."


def _of_room(needed: float, room: float) -> str:
    return f"{format_bytes(needed)} of the {format_bytes(room)} that a rank may use"


def _largest(e: "Estimate") -> str:
    parts = e.memory.parts()
    name = max(parts, key=lambda part: parts[part])
    return f"{name} ({format_bytes(parts[name])})"
