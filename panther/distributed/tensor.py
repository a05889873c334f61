r"""Tensor parallelism: the ranks of one mesh axis share every layer.

A sketched layer is cut like Megatron's (M. Shoeybi et al., 2019, arXiv:1909.08053), in pairs: column-wise, then
row-wise, so that nothing is sent between the two. Each sends once a forward and backward, and 2R numbers a row where a
dense layer sends its whole width.
"""

__all__ = [
    "ColwiseSKParallel",
    "HeadwiseParallel",
    "RowwiseSKParallel",
    "TensorParallelModel",
    "TensorParallelSKLinear",
]

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from panther.distributed._attention import shard_heads_
from panther.distributed._dense import ColwiseLinear, RowwiseLinear, VocabularyEmbedding, shard_dense_
from panther.distributed._layouts import Layouts
from panther.distributed._sharded import ColwiseSKLinear, RowwiseSKLinear, shard_
from panther.distributed.collectives import all_gather
from panther.errors import DistributedError, ShapeError
from panther.nn import SKLinear


class ColwiseSKParallel(ParallelStyle):
    """Cut the outputs of an :class:`~panther.nn.SKLinear` or an nn.Linear, for torch's ``parallelize_module``.

    The layer then takes the whole input on every rank and gives that rank's outputs, as :func:`torch.chunk` cuts them.
    S1 and U2 stay whole, S2, U1 and the bias are cut; all are DTensors, but for a seeded layer's sketches, of which
    every rank draws its part. Weights and seed are those of the mesh's first rank.

    Args:
        input_layouts: What a tensor that comes in is: ``Replicate()``, the default, or ``Shard(dim)`` for a dimension
            before the features, such as the sequence. A sketched layer gathers 2R numbers a row then, a dense one all.
            A DTensor is brought into this layout.
        output_layouts: ``Shard(-1)``, the default, or ``Replicate()``: the outputs of all ranks are gathered.
        use_local_output: Whether to give a tensor, or else a DTensor.

    Raises:
        ValueError: If a layout is another one.
        TypeError: When applied, if the module is neither.
        ShapeError: When applied, if there are fewer outputs than ranks.

    Cost: nothing is sent forward; backward an all-reduce of 2R numbers a row, or of a dense layer's inputs. With
        ``Shard(dim)`` in their place 2R numbers a row are gathered forward and as many scattered backward, and the
        gradients of S1, and of a fitted U2, summed.

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

    _kinds: ClassVar[Mapping[type[nn.Module], Any]] = {SKLinear: ColwiseSKLinear, nn.Linear: ColwiseLinear}
    _kept, _sequence = "output_layouts", "input_layouts"

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        given = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        _check_layout(self._kept, given[self._kept], features=True)
        _check_layout(self._sequence, given[self._sequence], features=False)
        self.input_layouts, self.output_layouts, self.use_local_output = input_layouts, output_layouts, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        kind = self._kinds.get(type(module))
        if kind is None:
            raise TypeError(
                f"{type(self).__name__} cuts {' or '.join(plain.__name__ for plain in self._kinds)}, not a "
                f"{type(module).__name__}: name its layers"
            )
        layouts = Layouts(device_mesh, self.input_layouts, self.output_layouts, self.use_local_output)
        if isinstance(module, SKLinear):
            return shard_(module, device_mesh, kind, layouts)
        return shard_dense_(module, device_mesh, kind, layouts)


class RowwiseSKParallel(ColwiseSKParallel):
    """Cut the inputs of an :class:`~panther.nn.SKLinear` or an nn.Linear, or an nn.Embedding's rows.

    A linear layer then takes this rank's inputs, such as a column-wise layer gives, and gives the whole output on every
    rank. S1 and U2 are cut, S2, U1 and the bias stay whole. An embedding looks up the vectors that it has.

    Args:
        input_layouts: ``Shard(-1)``, the default, or ``Replicate()``. An embedding takes whole indices.
        output_layouts: ``Replicate()``, the default, or ``Shard(dim)`` for a dimension before the features, such as
            the sequence: each rank gets its part of the sum.
        use_local_output: Whether to give a tensor, or else a DTensor.

    Raises:
        ValueError: If a layout is another one.
        TypeError: When applied, if the module is none of these.
        ShapeError: When applied, if there are fewer inputs, or rows, than ranks.

    Cost: an all-reduce of 2R numbers a row forward, or of a dense layer's outputs or an embedding's features; nothing
        is sent backward. With ``Shard(dim)`` the sum is scattered in its place, gathered backward, and the gradients of
        S2, bias, and a fitted U1, summed.

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

    _kinds: ClassVar[Mapping[type[nn.Module], Any]] = {
        SKLinear: RowwiseSKLinear,
        nn.Linear: RowwiseLinear,
        nn.Embedding: VocabularyEmbedding,
    }
    _kept, _sequence = "input_layouts", "output_layouts"


class HeadwiseParallel(ParallelStyle):
    """Cut a :class:`~panther.nn.RandMultiHeadAttention` or nn.MultiheadAttention by heads, for ``parallelize_module``.

    Every rank projects, attends and projects back with its own heads, and the outputs are summed. Parameters are
    DTensors, W0 cut along its inputs, the other weights, their biases and the random directions along the heads; each
    rank draws its heads' directions. The packed projection of nn.MultiheadAttention stays whole on every rank, which
    uses its heads' rows of it. Weights and directions are those of the mesh's first rank.

    Raises:
        TypeError: When applied, if the module is neither, or has relative positions (``SRPE``), ``add_bias_kv`` or
            ``add_zero_attn``.
        ShapeError: When applied, if the ranks do not divide the heads.

    Cost: an all-reduce of the output forward, and of the gradients of query, key and value backward, once if they are
        one tensor; of a packed projection, of its gradient.

    Example:
        >>> import panther as pr
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> pr.distributed.init()
        >>> attention = pr.nn.RandMultiHeadAttention(64, 4, num_random_features=32)
        >>> attention = parallelize_module(attention, pr.distributed.make_mesh(tp=1)["tp"], HeadwiseParallel())
        >>> x = torch.randn(2, 10, 64)
        >>> attention(x, x, x)[0].shape
        torch.Size([2, 10, 64])
        >>> pr.distributed.shutdown()
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return shard_heads_(module, device_mesh)


def _check_layout(name: str, layout: Placement | None, *, features: bool) -> None:
    if layout is None or isinstance(layout, Replicate):
        return
    if not isinstance(layout, Shard) or (layout.dim != -1 if features else layout.dim < 0):
        other = "Shard(-1)" if features else "Shard(dim) with a dim from 0 that is not the last"
        raise ValueError(f"{name}={layout} must be Replicate() or {other}")


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
        DistributedError: If there is no process group.

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
        DistributedError: If there is no process group.

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
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError("there is no process group: call panther.distributed.init() first")
    return DeviceMesh.from_group(group, "cuda" if "nccl" in dist.get_backend(group) else "cpu")


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
