"""The guide's perceptrons of sketched layers: on one device, in stages on several devices, and sharded over ranks."""

__all__ = [
    "DistributedSketchedModel", "PipelineParallelSketchedModel", "TensorParallelModel", "TensorParallelSKLinear",
    "check_configs",
]  # fmt: skip

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from panther._process_settings import ignored_warnings
from panther.distributed.comm.collectives import all_gather
from panther.distributed.comm.ranks import mesh_of_group, require_process_group, transport
from panther.distributed.pipeline.balance import balance_stages
from panther.distributed.sync.replicas import broadcast_model
from panther.distributed.tensor._linear import ColwiseSKLinear, RowwiseSKLinear, shard_layer_
from panther.errors import PerformanceWarning, ShapeError, check_device, check_size
from panther.nn import SKLinear

_KEYS = ("in_features", "out_features", "sketch_size")


def check_configs(
    layer_configs: Sequence[Mapping[str, Any]], optional: Sequence[str] = ()
) -> list[tuple[int, int, int]]:
    """Return every layer's three sizes, or raise if a size is missing or an input's width is not the last output's."""
    if not layer_configs or not all(isinstance(config, Mapping) for config in layer_configs):
        raise ShapeError("layer_configs must be a list of mappings, one for each layer, and at least one")
    for index, config in enumerate(layer_configs):
        if not set(_KEYS) <= config.keys() <= {*_KEYS, *optional}:
            raise ShapeError(
                f"layer_configs[{index}] has the keys {', '.join(map(str, config))}, and must have {', '.join(_KEYS)}"
                + "".join(f", and may have {name}" for name in optional)
            )
        for key in _KEYS:
            check_size(f"layer_configs[{index}][{key!r}]", config[key], least=1)
    for index, (config, next_config) in enumerate(pairwise(layer_configs)):
        if config["out_features"] != next_config["in_features"]:
            raise ShapeError(
                f"layer_configs[{index}] gives {config['out_features']} features and layer_configs[{index + 1}] takes "
                f"{next_config['in_features']}: make them equal"
            )
    return [(config["in_features"], config["out_features"], config["sketch_size"]) for config in layer_configs]


def perceptron(sizes: Iterable[tuple[int, int, int]]) -> nn.Sequential:
    """Build SKLinears of the given inputs, outputs and sketch sizes, with ReLU between them."""
    model = nn.Sequential()
    for n_in, n_out, sketch_size in sizes:
        if model:
            model.append(nn.ReLU())
        model.append(SKLinear(n_in, n_out, sketch_size))
    return model


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
        sketched = [(n + m) * sketch_size for n, m, sketch_size in sizes]
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


class TensorParallelSKLinear(nn.Module):
    """One SKLinear whose outputs are sharded over the ranks of a group; every rank must build it.

    Args:
        in_features: Size of each input sample.
        out_features: Size of each output sample.
        sketch_size: Rank R of the layer, in one term.
        tensor_parallel_group: The ranks that share it, a process group or a one-dimensional mesh.
        gather_output: Whether every rank gets all outputs; else only its own.

    Attributes:
        local_sklinear: The sharded layer, an SKLinear whose factors are DTensors.
        tp_group: The process group.

    Raises:
        ShapeError: If a size is not positive, or there are fewer outputs than ranks.
        DistributedError: If there is no process group.

    Cost: with ``gather_output`` the outputs are gathered; the pairs of :class:`TensorParallelModel` avoid it.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> layer = TensorParallelSKLinear(
        ...     256, 128, 4, torch.distributed.group.WORLD
        ... )
        >>> layer(torch.randn(3, 256)).shape
        torch.Size([3, 128])
        >>> pr.distributed.shutdown()
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sketch_size: int,
        tensor_parallel_group: dist.ProcessGroup | DeviceMesh,
        *,
        gather_output: bool = True,
    ) -> None:
        super().__init__()
        mesh = _as_mesh(tensor_parallel_group)
        self.in_features, self.out_features, self.sketch_size = in_features, out_features, sketch_size
        self.gather_output, self.tp_group = gather_output, mesh.get_group()
        self.tp_world_size, self.tp_rank = mesh.size(), mesh.get_local_rank()
        layer = SKLinear(in_features, out_features, sketch_size, device=mesh.device_type)
        # The full layer is drawn as on one process, and every rank gets rank 0's weights, so that the result does not
        # depend on the number of ranks.
        broadcast_model(layer, self.tp_group, "TensorParallelSKLinear")
        self.local_sklinear = shard_layer_(layer, mesh, ColwiseSKLinear)
        self.local_out_features = len(self.local_sklinear.local_range)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``, or to this rank's outputs."""
        y = self.local_sklinear(x)
        return all_gather(y, -1, self.tp_group) if self.gather_output else y


class TensorParallelModel(nn.Module):
    """Sketched layers with ReLU between them, alternately sharded column-wise and row-wise over the ranks of a group.

    Nothing is gathered between the two layers of a pair: the ReLU acts on shards. If the number of layers is odd, the
    last one is sharded column-wise, and its outputs are gathered.

    Args:
        layer_configs: For each layer a mapping with ``in_features``, ``out_features`` and ``sketch_size``.
        tensor_parallel_group: The ranks that share the layers, a process group or a one-dimensional mesh.

    Attributes:
        layers: The sharded layers.
        tp_group: The process group.

    Raises:
        ShapeError: If there are no layers, keys are missing or unknown, or widths do not follow one another.
        DistributedError: If there is no process group.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> sizes = [(256, 512), (512, 64)]
        >>> configs = [
        ...     {"in_features": n, "out_features": m, "sketch_size": 4}
        ...     for n, m in sizes
        ... ]
        >>> TensorParallelModel(configs, torch.distributed.group.WORLD)(
        ...     torch.randn(3, 256)
        ... ).shape
        torch.Size([3, 64])
        >>> pr.distributed.shutdown()
    """

    def __init__(
        self, layer_configs: Sequence[Mapping[str, Any]], tensor_parallel_group: dist.ProcessGroup | DeviceMesh
    ) -> None:
        super().__init__()
        sizes = check_configs(layer_configs)
        mesh = _as_mesh(tensor_parallel_group)
        self.tp_group = mesh.get_group()
        self.layers = nn.ModuleList(SKLinear(n, m, sketch_size, device=mesh.device_type) for n, m, sketch_size in sizes)
        broadcast_model(self.layers, self.tp_group, "TensorParallelModel")
        for index in range(len(self.layers)):
            shard_layer_(self.layers[index], mesh, RowwiseSKLinear if index % 2 else ColwiseSKLinear)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, in_features)`` of the first layer to ``(*, out_features)`` of the last, on every rank."""
        for index, layer in enumerate(self.layers):
            # ReLU is elementwise, so it is right on the shards that a column-wise layer returns.
            x = layer(x if index == 0 else torch.relu(x))
        return all_gather(x, -1, self.tp_group) if len(self.layers) % 2 else x


def _as_mesh(group: dist.ProcessGroup | DeviceMesh) -> DeviceMesh:
    if isinstance(group, DeviceMesh):
        return group
    require_process_group(group)  # without one, torch.distributed.group.WORLD is None
    if group is None:
        raise TypeError("tensor_parallel_group is None: pass a process group, such as torch.distributed.group.WORLD")
    return mesh_of_group(group, transport(group).type)
