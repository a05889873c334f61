"""Convert a sharded model to a plain one, from records of the modules' states before sharding."""

__all__ = ["Unsharded", "plain_class", "remember_", "unshard_module"]

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from panther._torch import before_fsdp, buffers_of, parameters_of
from panther.nn.base import SketchedModule
from panther.nn.protocol import keep_own_forward


@dataclass(frozen=True)
class Unsharded:
    """State of a module before it was sharded."""

    plain: type[nn.Module]
    added: tuple[str, ...] = ()
    """Attributes that sharding added."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Values of attributes that sharding changed."""


def remember_(module: nn.Module, added: tuple[str, ...] = (), **attributes: Any) -> None:
    """Record a module's class and attributes before they are changed; later calls extend the first record."""
    record: Unsharded = vars(module).get("_unsharded", Unsharded(type(module)))
    module.__dict__["_unsharded"] = Unsharded(record.plain, record.added + added, attributes | record.attributes)


def unshard_module(module: nn.Module) -> nn.Module:
    """Return a plain copy of a module, including its submodules, on every rank. Every rank must call it.

    In the copy, sharded and replicated modules have their original classes, full parameters and buffers, and the
    original values of attributes that were changed, such as an attention's number of heads. Modules that are sharded
    for data parallelism are gathered too. Shared parameters and modules stay shared. The module itself is not changed.
    Attributes that are neither parameters nor modules are not copied.

    Args:
        module: A model, or any module in it.

    Returns:
        The copy, whose parameters have the same names.

    Cost: memory for the full module on every rank; unsharding its children one by one needs less.

    Example:
        >>> import panther as pr, torch
        >>> pr.distributed.init()
        >>> model = nn.Sequential(
        ...     pr.nn.SKLinear(256, 512, 4),
        ...     nn.ReLU(),
        ...     pr.nn.SKLinear(512, 256, 4),
        ... )
        >>> report = pr.distributed.tensor_parallel(
        ...     model, pr.distributed.make_mesh(tp=1)["tp"]
        ... )
        >>> type(model[0]).__name__, type(unshard_module(model)[0]).__name__
        ('ColwiseSKLinear', 'SKLinear')
        >>> pr.distributed.shutdown()
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"unshard_module takes an nn.Module, not {type(module).__name__}")
    copies: dict[int, Any] = {}
    modules = list(module.modules())
    for old in modules:
        plain = plain_class(old)
        copies[id(old)] = plain.__new__(plain)  # __init__ would need arguments and allocate tensors
        for tensor in (*parameters_of(old).values(), *buffers_of(old).values()):
            if tensor is not None and id(tensor) not in copies:
                full = _full(tensor)
                trained = isinstance(tensor, nn.Parameter)
                copies[id(tensor)] = nn.Parameter(full, requires_grad=tensor.requires_grad) if trained else full
    for old in modules:
        _fill(copies[id(old)], old, copies)
    return copies[id(module)]


def _fill(new: Any, old: nn.Module, copies: dict[int, Any]) -> None:
    record = vars(old).get("_unsharded", Unsharded(type(old)))
    for key, value in vars(old).items():
        # fully_shard keeps its state under "__composable_api...", which a plain module must not have.
        if key == "_unsharded" or key in record.added or key.startswith("__composable_api"):
            continue
        if "hooks" in key and isinstance(value, dict):
            hook_ids = [hook for hook, function in value.items() if not _came_with_sharding(function, new)]
            new.__dict__[key] = type(value)((hook, value[hook]) for hook in hook_ids)
        else:
            new.__dict__[key] = _mapped(value, copies)
    new.__dict__.update(record.attributes)
    # Sketches were drawn only for this rank's shard; the full ones are drawn from the seed.
    if "_unsharded" in vars(old) and isinstance(new, SketchedModule) and new.seed is not None:
        new.set_seeded_(new.seed)


def _mapped(value: Any, copies: dict[int, Any]) -> Any:
    """Replace modules and tensors in a value by their copies, in new containers."""
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is list:
        return [_mapped(item, copies) for item in value]
    if isinstance(value, dict) and not hasattr(value, "__dict__"):
        return type(value)((key, _mapped(item, copies)) for key, item in value.items())
    return value.copy() if type(value) is set else value


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before it was sharded."""
    if (record := vars(module).get("_unsharded")) is not None:
        return record.plain
    cls = type(module)
    return before_fsdp(cls) if issubclass(cls, FSDPModule) else cls


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    # Where several mesh axes shard one dimension, gather axis by axis: torch warns if it has to do that itself.
    placements = list(tensor.placements)
    for axis in range(len(placements) - 1):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor().clone()


def _came_with_sharding(hook: Any, plain: nn.Module) -> bool:
    """Return whether a hook was registered by sharding, and not by the plain module itself."""
    hook = getattr(hook, "hook", hook)
    hook = getattr(hook, "func", hook)
    if hook is keep_own_forward:  # sketched layers and attention register this hook themselves
        return not type(plain).__module__.startswith("panther.nn")
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed", "panther.distributed"))
