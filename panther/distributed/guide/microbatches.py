"""The guide's pipeline in one process: stages on more than one device, and microbatches with a batch's gradients."""

__all__ = ["MicrobatchPipelineTrainer", "PipelineParallelSketchedModel"]

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from panther.distributed.guide.layer_configs import check_configs, perceptron
from panther.distributed.pipeline.balance import balance_stages
from panther.distributed.pipeline.losses import check_reduction
from panther.errors import ShapeError, check_device, check_size


class PipelineParallelSketchedModel(nn.Module):
    """Sketched layers with ReLU between them, in stages on the devices of one process.

    For several processes see :func:`split_stages`.

    Args:
        layer_configs: For each layer a mapping with ``in_features``, ``out_features`` and ``sketch_size``.
        devices: A device for each stage; a device may be repeated. Layers are distributed so that the largest stage is
            as small as possible.

    Attributes:
        stages: The stages, an nn.ModuleList of nn.Sequential.
        devices: The devices of the stages.
        num_stages: The number of stages.

    Raises:
        ShapeError: If there are no layers or devices, or fewer layers than devices, keys are missing or unknown, or the
            width of a layer's input differs from the width of the previous layer's output.

    Example:
        >>> sizes = [(256, 256), (256, 256), (256, 64)]
        >>> configs = [
        ...     {"in_features": n, "out_features": m, "sketch_size": 4}
        ...     for n, m in sizes
        ... ]
        >>> model = PipelineParallelSketchedModel(configs, ["cpu", "cpu"])
        >>> (
        ...     [len(stage) for stage in model.stages],
        ...     model(torch.randn(3, 256)).shape,
        ... )
        ([2, 3], torch.Size([3, 64]))
    """

    def __init__(self, layer_configs: Sequence[Mapping[str, Any]], devices: Sequence[torch.device | str]) -> None:
        super().__init__()
        sizes = check_configs(layer_configs)
        if isinstance(devices, str):
            raise TypeError(f"devices must be a list with a device for each stage, not a str: use [{devices!r}]")
        if not devices:
            raise ShapeError("devices is empty and must name one device for each stage")
        for device in devices:
            check_device(device)
        self.devices = [torch.device(device) for device in devices]
        self.num_stages = len(self.devices)
        begins = balance_stages([sketch_size * (n_in + n_out) for n_in, n_out, sketch_size in sizes], len(devices))
        self.stages = nn.ModuleList()
        for device, (begin, end) in zip(self.devices, pairwise([*begins, len(sizes)]), strict=True):
            stage = perceptron(sizes[begin:end])
            if end < len(sizes):
                stage.append(nn.ReLU())
            self.stages.append(stage.to(device))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, in_features)`` of the first layer to ``(*, out_features)`` of the last one, on the last device."""
        for device, stage in zip(self.devices, self.stages, strict=True):
            x = stage(x.to(device))
        return x


class MicrobatchPipelineTrainer:
    """Train on the microbatches of a batch, with the gradients of the unsplit batch.

    Args:
        model: Any module, for example a :class:`PipelineParallelSketchedModel`.
        num_microbatches: Number of microbatches; a batch of fewer samples has fewer.

    Raises:
        ShapeError: If ``num_microbatches`` is not positive.

    Example:
        >>> model = nn.Linear(8, 2)
        >>> trainer = MicrobatchPipelineTrainer(model, num_microbatches=4)
        >>> x, y = torch.randn(10, 8), torch.randint(2, (10,))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = trainer.forward_backward_pipeline(
        ...     x, y, nn.CrossEntropyLoss(), optimizer
        ... )
    """

    def __init__(self, model: nn.Module, num_microbatches: int = 4) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
        self.model = model
        self.num_microbatches = check_size("num_microbatches", num_microbatches, least=1)

    def forward_backward_pipeline(
        self,
        batch_data: Tensor,  # (samples, ...)
        batch_targets: Tensor,  # (samples, ...)
        criterion: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> float:
        """Do one step of the optimizer on all samples; earlier gradients are cleared.

        The sizes of microbatches differ by at most one sample. If ``criterion`` takes the mean (by its ``reduction``,
        or because it has none), the loss of each microbatch is weighted by its samples; if it takes the sum, losses are
        added. Loss and gradients are therefore equal to the loss and gradients of the unsplit batch. Exceptions are
        means that are not over samples (``ignore_index``, class weights), and BatchNorm, which computes the statistics
        of a microbatch.

        Returns:
            The loss of the batch.

        Raises:
            ShapeError: If there are no samples, or a different number of targets.
            TypeError: If the batch does not consist of tensors, or the criterion is not a function.
            ValueError: If the criterion has a different reduction.
        """
        for name, part in (("batch_data", batch_data), ("batch_targets", batch_targets)):
            if not isinstance(part, Tensor):
                raise TypeError(f"{name} must be a tensor, not {type(part).__name__}")
        samples = len(batch_data)
        if samples == 0 or len(batch_targets) != samples:
            raise ShapeError(
                f"the batch must have samples and a target for each, and has {samples} and {len(batch_targets)}"
            )
        reduction = check_reduction(criterion, "criterion")
        # More microbatches than samples would leave some of them empty.
        count = min(self.num_microbatches, samples)
        optimizer.zero_grad()
        total = 0.0
        for data, targets in zip(batch_data.tensor_split(count), batch_targets.tensor_split(count), strict=True):
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
