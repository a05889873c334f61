"""Activation checkpointing that saves the 2R numbers a row of sketched layers, and sends nothing a second time.

Checkpointing a block saves its input and computes the rest again in backward, collectives included. The inner numbers
of a sketched layer, x [S1 | U2], are few, and half of the layer's products and all that ranks send are in them (Z. Wang
et al., "BOOST", 2025, arXiv:2512.12131, does so with low-rank layers).
"""

__all__ = ["inner_product_policy"]

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from panther.distributed.tensor._linear import ColwiseLayer
from panther.distributed.tensor._module import local_tensor
from panther.nn import SKLinear

_PRODUCTS = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}
"""Matrix products, with the position of their right factor."""


def inner_product_policy(model: nn.Module) -> Callable[..., CheckpointPolicy]:
    """Return a policy for torch's selective activation checkpointing that saves the inner products of sketched layers.

    For ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. In a region that is checkpointed with it, the
    2R numbers a row of each SKLinear are saved, before and after their sum over ranks, and all else is computed again.

    Args:
        model: The model, after :func:`tensor_parallel`; plain sketched layers are served too.

    Returns:
        The policy, which a policy of your own can call.

    Cost: memory for 2R numbers a row of each layer, twice for layers whose inputs are sharded, beside the region's
        input; half of the layers' products again. No sum of 2R numbers is sent again; the sums of dense layers are, and
        gathers and scatters of a sharded sequence. On a GPU the kernel of a plain layer is one operation, which is run
        again.

    Example:
        >>> import functools, panther as pr
        >>> from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
        >>> block = nn.Sequential(pr.nn.SKLinear(64, 256, 2), nn.GELU(), pr.nn.SKLinear(256, 64, 2))
        >>> policy = inner_product_policy(block)
        >>> contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        >>> y = checkpoint(block, torch.randn(8, 64), use_reentrant=False, context_fn=contexts)
        >>> y.sum().backward()
    """
    widest: dict[int, int] = {}
    for layer in model.modules():
        if isinstance(layer, SKLinear):
            features, rank = local_tensor(layer.S1).shape
            shared = layer.shared_input if isinstance(layer, ColwiseLayer) else None
            ranks = [rank] if shared is None else [other.S1.shape[1] for other in shared.layers]
            widest[features] = max(widest.get(features, 0), 2 * sum(ranks))
    most = max(widest.values(), default=0)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            # Known by its factor, which may be a copy: joined with others, or cast.
            features, columns = args[_PRODUCTS[operation]].shape
            saved = columns <= widest.get(features, 0)
        elif operation is torch.ops._c10d_functional.all_reduce.default:
            saved = args[0].dim() > 0 and args[0].shape[-1] <= most
        else:
            saved = operation is torch.ops.panther.sketched_inner.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
