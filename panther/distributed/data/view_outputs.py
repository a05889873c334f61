"""Outputs of sharded modules that are views, such as that of nn.Linear on an input of three dimensions.

FSDP2 gathers a module's parameters for backward by a hook on its output. An operation in place on a view (``y += x``)
replaces the view's place in the graph, and the hook with it, without an error. torch warns of every view for this, also
where nothing is done in place. Here the output becomes a tensor of its own on the same memory, so that the hook stays.
"""

__all__ = ["own_outputs_"]

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import base_of_view, tree_leaves, tree_map_only


def own_outputs_(module: nn.Module) -> None:
    """Let a module return no views that need a gradient. Call it before ``fully_shard``, whose hooks come after.

    Cost: nothing is copied, except for views of an input, of a parameter, or of a tensor that another output is a view
    of, too: an operation in place on these changes more than one tensor.
    """
    module.register_forward_hook(_own_outputs, with_kwargs=True)


def _own_outputs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not any(_is_trained_view(leaf) for leaf in outputs):
        return None
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # How many inputs and outputs a tensor is the memory of; an input is there as well as what is made of it.
    wholes = [_whole(leaf) for leaf in (*inputs, *outputs)]
    uses = Counter(map(id, wholes))

    def own(leaf: Tensor) -> Tensor:
        if not _is_trained_view(leaf):
            return leaf
        alone = uses[id(_whole(leaf))] == 1 and not _whole(leaf).is_leaf
        return _Alias.apply(leaf) if alone else leaf.clone()

    return tree_map_only(Tensor, own, output)


def _whole(leaf: Tensor) -> Tensor:
    base = base_of_view(leaf)
    return leaf if base is None else base


def _is_trained_view(leaf: Tensor) -> bool:
    return leaf.requires_grad and base_of_view(leaf) is not None


class _Alias(torch.autograd.Function):
    """A tensor on the memory of another one, with its version counter, and no view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input as a tensor of its own."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient as it is."""
        return gradient
