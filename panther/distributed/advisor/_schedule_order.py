"""The order of work in torch's pipeline schedules, and the idle time and peak memory that follow from it."""

__all__ = ["Order", "order_of"]

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.pipelining.schedules import _ComputationType
from torch.distributed.pipelining.stage import _PipelineStageBase

from panther.distributed.pipeline.schedules import SCHEDULES
from panther.errors import ShapeError

Step = tuple[int, str, int]
"""Stage, kind (F forward, B backward, I and W its parts for inputs and for weights), and microbatch."""


class _Stage(_PipelineStageBase):
    """A stage with only the attributes that torch's schedules read in their constructors, so that none is needed."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size = index, stages, ranks
        self.group_rank, self.has_backward, self.group, self.device = 0, False, None, torch.device("cpu")
        self.submod = torch.nn.Identity()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _create_grad_recv_info(self, *args: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Order:
    """The steps of every rank, and the idle time.

    A forward pass of a stage takes one unit of time, a backward pass two (half of it for inputs), and sending none.
    """

    steps: tuple[tuple[Step, ...], ...]
    """The steps of each rank."""
    bubble: float
    """Share of the time from the first to the last step in which a rank is idle, on average."""

    def peak(self, rank: int, sizes: Sequence[float]) -> float:
        """Return a rank's peak, given what a microbatch occupies in each stage from forward to backward.

        For schedules that split the backward pass it is an upper bound: it ignores what torch frees between the two
        parts in all stages except for the first.
        """
        held = most = 0.0
        steps = self.steps[rank]
        whole = {(stage, micro) for stage, kind, micro in steps if kind == "B"}
        for stage, kind, micro in steps:
            if kind == "F":
                held += sizes[stage]
                most = max(most, held)
            elif kind == "B" or (kind == "W" and (stage, micro) not in whole and stage == 0):
                held -= sizes[stage]
        return most


# Many layouts share a schedule, and the order of a long pipeline takes long to compute.
@lru_cache(maxsize=512)
def order_of(name: str, ranks: int, microbatches: int) -> Order:
    """Return the order of a schedule.

    Raises:
        ShapeError: If the schedule does not support the number of microbatches.
    """
    if name == "gpipe":
        steps = [
            [(r, "F", i) for i in range(microbatches)] + [(r, "B", i) for i in range(microbatches)]
            for r in range(ranks)
        ]
    elif name == "1f1b":
        steps = [_one_forward_one_backward(r, ranks, microbatches) for r in range(ranks)]
    else:
        steps = _torch_order(name, ranks, microbatches)
    frozen = tuple(tuple(rank) for rank in steps)
    return Order(frozen, _bubble(frozen))


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Step]:
    # The first rank starts most microbatches before its first backward pass, the last rank one.
    warmup = min(ranks - rank, microbatches)
    steps: list[Step] = [(rank, "F", i) for i in range(warmup)]
    for i in range(microbatches):
        steps.append((rank, "B", i))
        if warmup + i < microbatches:
            steps.append((rank, "F", warmup + i))
    return steps


_KINDS = {
    _ComputationType.FORWARD: "F",
    _ComputationType.FULL_BACKWARD: "B",
    _ComputationType.BACKWARD_INPUT: "I",
    _ComputationType.BACKWARD_WEIGHT: "W",
}


def _torch_order(name: str, ranks: int, microbatches: int) -> list[list[Step]]:
    stages = 2 * ranks
    mine = [0, stages - 1] if SCHEDULES[name].order == "v" else [0, ranks]
    try:
        # Private stage class: the public one runs collectives when it is made.
        schedule = SCHEDULES[name].make([_Stage(i, stages, ranks) for i in mine], microbatches, None)
    except ValueError as error:
        raise ShapeError(f"{name!r} does not support {microbatches} microbatches on {ranks} ranks: {error}") from error
    made: list[list[Step]] = []
    for rank in range(ranks):
        steps: list[Step] = []
        # torch 2.13 has no public way to read the order; None means that the rank waits.
        for action in schedule.pipeline_order[rank]:
            for part in [] if action is None else (getattr(action, "sub_actions", None) or (action,)):
                kind = _KINDS.get(part.computation_type)
                if kind is not None:
                    steps.append((part.stage_index, kind, part.microbatch_index))
        made.append(steps)
    return made


_UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}


def _bubble(steps: tuple[tuple[Step, ...], ...]) -> float:
    """Simulate the steps, each as soon as its rank is free and its input is ready, and return the idle share."""
    last = max(stage for rank in steps for stage, _, _ in rank)
    ready: dict[tuple[int, str, int], int] = {}
    clock, position = [0] * len(steps), [0] * len(steps)
    left = sum(map(len, steps))
    while left:
        before = left
        for rank, todo in enumerate(steps):
            while position[rank] < len(todo):
                stage, kind, micro = todo[position[rank]]
                if kind == "F":
                    needs = None if stage == 0 else (stage - 1, "F", micro)
                elif kind == "W":
                    needs = None
                else:
                    needs = (stage, "F", micro) if stage == last else (stage + 1, "B", micro)
                if needs is not None and needs not in ready:
                    break
                clock[rank] = max(clock[rank], ready[needs] if needs else 0) + _UNITS[kind]
                # The gradient of the weights is needed by no other stage.
                if kind != "W":
                    ready[stage, "F" if kind == "F" else "B", micro] = clock[rank]
                position[rank] += 1
                left -= 1
        # No rank could take a step.
        if left == before:
            raise ShapeError("the order of the schedule deadlocks")
    end = max(clock)
    work = sum(_UNITS[kind] for rank in steps for _, kind, _ in rank) / len(steps)
    return 1 - work / end
