"""The base class of the engines, which compute losses and gradients of the batches of a step.

Under FSDP2 it checks that all ranks run the same blocks in a step, and train the same parameters.
"""

__all__ = ["Engine", "Metrics", "Report", "check_loss", "loss_of_output", "value_of_loss", "zero_of_output"]

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from panther._text import list_names
from panther._torch import buffers_of, tree_leaves, tree_map_only, unsaved_buffers_of, watch_fsdp_unit
from panther.distributed.comm.agreement import gather_objects
from panther.distributed.comm.ranks import ranks_of
from panther.distributed.data.comm_hooks import hook_state
from panther.distributed.pipeline.losses import reduction_of
from panther.errors import ConfigError
from panther.nn.io import unwrapped
from panther.train.coordination import sum_over_ranks
from panther.train.loading.feed import Batch
from panther.train.optimization.loss_weights import LossWeights

Metrics = Mapping[str, Callable[[Any, Any], Any]]
Report = Callable[[float | Tensor], None]


@dataclass(kw_only=True, eq=False)
class Engine(ABC):
    """A distributed model that computes the losses and gradients of the batches of a step."""

    model: Any
    """The model, or the list of this rank's stages, in the form that checkpoints take."""
    loss_fn: Callable[..., Tensor] | None
    device: torch.device
    rank: int = 0
    """Number of this rank among the ranks that split the data."""
    size: int = 1
    """Number of ranks that split the data."""
    stages: int = 1
    """Number of ranks of the pipeline."""
    num_microbatches: int = 1
    """Number of microbatches of a batch, with a pipeline."""
    batch_factor: int = 1
    """Number of batches of the data that form one batch of this rank."""
    reports_loss: bool = True
    """Whether the losses of this rank count. Only one of the ranks that have the same samples reports them."""
    group: dist.ProcessGroup | None = None
    """The ranks that split the data; None is all ranks."""
    reduced: Sequence[str] = ()
    """The names of the parameters whose gradients DDP averages, in the order of DDP."""
    autocast_dtype: torch.dtype | None = None
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler(enabled=False))
    """Scales the loss of fp16. In other dtypes the scaler is disabled, and only calls the optimizer."""
    loss_weight: Callable[[Any], Any] | str | int | None = None
    """How much a batch counts; None uses the divisor of the loss function, if it is known."""

    def __post_init__(self) -> None:
        """Find out whether the loss is a sum, which is not divided by the number of samples, and watch FSDP's units."""
        self.loss_is_sum = reduction_of(self.loss_fn) == "sum"
        self.weights = LossWeights(self.loss_fn, self.loss_weight)
        self.weight_unit: float | None = 1.0 if self.weights.by_samples else None
        """A power of two near the weight of a sample, the same on all ranks; None before the first step."""
        # All ranks have the units of a model, and the ranks of the group those of a stage.
        self.sharded_step = ShardedStep(self.modules(), self.device, self.group if self.stages > 1 else None)
        self.weight: float | None = None
        """Sum of the weights of this rank's batches in the last step, in units; None if every sample weighs 1."""

    def train(self, was_training: bool | None) -> list[str]:
        """Put the model into training mode by its own ``train``, and return the names of modules that are not in it.

        Modules in evaluation mode, such as a frozen BatchNorm, go back to it if the whole model was in training mode;
        with None each part of the model is asked.
        """
        names = []
        for part in self.modules():
            is_partial = part.training if was_training is None else was_training
            frozen = [module for module in part.modules() if is_partial and module is not part and not module.training]
            part.train()
            for module in frozen:
                # A method of the module itself may do more than to set the flags.
                module.training = False if type(module).train is nn.Module.train else module.train(False).training
            names += [name for name, module in unwrapped(part).named_modules() if not module.training]
        return names

    @abstractmethod
    def forward_backward(self, window: list[Batch], before_backward: Report) -> None:
        """Add the gradients of the batches of one optimizer step to the parameters.

        They are the gradients of ``sum(weight * loss) / samples``, with weights in units and the samples of all ranks;
        :attr:`weight` is the sum of this rank's weights. The engine calls ``before_backward`` before the last backward
        pass, with this rank's ``sum(weight * loss)``. It is a tensor on a GPU, because nothing must wait for the GPU.
        """

    def evaluate(self, batches: Iterable[Batch], metrics: Metrics) -> Tensor:
        """Return the weighted sum of the loss, the sums of metrics over samples, the weight and number of samples."""
        # Users may keep single modules, such as a frozen BatchNorm, in evaluation mode.
        modes = [(module, module.training) for part in self.modules() for module in part.modules()]
        part_modes = dict(modes)
        totals = torch.zeros(len(metrics) + 3, dtype=torch.float64)
        try:
            for part in self.modules():
                part.eval()
            with torch.no_grad():
                for batch in batches:
                    totals += self.evaluate_batch(batch, metrics)
        finally:
            for part in self.modules():
                part.train(part_modes[part])  # a method of the model's own may do more than to set the flags
            for module, training in modes:
                module.training = training
        return totals

    @abstractmethod
    def evaluate_batch(self, batch: Batch, metrics: Metrics) -> Tensor:
        """Return the terms of one batch in :meth:`evaluate`; zeros on a rank that does not report its losses."""

    def _weigh(self, window: list[Batch]) -> list[float]:
        """Return the weights of the batches of a step in units, and note their sum."""
        is_divided = self.size > 1 or len(window) > 1 or self.stages > 1
        for batch in window:
            if batch.samples and is_divided:
                self.weights.warn_of_ignored_labels(batch.data)
        weights = [self.weights.of(batch.data, batch.samples) for batch in window]
        if self.weight_unit is None:
            # Weights far from 1 would leave the range of gradients in fp16. The unit is a power of two, which rounds
            # nothing, and is set once.
            total, samples = sum_over_ranks([sum(weights), float(sum(batch.samples for batch in window))])
            if total > 0:
                self.weight_unit = 2.0 ** round(math.log2(total / samples))
        unit = self.weight_unit or 1.0
        weights = [weight / unit for weight in weights]
        self.weight = None if self.weights.by_samples else sum(weights)
        return weights

    def modules(self) -> list[nn.Module]:
        """Return the modules of this rank."""
        return self.model if isinstance(self.model, list) else [self.model]

    def prepare_resume(self, first_window: Callable[[], list[Batch] | None]) -> None:
        """Run a backward pass, after which DDP reorders its buckets once, so that resumed runs sum in the same order.

        It changes buffers and generators, so it must come before the checkpoint is loaded.
        """
        # The sum of two numbers does not depend on the order of the buckets, but the state of a hook does.
        matters = self.size > 2 or hook_state(self.modules()[0]) is not None
        if isinstance(self.model, DistributedDataParallel) and matters and (window := first_window()) is not None:
            self.forward_backward(window[-1:], lambda loss_sum: None)
            self.model.zero_grad()

    def broadcast_buffers(self) -> None:
        """Broadcast the floating-point buffers of the first rank, such as BatchNorm's. DDP does it by itself."""
        if self.size == 1 or isinstance(self.model, DistributedDataParallel):
            return
        first = dist.get_process_group_ranks(self.group)[0]
        for part in self.modules():
            for module in part.modules():
                for name, buffer in buffers_of(module).items():
                    # Buffers that are not saved, such as sketches, are equal on all ranks.
                    saved = name not in unsaved_buffers_of(module)
                    if buffer is not None and saved and buffer.is_floating_point() and module.training:
                        dist.broadcast(buffer, first, group=self.group)

    def _to_device(self, data: Any) -> Any:
        if isinstance(data, Tensor):
            return data.to(self.device, non_blocking=True)
        if type(data) in (tuple, list):  # this is the usual batch; the general function takes 40 us longer
            return type(data)([self._to_device(part) for part in data])
        return tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=True), data)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _totals(self, loss: Tensor, output: Any, target: Any, samples: int, weight: float, metrics: Metrics) -> Tensor:
        """Return the loss of a batch times its weight, metrics times its samples, the weight, and the samples."""
        # The mean over no tokens is NaN.
        loss_sum = loss.item() * (1.0 if self.loss_is_sum else weight) if weight else 0.0
        values: list[float] = []
        for name, metric in metrics.items():
            result = metric(output, target)
            try:
                values.append(float(result))
            except (TypeError, ValueError, RuntimeError):
                shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
                raise ConfigError(
                    f"metric {name!r} returned a {type(result).__name__}{shape}, not one number: the batch's mean"
                ) from None
        means = [value * samples for value in values]
        return torch.tensor([loss_sum, *means, weight, samples], dtype=torch.float64)


class ShardedStep:
    """Compare the blocks that ranks ran in a step of FSDP2, and give missing gradients to its collectives.

    FSDP2 does not compare the ranks. If a rank lacks a gradient, gloo aborts the process because of the size, NCCL
    waits, and gradients of two parameters of equal size are added to each other in silence; so are the weights of two
    blocks. Therefore a missing gradient is replaced by zero, and the ranks compare both before the optimizer uses a
    gradient.
    """

    def __init__(self, parts: Sequence[nn.Module], device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._parts, self._device, self._group = parts, device, group
        self._run: list[str] = []
        self._missing: dict[int, nn.Parameter] = {}
        self._has_units = self._in_step = False
        for part in parts:
            for name, unit in part.named_modules():
                if isinstance(unit, FSDPModule):
                    self._has_units = True
                    watch_fsdp_unit(unit, partial(self._note_call, name), self._missing)

    def begin(self) -> None:
        """Begin a step."""
        self._run.clear()
        self._missing.clear()
        self._in_step = True

    def finish(self) -> None:
        """Compare the ranks after the backward pass; a gradient that all ranks lack is None afterwards."""
        self._in_step = False
        if not self._has_units:
            return
        missing = self._missing_names() if self._missing else []
        digest = float(zlib.crc32("\n".join((*self._run, "", *missing)).encode()))
        extremes = torch.tensor([digest, -digest], dtype=torch.float64, device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        largest, negative_smallest = extremes.tolist()
        if largest != -negative_smallest:
            ranks = ranks_of(self._group)
            records = gather_objects((list(self._run), missing), self._group)
            raise ConfigError(_describe(dict(zip(ranks, records, strict=True))))
        for parameter in self._missing.values():
            parameter.grad = None  # so that the optimizer leaves the parameter out, as on one process

    def _note_call(self, name: str) -> None:
        if self._in_step:  # The forwards of an evaluation, however many, are not compared.
            self._run.append(name)

    def _missing_names(self) -> list[str]:
        parameters_by_name = (pair for part in self._parts for pair in part.named_parameters())
        return [name for name, parameter in parameters_by_name if id(parameter) in self._missing]


def _describe(records: dict[int, tuple[list[str], list[str]]]) -> str:
    """Word the first difference between the first rank and another rank."""
    first_rank, (first_run, first_missing) = next(iter(records.items()))
    for rank, (run, missing) in records.items():
        for number, (first, other) in enumerate(zip_longest(first_run, run)):
            if first != other:
                return (
                    f"as call {number + 1} of a sharded block in this step, rank {first_rank} ran {_block(first)} and "
                    f"rank {rank} {_block(other)}, and fsdp gathers the weights of a block from all ranks: decide on "
                    "every rank alike which blocks run, or use strategy='ddp' with find_unused_parameters=True"
                )
        if missing != first_missing:
            lacking, having = (rank, first_rank) if set(missing) - set(first_missing) else (first_rank, rank)
            names = set(records[lacking][1]) - set(records[having][1])
            listed = list_names([name for name in records[lacking][1] if name in names])
            return (
                f"the loss of rank {lacking} does not depend on the parameters {listed} in this step, and the loss of "
                f"rank {having} does: under fsdp every rank must train the same parameters; add 0 * parameter.sum() to "
                "the loss, or use strategy='ddp' with find_unused_parameters=True"
            )
    raise AssertionError("the records of the ranks are equal")


def _block(name: str | None) -> str:
    if name is None:
        return "none"
    return repr(name) if name else "the model itself"


def loss_of_output(output: Any) -> Tensor:
    """Return the loss that a model computes itself: its output, or the entry or attribute ``loss`` of its output."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise ConfigError(
            f"there is no loss_fn, and the model returned a {type(output).__name__} without a loss: pass loss_fn, or "
            "let the model return its loss"
        )
    return loss


def zero_of_output(output: Any, loss: Tensor) -> Tensor:
    """Return 0 as a function of a model's outputs; the loss is used only if the model has no other output."""
    parts = output
    if not isinstance(output, Tensor | Mapping | tuple | list):
        parts = getattr(output, "__dict__", output)
    leaves = [leaf for leaf in tree_leaves(dict(parts) if isinstance(parts, Mapping) else parts) if leaf is not loss]
    trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad] or [loss]
    # In this order no infinity is multiplied by 0, neither here nor in the gradient.
    return torch.stack([(leaf * 0.0).nan_to_num(0.0, 0.0, 0.0).sum() for leaf in trained]).sum()


def value_of_loss(loss: Tensor) -> float | Tensor:
    """Return a loss as a number, or as a detached tensor if it is on a GPU."""
    return loss.item() if loss.is_cpu else loss.detach().double()


def check_loss(loss: Any, from_loss_fn: bool) -> None:
    """Raise ConfigError unless a loss is a scalar tensor that depends on a trainable parameter."""
    if not isinstance(loss, Tensor):
        raise ConfigError(f"loss_fn returned a {type(loss).__name__}: it must return one tensor and nothing else")
    if loss.dim():
        fix = "reduce it" if from_loss_fn else "without loss_fn the model's output is the loss, so pass loss_fn"
        raise ConfigError(f"the loss has shape {tuple(loss.shape)} and must be a scalar: {fix}")
    if not loss.requires_grad:
        raise ConfigError("the loss depends on no trainable parameter: do not detach it or make it from numbers")
