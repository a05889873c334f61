"""Data parallelism: every rank holds the model, sees its own samples, and averages gradients with the others."""

__all__ = ["DistributedSketchedModel", "data_parallel"]

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from panther.distributed.sync import sync_sketches, verify_sketches
from panther.errors import PerformanceWarning, ShapeError
from panther.nn import SKLinear
from panther.nn._sketched import SketchedModule

_STRATEGIES = ("ddp",)


def data_parallel(
    model: nn.Module, mesh: DeviceMesh | dist.ProcessGroup | None = None, strategy: str = "ddp", **options: Any
) -> DistributedDataParallel:
    """Wrap a model for data-parallel training. Every rank must call it.

    Sketches are synchronised here, a seed a layer, and never sent again: torch's DDP would broadcast them in every
    forward, with the other buffers. Those, such as BatchNorm's, keep DDP's behaviour.

    Args:
        model: Built alike on every rank, on its device; weights and seeds may differ, the first rank's are taken. Load
            a fitted checkpoint before wrapping: DDP learns of parameters only here.
        mesh: One-dimensional DeviceMesh, or a process group; None is the world.
        strategy: ``"ddp"``.
        **options: For :class:`torch.nn.parallel.DistributedDataParallel`, such as ``find_unused_parameters=True``.

    Returns:
        The wrapped model; the original is its attribute ``module``.

    Raises:
        ValueError: If ``strategy`` is unknown, or nothing in the model can be trained or has values.
        ShapeError: If ``mesh`` has more than one dimension.
        SketchMismatchError: If the models differ; see :func:`~panther.distributed.sync_sketches`.
        DistributedError: If there is no process group.

    Cost: a broadcast of the model here; then an all-reduce of the trained factors' gradients a step.

    Example:
        >>> import panther as pr, torch
        >>> pr.distributed.init()
        >>> model = data_parallel(pr.nn.SKLinear(256, 256, 4))
        >>> model(torch.randn(8, 256)).shape
        torch.Size([8, 256])
        >>> pr.distributed.shutdown()
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown: use {', '.join(map(repr, _STRATEGIES))}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "data parallelism averages gradients, and no parameter of the model requires one: train it as it is"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the model has tensors on the meta device, without values: call to_empty and initialise it first"
        )
    group: dist.ProcessGroup | None
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ShapeError(
                f"mesh must have one axis and has {mesh.mesh_dim_names} of sizes {tuple(mesh.shape)}: "
                "pass mesh['dp'], say"
            )
        group = mesh.get_group()
    else:
        group = mesh
    src = dist.get_process_group_ranks(group)[0] if dist.is_initialized() and dist.get_rank(group) >= 0 else 0
    sync_sketches(model, src=src, group=group)
    fixed = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SketchedModule)
        for name in (*module.sketch_names, "sketch_seed")
        if name in module._buffers
    ]
    device = next(model.parameters()).device
    users = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*users, *fixed])
    try:
        parallel = DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None, process_group=group, **options
        )
    finally:  # read at construction only; a layer that is fitted later must not be ignored by a later wrapping
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, users)
    verify_sketches(model, group)
    return parallel


class DistributedSketchedModel(nn.Module):
    """A perceptron of sketched layers with ReLU between them.

    The layer from a width n to the next has sketch size ``max(1, int(n * ratio))``.

    Args:
        input_size: Width of the input.
        hidden_sizes: Widths of the hidden layers.
        output_size: Width of the output.
        sketch_ratios: Sketch size by input width, one for each hidden layer, and one more for the output layer; without
            that one, the output layer uses the last.

    Shape:
        Input ``(*, input_size)``, output ``(*, output_size)``.

    Attributes:
        model: The layers, an nn.Sequential.

    Raises:
        ShapeError: If a size or ratio is not positive, or the number of ratios is wrong.

    Warns:
        PerformanceWarning: Once, if layers multiply by more numbers than dense ones would.

    Example:
        >>> model = DistributedSketchedModel(1024, [512, 256], 10, [0.02, 0.02, 0.01])
        >>> [layer.low_rank for layer in model.model if isinstance(layer, SKLinear)]
        [20, 10, 2]
    """

    def __init__(
        self, input_size: int, hidden_sizes: Sequence[int], output_size: int, sketch_ratios: Sequence[float]
    ) -> None:
        super().__init__()
        for name, value in (("hidden_sizes", hidden_sizes), ("sketch_ratios", sketch_ratios)):
            if not isinstance(value, Sequence):
                raise TypeError(f"{name} must be a list or tuple, not {type(value).__name__}: use [{value}]")
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
        self.model = nn.Sequential()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)
            for n_in, n_out, ratio in zip(widths, widths[1:], ratios, strict=False):
                if self.model:
                    self.model.append(nn.ReLU())
                self.model.append(SKLinear(n_in, n_out, max(1, int(n_in * ratio))))
        self._warn_of_losses()

    def _warn_of_losses(self) -> None:
        counts = [
            (2 * (layer.S1.numel() + layer.S2.numel()), layer.in_features * layer.out_features)
            for layer in self.model
            if isinstance(layer, SKLinear)
        ]
        large = sum(ours >= dense for ours, dense in counts)
        if large:
            ours, dense = (sum(column) for column in zip(*counts, strict=True))
            warnings.warn(
                f"{large} of {len(counts)} layers multiply by no fewer numbers than dense ones; the model by {ours:,}, "
                f"a dense one by {dense:,}: use smaller sketch_ratios",
                PerformanceWarning,
                stacklevel=3,
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, input_size)`` to ``(*, output_size)``."""
        return self.model(x)
