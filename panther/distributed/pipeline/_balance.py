"""Where the stages of a model begin: balanced by parameters, or by measured time."""

__all__ = ["Blocks", "balance_by_time", "balance_stages", "check_shared", "sizes_in_parameters", "stages_of_rank"]

import copy
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther.distributed.comm._diagnostics import watched
from panther.errors import DistributedError, ShapeError

_REPEATS = 5


class Blocks(Protocol):
    """The blocks of a model, consecutive runs of which make stages."""

    def __len__(self) -> int: ...

    def names_in(self, begin: int, end: int) -> set[str]: ...

    def module(self, model: nn.Module, begin: int, end: int) -> nn.Module: ...


def balance_stages(costs: Sequence[float], n: int) -> list[int]:
    """Return where each of n runs of consecutive items begins, none empty, for the smallest possible largest run.

    Raises:
        ShapeError: If there are fewer items than runs.

    Cost: O(n len(costs)^2).

    Example:
        >>> balance_stages([4, 1, 1, 1, 3], 2)
        [0, 2]
    """
    if len(costs) < n:
        raise ShapeError(f"{len(costs)} layers cannot make {n} stages of at least one layer: use fewer stages")
    before = [0, *accumulate(costs)]
    # best[j]: the cost of the largest run if the first j items are divided best, and where the last run begins
    best = [(float(total), 0) for total in before]
    begins = []
    for run in range(1, n):
        longer = [(float("inf"), 0)] * len(before)
        for j in range(run + 1, len(before)):
            longer[j] = min((max(best[i][0], before[j] - before[i]), i) for i in range(run, j))
        begins.append([begin for _, begin in longer])
        best = longer
    last, end = [], len(costs)
    for table in reversed(begins):
        end = table[end]
        last.append(end)
    return [0, *reversed(last)]


def stages_of_rank(rank: int, ranks: int, n: int, order: str) -> list[int]:
    """Return the stages of a rank, of n in the order ``"loop"`` or ``"v"`` of :func:`split_stages`."""
    return [rank, n - 1 - rank] if order == "v" else list(range(rank, n, ranks))


def _tensors(model: nn.Module, names: set[str]) -> dict[str, nn.Parameter]:
    """Return parameters by name, of modules or of their own names."""
    inside = tuple(f"{name}." for name in names)
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if name in names or name.startswith(inside)}


def sizes_in_parameters(model: nn.Module, blocks: Blocks) -> list[int]:
    """Return the number of parameters of each block, each counted once in it."""
    parts = (_tensors(model, blocks.names_in(i, i + 1)) for i in range(len(blocks)))
    return [sum(parameter.numel() for parameter in set(part.values())) for part in parts]


def check_shared(model: nn.Module, blocks: Blocks, begins: list[int]) -> None:
    """Raise if several stages train one parameter: each would apply only its part of the gradient."""
    seen: dict[nn.Parameter, tuple[str, int]] = {}
    for stage, (begin, end) in enumerate(pairwise([*begins, len(blocks)])):
        for name, parameter in _tensors(model, blocks.names_in(begin, end)).items():
            other, first = seen.setdefault(parameter, (name, stage))
            if first != stage and parameter.requires_grad:
                alias = "" if other == name else f", which is also {name!r},"
                raise ShapeError(
                    f"parameter {other!r}{alias} is used by the stages {first} and {stage}, and torch's pipelines do "
                    "not sum gradients across stages: put all its uses into one stage, or untie it"
                )


def balance_by_time(
    model: nn.Module, blocks: Blocks, n: int, sample: tuple[Tensor, ...], group: dist.ProcessGroup
) -> list[int]:
    """Return where stages begin, balanced by the times that the first rank measures; all raise if it fails."""
    answer: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            # One rank measures for all: times differ between ranks, and stages must not.
            answer = [balance_stages(_times(model, blocks, sample), n)]
        except Exception as error:
            answer = [f"{type(error).__name__}: {str(error) or 'no message'}"]
    src = dist.get_process_group_ranks(group)[0]
    with watched("split_stages, which waits for the times that its first rank measures,", group):
        dist.broadcast_object_list(answer, src, group=group)
    if isinstance(answer[0], str):
        raise DistributedError(
            f"rank {src} could not run the model on sample_input to measure it ({answer[0].splitlines()[0]}): pass the "
            "inputs of one microbatch as sample_input=, or balance='parameters'"
        )
    return answer[0]


def _times(model: nn.Module, blocks: Blocks, sample: tuple[Tensor, ...]) -> list[float]:
    """Return median seconds of each block, forward and backward; buffers and random states are not changed."""
    device = next((x.device for x in chain(sample, model.parameters())), torch.device("cpu"))
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        inputs, medians = sample, []
        for i in range(len(blocks)):
            # A copy, so that buffers such as BatchNorm's statistics stay as they are.
            part = copy.deepcopy(blocks.module(model, i, i + 1))
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
