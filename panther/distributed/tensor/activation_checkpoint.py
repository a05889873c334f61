"""Activation checkpointing that saves the 2R numbers per row of sketched layers, and sends nothing a second time.

Checkpointing a block saves its input and computes the rest again in backward, including collectives. The inner numbers
of a sketched layer, x [S1 | U2], are few, and computing them takes half of the layer's products and all of its
communication (Z. Wang et al., "BOOST", 2025, arXiv:2512.12131, use the same scheme with low-rank layers).
"""

__all__ = ["checkpoint_blocks_", "inner_product_policy", "require_blocks"]

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from panther._torch import checkpoint_wrapped_, functional_collectives
from panther.distributed.tensor._attention import HeadwiseRandAttention
from panther.distributed.tensor._linear import RowwiseLinear, RowwiseMonarchLinear
from panther.errors import ConfigError
from panther.nn.protocol import CompressedModule

_PRODUCTS = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2, torch.ops.aten.bmm.default: 1}
"""Matrix products, with the position of their right factor."""


def inner_product_policy(model: nn.Module, *, dense_products: bool = False) -> Callable[..., CheckpointPolicy]:
    """Return a policy for torch's selective activation checkpointing that saves the inner products of sketched layers.

    It is an argument of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. In a region that is
    checkpointed with it, the 2R numbers per row of each SKLinear, and the r of each LowRankLinear, are saved, before
    and after their sum over ranks, and everything else is computed again. Of sparse sketches the sums x U2, which take
    no products, are saved only if they are summed over ranks.

    Args:
        model: The model, which may be sharded until the policy is used; layers that are not sharded are supported too.
        dense_products: Whether the products of dense layers are saved too, as torch's own selective policy does. If
            :func:`tensor_parallel` has sharded the inputs of a dense layer, or heads, the sum over ranks is saved
            instead of the product, so that it is not sent again.

    Returns:
        The policy, which a policy of your own can call.

    Cost: memory for the region's input and for 2R numbers per row of each layer, twice for layers whose inputs are
        sharded; half of the layers' products are computed again. No sum of 2R numbers is sent again. The sums of dense
        layers are sent again unless ``dense_products`` saves them, and so are gathers and scatters of a sharded
        sequence. On a GPU, the kernel of an unsharded layer is a single operation, which runs again.

    Example:
        >>> import functools, panther as pr
        >>> from torch.utils.checkpoint import (
        ...     checkpoint,
        ...     create_selective_checkpoint_contexts,
        ... )
        >>> block = nn.Sequential(
        ...     pr.nn.SKLinear(64, 256, 2),
        ...     nn.GELU(),
        ...     pr.nn.SKLinear(256, 64, 2),
        ... )
        >>> policy = inner_product_policy(block)
        >>> contexts = functools.partial(
        ...     create_selective_checkpoint_contexts, policy
        ... )
        >>> y = checkpoint(
        ...     block,
        ...     torch.randn(8, 64),
        ...     use_reentrant=False,
        ...     context_fn=contexts,
        ... )
        >>> y.sum().backward()
    """
    shapes_of_model: list[_Shapes] = []

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not shapes_of_model:  # at the first use, because sharding may change shapes before it
            shapes_of_model.append(_Shapes.of(model))
        is_saved = saved(shapes_of_model[0], operation, args)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    def saved(shapes: _Shapes, operation: Any, args: tuple[Any, ...]) -> bool:
        if operation in _PRODUCTS:
            # A product is recognized by the shape of its factor, because the factor may be a concatenated or cast copy.
            factor = tuple(args[_PRODUCTS[operation]].shape)
            if len(factor) == 2 and factor[1] <= shapes.inner.get(factor[0], 0):
                return True
            # Layers whose product is summed over ranks add their bias afterwards, so that the operation is mm.
            is_summed = factor in shapes.summed and operation is torch.ops.aten.mm.default
            return dense_products and factor not in shapes.outer and not is_summed
        if operation is functional_collectives.all_reduce.default:
            width = args[0].shape[-1] if args[0].dim() else 0
            few = 0 < width <= max(shapes.inner.values(), default=0)
            return few or (dense_products and any(width == columns for _, columns in shapes.summed))
        return operation is torch.ops.panther.sketched_inner.default

    return policy


@dataclass
class _Shapes:
    """Shapes of this rank's factors, by which products are recognized."""

    inner: dict[int, int] = field(default_factory=dict)
    """Largest number of columns of [S1 | U2], by the number of rows."""
    outer: set[tuple[int, int]] = field(default_factory=set)
    """Shapes of [U1 ; S2], and of U1 and S2."""
    summed: set[tuple[int, int]] = field(default_factory=set)
    """Shapes of dense layers whose product is summed over ranks, except for shapes of layers without a bias."""

    @classmethod
    def of(cls, model: nn.Module) -> "_Shapes":
        """Compute the shapes from the layers' sizes, because FSDP may have sharded their parameters further."""
        shapes = cls()
        with_bias_free_product: set[tuple[int, int]] = set()
        for layer in model.modules():
            here = getattr(layer, "local_range", range(0))
            if isinstance(layer, CompressedModule) and layer.sharded_dims and (width := layer.inner_rank) is not None:
                by_rows = getattr(layer, "size_name", "") == "in_features"
                rows: Any = len(here) if by_rows else layer.in_features
                shapes.inner[rows] = max(shapes.inner.get(rows, 0), width)
                columns: Any = layer.out_features if by_rows or not here else len(here)
                shapes.outer |= {(width, columns)}
                if layer.sketch_names:  # Products with U1 and S2 may be separate.
                    shapes.outer |= {(width // 2, columns)}
            elif isinstance(layer, RowwiseLinear | RowwiseMonarchLinear) and layer.layouts.output_dim is None:
                shapes.summed.add((len(here), layer.out_features))
            elif isinstance(layer, nn.Linear) and layer.bias is None:
                with_bias_free_product.add((layer.in_features, len(here) or layer.out_features))
            elif isinstance(layer, HeadwiseRandAttention):
                embed_dim: Any = layer.embed_dim
                local_dim = len(layer.local_heads) * (embed_dim // layer.num_heads)
                shapes.summed.add((local_dim, embed_dim))
        shapes.summed -= with_bias_free_product
        return shapes


def checkpoint_blocks_(model: nn.Module, blocks: Collection[nn.Module], kind: str) -> None:
    """Recompute blocks of a model in backward, in place, after :func:`tensor_parallel` and before FSDP.

    ``"full"`` recomputes all of a block; ``"selective"`` saves the products of :func:`inner_product_policy`, including
    dense ones; ``"none"`` changes nothing. Without blocks, the other two are a ConfigError.
    """
    if kind == "none":
        return
    require_blocks(kind, blocks)

    def options(block: nn.Module) -> dict[str, Any]:
        if kind == "full":
            return {}
        policy = inner_product_policy(block, dense_products=True)
        return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}

    checkpoint_wrapped_(model, set(blocks), options)


def require_blocks(kind: str, blocks: Collection[nn.Module]) -> None:
    """Raise ConfigError if a model has no blocks to recompute."""
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing={kind!r} needs blocks, the modules of a ModuleList or nn.Sequential, and the "
            "model has none"
        )
