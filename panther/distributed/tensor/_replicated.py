"""Modules whose parameters are replicated over the tp mesh: they compute with their local tensors."""

__all__ = ["replicate_"]

import copyreg
import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from panther.distributed.tensor._module import (
    ShardedModule,
    local_parameters,
    no_view,
    shard_parameter_,
)
from panther.distributed.tensor._record import remember_
from panther.distributed.tensor.unshard import unshard_module
from panther.nn._sketched import keep_own_forward

# Their own forward reads the parameters of modules in them.
_READS_CHILDREN = (nn.MultiheadAttention,)


def replicate_(module: nn.Module, mesh: DeviceMesh, summed: bool = False) -> str:
    """Put a module's own parameters on the mesh, whole on every rank, in place.

    Norms of gradients need all parameters of a model on one mesh.

    Args:
        module: Any module.
        mesh: Of one dimension.
        summed: Whether each rank's gradient is a part of the whole one, because ranks see different inputs.

    Returns:
        What was done, for a report.
    """
    if reason := _must_stay_plain(module):
        return f"computed whole by every rank; its parameters stay plain tensors, for {reason}"
    owners = list(module.modules()) if isinstance(module, _READS_CHILDREN) else [module]
    for owner in owners:
        names = tuple(owner._parameters)
        for name in names:
            shard_parameter_(owner, name, mesh, Replicate())
    remember_(module, ("tp_mesh", "summed"))
    module.__class__ = _replicated_class(type(module))  # type: ignore[arg-type]  # of metaclasses, its __hash__
    module.tp_mesh = mesh  # type: ignore[assignment]
    module.summed = tuple(module._parameters) if summed else ()  # type: ignore[assignment]
    module.register_forward_pre_hook(keep_own_forward)
    return "computed whole by every rank"


def _must_stay_plain(module: nn.Module) -> str | None:
    if type(module).forward is nn.Module.forward or "forward" in vars(module):
        return "other modules read them"
    held = [leaf for key, value in vars(module).items() if not key.startswith("_forward") for leaf in _leaves(value)]
    own = {id(tensor) for values in (module._parameters, module._buffers) for tensor in values.values()}
    if any(isinstance(leaf, Tensor) and id(leaf) not in own for leaf in held) or "_flat_weights" in vars(module):
        return "it keeps tensors in other places too"
    return None


def _leaves(value: Any) -> list[Any]:
    return tree_leaves(value) if isinstance(value, Tensor | list | tuple | dict) else []


@functools.cache
def _replicated_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The class with a forward that sees plain tensors; given DTensors, the DTensors."""

    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return plain.forward(self, *args, **kwargs)
        owners = list(self.modules()) if issubclass(plain, _READS_CHILDREN) else [self]
        with local_parameters(*owners, summed=self.summed, group=self.tp_group):
            output = plain.forward(self, *args, **kwargs)
        return no_view(output) if isinstance(output, Tensor) else output

    def reduce(self: Any, protocol: Any) -> Any:
        reduced = plain.__reduce_ex__(self, protocol)
        if type(self) is made and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return _new_replicated, (plain,), *reduced[2:]
        return reduced

    body = {"forward": forward, "__reduce_ex__": reduce, "__doc__": plain.__doc__, "__module__": __name__}
    if hasattr(plain, "to_conv"):
        body["to_conv"] = _to_conv
    made: type[nn.Module] = type(f"Replicated{plain.__name__}", (ShardedModule, plain), body)
    return made


def _to_conv(self: Any) -> nn.Module:
    """The dense convolution that follows; every rank must ask."""
    return unshard_module(self).to_conv()  # type: ignore[operator]


def _new_replicated(plain: type[nn.Module]) -> nn.Module:
    """What pickle and copy begin with: they do not find the class by its name."""
    cls = _replicated_class(plain)  # type: ignore[arg-type]
    return cls.__new__(cls)
