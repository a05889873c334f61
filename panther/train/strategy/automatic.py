"""``strategy="auto"``: data parallelism, unless memory forbids it or measured speeds favour another layout."""

__all__ = ["Choice", "choose_strategy"]

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from panther._torch import has_hooks, tree_leaves
from panther.distributed import ClusterSpec, get_distributed_info, get_rank, get_world_size
from panther.distributed.advisor.reasons import UNCALIBRATED, memory_clause
from panther.distributed.comm.agreement import run_on_first_rank
from panther.distributed.comm.mesh import physical_memory
from panther.distributed.data.strategies import check_model
from panther.distributed.parallelize.layout import Layout
from panther.distributed.parallelize.rules import possible_strategies
from panther.distributed.pipeline.losses import reduction_of
from panther.errors import ConfigError, PantherError
from panther.train.config import TrainConfig
from panther.train.engines.engine import loss_of_output
from panther.train.loading.feed import Feed, count_samples

if TYPE_CHECKING:
    from panther.distributed import ParallelismPlan

_SCHEDULES = ("1f1b", "interleaved")
_STATES = 5  # parameters, gradients, two states of Adam, and DDP's buckets
_SMALL = 0.05
"""Share of the memory below which a model's parameters and states are replicated without measuring its activations: to
shard them could save no more, and measuring takes as long as many steps of a small model."""


class Choice(NamedTuple):
    """What ``"auto"`` stands for."""

    config: TrainConfig
    """With another strategy, and the sizes of its axes."""
    batch_factor: int = 1
    """Batches of a process that make one of a data-parallel rank, so that a step has those of all processes."""


class _Advice(NamedTuple):
    """The advisor's choice, as the first rank tells it to the others."""

    layout: Layout | None
    reason: str
    """Why it is the choice, or why there is none."""
    left_out: str | None = None
    """A layout that is better, by memory or by measured speeds, and that the Trainer cannot build, and why."""
    misfit: str | None = None
    """Why no layout fits."""


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def choose_strategy(model: nn.Module, config: TrainConfig, loss_fn: Any, feed: Callable[[], Feed]) -> Choice:
    """Return the strategy that ``"auto"`` stands for, on several processes, and print it on the first rank.

    That is ``"ddp"``, unless the settings or the memory forbid it, or by a file of measured speeds another layout is at
    least 1.2 times as fast. A model that the advisor cannot read is replicated, too. ``feed`` returns the training data
    as one process sees it.
    """
    advice = run_on_first_rank(lambda: _advice(model, config, loss_fn, feed), None)
    if advice.layout is None:
        choice = Choice(_replace(config, strategy=_other_strategy(config)))
        # Without measured speeds, and with settings that leave no choice, none was taken away.
        can_differ = set(possible_strategies(config)) - {"ddp", "zero1"} and not _is_model_parallel(config)
        if config.cluster_file is not None and can_differ:
            message = f"strategy='auto' uses {choice.config.strategy!r}: {advice.reason}"
            warnings.warn(message, UserWarning, stacklevel=4)
    else:
        choice = Choice(_config_of(config, advice.layout), advice.layout.tp * advice.layout.pp)
    if advice.misfit is not None:
        warnings.warn(f"strategy='auto': {advice.misfit}", UserWarning, stacklevel=4)
    if get_rank() == 0:
        layout = "" if advice.layout is None else f" ({advice.layout})"
        print(f"strategy='auto' uses {choice.config.strategy!r}{layout}: {advice.reason}", file=sys.stderr)
        if advice.left_out is not None:
            print(advice.left_out, file=sys.stderr)
    return choice


def _advice(model: nn.Module, config: TrainConfig, loss_fn: Any, feed: Callable[[], Feed]) -> _Advice:
    cluster = _cluster(config)
    room = cluster.memory_bytes * cluster.usable
    replicated = Layout(dp=get_world_size(), strategy="ddp")
    if not cluster.calibrated and not _settings_against(config, replicated):
        states = _STATES * sum(parameter.nbytes for parameter in model.parameters())
        if states <= _SMALL * room:
            needs = memory_clause("parameters, gradients and states take", states, room)
            return _Advice(replicated, f"{needs}; {UNCALIBRATED}")
    refusals = _Refusals(model, config, loss_fn, feed())
    try:
        plan = _plan(model, config, loss_fn, refusals.batch, cluster, refusals.reason)
    except ConfigError:
        raise
    except PantherError as error:
        return _Advice(None, f"the advisor has no layout: {error}")
    except Exception as error:  # a forward may do anything; ddp runs all that one process can run
        return _Advice(None, f"the advisor cannot read the model: {type(error).__name__}: {error}")
    misfit = None if plan.best.fits else plan.best.reason
    if misfit is not None and config.cpu_offload:
        misfit += " What cpu_offload keeps elsewhere is counted."
    option, reason = plan.preferred
    forbidden = refusals.reason(replicated)
    if forbidden is not None:
        reason = f"{replicated} cannot be built, because {forbidden}; {reason}"
    # Without measured speeds, a better layout is better by memory alone.
    left_out = plan.left_out if cluster.calibrated or misfit is not None else None
    return _Advice(option.layout, reason, left_out, misfit)


def _plan(
    model: nn.Module,
    config: TrainConfig,
    loss_fn: Any,
    batch: Any,
    cluster: ClusterSpec,
    refuse: Callable[[Layout], str | None],
) -> "ParallelismPlan":
    # Here, because most runs are replicated without a plan.
    from panther.distributed import ModelStats, plan_parallelism

    def stats(loss: Any) -> ModelStats:
        return ModelStats.of(
            model,
            batch if loss_fn is None else batch[0],
            loss_fn=loss,
            mixed_precision=config.mixed_precision,
            activation_checkpointing=config.activation_checkpointing,
        )

    def loss_of(output: Any) -> Tensor:
        target = batch[1]
        rows = len(next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))
        return loss_fn(output, torch.zeros((rows, *target.shape[1:]), dtype=target.dtype, device="cpu"))

    try:
        statistics = stats(loss_of_output if loss_fn is None else loss_of)
    except ConfigError:
        raise
    except Exception:
        if loss_fn is None:
            raise
        # A loss may look at values, or hold tensors of its own. The model is most of the memory.
        statistics = stats(None)
    schedules = _SCHEDULES if config.pipeline_schedule == "1f1b" else (config.pipeline_schedule,)
    samples = count_samples(batch) * get_world_size()
    return plan_parallelism(statistics, cluster, batch=samples, schedules=schedules, refuse=refuse)


class _Refusals:
    """Why layouts cannot be built for these settings, model, loss and data."""

    def __init__(self, model: nn.Module, config: TrainConfig, loss_fn: Any, feed: Feed) -> None:
        self.config, self.batch = config, feed.first_batch()
        try:
            check_model(model, "fsdp")
            self._sharded = None
        except (PantherError, ValueError) as error:
            self._sharded = str(error)
        self._shared = None
        if not feed.has_batch_size:
            self._shared = "ranks that share layers have larger batches, which a stream or batch_sampler does not give"
        self._stages = self._shared or _against_stages(model, loss_fn, self.batch)
        if self._stages is None and not feed.divides_into(get_world_size()):
            self._stages = (
                "pipelines leave out the last samples of an epoch, which do not fill a batch of all processes"
            )

    def reason(self, layout: Layout) -> str | None:
        """Return why a layout cannot be built; None if it can."""
        if (why := _settings_against(self.config, layout)) is not None:
            return why
        if layout.pp > 1 and self._stages is not None:
            return self._stages
        if layout.tp > 1 and self._shared is not None:
            return self._shared
        return None if layout.strategy == "ddp" else self._sharded


def _settings_against(config: TrainConfig, layout: Layout) -> str | None:
    """Return why the settings do not allow a layout; None if they do."""
    for name, size in {**layout.sizes(), "num_microbatches": layout.num_microbatches}.items():
        setting = getattr(config, name)
        if setting not in (None, size) and (name != "num_microbatches" or layout.pp > 1):
            return f"the settings ask for {name}={setting}"
    try:
        _config_of(config, layout)
    except ConfigError as error:
        return str(error).rpartition(":")[0] or str(error)
    return None


def _against_stages(model: nn.Module, loss_fn: Any, batch: Any) -> str | None:
    """Return why a model, its loss or a batch cannot go through a pipeline; None if they can."""
    if loss_fn is None:
        return "a pipeline needs loss_fn, which its last stage calls"
    if reduction_of(loss_fn) not in ("mean", "sum"):
        return f"a pipeline adds the losses of microbatches, and loss_fn has reduction={reduction_of(loss_fn)!r}"
    single = isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)
    if not single or len(batch[0]) != len(batch[1]):
        return "a pipeline of an nn.Sequential takes batches of an input and a target, tensors of as many samples"
    if any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        return "BatchNorm would take its statistics from microbatches"
    if has_hooks(model):
        return "stages do not run the hooks of the whole model"
    return None


def _config_of(config: TrainConfig, layout: Layout) -> TrainConfig:
    """Return the configuration that builds a layout, or raise ConfigError if a setting does not apply to it."""
    sizes = {name: size for name, size in layout.sizes().items() if size > 1 and name != "data_parallel_size"}
    if layout.pp > 1:
        sizes |= {"num_microbatches": layout.num_microbatches, "pipeline_schedule": layout.schedule}
    return _replace(config, strategy=layout.strategy or "tp", **sizes)


def _other_strategy(config: TrainConfig) -> str:
    """Return the strategy where the advisor has no answer: the one that takes most models."""
    if _is_model_parallel(config):
        return "hybrid"
    return "ddp" if "ddp" in possible_strategies(config) else "fsdp"


def _is_model_parallel(config: TrainConfig) -> bool:
    """Return whether layers are sharded or stages divided among ranks."""
    return config.strategy in ("tp", "pp", "hybrid") or any(
        (size or 1) > 1 for size in (config.tensor_parallel_size, config.pipeline_parallel_size)
    )


def _replace(config: TrainConfig, **settings: Any) -> TrainConfig:
    return dataclasses.replace(config, cluster_file=None, **settings)  # which is for "auto"


def _cluster(config: TrainConfig) -> ClusterSpec:
    """Return the speeds and the memory that there are."""
    device = get_distributed_info().device
    # Set by torchrun and panther launch; without it all ranks are on one node.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else physical_memory() / local
    sizes: dict[str, Any] = {"gpus": get_world_size(), "memory_bytes": memory, "gpus_per_node": local}
    file = config.cluster_file
    if file is None:
        return ClusterSpec(**sizes) if on_gpu else ClusterSpec.preset("cpu", **sizes)
    try:
        return ClusterSpec.load(file, **sizes)
    except OSError as error:
        raise ConfigError(
            f"cluster_file={file!r} cannot be read ({error.strerror}): write it with `panther advise --measure {file}`"
        ) from None
    except ValueError as error:
        raise ConfigError(f"cluster_file: {error}") from error
