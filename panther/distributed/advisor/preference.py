"""The layout to take without asking further: the simplest one that fits, unless measured speeds favour another one."""

__all__ = ["REQUIRED_SPEEDUP", "UNCALIBRATED", "Preference", "memory_clause", "preferred"]

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from panther._text import format_bytes
from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.cost.layout import Layout

if TYPE_CHECKING:
    from panther.distributed.advisor.plan import Option

REQUIRED_SPEEDUP = 1.2
"""How many times as fast as the simplest layout another one must be, by measured speeds. Predicted steps are off by up
to 30 %, and a layout that is harder to work with should gain about as much as their error."""
UNCALIBRATED = "speeds are uncalibrated, so no other layout was preferred for its predicted speed"


class Preference(NamedTuple):
    """A layout, and why it is preferred to the others."""

    option: "Option"
    reason: str


def preferred(options: Sequence["Option"], cluster: ClusterSpec) -> Preference:
    """Return the layout of a plan that ``strategy="auto"`` builds.

    Layouts that fit, and keep to the budget if there is one, are ordered by simplicity: ``"ddp"``, then data
    parallelism of other kinds, then tensor and pipeline parallelism. The first one is taken, unless the speeds of the
    cluster were measured and the fastest layout is at least :data:`REQUIRED_SPEEDUP` times as fast.
    """
    possible = [option for option in options if option.possible]
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
        verb = "costs more than the budget" if missed.fits else f"does not fit ({_needs(missed, cluster)})"
        return Preference(simplest, f"{missed.layout} {verb}; {why}")
    return Preference(simplest, f"{_needs(simplest, cluster)}; {why}")


def memory_clause(subject: str, needed: float, room: float) -> str:
    """Return how many bytes something needs of those that a rank may use; ``subject`` ends in the verb."""
    return f"{subject} {format_bytes(needed)} of the {format_bytes(room)} that a rank may use"


def _needs(option: "Option", cluster: ClusterSpec) -> str:
    return memory_clause("it needs", option.estimate.peak, cluster.memory_bytes * cluster.usable)


def _complexity(layout: Layout) -> tuple[bool, bool]:
    """Return a key that orders layouts by how much they differ from one process that trains the whole model."""
    return layout.tp * layout.pp > 1, layout.strategy != "ddp"
