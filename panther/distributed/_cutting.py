"""What modules of a tensor-parallel model share: their parameters are DTensors, and what computes is the local part.

A module changes its class, not its name or place, and remembers what it was; :func:`panther.distributed.unshard_module`
reads that.
"""

__all__ = [
    "Cut",
    "CutModule",
    "check_mesh",
    "copied_",
    "cut_parameter_",
    "keep_own_forward",
    "local_parameters",
    "local_part",
    "no_view",
    "remember_",
]

import copyreg
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.utils._pytree import tree_leaves

from panther.distributed.collectives import sum_in_backward
from panther.errors import ShapeError


@dataclass(frozen=True)
class Cut:
    """What a module was before it was cut."""

    plain: type[nn.Module]
    added: tuple[str, ...] = ()
    """Attributes that it did not have."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Values of attributes that were changed."""


def remember_(module: nn.Module, added: tuple[str, ...] = (), **attributes: Any) -> None:
    """Note what a module is, before it is changed, once; later calls add to the note."""
    before: Cut = vars(module).get("_cut", Cut(type(module)))
    module.__dict__["_cut"] = Cut(before.plain, before.added + added, attributes | before.attributes)


class CutModule(nn.Module):
    """A module whose parameters are DTensors on ``tp_mesh``."""

    tp_mesh: DeviceMesh
    summed: tuple[str, ...] = ()
    """Parameters that are whole here, of whose gradient each rank has a part."""

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that share the module."""
        return self.tp_mesh.get_group()

    def local(self, name: str) -> Any:
        """This rank's part of a parameter or buffer, for autograd too; None for one that is not there."""
        part = local_part(getattr(self, name))
        return sum_in_backward(part, self.tp_group) if name in self.summed and part is not None else part

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take whole tensors too, which every rank gives alike: nothing is sent."""
        for name, own in (*self.named_parameters(), *self.named_buffers()):
            given = state_dict.get(prefix + name)
            if not isinstance(own, DTensor) or not isinstance(given, Tensor) or isinstance(given, DTensor):
                continue
            if given.shape == own.shape:  # of others torch has to say so
                cut = distribute_tensor(given.detach(), own.device_mesh, own.placements, src_data_rank=None)
                state_dict[prefix + name] = cut
        super()._load_from_state_dict(state_dict, prefix, *args)


def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def no_view(output: Tensor) -> Tensor:
    """The output, or a copy: of a view, changed in place, FSDP2 would lose the hook that gathers in backward."""
    return output.clone() if output._is_view() else output


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless the mesh has one dimension."""
    if mesh.ndim != 1:
        raise ShapeError(f"a layer is cut over one mesh axis, and the mesh has {mesh.mesh_dim_names}: use mesh['tp']")


def cut_parameter_(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Put a parameter on the mesh, with the values of the mesh's first rank."""
    whole = module._parameters.get(name)
    if whole is not None and not isinstance(whole, DTensor):
        cut = distribute_tensor(whole.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(cut, requires_grad=whole.requires_grad))


def keep_own_forward(module: nn.Module, args: Any) -> None:
    """A hook that does nothing: what has one keeps nn.TransformerEncoderLayer off its fast path, without forwards."""


# Their own forward reads the parameters of modules in them.
_READS_CHILDREN = (nn.MultiheadAttention,)


def copied_(module: nn.Module, mesh: DeviceMesh, summed: bool = False) -> str:
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
            cut_parameter_(owner, name, mesh, Replicate())
    remember_(module, ("tp_mesh", "summed"))
    module.__class__ = _copied_class(type(module))  # type: ignore[arg-type]  # of metaclasses, its __hash__
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


@contextmanager
def local_parameters(*modules: nn.Module, summed: tuple[str, ...] = (), group: Any = None) -> Iterator[None]:
    """Let modules hold their local parts in the place of parameters."""
    held = [module._parameters for module in modules]
    for module in modules:
        parts = {name: local_part(parameter) for name, parameter in module._parameters.items()}
        for name in summed:
            if parts.get(name) is not None:
                parts[name] = sum_in_backward(parts[name], group)
        module.__dict__["_parameters"] = parts
    try:
        yield
    finally:
        for module, parameters in zip(modules, held, strict=True):
            module.__dict__["_parameters"] = parameters


@functools.cache
def _copied_class(plain: type[nn.Module]) -> type[nn.Module]:
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
            return _new_copied, (plain,), *reduced[2:]
        return reduced

    body = {"forward": forward, "__reduce_ex__": reduce, "__doc__": plain.__doc__, "__module__": __name__}
    if hasattr(plain, "to_conv"):
        body["to_conv"] = _to_conv
    made: type[nn.Module] = type(f"Copied{plain.__name__}", (CutModule, plain), body)
    return made


def _to_conv(self: Any) -> nn.Module:
    """The dense convolution that follows; every rank must ask."""
    from panther.distributed._unsharding import unshard_module  # which needs this module

    return unshard_module(self).to_conv()  # type: ignore[operator]


def _new_copied(plain: type[nn.Module]) -> nn.Module:
    """What pickle and copy begin with: they do not find the class by its name."""
    cls = _copied_class(plain)  # type: ignore[arg-type]
    return cls.__new__(cls)
