"""Which parallelism to use: every mesh and strategy that a cluster allows, priced, ranked and explained."""

__all__ = ["Option", "ParallelismPlan", "plan_parallelism"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from panther._text import format_bytes, format_seconds, format_table
from panther.distributed.advisor._text import explain, reason
from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.cost_model import Estimate, Layout, estimate
from panther.distributed.advisor.model_stats import ModelStats
from panther.distributed.comm._ranks import require_process_group
from panther.distributed.comm.mesh import get_world_size, make_mesh
from panther.distributed.data.strategies import data_parallel
from panther.distributed.hybrid import HybridParallelTrainer
from panther.distributed.pipeline.schedules import SCHEDULES
from panther.distributed.tensor.parallelize import tensor_parallel
from panther.errors import DistributedError, ShapeError, check_size

_OBJECTIVES = ("time", "memory")
_SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
_LONGEST = 32  # of the pp axis: orders of longer pipelines take seconds to play


@dataclass(frozen=True)
class Option:
    """A layout, what it costs, and why it stands where it does."""

    estimate: Estimate
    fits: bool
    reason: str

    @property
    def layout(self) -> Layout:
        """The mesh and the strategies."""
        return self.estimate.layout


@dataclass(frozen=True)
class ParallelismPlan:
    """Layouts of a model on a cluster, the best first; ``print`` shows a table and the reasons."""

    options: tuple[Option, ...]
    cluster: ClusterSpec
    batch: int
    objective: str
    notes: tuple[str, ...]
    """What was not tried, and why."""
    mixed_precision: str | None = None

    @property
    def best(self) -> Option:
        """The first."""
        return self.options[0]

    def table(self, rows: int = 10) -> str:
        """The first options, a line each."""
        head = ("", "layout", "memory", "fits", "step", "bubble", "sent in node", "between nodes")
        lines = [head]
        for i, option in enumerate(self.options[:rows], 1):
            e = option.estimate
            lines.append(
                (
                    str(i), str(option.layout), format_bytes(e.memory.total), "yes" if option.fits else "no",
                    format_seconds(e.step_seconds), f"{100 * e.bubble:.0f}%", format_bytes(e.sent("intra")),
                    format_bytes(e.sent("inter")),
                )
            )  # fmt: skip
        return format_table(lines)

    def explain(self, rows: int = 10) -> str:
        """Why the first option won, and why each of the next lost, a sentence each."""
        return "\n".join(f"{i}. {option.reason}" for i, option in enumerate(self.options[:rows], 1))

    def __str__(self) -> str:
        """The table, the reasons and the notes."""
        left = len(self.options) - 10
        more = [f"{left} more options are in .options"] if left > 0 else []
        return "\n".join([self.table(), "", self.explain(), *more, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "objective": self.objective,
            "batch": self.batch,
            "gpus": self.cluster.gpus,
            "memory_bytes": self.cluster.memory_bytes,
            "options": [
                {
                    "layout": {name: getattr(option.layout, name) for name in Layout.__dataclass_fields__},
                    "fits": option.fits,
                    "memory_bytes": {**option.estimate.memory.parts(), "total": option.estimate.memory.total},
                    "seconds": {**option.estimate.seconds, "step": option.estimate.step_seconds},
                    "bubble": option.estimate.bubble,
                    "sent_bytes": {
                        t.axis: {"link": t.link, "handed": t.handed, "sent": t.sent} for t in option.estimate.traffic
                    },
                    "reason": option.reason,
                }
                for option in self.options
            ],
            "notes": list(self.notes),
        }

    def apply(self, model: nn.Module, option: int = 0) -> Any:
        """Build an option on the live process group. Every rank must call it.

        Args:
            model: The model that was planned for, on its device.
            option: Its place in ``options``.

        Returns:
            What to train: the model, wrapped with ``"ddp"``, to be called with this rank's samples; or for a pipeline a
            :class:`HybridParallelTrainer`, whose ``train_step`` takes them. Make the optimizer after it.

        Raises:
            DistributedError: If there is no process group, or it is of another size than the plan.
            IndexError: If there is no such option.
        """
        layout = self.options[option].layout
        require_process_group()
        if get_world_size() != layout.world:
            raise DistributedError(
                f"the plan is for {layout.world} ranks ({layout}) and the world size is {get_world_size()}: plan for "
                f"gpus={get_world_size()}, or start {layout.world} processes"
            )
        if layout.pp > 1:
            config = {
                "tensor_parallel_size": layout.tp,
                "pipeline_parallel_size": layout.pp,
                "data_parallel_size": layout.dp,
                "num_microbatches": layout.num_microbatches,
                "schedule": layout.schedule,
                "data_parallel": layout.strategy,
            }
            return HybridParallelTrainer(model, config)
        copies = {"replicate": layout.replicate} if layout.replicate > 1 else {}
        mesh = make_mesh(dp=layout.dp, tp=layout.tp, **copies)
        if layout.tp > 1:
            tensor_parallel(model, mesh["tp"])
        if layout.strategy is None:
            return model
        half: dict[str, Any] = {"mixed_precision": self.mixed_precision} if self.mixed_precision else {}
        axes = mesh["replicate", "dp"] if copies else mesh["dp"]
        return data_parallel(model, axes, layout.strategy, **half)


def plan_parallelism(
    model: nn.Module | ModelStats,
    cluster: ClusterSpec,
    *,
    batch: int,
    objective: str = "time",
    sample_input: Any = None,
    loss_fn: Callable[[Any], Tensor] | None = None,
    mixed_precision: str | None = None,
    optimizer_states: int = 2,
    schedules: Sequence[str] = _SCHEDULES,
) -> ParallelismPlan:
    """Price every way to train a model on a cluster, and rank them.

    Tried are the axes dp, pp and tp of every size that divides the ranks, tp within a node, with ``"ddp"``, ``"fsdp"``,
    ``"replicate"`` and HSDP where they go together, and pipelines of one to four microbatches a stage. What the
    figures assume is said in :mod:`panther.distributed.advisor.cost_model`; on the memory of a device they are checked.

    Args:
        model: A module, of which nothing is read but shapes, or its :class:`ModelStats`.
        cluster: Where it is to run.
        batch: Samples of a step, of all ranks.
        objective: ``"time"``, the shortest step, or ``"memory"``, the fewest bytes on a rank; of equal ones the other
            decides. What does not fit comes last.
        sample_input: For a module, what its forward takes, with a batch of any size; see :meth:`ModelStats.of`.
        loss_fn: For a module, computes a scalar from its output.
        mixed_precision: For a module, what to compute in, as :func:`data_parallel`'s.
        optimizer_states: Copies of the trained parameters that the optimizer keeps: 2 with Adam, 0 with SGD.
        schedules: Of pipelines, to be tried.

    Returns:
        All options, the best first, with reasons.

    Raises:
        ValueError: If ``objective`` or a schedule is unknown, or an argument is for a module and stats are given.
        TypeError: If ``model`` is neither, or a module comes without ``sample_input``.
        ShapeError: If a size is not positive, or no axes divide the batch.

    Cost: running the model without arithmetic, twice for every size of tp, and up to some seconds for long pipelines.

    Example:
        >>> import panther as pr
        >>> model = nn.Sequential(pr.nn.SKLinear(1024, 1024, 16), nn.ReLU(), nn.Linear(1024, 10))
        >>> cluster = ClusterSpec.preset("h100-80gb", gpus=4)
        >>> plan = plan_parallelism(model, cluster, batch=512, sample_input=torch.ones(1, 1024))
        >>> print(plan.best.layout)
        dp=4 ddp
    """
    stats = _stats(model, sample_input, loss_fn, mixed_precision)
    check_size("batch", batch, least=1)
    check_size("optimizer_states", optimizer_states, least=0)
    if objective not in _OBJECTIVES:
        raise ValueError(f"objective={objective!r} is unknown: use one of {', '.join(map(repr, _OBJECTIVES))}")
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r} is unknown: use some of {', '.join(map(repr, SCHEDULES))}")
    notes: list[str] = []
    estimates = []
    for layout in _layouts(stats, cluster, batch, schedules, notes):
        try:
            estimates.append(estimate(stats, cluster, layout, batch, optimizer_states))
        except ShapeError as error:
            if (note := f"pp={layout.pp} was left out with some schedules: {error}") not in notes:
                notes.append(note)
    if not estimates:
        raise ShapeError(
            f"batch={batch} cannot be shared by {cluster.gpus} ranks: give a multiple of them, or of a divisor that tp "
            f"and pp leave to dp ({'; '.join(notes) or 'no axis can be longer than one'})"
        )
    room = cluster.memory_bytes * cluster.usable

    def rank(e: Estimate) -> tuple[Any, ...]:
        time, memory = e.step_seconds, e.memory.total
        if memory > room:
            return True, memory, time
        first = (time, memory) if objective == "time" else (memory, time)
        return False, *first

    estimates.sort(key=rank)
    first = estimates[0]
    options = [Option(first, first.memory.total <= room, explain(estimates, room, objective))]
    options += [Option(e, e.memory.total <= room, reason(e, first, room, objective)) for e in estimates[1:]]
    return ParallelismPlan(tuple(options), cluster, batch, objective, tuple(notes), stats.mixed_precision)


def _stats(
    model: nn.Module | ModelStats,
    sample_input: Any,
    loss_fn: Callable[[Any], Tensor] | None,
    mixed_precision: str | None,
) -> ModelStats:
    if isinstance(model, ModelStats):
        if sample_input is not None or loss_fn is not None or mixed_precision is not None:
            raise ValueError(
                "sample_input, loss_fn and mixed_precision are for a module: ModelStats already include them"
            )
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module or ModelStats, not {type(model).__name__}")
    if sample_input is None:
        raise TypeError("a module needs sample_input, what its forward takes, to see what autograd keeps")
    return ModelStats.of(model, sample_input, loss_fn=loss_fn, mixed_precision=mixed_precision)


def _layouts(
    stats: ModelStats, cluster: ClusterSpec, batch: int, schedules: Sequence[str], notes: list[str]
) -> Iterator[Layout]:
    half = stats.mixed_precision is not None
    if half:
        notes.append("ddp and pipelines were left out: mixed_precision is for fsdp and replicate")
    elif not stats.in_sequence:
        notes.append("pipelines were left out: the model is no nn.Sequential")
    longest = min(_LONGEST, len(stats.elements)) if stats.in_sequence and not half else 1
    if longest == _LONGEST < min(cluster.gpus, len(stats.elements)):
        notes.append(f"pipelines of more than {_LONGEST} ranks were left out")
    for tp in _divisors(cluster.gpus):
        if cluster.link(tp) == "inter" or not _can_cut(stats, tp, notes):
            continue
        for pp in _divisors(cluster.gpus // tp):
            dp = cluster.gpus // (tp * pp)
            if pp > longest or batch % dp:
                continue
            if pp == 1:
                yield from _unpiped(dp, tp, cluster, half=half)
                continue
            for strategy in ("fsdp", "replicate") if dp > 1 else ("fsdp",):
                for schedule in schedules:
                    if pp * SCHEDULES[schedule].stages_per_rank > len(stats.elements):
                        continue
                    for m in _microbatches(batch // dp, pp):
                        yield Layout(dp=dp, pp=pp, tp=tp, strategy=strategy, schedule=schedule, num_microbatches=m)


def _unpiped(dp: int, tp: int, cluster: ClusterSpec, *, half: bool) -> Iterator[Layout]:
    if dp == 1:
        yield Layout(tp=tp, strategy="replicate" if half else None)
        return
    strategies = ("fsdp", "replicate") if tp > 1 or half else ("ddp", "fsdp")
    for strategy in strategies:
        yield Layout(dp=dp, tp=tp, strategy=strategy)
    inside = cluster.gpus_per_node // tp
    if 1 < inside < dp and dp % inside == 0:
        yield Layout(replicate=dp // inside, dp=inside, tp=tp, strategy="fsdp")


def _can_cut(stats: ModelStats, tp: int, notes: list[str]) -> bool:
    if tp == 1:
        return True
    try:
        cut = stats.cut(tp)
    except (ShapeError, ValueError, RuntimeError) as error:  # a forward may use what is cut in ways of its own
        notes.append(f"tp={tp} was left out: {str(error).partition(chr(10))[0]}")
        return False
    if not any(element.tp_calls for element in cut.elements):
        notes.append(f"tp={tp} was left out: it cuts none of the model's layers")
        return False
    return True


def _microbatches(samples: int, pp: int) -> list[int]:
    return [m for m in (pp, 2 * pp, 4 * pp) if samples % m == 0]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
