"""The guide's tensor-parallel classes: one sketched layer, and a perceptron of them."""

__all__ = ["TensorParallelModel", "TensorParallelSKLinear"]

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from panther.distributed.comm.collectives import all_gather
from panther.distributed.comm.ranks import require_process_group, transport
from panther.distributed.comm.supervision.groups import mesh_of_group
from panther.distributed.guide.layer_configs import check_configs
from panther.distributed.sync.replicas import broadcast_model
from panther.distributed.tensor._linear import ColwiseSKLinear, RowwiseSKLinear, shard_layer_
from panther.nn import SKLinear


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
