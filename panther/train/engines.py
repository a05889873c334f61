"""The forward and backward pass of one optimizer step: with the whole model on each rank, or with pipeline stages."""

__all__ = ["Engine", "ModelEngine", "PipelineEngine", "loss_of_output"]

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from panther._torch import buffers_of, tree_leaves, tree_map_only, unreduced_positions, unsaved_buffers_of
from panther.distributed.data.gradient_compression import hook_state
from panther.distributed.pipeline.losses import reduction_of
from panther.errors import ConfigError
from panther.train.loading.feed import Batch
from panther.train.optimization.loss_weights import LossWeights
from panther.train.optimization.trainable import list_names
from panther.train.reductions import sum_over_ranks
from panther.train.step_exchange import GradientCarrier

if TYPE_CHECKING:
    from panther.distributed import HybridParallelTrainer

Metrics = Mapping[str, Callable[[Any, Any], Any]]
Report = Callable[[float | Tensor], None]
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(kw_only=True, eq=False)
class Engine(ABC):
    """A distributed model that computes losses and gradients of windows of batches."""

    model: Any
    """The model, or the list of this rank's stages. Checkpoints take it as it is."""
    loss_fn: Callable[..., Tensor] | None
    device: torch.device
    rank: int = 0
    """The rank among those that split the data."""
    size: int = 1
    """Number of ranks that split the data."""
    stages: int = 1
    """Number of ranks of the pipeline."""
    num_microbatches: int = 1
    """Number of microbatches of a batch, with a pipeline."""
    batch_factor: int = 1
    """Number of the data's batches that make one of this rank's."""
    reports_loss: bool = True
    """Whether this rank's losses are counted. Of ranks that see the same samples, only one reports them."""
    group: dist.ProcessGroup | None = None
    """The ranks that split the data; None is all ranks."""
    carrier: GradientCarrier | None = None
    """Sends numbers of the step with the gradients, where that is possible."""
    reduced: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """For DDP, the parameters whose gradients it averages, in its own order."""
    autocast_dtype: torch.dtype | None = None
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler(enabled=False))
    """Scales the loss of fp16. Otherwise it is disabled: torch's does nothing then except to call the optimizer."""
    loss_weight: Callable[[Any], Any] | str | int | None = None
    """How much a batch counts; None is by what the loss function is known to divide by."""

    def __post_init__(self) -> None:
        """Read from the loss whether it is a sum, which is not divided by the number of samples."""
        self.loss_is_sum = reduction_of(self.loss_fn) == "sum"
        self.weights = LossWeights(self.loss_fn, self.loss_weight)
        self.weight_unit: float | None = 1.0 if self.weights.by_samples else None
        """A power of two near the weight of a sample, the same on all ranks; None before the first step."""
        self.weight: float | None = None
        """What this rank's batches of the last step weigh, in units; None if every sample weighs 1."""

    @abstractmethod
    def forward_backward(self, window: list[Batch], before_backward: Report) -> None:
        """Add the gradients of the batches of one optimizer step to the parameters.

        The gradients are those of ``sum(weight * loss) / samples``, with weights in units and the samples of all ranks;
        :attr:`weight` is the sum of this rank's weights. ``before_backward`` is called with this rank's
        ``sum(weight * loss)``, before the last backward; a tensor on a GPU, which must not be waited for.
        """

    def evaluate(self, batches: Iterable[Batch], metrics: Metrics) -> Tensor:
        """Return the weighted sum of the loss, the sums of metrics over samples, the weight and number of samples."""
        # Users may keep single modules, such as a frozen BatchNorm, in evaluation mode.
        modes = [(module, module.training) for part in self.modules() for module in part.modules()]
        totals = torch.zeros(len(metrics) + 3, dtype=torch.float64)
        try:
            for part in self.modules():
                part.eval()
            with torch.no_grad():
                for batch in batches:
                    totals += self.evaluate_batch(batch, metrics)
        finally:
            for module, training in modes:
                module.training = training
        return totals

    @abstractmethod
    def evaluate_batch(self, batch: Batch, metrics: Metrics) -> Tensor:
        """Return what :meth:`evaluate` sums up, of one batch; zeros on a rank that does not report its losses."""

    def _weigh(self, window: list[Batch]) -> list[float]:
        """Return the weights of the batches of a step in units, and note their sum."""
        is_divided = self.size > 1 or len(window) > 1 or self.stages > 1
        for batch in window:
            if batch.samples and is_divided:
                self.weights.warn_of_ignored_labels(batch.data)
        weights = [self.weights.of(batch.data, batch.samples) for batch in window]
        if self.weight_unit is None:
            # Once. Weights far from 1 would take the gradients of fp16 out of its range. A power of two rounds nothing.
            total, samples = sum_over_ranks([sum(weights), float(sum(batch.samples for batch in window))])
            if total > 0:
                self.weight_unit = 2.0 ** round(math.log2(total / samples))
        unit = self.weight_unit or 1.0
        weights = [weight / unit for weight in weights]
        self.weight = None if self.weights.by_samples else sum(weights)
        return weights

    def check_evaluation(self) -> None:  # noqa: B027 (most engines can evaluate)
        """Raise ConfigError if this layout cannot be evaluated."""

    def modules(self) -> list[nn.Module]:
        """Return the modules of this rank."""
        return self.model if isinstance(self.model, list) else [self.model]

    def prepare_resume(self, first_window: Callable[[], list[Batch] | None]) -> None:
        """Trigger what DDP does once after the first backward pass, so that resumed runs sum in the same order.

        It changes buffers and generators, so it must come before the checkpoint is loaded.
        """
        # DDP reorders its buckets then. The sum of two numbers does not depend on the order; what a hook keeps does.
        matters = self.size > 2 or hook_state(self.modules()[0]) is not None
        if isinstance(self.model, DistributedDataParallel) and matters and (window := first_window()) is not None:
            self.forward_backward(window[-1:], lambda loss_sum: None)
            self.model.zero_grad()

    def broadcast_buffers(self) -> None:
        """Give all ranks the first rank's floating-point buffers, such as BatchNorm's, as DDP does by itself."""
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
        if type(data) in (tuple, list):  # the usual batch; the general way takes 40 us more
            return type(data)([self._to_device(part) for part in data])
        return tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=True), data)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _totals(self, loss: Tensor, output: Any, target: Any, samples: int, weight: float, metrics: Metrics) -> Tensor:
        """Return the loss of a batch times its weight, metrics times its samples, the weight, and the samples."""
        # The mean over no tokens is not a number.
        loss_sum = loss.item() * (1.0 if self.loss_is_sum else weight) if weight else 0.0
        values: list[float] = []
        for name, metric in metrics.items():
            result = metric(output, target)
            try:
                value = torch.as_tensor(result)
            except (TypeError, ValueError, RuntimeError):
                raise ConfigError(
                    f"metric {name!r} returned a {type(result).__name__} and must return one number: the batch's mean"
                ) from None
            if value.numel() != 1:
                raise ConfigError(
                    f"metric {name!r} has shape {tuple(value.shape)} and must be one number: the batch's mean"
                )
            values.append(value.item())
        means = [value * samples for value in values]
        return torch.tensor([loss_sum, *means, weight, samples], dtype=torch.float64)


class ModelEngine(Engine):
    """Calls the model as one module: on one process, replicated, sharded, or with tensor parallelism."""

    def _forward(self, data: Any) -> tuple[Tensor, Any, Any]:
        """Return loss, output and target of a batch."""
        data = self._to_device(data)
        with self._autocast():
            if self.loss_fn is None:
                try:
                    output = self._call(data)
                except TypeError as error:
                    if self._takes(data):
                        raise
                    raise ConfigError(
                        f"there is no loss_fn, so forward must take all that a batch holds, and does not ({error}): "
                        "pass loss_fn for batches (input, target)"
                    ) from error
                return loss_of_output(output), output, data
            if not isinstance(data, tuple | list) or len(data) != 2:
                raise ConfigError(
                    f"with a loss_fn a batch must be (input, target), and is a {type(data).__name__}"
                    f"{f' of {len(data)}' if isinstance(data, tuple | list) else ''}: leave loss_fn out if the model "
                    "returns its loss"
                )
            output = self._call(data[0])
            return self.loss_fn(output, data[1]), output, data[1]

    def _call(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, tuple | list) else self.model(inputs)

    def _takes(self, inputs: Any) -> bool:
        """Return whether the arguments fit to the signature of the model's forward."""
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
        try:
            inspect.signature(model.forward).bind(*(args if isinstance(args, tuple | list) else (args,)), **kwargs)
        except TypeError:
            return False
        return True

    def forward_backward(self, window: list[Batch], before_backward: Report) -> None:  # noqa: D102 (see Engine)
        loss_sum: float | Tensor = 0.0
        weights = self._weigh(window)
        if self.carrier is not None:
            self.carrier.begin()
        statistics: list[tuple[Tensor, Tensor]] = []
        for number, (batch, batch_weight) in enumerate(zip(window, weights, strict=True)):
            last = number == len(window) - 1
            if not batch.samples and not statistics:
                statistics = self._statistics()
            with self._gradient_exchange(last):
                loss, output, _ = self._forward(batch.data)
                # On every batch: what a user function returns can change.
                _check_loss(loss, self.loss_fn is not None)
                if batch_weight:
                    # A mean counts by its weight, a sum by itself.
                    loss_sum += _value(loss) * (1 if self.loss_is_sum else batch_weight)
                # Ranks average gradients. With this weight, the average is the gradient of the mean over all samples of
                # the window, or of their sum.
                weight = self.size * (bool(batch.samples) if self.loss_is_sum else batch.share)
                if batch_weight != batch.samples:
                    weight *= batch_weight / batch.samples
                weighted = loss
                if not batch_weight:
                    # This rank must still join the other ranks' collectives, with gradients of zero, although the loss
                    # of a filler, or of a batch without labels, may not be finite.
                    weighted = self._zero_of(loss, output)
                elif weight != 1.0:
                    weighted = loss * weight
                weighted = self.scaler.scale(weighted)
                if last:
                    before_backward(loss_sum)
                if last and self.carrier is not None:
                    self.carrier.backward(weighted)
                else:
                    weighted.backward()
        if isinstance(self.model, DistributedDataParallel):
            self._finish_reduction(self.model)
        for buffer, value in statistics:
            buffer.copy_(value)
        self.broadcast_buffers()

    def _finish_reduction(self, model: DistributedDataParallel) -> None:
        """Let DDP average gradients without those of parameters that were frozen after it was made.

        Raises:
            ConfigError: If it waits for gradients of parameters that are not frozen, before any is used.
        """
        if not (positions := unreduced_positions(model)):
            return
        parameters = list(self.reduced.items())
        waiting = [parameters[position] for position in positions]
        if unused := [name for name, parameter in waiting if parameter.requires_grad]:
            raise ConfigError(
                f"the loss of this step does not depend on the parameters {list_names(unused)}, and DDP waits for "
                "their gradients: set find_unused_parameters=True, or requires_grad=False for them"
            )
        # Its hooks wait on nodes of the parameters, which gradients of zero reach too; ranks that have not frozen them
        # are found afterwards, by the exchange.
        frozen = [parameter for _, parameter in waiting]
        before = [parameter.grad for parameter in frozen]
        for parameter in frozen:
            parameter.requires_grad_(True)
        torch.autograd.backward(frozen, [torch.zeros_like(parameter) for parameter in frozen])
        for parameter, gradient in zip(frozen, before, strict=True):
            parameter.requires_grad_(False)
            if gradient is None:
                parameter.grad = None  # as on one process, where the optimizer leaves it out

    def _statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Return the running statistics of BatchNorm and their values, which samples of a filler must not change."""
        norms = [module for module in self.model.modules() if isinstance(module, _BATCH_NORMS) and module.training]
        return [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]

    def _zero_of(self, loss: Tensor, output: Any) -> Tensor:
        """Return 0 as a function of the parameters on which a loss depends, with gradients of zero."""
        # A loss divided by nothing has no finite gradient, so not through the loss if there is another way.
        if self.loss_fn is None and bool(loss.isfinite()):
            return loss * 0.0
        return zero_of_output(output, loss)

    def _gradient_exchange(self, last: bool) -> AbstractContextManager[Any]:
        """Let ranks average their gradients only in the last backward pass of a window."""
        if isinstance(self.model, DistributedDataParallel):
            return nullcontext() if last else self.model.no_sync()
        if isinstance(self.model, FSDPModule):
            # FSDP2 keeps unsharded gradients until then, which needs more memory than a reduction per batch.
            self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def evaluate_batch(self, batch: Batch, metrics: Metrics) -> Tensor:  # noqa: D102 (documented in Engine)
        loss, output, target = self._forward(batch.data)
        weight = self.weights.of(batch.data, batch.samples)
        totals = self._totals(loss, output, target, batch.samples, weight, metrics)
        # A filler batch may give a loss that is not finite.
        return totals if batch.samples and self.reports_loss else torch.zeros_like(totals)


@dataclass(kw_only=True, eq=False)
class PipelineEngine(Engine):
    """Runs stages on the ranks of an axis. All batches have the same size."""

    loss_fn: Callable[..., Tensor]
    parallel: "HybridParallelTrainer"

    def __post_init__(self) -> None:
        """Make the schedule, which calls the loss on the last stage."""
        from panther.distributed import make_schedule  # here, because torch's pipelines are slow to import

        super().__post_init__()
        self._scaled_loss = _MicrobatchLoss(self.loss_fn)
        self.num_microbatches = self.parallel.num_microbatches
        name, stages = self.parallel.schedule_name, self.parallel.stages
        self.schedule = make_schedule(name, stages, self.num_microbatches, self._scaled_loss)
        self.reports_loss = self.reports_loss and self.schedule.is_last
        self._batch_size: int | None = None

    def _inputs_and_target(self, data: Any) -> tuple[Any, Any]:
        data = self._to_device(data)
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise ConfigError("a pipeline's batch must be (input, target), the input a tensor or a tuple of tensors")
        # Without gaps, so that a microbatch's place in the batch follows from where its memory begins.
        return (tuple(data[0]) if isinstance(data[0], tuple | list) else (data[0],)), data[1].contiguous()

    def forward_backward(self, window: list[Batch], before_backward: Report) -> None:  # noqa: D102 (see Engine)
        total: float | Tensor = 0.0
        self._weigh(window)
        for batch in window:
            inputs, target = self._inputs_and_target(batch.data)
            self._batch_size = len(target)
            # Data parallelism averages gradients over the ranks that split the data.
            share = self.size * (1.0 if self.loss_is_sum else batch.share)
            self._scaled_loss.begin(target, [share * part for part in self._parts(batch)])
            with self._autocast():
                _, loss = self.schedule.step(inputs, target)
            if loss is not None:
                total += _value(loss) * (1.0 if self.loss_is_sum else batch.samples) / share
        before_backward(total if self.reports_loss else 0.0)
        self.broadcast_buffers()

    def _parts(self, batch: Batch) -> list[float]:
        """Return what each microbatch weighs relative to its samples, in units."""
        count = self.num_microbatches
        if self.weights.by_samples or batch.samples % count:  # which the schedule refuses
            return [1.0] * count
        size = batch.samples // count
        parts = [_rows(batch.data, begin, begin + size) for begin in range(0, batch.samples, size)]
        return [self.weights.of(part, size) / (size * (self.weight_unit or 1.0)) for part in parts]

    def check_evaluation(self) -> None:  # noqa: D102 (documented in Engine)
        # torch 2.13: the eval of these schedules looks for gradients, which an evaluation does not compute.
        name = self.parallel.schedule_name
        if name in ("zbv", "dualpipev"):
            raise ConfigError(
                f"pipeline_schedule={name!r} cannot be evaluated by torch: leave the validation data out, or use "
                "'1f1b', 'interleaved' or 'zero_bubble'"
            )

    def evaluate_batch(self, batch: Batch, metrics: Metrics) -> Tensor:  # noqa: D102 (documented in Engine)
        inputs, target = self._inputs_and_target(batch.data)
        # torch's stages have buffers of the size of the first batch, so others are split or repeat their last sample.
        count = self.num_microbatches
        size = self._batch_size or -(-batch.largest // count) * count
        row = torch.zeros(len(metrics) + 3, dtype=torch.float64)
        # As often as the rank with the most samples, because stages that are sharded gather their parameters each time.
        for begin in range(0, batch.largest, size):
            end = min(begin + size, len(target), batch.samples)
            indices = torch.arange(begin, begin + size, device=target.device).clamp(max=len(target) - 1)
            with self._autocast():
                output = self._outputs(tuple(x[indices] for x in inputs), target[indices])
            if self.reports_loss and end > begin:
                output, labels = output[: end - begin], target[begin:end]
                weight = self.weights.of(_rows(batch.data, begin, end), end - begin)
                row += self._totals(self.loss_fn(output, labels), output, labels, end - begin, weight, metrics)
        return row

    def _outputs(self, inputs: tuple[Tensor, ...], target: Tensor) -> Any:
        arguments = inputs if self.schedule.is_first else ()
        keywords = {"target": target, "losses": []} if self.schedule.is_last else {}
        # torch's own method, because PipelineSchedule can only train.
        return self.schedule.schedule.eval(*arguments, **keywords)


class _MicrobatchLoss:
    """A loss function whose values for the microbatches of a batch are multiplied by factors.

    The schedule divides a mean by the number of microbatches; a sum it does not.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self.loss_fn, self.reduction = loss_fn, reduction_of(loss_fn)
        self._target, self._factors = torch.empty(0), [1.0]

    def begin(self, target: Tensor, factors: list[float]) -> None:
        """Give the target of the whole batch and the factors of its microbatches."""
        self._target, self._factors = target, factors

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss of a microbatch times its factor; 0 without regard to the loss if the factor is 0."""
        factor = self._factors[self._number_of(target) if len(set(self._factors)) > 1 else 0]
        loss = self.loss_fn(output, target)
        return loss * factor if factor else zero_of_output(output, loss)

    def _number_of(self, target: Tensor) -> int:
        """Return the number of a microbatch: its target is a view of the batch's, and begins at one of its rows."""
        row = (target.storage_offset() - self._target.storage_offset()) // self._target.stride(0)
        return row * len(self._factors) // len(self._target)


def _rows(data: Any, begin: int, end: int) -> Any:
    return tree_map_only(Tensor, lambda x: x[begin:end] if x.dim() else x, data)


def loss_of_output(output: Any) -> Tensor:
    """Return the loss that a model computes itself: its output, or what is named ``loss`` in it."""
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
    """Return 0 as a function of a model's outputs, except for the loss if there are others."""
    parts = output
    if not isinstance(output, Tensor | Mapping | tuple | list):
        parts = getattr(output, "__dict__", output)
    leaves = [leaf for leaf in tree_leaves(dict(parts) if isinstance(parts, Mapping) else parts) if leaf is not loss]
    trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad] or [loss]
    # In this order no infinity is multiplied by 0, neither here nor in the gradient.
    return torch.stack([(leaf * 0.0).nan_to_num(0.0, 0.0, 0.0).sum() for leaf in trained]).sum()


def _value(loss: Tensor) -> float | Tensor:
    """Return a loss as a number; as a tensor, detached, if it is on a GPU."""
    return loss.item() if loss.is_cpu else loss.detach().double()


def _check_loss(loss: Any, from_loss_fn: bool) -> None:
    """Raise ConfigError unless a loss is a scalar tensor that depends on a trainable parameter."""
    if not isinstance(loss, Tensor):
        raise ConfigError(f"loss_fn returned a {type(loss).__name__}: it must return one tensor and nothing else")
    if loss.dim():
        fix = "reduce it" if from_loss_fn else "there is no loss_fn, so the model's output is the loss: pass loss_fn"
        raise ConfigError(f"the loss has shape {tuple(loss.shape)} and must be a scalar: {fix}")
    if not loss.requires_grad:
        raise ConfigError("the loss depends on no trainable parameter: do not detach it or make it from numbers")
