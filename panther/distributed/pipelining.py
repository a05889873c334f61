"""Pipeline parallelism: stages of a model on the ranks of a mesh axis, on torch.distributed.pipelining."""

__all__ = ["PipelineSchedule", "balanced_cuts", "make_schedule", "split_stages"]

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules

from panther.distributed.sync import start_alike
from panther.errors import DistributedError, ShapeError, check_size

_ORDERS = ("loop", "v")


@dataclass(frozen=True)
class _Kind:
    """A schedule of torch's, and what it asks of a rank's stages."""

    make: Callable[..., Any]
    several: bool = True  # takes a list of stages
    order: str = "loop"


_SCHEDULES = {
    "gpipe": _Kind(schedules.ScheduleGPipe, several=False),
    "1f1b": _Kind(schedules.Schedule1F1B, several=False),
    "interleaved": _Kind(schedules.ScheduleInterleaved1F1B),
    "looped_bfs": _Kind(schedules.ScheduleLoopedBFS),
    "zero_bubble": _Kind(schedules.ScheduleInterleavedZeroBubble),
    "zbv": _Kind(schedules.ScheduleZBVZeroBubble, order="v"),
    "dualpipev": _Kind(schedules.ScheduleDualPipeV, order="v"),
}


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


def split_stages(
    model: nn.Sequential,
    n: int,
    points: Sequence[str] | None = None,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    order: str = "loop",
) -> list[PipelineStage]:
    """Cut a model into n stages, and keep those of this rank. Every rank of the axis must call it.

    Names stay those of the whole model, so that checkpoints fit together. Weights and sketches are those of the axis's
    first rank.

    Args:
        model: Built alike on every rank, on its device; it is left as it is, its layers are shared with the stages.
        n: Stages, a multiple of the ranks.
        points: Names of the elements at which stages begin, the first left out; None cuts so that the stage with the
            most parameters has as few as it can.
        mesh: The pp axis, a one-dimensional mesh or a process group; None is the world.
        order: ``"loop"``: rank r has the stages r, r + ranks, ...; ``"v"``: r, and 2 ranks - 1 - r, as ``"zbv"`` and
            ``"dualpipev"`` want it.

    Returns:
        This rank's stages, by rising index.

    Raises:
        ShapeError: If n is no multiple of the ranks, there are fewer elements than stages, or ``points`` does not fit.
        TypeError: If the model is no nn.Sequential.
        ValueError: If ``order`` is unknown.
        DistributedError: If there is no process group.

    Cost: a broadcast of the model.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [stage] = split_stages(model, 1)
        >>> sorted(name for name, _ in stage.submod.named_parameters())
        ['0.bias', '0.weight', '2.bias', '2.weight']
        >>> pr.distributed.shutdown()
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError("there is no process group: call panther.distributed.init() first")
    if not isinstance(model, nn.Sequential):
        raise TypeError(f"split_stages cuts an nn.Sequential, not a {type(model).__name__}: put its parts into one")
    if order not in _ORDERS:
        raise ValueError(f"order={order!r} is unknown: use one of {', '.join(map(repr, _ORDERS))}")
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh or dist.group.WORLD
    assert group is not None
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    check_size("n", n, least=1)
    if n % ranks or (order == "v" and n != 2 * ranks):
        rule = f"twice the ranks of the axis ({ranks})" if order == "v" else f"a multiple of the ranks ({ranks})"
        raise ShapeError(f"n={n} stages must be {rule}: use n={2 * ranks if order == 'v' else -(-n // ranks) * ranks}")
    names = list(model._modules)
    begins = [*_begins(model, n, points), len(names)]
    start_alike(model, group)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    mine = [rank, n - 1 - rank] if order == "v" else list(range(rank, n, ranks))
    return [
        PipelineStage(
            nn.Sequential(OrderedDict((name, model._modules[name]) for name in names[begins[i] : begins[i + 1]])),
            i,
            n,
            device,
            group=group,
        )
        for i in mine
    ]


def _begins(model: nn.Sequential, n: int, points: Sequence[str] | None) -> list[int]:
    names = list(model._modules)
    if points is None:
        costs = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model]
        return balanced_cuts(costs, n)
    unknown = [point for point in points if point not in names]
    places = [0, *(names.index(point) for point in points if point in names)]
    if unknown or len(places) != n or places != sorted(set(places)):
        raise ShapeError(
            f"points={list(points)} must be {n - 1} different names of elements after the first, in order, of "
            f"{', '.join(names)}"
        )
    return places


class PipelineSchedule:
    """A schedule over this rank's stages; made by :func:`make_schedule`.

    Attributes:
        schedule: torch's.
        stages: This rank's stages.
        is_first: Whether the first stage is here, which reads the input.
        is_last: Whether the last stage is here, which makes the output and the loss.
    """

    def __init__(self, schedule: Any, stages: list[PipelineStage], n_microbatches: int, *, mean: bool) -> None:
        self.schedule, self.stages, self.n_microbatches, self._mean = schedule, stages, n_microbatches, mean
        self.is_first = any(stage.is_first for stage in stages)
        self.is_last = any(stage.is_last for stage in stages)

    def parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank's stages, for its optimizer."""
        return [parameter for stage in self.stages for parameter in stage.submod.parameters()]

    def step(self, x: Tensor, target: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Forward and backward of a batch; every rank must call it, with the same batch.

        Gradients are added to those that are there, as those of the loss over the whole batch.

        Args:
            x: The input, (samples, ...).
            target: What the loss compares with, (samples, ...).

        Returns:
            The output and the loss of the batch on the rank of the last stage, None elsewhere.

        Raises:
            ShapeError: If the microbatches do not divide the samples.
        """
        samples = len(x)
        if samples == 0 or samples % self.n_microbatches:
            divisors = [str(d) for d in range(1, samples + 1) if samples % d == 0]
            raise ShapeError(
                f"{samples} samples cannot be cut into n_microbatches={self.n_microbatches} of one size: use one of "
                f"{', '.join(divisors) or 'no samples'}, or another batch"
            )
        losses: list[Tensor] = []
        given = (x,) if self.is_first else ()
        wanted = {"target": target, "losses": losses} if self.is_last else {}
        output = self.schedule.step(*given, **wanted)
        if not self.is_last:
            return None, None
        total = torch.stack(losses).sum()
        return output, total / self.n_microbatches if self._mean else total


def make_schedule(
    name: str, stages: Sequence[PipelineStage], n_microbatches: int, loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> PipelineSchedule:
    """How the microbatches of a batch go through the stages.

    Args:
        name: ``"gpipe"`` or ``"1f1b"``, of one stage a rank; ``"interleaved"``, ``"looped_bfs"`` or ``"zero_bubble"``,
            of several; ``"zbv"`` or ``"dualpipev"``, of two in the order ``"v"``.
        stages: This rank's, from :func:`split_stages`.
        n_microbatches: Pieces of a batch, which must divide its samples.
        loss_fn: ``loss_fn(output, target)``. Where its attribute ``reduction`` is ``"sum"``, microbatches' losses are
            added, else (a function has none) they are averaged, so that loss and gradients are those of the batch in
            one piece. Exceptions: means that are not over samples (``ignore_index``, class weights), and BatchNorm,
            which sees each microbatch for itself.

    Raises:
        ValueError: If the schedule is unknown or does not fit the stages, or ``loss_fn`` reduces nothing.
        ShapeError: If ``n_microbatches`` is not what the schedule needs.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> stages = split_stages(nn.Sequential(nn.Linear(8, 2)), 1)
        >>> schedule = make_schedule("gpipe", stages, 2, nn.MSELoss())
        >>> output, loss = schedule.step(torch.randn(6, 8), torch.zeros(6, 2))
        >>> output.shape
        torch.Size([6, 2])
        >>> pr.distributed.shutdown()
    """
    if name not in _SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown: use one of {', '.join(map(repr, _SCHEDULES))}")
    kind, stages = _SCHEDULES[name], list(stages)
    check_size("n_microbatches", n_microbatches, least=1)
    indices = [stage.stage_index for stage in stages]
    ranks = stages[0].group_size
    in_v = len(indices) == 2 and sum(indices) == stages[0].num_stages - 1 and stages[0].num_stages == 2 * ranks
    if not kind.several and len(stages) != 1:
        raise ValueError(f"schedule {name!r} takes one stage a rank, not {len(stages)}: use n={ranks} stages")
    if kind.order == "v" and not in_v:
        raise ValueError(
            f"schedule {name!r} takes two stages a rank in a v: use split_stages(..., {2 * ranks}, order='v')"
        )
    if kind.several and kind.order == "loop" and in_v and ranks > 1:
        raise ValueError(f"schedule {name!r} takes stages in the order 'loop': leave order='v' out of split_stages")
    reduction = getattr(loss_fn, "reduction", "mean")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"the loss has reduction={reduction!r}, and must have 'mean' or 'sum'")
    try:
        schedule = kind.make(
            stages if kind.several else stages[0], n_microbatches, loss_fn, scale_grads=reduction == "mean"
        )
    except ValueError as error:
        raise ShapeError(
            f"schedule {name!r} cannot take n_microbatches={n_microbatches} over {stages[0].num_stages} stages: {error}"
        ) from error
    return PipelineSchedule(schedule, stages, n_microbatches, mean=reduction == "mean")
