r"""Tensor parallelism: the ranks of one mesh axis share every layer.

A sketched layer is cut like Megatron's (M. Shoeybi et al., 2019, arXiv:1909.08053), in pairs: column-wise, then
row-wise, so that nothing is sent between the two. Each sends once a forward and backward, and 2R numbers a row where a
dense layer sends its whole width.
"""

__all__ = [
    "ColwiseSKParallel",
    "HeadwiseParallel",
    "RowwiseSKParallel",
]

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from panther.distributed.tensor._attention import shard_heads_
from panther.distributed.tensor._layouts import Layouts
from panther.distributed.tensor._linear import ColwiseLinear, RowwiseLinear, VocabularyEmbedding, shard_dense_
from panther.distributed.tensor._sk_linear import ColwiseSKLinear, RowwiseSKLinear, shard_
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
        >>> import torch, panther as pr
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
        >>> import torch, panther as pr
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
        >>> import torch, panther as pr
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
