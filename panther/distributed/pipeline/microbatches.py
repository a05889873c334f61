"""Stages and microbatches in one process."""

__all__ = ["MicrobatchPipelineTrainer", "PipelineParallelSketchedModel"]

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from panther.distributed._layer_configs import check_configs
from panther.distributed.pipeline._balance import balanced_cuts
from panther.distributed.pipeline.losses import check_reduction
from panther.errors import ShapeError, check_size
from panther.nn import SKLinear


class PipelineParallelSketchedModel(nn.Module):
    """Sketched layers with ReLU between them, cut into stages that stand on devices of one process.

    For several processes see :func:`split_stages`.

    Args:
        layer_configs: For each layer a mapping with ``in_features``, ``out_features`` and ``sketch_size``.
        devices: One for each stage; one can be named several times. Layers are shared out so that the largest stage is
            as small as it can be.

    Attributes:
        stages: The stages, an nn.ModuleList of nn.Sequential.
        devices: Their devices.

    Raises:
        ShapeError: If there are fewer layers than devices, none of either, keys are missing or unknown, or widths do
            not follow one another.

    Example:
        >>> sizes = [(256, 256), (256, 256), (256, 64)]
        >>> configs = [{"in_features": n, "out_features": m, "sketch_size": 4} for n, m in sizes]
        >>> model = PipelineParallelSketchedModel(configs, ["cpu", "cpu"])
        >>> [len(stage) for stage in model.stages], model(torch.randn(3, 256)).shape
        ([2, 3], torch.Size([3, 64]))
    """

    def __init__(self, layer_configs: Sequence[Mapping[str, Any]], devices: Sequence[torch.device | str]) -> None:
        super().__init__()
        check_configs(layer_configs)
        if not devices:
            raise ShapeError("devices is empty and must name one device for each stage")
        self.devices = [torch.device(device) for device in devices]
        costs = [config["sketch_size"] * (config["in_features"] + config["out_features"]) for config in layer_configs]
        begins = [*balanced_cuts(costs, len(devices)), len(layer_configs)]
        self.stages = nn.ModuleList()
        for device, begin, end in zip(self.devices, begins, begins[1:], strict=False):
            stage = nn.Sequential()
            for index in range(begin, end):
                config = layer_configs[index]
                layer = SKLinear(config["in_features"], config["out_features"], config["sketch_size"], device=device)
                stage.append(layer)
                if index < len(layer_configs) - 1:
                    stage.append(nn.ReLU())
            self.stages.append(stage)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, in_features)`` of the first layer to ``(*, out_features)`` of the last, on the last device."""
        for device, stage in zip(self.devices, self.stages, strict=True):
            x = stage(x.to(device))
        return x


class MicrobatchPipelineTrainer:
    """Train on a batch in pieces, with the gradients of the whole.

    Args:
        model: Any module, :class:`PipelineParallelSketchedModel` say.
        num_microbatches: Pieces of a batch; a smaller batch makes fewer.

    Raises:
        ShapeError: If ``num_microbatches`` is not positive.

    Example:
        >>> model = nn.Linear(8, 2)
        >>> trainer = MicrobatchPipelineTrainer(model, num_microbatches=4)
        >>> x, y = torch.randn(10, 8), torch.randint(2, (10,))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = trainer.forward_backward_pipeline(x, y, nn.CrossEntropyLoss(), optimizer)
    """

    def __init__(self, model: nn.Module, num_microbatches: int = 4) -> None:
        self.model = model
        self.num_microbatches = check_size("num_microbatches", num_microbatches, least=1)

    def forward_backward_pipeline(
        self,
        batch_data: Tensor,  # (samples, ...)
        batch_targets: Tensor,  # (samples, ...)
        criterion: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> float:
        """One step of the optimizer on all samples; gradients from before are cleared.

        Microbatches differ by at most one sample. The loss of each is weighted by its samples where ``criterion`` takes
        the mean (its attribute ``reduction``; a function without one is taken to), and added where it takes the sum, so
        that loss and gradients are those of the batch in one piece. Exceptions, as everywhere with microbatches: means
        that are not over samples (``ignore_index``, class weights), and BatchNorm, which sees each piece for itself.

        Returns:
            The loss of the batch.

        Raises:
            ShapeError: If there are no samples, or not as many targets.
            ValueError: If the criterion reduces nothing.
        """
        samples = len(batch_data)
        if samples == 0 or len(batch_targets) != samples:
            raise ShapeError(
                f"the batch must have samples, and a target each, and has {samples} and {len(batch_targets)}"
            )
        reduction = check_reduction(criterion, "criterion")
        pieces = min(self.num_microbatches, samples)
        optimizer.zero_grad()
        total = 0.0
        for data, targets in zip(batch_data.tensor_split(pieces), batch_targets.tensor_split(pieces), strict=True):
            output = self.model(data)
            loss = criterion(output, targets.to(output.device))
            if loss.dim():
                raise ValueError(
                    f"the criterion returned a tensor of shape {tuple(loss.shape)}: it must reduce to one number"
                )
            if reduction == "mean":
                loss = loss * (len(data) / samples)
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total
