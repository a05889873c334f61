"""Choose the blocks of a model that FSDP shards one by one, and let them return no views."""

__all__ = ["fsdp_blocks", "has_no_forward", "own_outputs_"]

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import Alias, base_of_view, parameters_of, tree_leaves, tree_map_only


def has_no_forward(module: nn.Module) -> bool:
    """Return whether a module is only a container without a forward, so that FSDP would never gather its parameters."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def fsdp_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the children of ModuleLists and Sequentials, except for children that share a parameter with a module.

    A parameter in two blocks would be sharded twice; the root unit holds it instead.
    """
    blocks = list(dict.fromkeys(_candidates(model)))
    users = Counter(parameter for block in blocks for parameter in set(block.parameters()))
    inside = {module for block in blocks for module in block.modules()}
    outside = {p for module in model.modules() if module not in inside for p in parameters_of(module).values()}
    shared = {parameter for parameter, count in users.items() if count > 1} | outside
    return [block for block in blocks if not shared.intersection(block.parameters())]


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    # A list without a forward cannot be a block, because FSDP gathers a block when its forward begins.
    stack = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential) or has_no_forward(child) or not stack:
            yield from _candidates(child)
        elif any(True for _ in child.parameters()):
            yield child


def own_outputs_(module: nn.Module) -> None:
    """Let a module return no views that need a gradient. Call it before ``fully_shard``, whose hooks must come later.

    FSDP2 gathers the parameters of a module for the backward pass by a hook on the module's output. An operation in
    place on a view (``y += x``) replaces the view's node in the graph, and so removes the hook, without an error. For
    this reason torch warns about every view, such as the output of nn.Linear for three dimensions. Here the output
    becomes a separate tensor on the same memory, so that the hook stays.

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
        return Alias.apply(leaf) if is_only_use else leaf.clone()

    return tree_map_only(Tensor, own, output)


def _base(leaf: Tensor) -> Tensor:
    base = base_of_view(leaf)
    return leaf if base is None else base


def _is_trained_view(leaf: Tensor) -> bool:
    return leaf.requires_grad and base_of_view(leaf) is not None
