"""Styles of tensor parallelism for torch's ``parallelize_module`` and the plans of :func:`tensor_parallel`.

Layers are sharded in pairs (M. Shoeybi et al., 2019, arXiv:1909.08053): column-wise, then row-wise, so that nothing is
sent between the two. Each layer has one collective in a forward and backward pass: a sketched layer sends 2R numbers
per row, and a dense layer its full width. Dense layers with the same input share a collective.
"""

__all__ = ["ColwiseSKParallel", "HeadwiseParallel", "PantherStyle", "RowwiseSKParallel"]

from collections.abc import Mapping
from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from panther.distributed.sync.replicas import broadcast_model
from panther.distributed.tensor._attention import shard_heads_
from panther.distributed.tensor._linear import (
    ColwiseLinear,
    ColwiseLowRankLinear,
    ColwiseMonarchLinear,
    ColwiseSKLinear,
    Layouts,
    RowwiseLinear,
    RowwiseLowRankLinear,
    RowwiseMonarchLinear,
    RowwiseSKLinear,
    ShardedLayer,
    VocabularyEmbedding,
    shard_layer_,
)
from panther.errors import ShapeError
from panther.nn import LowRankLinear, MonarchLinear, SKLinear

_Kinds = Mapping[type[nn.Module], type[ShardedLayer]]
"""The sharded class of each class that a style can shard."""


class PantherStyle(ParallelStyle):
    """Base of the styles. ``parallelize_module`` of torch first broadcasts the module of the mesh's first rank.

    :func:`tensor_parallel` has broadcast the entire model already, and calls only :meth:`shard_`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ShapeError(
                f"{type(self).__name__} shards over one mesh axis, and the mesh has {device_mesh.mesh_dim_names}: use "
                "mesh['tp']"
            )
        # The broadcast compares the modules as well, so that sharding raises on all ranks or on none.
        broadcast_model(module, device_mesh.get_group(), type(self).__name__)
        return self.shard_(module, device_mesh)

    def shard_(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard a module that is equal on every rank, in place; nothing is sent."""
        raise NotImplementedError


class ColwiseSKParallel(PantherStyle):
    """Shard the outputs of a sketched, low-rank, Monarch or dense linear layer, for torch's ``parallelize_module``.

    The layer then takes the full input on every rank and returns that rank's outputs, split as by :func:`torch.chunk`.
    S1 and U2, or ``down``, are replicated, and S2, U1, ``up`` and the bias are sharded. All of them are DTensors,
    except for the sketches of a seeded layer, whose shards each rank draws. Weights and seed are taken from the mesh's
    first rank.

    Args:
        input_layouts: Placement of an input tensor: ``Replicate()``, the default, or ``Shard(dim)`` for a dimension
            before the features, such as the sequence. A sketched layer gathers 2R numbers per row along it, and a dense
            layer its inputs. A DTensor is redistributed to this placement.
        output_layouts: ``Shard(-1)``, the default, or ``Replicate()``: the outputs of all ranks are gathered.

    Raises:
        ValueError: If a layout is not one of these.
        TypeError: When applied, if the module has a different class.
        ShapeError: When applied, if there are fewer outputs than ranks, or if ranks would not have equally many outputs
            of each block of a MonarchLinear, whose outputs are not padded.

    Cost: nothing is sent in forward; backward has an all-reduce of 2R numbers per row, or of a dense layer's inputs. A
        MonarchLinear sends a dense layer's message and, once for a batch, the gradient of ``down``.
        With ``Shard(dim)`` instead, 2R numbers per row are gathered in forward and scattered in backward, and the
        gradients of S1, and of a fitted U2, are summed.

    Example:
        >>> import torch, panther as pr
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> pr.distributed.init()
        >>> mesh = pr.distributed.make_mesh(tp=1)
        >>> layer = parallelize_module(
        ...     pr.nn.SKLinear(256, 128, 4), mesh["tp"], ColwiseSKParallel()
        ... )
        >>> layer(torch.randn(3, 256)).shape
        torch.Size([3, 128])
        >>> pr.distributed.shutdown()
    """

    _kinds: ClassVar[_Kinds] = {
        SKLinear: ColwiseSKLinear,
        LowRankLinear: ColwiseLowRankLinear,
        MonarchLinear: ColwiseMonarchLinear,
        nn.Linear: ColwiseLinear,
    }
    _features, _sequence = "output_layouts", "input_layouts"

    def __init__(self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None) -> None:
        super().__init__()
        layouts = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        _check_layout(self._features, layouts[self._features], features=True)
        _check_layout(self._sequence, layouts[self._sequence], features=False)
        self.input_layouts, self.output_layouts = input_layouts, output_layouts

    def shard_(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard a layer that is equal on every rank, in place; nothing is sent."""
        if type(module) not in self._kinds:
            raise TypeError(
                f"{type(self).__name__} shards {' or '.join(plain.__name__ for plain in self._kinds)}, not a "
                f"{type(module).__name__}: name its layers"
            )
        layouts = Layouts(mesh, self.input_layouts, self.output_layouts)
        return shard_layer_(module, mesh, self._kinds[type(module)], layouts)


class RowwiseSKParallel(ColwiseSKParallel):
    """Shard the inputs of a sketched, low-rank, Monarch or dense linear layer, or an nn.Embedding's rows.

    A linear layer then takes this rank's inputs, which a column-wise layer returns, and returns the full output on
    every rank. S1 and U2, or ``down``, are sharded, and S2, U1, ``up`` and the bias are replicated. An embedding looks
    up its own rows.

    Args:
        input_layouts: ``Shard(-1)``, the default, or ``Replicate()``. An embedding takes replicated indices.
        output_layouts: ``Replicate()``, the default, or ``Shard(dim)`` for a dimension before the features, such as
            the sequence: each rank gets its shard of the sum.

    Raises:
        ValueError: If a layout is not one of these.
        TypeError: When applied, if the module has a different class.
        ShapeError: When applied, if there are fewer inputs, or rows, than ranks, or if the blocks of inputs of a
            MonarchLinear are padded or not a multiple of the ranks.

    Cost: an all-reduce of 2R numbers per row in forward, or of a dense layer's or MonarchLinear's outputs or an
        embedding's features;
        nothing is sent in backward. With ``Shard(dim)`` the sum is scattered instead, and gathered in backward, and the
        gradients of a sketched layer's S2, bias and fitted U1 are summed.

    Example:
        >>> import torch, panther as pr
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> pr.distributed.init()
        >>> pair = torch.nn.Sequential(
        ...     pr.nn.SKLinear(256, 512, 4),
        ...     torch.nn.ReLU(),
        ...     pr.nn.SKLinear(512, 64, 4),
        ... )
        >>> plan = {"0": ColwiseSKParallel(), "2": RowwiseSKParallel()}
        >>> pair = parallelize_module(
        ...     pair, pr.distributed.make_mesh(tp=1)["tp"], plan
        ... )
        >>> pair(torch.randn(3, 256)).shape
        torch.Size([3, 64])
        >>> pr.distributed.shutdown()
    """

    _kinds: ClassVar[_Kinds] = {
        SKLinear: RowwiseSKLinear,
        LowRankLinear: RowwiseLowRankLinear,
        MonarchLinear: RowwiseMonarchLinear,
        nn.Linear: RowwiseLinear,
        nn.Embedding: VocabularyEmbedding,
    }
    _features, _sequence = "input_layouts", "output_layouts"


class HeadwiseParallel(PantherStyle):
    """Shard a :class:`~panther.nn.RandMultiHeadAttention` by heads.

    Every rank projects, attends and projects back with its own heads, and the outputs are summed. Parameters are
    DTensors: W0 is sharded along its inputs, and the other weights, their biases and the random directions along the
    heads. Each rank draws the directions of its heads. Weights and directions are taken from the mesh's first rank.

    Raises:
        TypeError: When applied, if the module has a different class, or has relative positions (``SRPE``).
        ShapeError: When applied, if the heads are not a multiple of the ranks.

    Cost: an all-reduce of the output in forward, and of the gradients of query, key and value in backward (once if they
        are the same tensor).

    Example:
        >>> import torch, panther as pr
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> pr.distributed.init()
        >>> attention = pr.nn.RandMultiHeadAttention(
        ...     64, 4, num_random_features=32
        ... )
        >>> attention = parallelize_module(
        ...     attention,
        ...     pr.distributed.make_mesh(tp=1)["tp"],
        ...     HeadwiseParallel(),
        ... )
        >>> x = torch.randn(2, 10, 64)
        >>> attention(x, x, x)[0].shape
        torch.Size([2, 10, 64])
        >>> pr.distributed.shutdown()
    """

    def shard_(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard an attention that is equal on every rank, in place; nothing is sent."""
        return shard_heads_(module, mesh)


def _check_layout(name: str, layout: Placement | None, *, features: bool) -> None:
    if layout is None or isinstance(layout, Replicate):
        return
    if not isinstance(layout, Shard) or (layout.dim != -1 if features else layout.dim < 0):
        other = "Shard(-1)" if features else "Shard(dim) with a dim from 0 that is not the last"
        raise ValueError(f"{name}={layout} must be Replicate() or {other}")
