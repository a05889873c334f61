"""Where to cut a model into stages: by its parameters, or by the time that its parts take."""

__all__ = ["Segments", "balanced_cuts", "check_shared", "sizes_in_parameters", "timed_cuts"]

import copy
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther.distributed.comm._diagnostics import watched
from panther.errors import DistributedError, ShapeError

_REPEATS = 5


class Segments(Protocol):
    """What a model is cut into."""

    def __len__(self) -> int: ...

    def names_in(self, begin: int, end: int) -> set[str]: ...

    def module(self, model: nn.Module, begin: int, end: int) -> nn.Module: ...


def balanced_cuts(costs: Sequence[float], n: int) -> list[int]:
    """Where to begin each of n runs of consecutive items, none empty, so that the dearest run is as cheap as it can be.

    Raises:
        ShapeError: If there are fewer items than runs.

    Cost: O(n len(costs)^2).

    Example:
        >>> balanced_cuts([4, 1, 1, 1, 3], 2)
        [0, 2]
    """
    if len(costs) < n:
        raise ShapeError(f"{len(costs)} layers cannot make {n} stages of at least one layer: use fewer stages")
    before = [0, *accumulate(costs)]
    # best[j]: the least dearest run for the first j items, and where its last run begins
    best = [(float(total), 0) for total in before]
    begins = []
    for run in range(1, n):
        longer = [(float("inf"), 0)] * len(before)
        for j in range(run + 1, len(before)):
            longer[j] = min((max(best[i][0], before[j] - before[i]), i) for i in range(run, j))
        begins.append([begin for _, begin in longer])
        best = longer
    cuts, end = [], len(costs)
    for table in reversed(begins):
        end = table[end]
        cuts.append(end)
    return [0, *reversed(cuts)]


def _tensors(model: nn.Module, names: set[str]) -> dict[str, nn.Parameter]:
    """Parameters of modules, or parameters themselves, by name."""
    inside = tuple(f"{name}." for name in names)
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if name in names or name.startswith(inside)}


def sizes_in_parameters(model: nn.Module, segments: Segments) -> list[int]:
    """Parameters of each segment, none counted twice in it."""
    parts = (_tensors(model, segments.names_in(i, i + 1)) for i in range(len(segments)))
    return [sum(parameter.numel() for parameter in set(part.values())) for part in parts]


def check_shared(model: nn.Module, segments: Segments, begins: list[int]) -> None:
    """Refuse parameters that several stages train: each would have a part of the gradient."""
    seen: dict[nn.Parameter, tuple[str, int]] = {}
    for stage in range(len(begins) - 1):
        for name, parameter in _tensors(model, segments.names_in(begins[stage], begins[stage + 1])).items():
            other, first = seen.setdefault(parameter, (name, stage))
            if first != stage and parameter.requires_grad:
                alias = "" if other == name else f", which is also {name!r},"
                raise ShapeError(
                    f"parameter {other!r}{alias} is used by the stages {first} and {stage}, and torch's pipelines do "
                    "not add up gradients across stages: cut so that one stage has all its uses, or untie it"
                )


def timed_cuts(
    model: nn.Module, segments: Segments, n: int, sample: tuple[Tensor, ...], group: dist.ProcessGroup
) -> list[int]:
    """Cuts by the times that the first rank measures; all take its word, or its failure."""
    answer: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            answer = [balanced_cuts(_times(model, segments, sample), n)]
        except Exception as error:
            answer = [f"{type(error).__name__}: {str(error) or 'no message'}"]
    src = dist.get_process_group_ranks(group)[0]
    with watched("split_stages, which waits for the times that its first rank measures,", group):
        dist.broadcast_object_list(answer, src, group=group)
    if isinstance(answer[0], str):
        raise DistributedError(
            f"rank {src} could not run the model on the sample to measure it ({answer[0].splitlines()[0]}): pass the "
            "inputs of one microbatch as sample_input=, or balance='parameters'"
        )
    return answer[0]


def _times(model: nn.Module, segments: Segments, sample: tuple[Tensor, ...]) -> list[float]:
    """Median seconds of each segment, forward and backward; the model's buffers and random numbers stay as they are."""
    device = next((x.device for x in chain(sample, model.parameters())), torch.device("cpu"))
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        inputs, medians = sample, []
        for i in range(len(segments)):
            part = copy.deepcopy(segments.module(model, i, i + 1))
            seconds = []
            for _ in range(_REPEATS + 1):
                given = tuple(x.detach().requires_grad_(i > 0 and x.is_floating_point()) for x in inputs)
                begun = _now(device)
                outputs = part(*given)
                results = outputs if isinstance(outputs, tuple | list) else (outputs,)
                wanted = [x for x in (*given, *part.parameters()) if x.requires_grad]
                ends = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
                if wanted and ends:
                    ones = [torch.ones_like(x) for x in ends]
                    torch.autograd.grad(ends, wanted, ones, allow_unused=True)
                seconds.append(_now(device) - begun)
            inputs = tuple(x.detach() for x in results)
            medians.append(statistics.median(seconds[1:]))  # the first warms up
    return medians


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
