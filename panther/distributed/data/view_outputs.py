"""Outputs of sharded modules that are views, for example of nn.Linear on an input of three dimensions.

FSDP2 gathers the parameters of a module for the backward pass by a hook on the module's output. An operation in place
on a view (``y += x``) replaces the view's node in the graph, and so removes the hook, without an error. For this reason
torch warns about every view, also without operations in place. Here the output becomes a separate tensor on the same
memory, so that the hook stays.
"""

__all__ = ["own_outputs_"]

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import base_of_view, tree_leaves, tree_map_only


def own_outputs_(module: nn.Module) -> None:
    """Let a module return no views that need a gradient. Call it before ``fully_shard``, whose hooks must come later.

    Cost: only views of an input, of a parameter, or of the memory of another output are copied, because an operation in
    place on such a view changes more than one tensor.
    """
    module.register_forward_hook(_own_outputs, with_kwargs=True)


def _own_outputs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not any(_is_trained_view(leaf) for leaf in outputs):
        return None
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # Count the inputs and outputs that share a memory.
    bases = [_base(leaf) for leaf in (*inputs, *outputs)]
    uses = Counter(map(id, bases))

    def own(leaf: Tensor) -> Tensor:
        if not _is_trained_view(leaf):
            return leaf
        is_only_use = uses[id(_base(leaf))] == 1 and not _base(leaf).is_leaf
        return _Alias.apply(leaf) if is_only_use else leaf.clone()

    return tree_map_only(Tensor, own, output)


def _base(leaf: Tensor) -> Tensor:
    base = base_of_view(leaf)
    return leaf if base is None else base


def _is_trained_view(leaf: Tensor) -> bool:
    return leaf.requires_grad and base_of_view(leaf) is not None


class _Alias(torch.autograd.Function):
    """Return a tensor on the memory and with the version counter of another tensor that is not a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input as a separate tensor."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return gradient
