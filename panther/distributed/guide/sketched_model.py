"""The distributed guide's perceptron of sketched layers."""

__all__ = ["DistributedSketchedModel"]

import math
import warnings
from collections.abc import Sequence
from numbers import Real

from torch import Tensor, nn

from panther._process_settings import ignored_warnings
from panther.distributed.guide.layer_configs import perceptron
from panther.errors import PerformanceWarning, ShapeError, check_size


class DistributedSketchedModel(nn.Module):
    """A perceptron of sketched layers with ReLU between them.

    A layer with n inputs has the sketch size ``max(1, int(n * ratio))``.

    Args:
        input_size: Width of the input.
        hidden_sizes: Widths of the hidden layers.
        output_size: Width of the output.
        sketch_ratios: Sketch size divided by input width, for each hidden layer and the output layer. If the ratio of
            the output layer is missing, the last ratio is used.

    Shape:
        Input ``(*, input_size)``, output ``(*, output_size)``.

    Attributes:
        model: The layers, an nn.Sequential.

    Raises:
        ShapeError: If a size or ratio is not positive, or the number of ratios is wrong.

    Warns:
        PerformanceWarning: Once, if layers have at least as many numbers as dense layers would.

    Example:
        >>> model = DistributedSketchedModel(
        ...     1024, [512, 256], 10, [0.02, 0.02, 0.01]
        ... )
        >>> [layer.low_rank for layer in model.model[::2]]
        [20, 10, 2]
    """

    def __init__(
        self, input_size: int, hidden_sizes: Sequence[int], output_size: int, sketch_ratios: Sequence[float]
    ) -> None:
        super().__init__()
        for name, value in (("hidden_sizes", hidden_sizes), ("sketch_ratios", sketch_ratios)):
            if not isinstance(value, Sequence):
                raise TypeError(f"{name} must be a list or tuple, not {type(value).__name__}: use [{value}]")
        check_size("input_size", input_size, least=1)
        for ratio in sketch_ratios:
            if not isinstance(ratio, Real):
                raise TypeError(f"sketch_ratios={list(sketch_ratios)} must all be numbers")
        layers = len(hidden_sizes) + 1
        if len(sketch_ratios) not in (layers - 1, layers) or not sketch_ratios:
            raise ShapeError(
                f"sketch_ratios must have one ratio for each of the {layers - 1} hidden layers, or one more for the "
                f"output layer, and has {len(sketch_ratios)}"
            )
        if not all(0 < ratio < math.inf for ratio in sketch_ratios):
            raise ShapeError(f"sketch_ratios={list(sketch_ratios)} must all be positive numbers")
        ratios = [*sketch_ratios, sketch_ratios[-1]][:layers]
        widths = [input_size, *hidden_sizes, output_size]
        sizes = [(n, m, max(1, int(n * ratio))) for n, m, ratio in zip(widths, widths[1:], ratios, strict=False)]
        with ignored_warnings(category=PerformanceWarning):  # A single warning replaces the warnings of the layers.
            self.model = perceptron(sizes)
        dense = [n * m for n, m, _ in sizes]
        sketched = [2 * (n + m) * sketch_size for n, m, sketch_size in sizes]
        if large := sum(numbers >= plain for numbers, plain in zip(sketched, dense, strict=True)):
            warnings.warn(
                f"{large} of {len(sizes)} layers multiply by no fewer numbers than dense ones; the model by "
                f"{sum(sketched):,}, a dense one by {sum(dense):,}: use smaller sketch_ratios",
                PerformanceWarning,
                stacklevel=2,
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, input_size)`` to ``(*, output_size)``."""
        return self.model(x)
