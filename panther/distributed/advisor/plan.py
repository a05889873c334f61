"""Plan parallelism: predict the cost of every mesh and strategy that a cluster allows, and rank them with reasons."""

__all__ = ["ParallelismPlan", "plan_parallelism"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from torch import nn

from panther._text import counted, format_bytes, format_seconds, format_table
from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.cost import Estimate, Layout, estimate
from panther.distributed.advisor.model_stats import ModelStats
from panther.distributed.advisor.reasons import Option, Preference, explain, preferred
from panther.distributed.comm.mesh import get_world_size
from panther.distributed.comm.ranks import require_process_group
from panther.distributed.guide.hybrid import HybridParallelTrainer
from panther.distributed.parallelize.build import parallelize
from panther.distributed.parallelize.config import ParallelismConfig
from panther.distributed.pipeline.balance import SCHEDULES, check_schedule
from panther.errors import DistributedError, ShapeError, check_size

_OBJECTIVES = ("time", "memory")
_SCHEDULES = ("1f1b", "interleaved")
_UNCALIBRATED = (
    "Times and costs are uncalibrated: they are computed from data sheets and assumed shares of peak speed. Measure "
    "the cluster with `panther advise --measure FILE`, or ClusterSpec.measure()."
)


@dataclass(frozen=True)
class ParallelismPlan:
    """Layouts of a model on a cluster, the best first. ``print`` shows a table and the reasons."""

    options: tuple[Option, ...]
    """All layouts that were considered, the best first."""
    cluster: ClusterSpec
    """The cluster of the call."""
    batch: int
    """Number of samples of a step, over all ranks."""
    objective: str
    """The measure by which options are sorted."""
    notes: tuple[str, ...]
    """Layouts that were not considered, and why."""
    mixed_precision: str | None = None
    """Dtype of the computation; None is the dtype of the parameters."""
    activation_checkpointing: str = "none"
    """The tensors that the backward pass recomputes: ``"none"``, ``"selective"`` or ``"full"``."""
    left_out: str | None = None
    """A sentence on the layout that would be the best, if it was refused."""

    @property
    def best(self) -> Option:
        """The best option."""
        return self.options[0]

    @property
    def preferred(self) -> Preference:
        """The layout that ``strategy="auto"`` of a Trainer builds, an ``option`` and a ``reason``.

        It is ``"ddp"`` unless that does not fit, or the speeds were measured and another layout is at least 1.2 times
        as fast.
        """
        return preferred(self.options, self.cluster)

    def table(self, rows: int = 10) -> str:
        """Return a table of the first options."""
        step = "step" if self.cluster.calibrated else "step (uncalibrated)"
        lines: list[tuple[str, ...]] = [
            ("", "layout", "memory", "start", "fits", step, "bubble", "sent in node", "between nodes")
        ]
        for i, option in enumerate(self.options[:rows], 1):
            e, fits = option.estimate, "yes" if option.fits else "no"
            sent_bytes = format_bytes(e.sent("intra")), format_bytes(e.sent("inter"))
            memory = format_bytes(e.memory.total), format_bytes(e.start)
            costs = *memory, fits, format_seconds(e.step_seconds), f"{100 * e.bubble:.0f}%"
            lines.append((str(i), str(option.layout), *costs, *sent_bytes))
        return format_table(lines)

    def explain(self, rows: int = 10) -> str:
        """Return one sentence for each of the first options: why it is the best, or why it is not."""
        return "\n".join(f"{i}. {option.reason}" for i, option in enumerate(self.options[:rows], 1))

    def remarks(self) -> list[str]:
        """Return sentences on calibration, and on layouts that were not considered."""
        option, reason = self.preferred
        automatic = f"A Trainer with strategy='auto' takes {option.layout}: {reason}."
        remarks = [automatic, *([self.left_out] if self.left_out else []), *self.notes]
        if not self.cluster.calibrated:
            remarks.insert(0, _UNCALIBRATED)
        elif self.cluster.gpus != self.cluster.measured_gpus:
            measured = counted(self.cluster.measured_gpus, "device")
            remarks.insert(0, f"Times are extrapolated from speeds that were measured on {measured}.")
        return remarks

    def __str__(self) -> str:
        """Return the table, the reasons and the remarks."""
        left = len(self.options) - 10
        more = [f"{left} more options are in .options"] if left > 0 else []
        return "\n".join([self.table(), "", self.explain(), *more, *self.remarks()])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers, strings, lists and dicts."""
        return {
            "objective": self.objective,
            "batch": self.batch,
            "gpus": self.cluster.gpus,
            "memory_bytes": self.cluster.memory_bytes,
            "calibrated": self.cluster.calibrated,
            "options": [
                {
                    "layout": asdict(option.layout),
                    "fits": option.fits,
                    "memory_bytes": {**option.estimate.memory.parts(), "total": option.estimate.memory.total},
                    "start_bytes": {"as_given": option.estimate.start, "on_meta": option.estimate.start_on_meta},
                    "seconds": {**option.estimate.seconds, "step": option.estimate.step_seconds},
                    "bubble": option.estimate.bubble,
                    "sent_bytes": {
                        t.axis: {"link": t.link, "payload": t.payload, "sent": t.sent_bytes}
                        for t in option.estimate.traffic
                    },
                    "reason": option.reason,
                }
                for option in self.options
            ],
            "preferred": {"layout": asdict(self.preferred.option.layout), "reason": self.preferred.reason},
            "left_out": self.left_out,
            "notes": list(self.notes),
        }

    def apply(self, model: nn.Module, option: int = 0) -> Any:
        """Distribute a model by the layout of an option, on the present process group. Every rank must call it.

        Args:
            model: The model that was planned for, on its device. It is changed in place.
            option: Index of the option in ``options``.

        Returns:
            The model to train, wrapped if the strategy is ``"ddp"``; for a pipeline a :class:`HybridParallelTrainer`.
            Either takes this rank's samples. Make the optimizer afterwards. In mixed precision, run a model under
            ``"ddp"`` in :class:`torch.autocast`.

        Raises:
            DistributedError: If there is no process group, or its size differs from the plan's.
            IndexError: If ``option`` is out of range.
        """
        require_process_group()
        layout, world = self.options[option].layout, get_world_size()
        if world != layout.world:
            raise DistributedError(
                f"the plan is for {layout.world} ranks ({layout}) and the world size is {world}: plan for "
                f"gpus={world}, or start {layout.world} processes"
            )
        settings = layout.settings() | {"activation_checkpointing": self.activation_checkpointing}
        if layout.strategy != "ddp":  # for which the user runs the model in torch.autocast
            settings["mixed_precision"] = self.mixed_precision
        if layout.pp > 1:
            return HybridParallelTrainer(model, settings)
        return parallelize(model, ParallelismConfig(**settings)).model


def plan_parallelism(
    model: nn.Module | ModelStats,
    cluster: ClusterSpec,
    *,
    batch: int,
    objective: str = "time",
    sample_input: Any = None,
    optimizer_states: float = 2,
    schedules: Sequence[str] = _SCHEDULES,
    refuse: Callable[[Layout], str | None] | None = None,
) -> ParallelismPlan:
    """Predict the cost of every way to train a model on a cluster, and rank them.

    It considers all sizes of the axes dp, pp and tp that divide the number of ranks, with tp within a node; ``"ddp"``,
    ``"fsdp"``, ``"replicate"`` and HSDP where they can be combined; and pipelines with one to four microbatches per
    rank. The assumptions are documented in ``panther/distributed/advisor/cost.py``.

    Args:
        model: A module, whose values are not read, or its :class:`ModelStats`.
        cluster: The devices and links.
        batch: Number of samples of a step, over all ranks.
        objective: ``"time"`` for the shortest step or ``"memory"`` for the fewest bytes per rank; the other objective
            breaks ties. Layouts that do not fit come last.
        sample_input: For a module, an input of its forward with any batch size. :meth:`ModelStats.of` also takes the
            loss, and the settings of mixed precision and activation checkpointing.
        optimizer_states: Number of copies of the trainable parameters in the optimizer: 2 for Adam, 0 for SGD, and a
            fraction for optimizers with smaller states, such as :class:`panther.optim.SketchedAdamW`.
        schedules: Pipeline schedules to consider. Those that split the backward pass are left out.
        refuse: A function that returns the reason why a layout cannot be used, or None if it can. Refused layouts are
            left out. If a refused layout would be the best, the plan names it and the reason.

    Returns:
        All options, the best first, with reasons.

    Raises:
        ValueError: If ``objective`` or a schedule is unknown, or ``optimizer_states`` is negative.
        TypeError: If ``model`` or ``cluster`` has the wrong type, or is a module without ``sample_input``.
        ShapeError: If ``batch`` is not positive, no mesh divides it, or all layouts are refused.

    Cost: the model runs without arithmetic, twice for every size of tp; hundreds of layouts take up to some seconds.

    Example:
        >>> import torch, panther as pr
        >>> from torch import nn
        >>> model = nn.Sequential(
        ...     pr.nn.SKLinear(1024, 1024, 16), nn.ReLU(), nn.Linear(1024, 10)
        ... )
        >>> cluster = ClusterSpec.preset("h100-80gb", gpus=4)
        >>> plan = plan_parallelism(
        ...     model, cluster, batch=512, sample_input=torch.ones(1, 1024)
        ... )
        >>> print(plan.best.layout)
        dp=4 ddp
    """
    if not isinstance(cluster, ClusterSpec):
        raise TypeError(
            f"cluster must be a ClusterSpec, not a {type(cluster).__name__}: use ClusterSpec.preset('h100-80gb', "
            "gpus=8), or ClusterSpec.load of a measured file"
        )
    if isinstance(model, ModelStats):
        stats = model
    elif not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module or ModelStats, not {type(model).__name__}")
    elif sample_input is None:
        raise TypeError("a module needs sample_input, an input of its forward, to measure its activations")
    else:
        stats = ModelStats.of(model, sample_input)
    check_size("batch", batch, least=1)
    if not optimizer_states >= 0:
        raise ValueError(f"optimizer_states={optimizer_states} must be a number of copies, at least 0")
    if objective not in _OBJECTIVES:
        raise ValueError(f"objective={objective!r} is unknown: use one of {', '.join(map(repr, _OBJECTIVES))}")
    for schedule in schedules:
        check_schedule(schedule)
    notes: list[str] = []
    estimates = []
    for layout in possible_layouts(stats, cluster, batch, schedules, notes):
        try:
            estimates.append(estimate(stats, cluster, layout, batch, optimizer_states))
        except ShapeError as error:
            if (note := f"pp={layout.pp} was not considered with some schedules: {error}") not in notes:
                notes.append(note)
    if not estimates:
        raise ShapeError(
            f"batch={batch} cannot be divided over {cluster.gpus} ranks, nor over fewer with tensor or pipeline "
            f"parallelism: use a multiple of {cluster.gpus}{''.join(f' ({note})' for note in notes)}"
        )
    room = cluster.memory_bytes * cluster.usable

    def rank(e: Estimate) -> tuple[Any, ...]:
        fits, costs = e.peak <= room, (e.memory.total, e.step_seconds)
        return not fits, costs[::-1] if fits and objective == "time" else costs

    estimates.sort(key=rank)
    estimates, left_out = _allowed(estimates, refuse, rank)
    options = tuple(Option(e, e.peak <= room, explain(estimates, i, room, objective)) for i, e in enumerate(estimates))
    return ParallelismPlan(
        options,
        cluster,
        batch,
        objective,
        tuple(notes),
        stats.mixed_precision,
        stats.activation_checkpointing,
        left_out,
    )


def _allowed(
    estimates: list[Estimate], refuse: Callable[[Layout], str | None] | None, rank: Callable[[Estimate], Any]
) -> tuple[list[Estimate], str | None]:
    """Return the estimates of the layouts that are not refused, and a sentence if a better layout was refused."""
    if refuse is None:
        return estimates, None
    reasons = [refuse(e.layout) for e in estimates]
    allowed = [e for e, reason in zip(estimates, reasons, strict=True) if reason is None]
    if not allowed:
        raise ShapeError(f"no layout can be used; the best would be {estimates[0].layout}, but {reasons[0]}")
    if reasons[0] is None or rank(estimates[0]) >= rank(allowed[0]):
        return allowed, None
    return allowed, f"{estimates[0].layout} would be the best, but {reasons[0]}."


def possible_layouts(
    stats: ModelStats, cluster: ClusterSpec, batch: int, schedules: Sequence[str], notes: list[str]
) -> Iterator[Layout]:
    """Yield every layout to consider; a sentence on each kind that is left out is appended to ``notes``.

    The layouts have all sizes of the axes dp, pp and tp that divide the number of ranks, with tp within a node.
    """
    half = stats.mixed_precision is not None
    if not stats.is_sequential:
        notes.append("pipelines were not considered: the model is not an nn.Sequential of modules that return a tensor")
    longest = len(stats.layers) if stats.is_sequential else 1
    if split := [name for name in schedules if SCHEDULES[name].splits_backward]:
        notes.append(f"{', '.join(split)} were not considered: their memory is not predicted")
        schedules = [name for name in schedules if name not in split]
    for tp in _divisors(cluster.gpus):
        # tp exchanges activations in every layer, for which links between nodes are too slow.
        if cluster.link(tp) == "inter" or not _can_shard(stats, tp, notes):
            continue
        for pp in _divisors(cluster.gpus // tp):
            dp = cluster.gpus // (tp * pp)
            # Every rank must get the same number of samples.
            if pp > longest or batch % dp:
                continue
            if pp == 1:
                yield from _without_pipeline(dp, tp, cluster, half=half)
                continue
            # DDP does not support pipelines. HybridParallelTrainer requires a strategy for a pipeline even if dp is 1.
            strategies = ("fsdp", "replicate") if dp > 1 else ("fsdp",)
            fitting = [name for name in schedules if pp * SCHEDULES[name].stages_per_rank <= len(stats.layers)]
            # With more microbatches the bubble is smaller, and there are more messages.
            numbers = [m for m in (pp, 2 * pp, 4 * pp) if batch // dp % m == 0]
            for strategy, schedule, m in product(strategies, fitting, numbers):
                yield Layout(dp=dp, pp=pp, tp=tp, strategy=strategy, schedule=schedule, num_microbatches=m)


def _without_pipeline(dp: int, tp: int, cluster: ClusterSpec, *, half: bool) -> Iterator[Layout]:
    if dp == 1:
        yield Layout(tp=tp, strategy="replicate" if half else None)
        return
    # DDP does not support parameters of tensor parallelism. "replicate" uses FSDP2's engine, which sends the gradients
    # of a unit in one message and, in mixed precision, casts parameters once per step.
    strategies = ("fsdp", "replicate") if tp > 1 else ("ddp", "fsdp", *(("replicate",) if half else ()))
    for strategy in strategies:
        yield Layout(dp=dp, tp=tp, strategy=strategy)
    # HSDP shards within a node, where links are fast, and replicates over nodes.
    inside = cluster.gpus_per_node // tp
    if 1 < inside < dp and dp % inside == 0:
        yield Layout(replicate=dp // inside, dp=inside, tp=tp, strategy="fsdp")


def _can_shard(stats: ModelStats, tp: int, notes: list[str]) -> bool:
    if tp == 1:
        return True
    try:
        sharded = stats.shard(tp)
    except (ShapeError, ValueError, RuntimeError) as error:  # a forward may fail on sharded layers in many ways
        notes.append(f"tp={tp} was not considered: {str(error).partition(chr(10))[0]}")
        return False
    if not any(layer.tp_calls for layer in sharded.layers):
        notes.append(f"tp={tp} was not considered: it shards none of the model's layers")
        return False
    return True


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
