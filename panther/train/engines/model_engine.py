"""The engine that calls the model as one module: on one process, replicated, sharded, or with tensor parallelism."""

__all__ = ["ModelEngine"]

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from panther._text import list_names
from panther._torch import unreduced_positions
from panther.errors import ConfigError
from panther.train.engines.engine import (
    Engine,
    Metrics,
    Report,
    check_loss,
    loss_of_output,
    value_of_loss,
    zero_of_output,
)
from panther.train.loading.feed import Batch

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ModelEngine(Engine):
    """Call the model as one module: on one process, replicated, sharded, or with tensor parallelism."""

    def _forward(self, data: Any) -> tuple[Tensor, Any, Any]:
        """Return loss, output and target of a batch."""
        data = self._to_device(data)
        with self._autocast():
            if self.loss_fn is None:
                try:
                    output = self._call(data)
                except TypeError as error:
                    error.add_note(
                        "Without loss_fn, forward takes all entries of a batch: pass loss_fn for (input, target)."
                    )
                    raise
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

    def forward_backward(self, window: list[Batch], before_backward: Report) -> None:  # noqa: D102 (see Engine)
        loss_sum: float | Tensor = 0.0
        weights = self._weigh(window)
        self.sharded_step.begin()
        statistics: list[tuple[Tensor, Tensor]] = []
        for number, (batch, batch_weight) in enumerate(zip(window, weights, strict=True)):
            last = number == len(window) - 1
            if not batch.samples and not statistics:
                statistics = self._statistics()
            with self._gradient_exchange(last):
                loss, output, _ = self._forward(batch.data)
                # The check runs for every batch, because a function of the user can return different types.
                check_loss(loss, self.loss_fn is not None)
                if batch_weight:
                    # A mean is multiplied by its weight, a sum is not.
                    loss_sum += value_of_loss(loss) * (1 if self.loss_is_sum else batch_weight)
                # Ranks average gradients. With this weight, the average is the gradient of the mean, or of the sum,
                # over all samples of the step.
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
                weighted.backward()
        if isinstance(self.model, DistributedDataParallel):
            self._check_reduction(self.model)
        self.sharded_step.finish()
        for buffer, value in statistics:
            buffer.copy_(value)
        self.broadcast_buffers()

    def _check_reduction(self, model: DistributedDataParallel) -> None:
        """Raise ConfigError if DDP waits for gradients after the backward pass. No gradient has been used then."""
        if positions := unreduced_positions(model):
            names = list(self.reduced)
            raise ConfigError(
                f"the loss of this step does not depend on the parameters "
                f"{list_names([names[position] for position in positions])}, and DDP waits for their gradients: set "
                "find_unused_parameters=True, or requires_grad=False for them"
            )

    def _statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Return the running statistics of BatchNorm and copies of them, because a filler must not change them."""
        norms = [module for module in self.model.modules() if isinstance(module, _BATCH_NORMS) and module.training]
        return [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]

    def _zero_of(self, loss: Tensor, output: Any) -> Tensor:
        """Return 0 as a function of the parameters of a loss, so that their gradients are zero."""
        # A mean over no samples has no finite gradient, so only a finite loss is multiplied by 0.
        if self.loss_fn is None and bool(loss.isfinite()):
            return loss * 0.0
        return zero_of_output(output, loss)

    def _gradient_exchange(self, last: bool) -> AbstractContextManager[Any]:
        """Let ranks average their gradients only in the last backward pass of a step."""
        if isinstance(self.model, DistributedDataParallel):
            return nullcontext() if last else self.model.no_sync()
        if isinstance(self.model, FSDPModule):
            # FSDP2 keeps unsharded gradients until the last pass, which needs more memory than a reduction per batch.
            self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def evaluate_batch(self, batch: Batch, metrics: Metrics) -> Tensor:  # noqa: D102 (documented in Engine)
        loss, output, target = self._forward(batch.data)
        weight = self.weights.of(batch.data, batch.samples)
        totals = self._totals(loss, output, target, batch.samples, weight, metrics)
        # A filler batch may give a loss that is not finite.
        return totals if batch.samples and self.reports_loss else torch.zeros_like(totals)
