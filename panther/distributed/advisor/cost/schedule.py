"""The order of work in torch's pipeline schedules, and the idle time and peak memory that follow from it."""

__all__ = ["Order", "order_of"]

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from panther.distributed.pipeline.balance import SCHEDULES, stages_of_rank
from panther.errors import ShapeError

# Kinds of steps in torch's _ComputationType, and their times.
_UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}
Step = tuple[int, str, int]
"""Stage, kind (F: forward, B: backward, I and W: backward for inputs and for weights), and microbatch."""


@dataclass(frozen=True)
class Order:
    """The steps of every rank, and the idle time.

    A forward pass of a stage takes one unit of time, a backward pass two (one of them for inputs), and sending none.
    """

    steps: tuple[tuple[Step, ...], ...]
    """The steps of each rank."""
    bubble: float
    """Share of the time from the first to the last step in which a rank is idle, on average."""

    def peak(
        self, rank: int, sizes: Sequence[float], gradients: Sequence[float] = (), recomputed: Sequence[float] = ()
    ) -> float:
        """Return a rank's peak bytes.

        For schedules that split the backward pass, it is an upper bound, because the bytes that torch frees between the
        two parts are counted only for the first stage.

        Args:
            rank: The rank.
            sizes: Bytes of a microbatch in each stage, from its forward to its backward pass.
            gradients: Bytes of the gradients of each stage, which exist from the first backward pass of the stage on.
                The backward pass frees the microbatch layer by layer while it makes them.
            recomputed: Bytes that the backward pass of each stage recomputes.
        """
        stored_bytes = peak_bytes = 0.0
        reduced_stages: set[int] = set()
        for stage, kind, _ in self.steps[rank]:
            if kind != "F" and recomputed:
                peak_bytes = max(peak_bytes, stored_bytes + recomputed[stage])
            if kind == "F":
                stored_bytes += sizes[stage]
            elif kind == "B" or (kind == "W" and stage == 0):
                stored_bytes -= sizes[stage]
            if gradients and kind in "BW" and stage not in reduced_stages:
                reduced_stages.add(stage)
                stored_bytes += gradients[stage]
            peak_bytes = max(peak_bytes, stored_bytes)
        return peak_bytes


# Many layouts share a schedule, and a long pipeline has many steps.
@lru_cache(maxsize=512)
def order_of(name: str, ranks: int, microbatches: int) -> Order:
    """Return the order of a schedule.

    Raises:
        ShapeError: If the schedule does not support the number of microbatches.
    """
    # torch 2.13 executes 1f1b in a different order from the one that it lists.
    listed = _one_forward_one_backward if name == "1f1b" else _listed_by_torch
    steps = tuple(tuple(rank) for rank in listed(name, ranks, microbatches))
    return Order(steps, _bubble(steps))


def _one_forward_one_backward(name: str, ranks: int, microbatches: int) -> list[list[Step]]:
    orders = []
    for rank in range(ranks):
        # The first rank starts most microbatches before its first backward pass, the last rank one.
        warmup = min(ranks - rank, microbatches)
        steps: list[Step] = [(rank, "F", i) for i in range(warmup)]
        for i in range(microbatches):
            steps.append((rank, "B", i))
            if warmup + i < microbatches:
                steps.append((rank, "F", warmup + i))
        orders.append(steps)
    return orders


def _listed_by_torch(name: str, ranks: int, microbatches: int) -> list[list[Step]]:
    kind = SCHEDULES[name]

    class Listed(kind.make):  # type: ignore[name-defined]
        def _prepare_schedule_with_comms(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing, because torch would add the messages, which takes seconds for long pipelines."""

    n = ranks * kind.stages_per_rank
    # The attributes of a stage that the constructors read. A real stage would run collectives when it is made.
    common = {"num_stages": n, "group_size": ranks, "group_rank": 0, "group": None, "device": torch.device("cpu")}
    stages = [SimpleNamespace(stage_index=i, submod=None, **common) for i in stages_of_rank(0, ranks, n, kind.order)]
    try:
        # torch 2.13 has no public way to read the order.
        order = Listed(stages if kind.stages_per_rank > 1 else stages[0], microbatches).pipeline_order
    except ValueError as error:
        raise ShapeError(f"{name!r} does not support {microbatches} microbatches on {ranks} ranks: {error}") from error
    return [
        [
            (part.stage_index, part.computation_type.value, part.microbatch_index)
            for action in order[rank]
            if action is not None  # the rank waits
            for part in action.sub_actions or (action,)
            if part.computation_type.value in _UNITS
        ]
        for rank in range(ranks)
    ]


def _bubble(steps: tuple[tuple[Step, ...], ...]) -> float:
    """Simulate the steps, each as soon as its rank is free and its input is ready, and return the idle share."""
    last = max(stage for rank in steps for stage, _, _ in rank)
    ready: dict[Step, int] = {}
    clock = [0] * len(steps)
    left = [list(reversed(rank)) for rank in steps]
    while any(left):
        num_steps_left = sum(map(len, left))
        for rank, todo in enumerate(left):
            while todo:
                stage, kind, micro = todo[-1]
                needs: Step | None = None
                if kind == "F" and stage > 0:
                    needs = (stage - 1, "F", micro)
                elif kind in "BI":
                    needs = (stage, "F", micro) if stage == last else (stage + 1, "B", micro)
                if needs is not None and needs not in ready:
                    break
                clock[rank] = max(clock[rank], ready[needs] if needs else 0) + _UNITS[kind]
                # No other stage needs the gradient of the weights.
                if kind != "W":
                    ready[stage, "F" if kind == "F" else "B", micro] = clock[rank]
                todo.pop()
        if sum(map(len, left)) == num_steps_left:  # no rank could take a step
            raise ShapeError("the order of the schedule deadlocks")
    work = sum(_UNITS[kind] for rank in steps for _, kind, _ in rank) / len(steps)
    return 1 - work / max(clock)
