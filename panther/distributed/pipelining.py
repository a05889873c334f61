"""Pipeline parallelism: a model cut into stages, and batches into microbatches."""

__all__ = ["MicrobatchPipelineTrainer", "PipelineParallelSketchedModel", "balanced_cuts"]

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from panther.distributed.tensor import check_configs
from panther.errors import ShapeError, check_size
from panther.nn import SKLinear


def balanced_cuts(costs: Sequence[float], n: int) -> list[int]:
    """Where to begin each of n runs of consecutive items, none empty, so that the dearest run is as cheap as it can be.

    Raises:
        ShapeError: If there are fewer items than runs.

    Cost: O(n len(costs)^2).

    Example:
        >>> balanced_cuts([4, 1, 1, 1, 3], 2)
        [0, 2]
    """
    if len(costs) < n:
        raise ShapeError(f"{len(costs)} layers cannot make {n} stages of at least one layer: use fewer stages")
    before = [0, *accumulate(costs)]
    # best[j]: the least dearest run for the first j items, and where its last run begins
    best = [(float(total), 0) for total in before]
    begins = []
    for run in range(1, n):
        longer = [(float("inf"), 0)] * len(before)
        for j in range(run + 1, len(before)):
            longer[j] = min((max(best[i][0], before[j] - before[i]), i) for i in range(run, j))
        begins.append([begin for _, begin in longer])
        best = longer
    cuts, end = [], len(costs)
    for table in reversed(begins):
        end = table[end]
        cuts.append(end)
    return [0, *reversed(cuts)]


class PipelineParallelSketchedModel(nn.Module):
    """Sketched layers with ReLU between them, cut into stages that stand on devices of one process.

    For several processes see torch.distributed.pipelining.

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
        reduction = getattr(criterion, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"the criterion has reduction={reduction!r}, and must have 'mean' or 'sum'")
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
