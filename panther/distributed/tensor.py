r"""Tensor parallelism: the ranks of one mesh axis share every layer.

A sketched layer is cut like Megatron's (M. Shoeybi et al., 2019, arXiv:1909.08053), in pairs: column-wise, then
row-wise, so that nothing is sent between the two. Each sends once a forward and backward, and 2R numbers a row where a
dense layer sends its whole width.
"""

__all__ = ["ColwiseSKParallel", "RowwiseSKParallel", "TensorParallelModel", "TensorParallelSKLinear"]

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from panther.distributed._sharded import ColwiseSKLinear, RowwiseSKLinear, ShardedSKLinear, shard_
from panther.distributed.collectives import all_gather
from panther.errors import ShapeError
from panther.nn import SKLinear


class ColwiseSKParallel(ParallelStyle):
    """Cut the outputs of an :class:`~panther.nn.SKLinear`, for torch's ``parallelize_module``.

    The layer then takes the whole input on every rank and gives that rank's outputs, as :func:`torch.chunk` cuts them.
    S1 and U2 stay whole, S2, U1 and the bias are cut; all are DTensors, but for a seeded layer's sketches, of which
    every rank draws its part. Weights and seed are those of the mesh's first rank.

    Raises:
        TypeError: When applied, if the module is no SKLinear.
        ShapeError: When applied, if there are fewer outputs than ranks.

    Cost: nothing is sent forward; backward an all-reduce of 2R numbers a row.

    Example:
        >>> import panther as pr
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> pr.distributed.init()
        >>> mesh = pr.distributed.make_mesh(tp=1)
        >>> layer = parallelize_module(pr.nn.SKLinear(256, 128, 4), mesh["tp"], ColwiseSKParallel())
        >>> layer(torch.randn(3, 256)).shape
        torch.Size([3, 128])
        >>> pr.distributed.shutdown()
    """

    kind: type[ShardedSKLinear] = ColwiseSKLinear

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, SKLinear):
            raise TypeError(f"{type(self).__name__} cuts an SKLinear, not a {type(module).__name__}: name its layers")
        return shard_(module, device_mesh, self.kind)


class RowwiseSKParallel(ColwiseSKParallel):
    """Cut the inputs of an :class:`~panther.nn.SKLinear`, for torch's ``parallelize_module``.

    The layer then takes this rank's inputs, such as a column-wise layer gives, and gives the whole output on every
    rank. S1 and U2 are cut, S2, U1 and the bias stay whole.

    Raises:
        TypeError: When applied, if the module is no SKLinear.
        ShapeError: When applied, if there are fewer inputs than ranks.

    Cost: an all-reduce of 2R numbers a row forward; nothing is sent backward.

    Example:
        >>> import panther as pr
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> pr.distributed.init()
        >>> pair = torch.nn.Sequential(pr.nn.SKLinear(256, 512, 4), torch.nn.ReLU(), pr.nn.SKLinear(512, 64, 4))
        >>> plan = {"0": ColwiseSKParallel(), "2": RowwiseSKParallel()}
        >>> pair = parallelize_module(pair, pr.distributed.make_mesh(tp=1)["tp"], plan)
        >>> pair(torch.randn(3, 256)).shape
        torch.Size([3, 64])
        >>> pr.distributed.shutdown()
    """

    kind = RowwiseSKLinear


class TensorParallelSKLinear(nn.Module):
    """One SKLinear whose outputs are cut over the ranks of a group; every rank must build it.

    Args:
        in_features: Size of each input sample.
        out_features: Size of each output sample.
        sketch_size: Rank R of the layer, in one term.
        tensor_parallel_group: The ranks that share it, a process group or a one-dimensional mesh.
        gather_output: Whether every rank gets all outputs; else only its own.

    Attributes:
        local_sklinear: The cut layer, an SKLinear whose factors are DTensors.
        tp_group: The process group.

    Raises:
        ShapeError: If a size is not positive, or there are fewer outputs than ranks.

    Cost: with ``gather_output`` the outputs are sent, which pairing layers avoids; see :class:`TensorParallelModel`.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> layer = TensorParallelSKLinear(256, 128, 4, torch.distributed.group.WORLD)
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
        layer = SKLinear(in_features, out_features, sketch_size, device=_device_of(mesh))
        self.local_sklinear = shard_(layer, mesh, ColwiseSKLinear)
        self.local_out_features = len(self.local_sklinear.part)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``, or to this rank's outputs."""
        y = self.local_sklinear(x)
        return all_gather(y, -1, self.tp_group) if self.gather_output else y


class TensorParallelModel(nn.Module):
    """Sketched layers with ReLU between them, cut in turn column-wise and row-wise over the ranks of a group.

    Between the two layers of a pair nothing is gathered: the ReLU acts on parts. With an odd number the last layer is
    cut column-wise, and its outputs gathered.

    Args:
        layer_configs: For each layer a mapping with ``in_features``, ``out_features`` and ``sketch_size``.
        tensor_parallel_group: The ranks that share the layers, a process group or a one-dimensional mesh.

    Attributes:
        layers: The cut layers.
        tp_group: The process group.

    Raises:
        ShapeError: If there are no layers, keys are missing or unknown, or widths do not follow one another.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> sizes = [(256, 512), (512, 64)]
        >>> configs = [{"in_features": n, "out_features": m, "sketch_size": 4} for n, m in sizes]
        >>> TensorParallelModel(configs, torch.distributed.group.WORLD)(torch.randn(3, 256)).shape
        torch.Size([3, 64])
        >>> pr.distributed.shutdown()
    """

    def __init__(
        self, layer_configs: Sequence[Mapping[str, Any]], tensor_parallel_group: dist.ProcessGroup | DeviceMesh
    ) -> None:
        super().__init__()
        check_configs(layer_configs)
        mesh = _as_mesh(tensor_parallel_group)
        self.tp_group = mesh.get_group()
        self.layers = nn.ModuleList()
        for index, config in enumerate(layer_configs):
            layer = SKLinear(*(config[key] for key in _KEYS), device=_device_of(mesh))
            self.layers.append(shard_(layer, mesh, RowwiseSKLinear if index % 2 else ColwiseSKLinear))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, in_features)`` of the first layer to ``(*, out_features)`` of the last, on every rank."""
        for index, layer in enumerate(self.layers):
            x = layer(x if index == 0 else torch.relu(x))
        return all_gather(x, -1, self.tp_group) if len(self.layers) % 2 else x


_KEYS = ("in_features", "out_features", "sketch_size")


def check_configs(layer_configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless every layer has its three sizes, and each layer's input is as wide as the last one's output."""
    if not layer_configs:
        raise ShapeError("layer_configs is empty and must have at least one layer")
    for index, config in enumerate(layer_configs):
        if set(config) != set(_KEYS):
            raise ShapeError(f"layer_configs[{index}] must have the keys {', '.join(_KEYS)}, not {', '.join(config)}")
    for index, (before, after) in enumerate(pairwise(layer_configs)):
        if before["out_features"] != after["in_features"]:
            raise ShapeError(
                f"layer_configs[{index}] gives {before['out_features']} features and layer_configs[{index + 1}] takes "
                f"{after['in_features']}: make them equal"
            )


def _as_mesh(group: dist.ProcessGroup | DeviceMesh) -> DeviceMesh:
    if isinstance(group, DeviceMesh):
        return group
    return DeviceMesh.from_group(group, "cuda" if "nccl" in dist.get_backend(group) else "cpu")


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
