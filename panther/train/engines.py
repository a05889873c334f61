"""What does a window's forward and backward: the whole model on this rank, or stages of a pipeline."""

__all__ = ["Engine", "PipelineEngine", "WholeEngine", "own_loss"]

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from panther.distributed import HybridParallelTrainer, make_schedule
from panther.distributed.comm.gradient_clipping import clip_gradients, gradient_norm
from panther.distributed.pipeline.losses import DividedLoss, reduction_of
from panther.errors import ConfigError
from panther.train.arguments import check_loss
from panther.train.batches import Batch

Metrics = Mapping[str, Callable[[Any, Any], Any]]


class Engine(ABC):
    """A model in its layout."""

    parts: Any
    """What checkpoints take: the model, or the modules of this rank's stages."""
    device: torch.device
    rank: int
    """Among those that split the data."""
    size: int
    stages: int = 1
    speaks: bool
    """Whether this rank's losses are counted: one of those that see the same samples."""
    group: dist.ProcessGroup | None = None
    """The ranks that split the data; None is the world."""

    @abstractmethod
    def run(self, window: list[Batch], before_backward: Callable[[float], None]) -> None:
        """Add the gradients of a window; ``before_backward`` gets the sum of this rank's losses over its samples."""

    @abstractmethod
    def evaluate(self, batch: Batch, metrics: Metrics) -> Tensor:
        """Loss and metrics of a batch times its samples, and the samples; zeros where this rank does not speak."""

    def check_evaluation(self) -> None:  # noqa: B027 (most can)
        """Raise ConfigError if this layout cannot be evaluated."""

    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """The modules of this rank."""

    def settle(self, first: Callable[[], list[Batch] | None]) -> None:  # noqa: B027 (most have nothing to do)
        """Do what torch does once, after the first backward, so that a resumed run sums in the order of a whole one.

        It leaves traces in buffers and generators, which the checkpoint that is then loaded sets.
        """

    def _placed(self, data: Any) -> Any:
        """A batch on this rank's device; loaders make them on the CPU."""
        if self.device.type == "cpu":
            return data
        return tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=True), data)

    def share_buffers(self) -> None:
        """Give buffers that training changes, as BatchNorm's, the values of the first rank, as DDP does by itself."""
        if self.size == 1:
            return
        first = dist.get_process_group_ranks(self.group)[0]
        for part in self.modules():
            for module in () if isinstance(part, DistributedDataParallel) else part.modules():
                for name, buffer in module._buffers.items():
                    kept = name not in module._non_persistent_buffers_set
                    if buffer is not None and kept and buffer.is_floating_point() and module.training:
                        dist.broadcast(buffer, first, group=self.group)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank."""
        for module in self.modules():
            yield from module.parameters()

    def gradient_norm(self) -> Tensor:
        """Of the whole model, on every rank."""
        return gradient_norm(self.parameters(), stages=self.stages)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients down to a norm."""
        clip_gradients(self.parameters(), max_norm, norm)


class WholeEngine(Engine):
    """The model is called as a whole: alone, copied, sharded, or with its layers cut."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor] | None,
        *,
        device: torch.device,
        rank: int = 0,
        size: int = 1,
        speaks: bool = True,
        precision: torch.dtype | None = None,
        scaler: Any = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.parts, self.model, self.group = model, model, group
        self.loss_fn, self.device, self.rank, self.size, self.speaks = loss_fn, device, rank, size, speaks
        self.precision, self.scaler = precision, scaler
        self._sum = reduction_of(loss_fn) == "sum"

    def modules(self) -> list[nn.Module]:  # noqa: D102 (said by Engine)
        return [self.model]

    def _forward(self, data: Any) -> tuple[Tensor, Any, Any]:
        """Loss, output and target of a batch."""
        data = self._placed(data)
        with self._autocast():
            if self.loss_fn is None:
                output = self._call(data)
                return own_loss(output), output, data
            if not isinstance(data, tuple | list) or len(data) != 2:
                raise ConfigError(
                    f"with a loss_fn a batch must be (input, target), and is a {type(data).__name__}"
                    f"{f' of {len(data)}' if isinstance(data, tuple | list) else ''}: leave loss_fn out if the model "
                    "returns its loss"
                )
            output = self._call(data[0])
            return self.loss_fn(output, data[1]), output, data[1]

    def _call(self, given: Any) -> Any:
        if isinstance(given, Mapping):
            return self.model(**given)
        return self.model(*given) if isinstance(given, tuple | list) else self.model(given)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.precision is None else torch.autocast(self.device.type, self.precision)

    def run(self, window: list[Batch], before_backward: Callable[[float], None]) -> None:  # noqa: D102
        losses: list[tuple[Tensor, int]] = []
        for number, batch in enumerate(window):
            last = number == len(window) - 1
            with self._synchronised(last):
                loss, _, _ = self._forward(batch.data)
                check_loss(loss)
                if batch.samples:
                    losses.append((loss.detach(), 1 if self._sum else batch.samples))
                if last:  # what it is, is asked once a window: a GPU is waited for then
                    before_backward(sum(one.item() * count for one, count in losses))
                # Averaged over ranks, this is the gradient of the mean over the window's samples, or of their sum.
                weight = self.size * (bool(batch.samples) if self._sum else batch.share)
                scaled = loss
                if not batch.samples:
                    scaled = loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
                elif weight != 1.0:
                    scaled = loss * weight
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        self.share_buffers()

    def settle(self, first: Callable[[], list[Batch] | None]) -> None:  # noqa: D102
        if (
            not isinstance(self.model, DistributedDataParallel) or self.size <= 2
        ):  # of two summands the order is nothing
            return
        if (window := first()) is not None:
            self.run(window[-1:], lambda loss: None)  # DDP's buckets follow the order of the first backward
            self.model.zero_grad()

    def _synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are averaged over ranks in the last backward of a window."""
        if isinstance(self.model, DistributedDataParallel):
            return nullcontext() if last else self.model.no_sync()
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def evaluate(self, batch: Batch, metrics: Metrics) -> Tensor:  # noqa: D102
        loss, output, target = self._forward(batch.data)
        values = [loss / (batch.samples or 1) if self._sum else loss]
        values += [_number(name, metric(output, target)) for name, metric in metrics.items()]
        row = torch.stack(
            [*(value.detach().double().to("cpu") for value in values), torch.ones((), dtype=torch.float64)]
        )
        return row * batch.samples if batch.samples and self.speaks else torch.zeros_like(row)


class PipelineEngine(Engine):
    """Stages on the ranks of an axis; batches are of one size."""

    def __init__(
        self,
        built: HybridParallelTrainer,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        device: torch.device,
        microbatches: int,
        precision: torch.dtype | None,
    ) -> None:
        self.built, self.device, self.group = built, device, built.dp_group
        self.parts = [stage.submod for stage in built.stages]
        dp, tp = built.mesh["dp"], built.mesh["tp"]
        self.rank, self.size, self.stages = dp.get_local_rank(), dp.size(), built.mesh["pp"].size()
        self.precision, self.loss_fn = precision, loss_fn
        self._sum = reduction_of(loss_fn) == "sum"
        shared = DividedLoss(loss_fn, 1 / self.size)
        self._shared = shared
        self.schedule = make_schedule(built.schedule_name, built.stages, microbatches, shared)
        self.speaks = self.schedule.is_last and tp.get_local_rank() == 0
        self._batch_size: int | None = None

    def modules(self) -> list[nn.Module]:  # noqa: D102 (said by Engine)
        return list(self.parts)

    def _pair(self, data: Any) -> tuple[Any, Any]:
        data = self._placed(data)
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise ConfigError("a pipeline's batch must be (input, target), the input a tensor or a tuple of tensors")
        return (tuple(data[0]) if isinstance(data[0], tuple | list) else (data[0],)), data[1]

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.precision is None else torch.autocast(self.device.type, self.precision)

    def run(self, window: list[Batch], before_backward: Callable[[float], None]) -> None:  # noqa: D102
        total = 0.0
        if not self._sum:
            self._shared.divisor = len(window)  # the last one of an epoch may be shorter
        for batch in window:
            inputs, target = self._pair(batch.data)
            self._batch_size = len(target)
            with self._autocast():
                _, loss = self.schedule.step(inputs, target)
            if loss is not None:
                total += loss.item() * self._shared.divisor * (1 if self._sum else batch.samples)
        before_backward(total if self.speaks else 0.0)
        self.share_buffers()

    def check_evaluation(self) -> None:  # noqa: D102
        if self.built.schedule_name in ("zbv", "dualpipev"):  # torch's eval steals gradients that are not there
            raise ConfigError(
                f"pipeline_schedule={self.built.schedule_name!r} cannot be evaluated by torch: leave the validation "
                "data out, or use '1f1b', 'interleaved' or 'zero_bubble'"
            )

    def evaluate(self, batch: Batch, metrics: Metrics) -> Tensor:  # noqa: D102
        inputs, target = self._pair(batch.data)
        size = self._batch_size or len(target)
        row = torch.zeros(len(metrics) + 2, dtype=torch.float64)
        for begin in range(0, len(target), size):
            piece = slice(begin, min(begin + size, len(target)))
            count = min(piece.stop, batch.samples) - begin
            place = torch.arange(begin, begin + size, device=target.device).clamp(max=len(target) - 1)
            with self._autocast():
                output = self._outputs(tuple(x[place] for x in inputs), target[place])
            if self.speaks and count > 0:
                kept, wanted = output[:count], target[begin : begin + count]
                loss = self.loss_fn(kept, wanted)
                values = [loss / count if self._sum else loss]
                values += [_number(name, metric(kept, wanted)) for name, metric in metrics.items()]
                row += torch.tensor([*(float(value) for value in values), 1.0], dtype=torch.float64) * count
        return row

    def _outputs(self, inputs: tuple[Tensor, ...], target: Tensor) -> Any:
        given = inputs if self.schedule.is_first else ()
        wanted = {"target": target, "losses": []} if self.schedule.is_last else {}
        return self.schedule.schedule.eval(*given, **wanted)


def own_loss(output: Any) -> Tensor:
    """The loss that a model returns: itself, or under the name ``loss``."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise ConfigError(
            f"there is no loss_fn, and the model returned a {type(output).__name__} without a loss: pass loss_fn, or "
            "let the model return its loss"
        )
    return loss


def _number(name: str, value: Any) -> Tensor:
    value = torch.as_tensor(value)
    if value.numel() != 1:
        raise ConfigError(f"metric {name!r} has shape {tuple(value.shape)} and must be one number: the batch's mean")
    return value.reshape(())
