"""The engine that runs the stages of a pipeline on the ranks of an axis."""

__all__ = ["PipelineEngine"]

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panther._torch import tree_map_only
from panther.distributed.pipeline.losses import reduction_of
from panther.errors import ConfigError
from panther.train.engines.engine import Engine, Metrics, Report, value_of_loss, zero_of_output
from panther.train.loading.feed import Batch

if TYPE_CHECKING:
    from panther.distributed.parallelize.build import Parallelized


@dataclass(kw_only=True, eq=False)
class PipelineEngine(Engine):
    """Run the stages of a pipeline on the ranks of an axis. All batches have the same size."""

    loss_fn: Callable[..., Tensor]
    parallel: "Parallelized"

    def __post_init__(self) -> None:
        """Create the schedule, which calls the loss on the last stage."""
        from panther.distributed import make_schedule  # here, because torch's pipelines are slow to import

        super().__post_init__()
        self._scaled_loss = _MicrobatchLoss(self.loss_fn)
        layout, stages = self.parallel.layout, self.parallel.stages
        self.num_microbatches = layout.num_microbatches
        self.schedule = make_schedule(layout.schedule or "", stages, self.num_microbatches, self._scaled_loss)
        self.reports_loss = self.reports_loss and self.schedule.is_last
        self._batch_size: int | None = None

    def _inputs_and_target(self, data: Any) -> tuple[Any, Any]:
        data = self._to_device(data)
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise ConfigError("a pipeline's batch must be (input, target), the input a tensor or a tuple of tensors")
        # The target is contiguous, so that the offset of a microbatch's memory tells its place in the batch.
        return (tuple(data[0]) if isinstance(data[0], tuple | list) else (data[0],)), data[1].contiguous()

    def forward_backward(self, window: list[Batch], before_backward: Report) -> None:  # noqa: D102 (see Engine)
        total: float | Tensor = 0.0
        self._weigh(window)
        self.sharded_step.begin()
        for batch in window:
            inputs, target = self._inputs_and_target(batch.data)
            self._batch_size = len(target)
            # Data parallelism averages gradients over the ranks that split the data.
            share = self.size * (1.0 if self.loss_is_sum else batch.share)
            self._scaled_loss.begin(target, [share * part for part in self._parts(batch)])
            with self._autocast():
                _, loss = self.schedule.step(inputs, target)
            if loss is not None:
                total += value_of_loss(loss) * (1.0 if self.loss_is_sum else batch.samples) / share
        self.sharded_step.finish()
        before_backward(total if self.reports_loss else 0.0)
        self.broadcast_buffers()

    def _parts(self, batch: Batch) -> list[float]:
        """Return the weight of each microbatch divided by the number of its samples, in units."""
        count = self.num_microbatches
        if self.weights.by_samples or batch.samples % count:  # the schedule refuses an uneven division
            return [1.0] * count
        size = batch.samples // count
        parts = [_rows(batch.data, begin, begin + size) for begin in range(0, batch.samples, size)]
        return [self.weights.of(part, size) / (size * (self.weight_unit or 1.0)) for part in parts]

    def evaluate_batch(self, batch: Batch, metrics: Metrics) -> Tensor:  # noqa: D102 (documented in Engine)
        inputs, target = self._inputs_and_target(batch.data)
        # torch's stages have buffers of the size of the first batch. Larger batches are split, and smaller batches
        # repeat their last sample.
        count = self.num_microbatches
        size = self._batch_size or -(-batch.largest // count) * count
        row = torch.zeros(len(metrics) + 3, dtype=torch.float64)
        # All ranks run as often as the rank with the most samples, because sharded stages gather parameters in each
        # run.
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
    """A loss function that multiplies the losses of the microbatches of a batch by factors.

    The schedule divides a mean by the number of microbatches, and does not divide a sum.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self.loss_fn, self.reduction = loss_fn, reduction_of(loss_fn)
        self._target, self._factors = torch.empty(0), [1.0]

    def begin(self, target: Tensor, factors: list[float]) -> None:
        """Set the target of the whole batch and the factors of its microbatches."""
        self._target, self._factors = target, factors

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss of a microbatch times its factor; return 0, also for an infinite loss, if the factor is 0."""
        factor = self._factors[self._number_of(target) if len(set(self._factors)) > 1 else 0]
        loss = self.loss_fn(output, target)
        return loss * factor if factor else zero_of_output(output, loss)

    def _number_of(self, target: Tensor) -> int:
        """Return the number of a microbatch. Its target is a view that begins at a row of the batch's target."""
        row = (target.storage_offset() - self._target.storage_offset()) // self._target.stride(0)
        return row * len(self._factors) // len(self._target)


def _rows(data: Any, begin: int, end: int) -> Any:
    return tree_map_only(Tensor, lambda x: x[begin:end] if x.dim() else x, data)
