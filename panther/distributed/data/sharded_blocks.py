"""Choose the blocks of a model that FSDP shards one by one."""

__all__ = ["fsdp_blocks", "has_no_forward"]

from collections import Counter
from collections.abc import Iterator

from torch import nn

from panther._torch import parameters_of


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
