"""The forward and backward pass of one optimizer step: with the whole model on each rank, or with pipeline stages."""

__all__ = ["Engine", "ModelEngine", "PipelineEngine", "loss_of_output"]

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from panther._torch import buffers_of, tree_map_only, unreduced_positions, unsaved_buffers_of
from panther.distributed import HybridParallelTrainer, make_schedule
from panther.distributed.data.gradient_compression import hook_state
from panther.distributed.pipeline.losses import DividedLoss, reduction_of
from panther.errors import ConfigError
from panther.train.batches import Batch
from panther.train.coordination import GradientCarrier
from panther.train.optimization.trainable import list_names

Metrics = Mapping[str, Callable[[Any, Any], Any]]
Report = Callable[[float | Tensor], None]


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

    def __post_init__(self) -> None:
        """Read from the loss whether it is a sum, which is not divided by the number of samples."""
        self.loss_is_sum = reduction_of(self.loss_fn) == "sum"

    @abstractmethod
    def forward_backward(self, window: list[Batch], before_backward: Report) -> None:
        """Add the gradients of the batches of one optimizer step to the parameters.

        ``before_backward`` is called with the sum of this rank's losses over its samples, before the last backward; a
        tensor on a GPU, which must not be waited for.
        """

    def evaluate(self, batches: Iterable[Batch], metrics: Metrics) -> Tensor:
        """Return the sums of loss and metrics over this rank's samples, and their number."""
        # Users may keep single modules, such as a frozen BatchNorm, in evaluation mode.
        modes = [(module, module.training) for part in self.modules() for module in part.modules()]
        totals = torch.zeros(len(metrics) + 2, dtype=torch.float64)
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
        """Return loss and metrics of a batch times its samples, and their number; zeros on a rank that reports none."""

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

    def _totals(self, loss: Tensor, output: Any, target: Any, samples: int, metrics: Metrics) -> Tensor:
        """Return loss and metrics of a batch times its samples, and their number."""
        values = [(loss / (samples or 1) if self.loss_is_sum else loss).item()]
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
        return torch.tensor([*values, 1.0], dtype=torch.float64) * samples


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
        if self.carrier is not None:
            self.carrier.begin()
        for number, batch in enumerate(window):
            last = number == len(window) - 1
            with self._gradient_exchange(last):
                loss, _, _ = self._forward(batch.data)
                # On every batch: what a user function returns can change.
                _check_loss(loss, self.loss_fn is not None)
                if batch.samples:
                    # A mean counts by its samples, a sum by itself.
                    loss_sum += _value(loss) * (1 if self.loss_is_sum else batch.samples)
                # Ranks average gradients. With this weight, the average is the gradient of the mean over all samples of
                # the window, or of their sum.
                weight = self.size * (bool(batch.samples) if self.loss_is_sum else batch.share)
                weighted = loss
                if not batch.samples:
                    # This rank must still join the other ranks' collectives, with gradients of zero, although its
                    # filler batch may give a loss that is not finite.
                    weighted = loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
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
        self.broadcast_buffers()

    def _finish_reduction(self, model: DistributedDataParallel) -> None:
        """Let DDP average gradients without those of parameters that were frozen after it was made.

        Raises:
            ConfigError: If it waits for gradients of parameters that are not frozen, before any is used.
        """
        if not (positions := unreduced_positions(model)):
            return
        named = list(self.reduced.items())
        waiting = [named[position] for position in positions]
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
        totals = self._totals(loss, output, target, batch.samples, metrics)
        # A filler batch may give a loss that is not finite.
        return totals if batch.samples and self.reports_loss else torch.zeros_like(totals)


@dataclass(kw_only=True, eq=False)
class PipelineEngine(Engine):
    """Runs stages on the ranks of an axis. All batches have the same size."""

    loss_fn: Callable[..., Tensor]
    parallel: HybridParallelTrainer

    def __post_init__(self) -> None:
        """Make the schedule, which calls the loss on the last stage."""
        super().__post_init__()
        self._divided_loss = DividedLoss(self.loss_fn, 1 / self.size)
        name, stages = self.parallel.schedule_name, self.parallel.stages
        self.schedule = make_schedule(name, stages, self.parallel.num_microbatches, self._divided_loss)
        self.reports_loss = self.reports_loss and self.schedule.is_last
        self._batch_size: int | None = None

    def _inputs_and_target(self, data: Any) -> tuple[Any, Any]:
        data = self._to_device(data)
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise ConfigError("a pipeline's batch must be (input, target), the input a tensor or a tuple of tensors")
        return (tuple(data[0]) if isinstance(data[0], tuple | list) else (data[0],)), data[1]

    def forward_backward(self, window: list[Batch], before_backward: Report) -> None:  # noqa: D102 (see Engine)
        total: float | Tensor = 0.0
        if not self.loss_is_sum:
            self._divided_loss.divisor = len(window)  # the last window of an epoch may have fewer batches
        for batch in window:
            inputs, target = self._inputs_and_target(batch.data)
            self._batch_size = len(target)
            with self._autocast():
                _, loss = self.schedule.step(inputs, target)
            if loss is not None:
                total += _value(loss) * self._divided_loss.divisor * (1 if self.loss_is_sum else batch.samples)
        before_backward(total if self.reports_loss else 0.0)
        self.broadcast_buffers()

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
        size = self._batch_size or len(target)
        row = torch.zeros(len(metrics) + 2, dtype=torch.float64)
        for begin in range(0, len(target), size):
            count = min(begin + size, len(target), batch.samples) - begin
            indices = torch.arange(begin, begin + size, device=target.device).clamp(max=len(target) - 1)
            with self._autocast():
                output = self._outputs(tuple(x[indices] for x in inputs), target[indices])
            if self.reports_loss and count > 0:
                output, wanted = output[:count], target[begin : begin + count]
                row += self._totals(self.loss_fn(output, wanted), output, wanted, count, metrics)
        return row

    def _outputs(self, inputs: tuple[Tensor, ...], target: Tensor) -> Any:
        arguments = inputs if self.schedule.is_first else ()
        keywords = {"target": target, "losses": []} if self.schedule.is_last else {}
        # torch's own method, because PipelineSchedule can only train.
        return self.schedule.schedule.eval(*arguments, **keywords)


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
