"""From a model that is cut over ranks back to the plain one."""

__all__ = ["unshard_module"]

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from panther.distributed.tensor._record import Unsharded
from panther.nn._sketched import SketchedModule


def unshard_module(module: nn.Module) -> nn.Module:
    """A plain copy of a module, and of all that is in it, on every rank; every rank must call it.

    Cut and copied modules get back their classes, their whole parameters and buffers, and what else was changed, such
    as an attention's number of heads; so does what is sharded for data parallelism. Shared parameters and modules stay
    shared. The module itself is left as it is. Attributes that are neither parameters nor modules are not copied.

    Args:
        module: A model, or any part of it.

    Returns:
        The copy, whose parameters have the same names.

    Cost: the size of the module, on every rank; a part at a time needs less.

    Example:
        >>> import panther as pr, torch
        >>> pr.distributed.init()
        >>> model = nn.Sequential(pr.nn.SKLinear(256, 512, 4), nn.ReLU(), pr.nn.SKLinear(512, 256, 4))
        >>> report = pr.distributed.tensor_parallel(model, pr.distributed.make_mesh(tp=1)["tp"])
        >>> type(model[0]).__name__, type(unshard_module(model)[0]).__name__
        ('ColwiseSKLinear', 'SKLinear')
        >>> pr.distributed.shutdown()
    """
    copies: dict[int, Any] = {}
    modules = list(module.modules())
    for old in modules:
        plain = _plain_class(old)
        copies[id(old)] = plain.__new__(plain)
        for parameter in old._parameters.values():
            if parameter is not None and id(parameter) not in copies:
                copies[id(parameter)] = nn.Parameter(_whole(parameter), requires_grad=parameter.requires_grad)
        for buffer in old._buffers.values():
            if buffer is not None and id(buffer) not in copies:
                copies[id(buffer)] = _whole(buffer)
    for old in modules:
        _fill(copies[id(old)], old, copies)
    return copies[id(module)]


def _fill(new: nn.Module, old: nn.Module, copies: dict[int, Any]) -> None:
    cut = vars(old).get("_cut", Unsharded(type(old)))
    for key, value in vars(old).items():
        if key == "_cut" or key in cut.added or key.startswith("__composable_api"):  # the last of fully_shard
            continue
        if "hooks" in key and isinstance(value, dict):
            kept = [hook for hook, function in value.items() if not _is_of_distributed(function)]
            new.__dict__[key] = type(value)((hook, value[hook]) for hook in kept)
        else:
            new.__dict__[key] = _mapped(value, copies)
    new.__dict__.update(cut.attributes)
    if "_cut" in vars(old) and isinstance(new, SketchedModule) and new.seed is not None:
        new.set_seeded_(new.seed)


def _mapped(value: Any, copies: dict[int, Any]) -> Any:
    """The value with the copies of modules and tensors in their places; a container anew."""
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is list:
        return [_mapped(item, copies) for item in value]
    if isinstance(value, dict) and not hasattr(value, "__dict__"):
        return type(value)((key, _mapped(item, copies)) for key, item in value.items())
    return value.copy() if type(value) is set else value


def _plain_class(module: nn.Module) -> type[nn.Module]:
    if (cut := vars(module).get("_cut")) is not None:
        return cut.plain
    cls = type(module)
    return cls.__mro__[cls._orig_cls_mro_index] if issubclass(cls, FSDPModule) else cls


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    # Shards of parts of one dimension are put together an axis at a time: of all at once torch warns that it does so.
    placements = list(tensor.placements)
    for axis in range(len(placements) - 1):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor().clone()


def _is_of_distributed(hook: Any) -> bool:
    """Whether a hook came with cutting or sharding."""
    hook = getattr(hook, "hook", hook)
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed", "panther.distributed"))
