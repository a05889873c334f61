"""Modules of a tensor-parallel model: their parameters are DTensors, and they compute with the local tensors.

A module changes its class, but not its name or place, so that references to it, its hooks and its state_dict stay
valid. The functions of this module send nothing; their callers have made the model equal on all ranks of the mesh.
"""

__all__ = [
    "FullWeightOnDemand", "ShardedModule", "ShardedSketchedModule", "become_", "distribute", "flattened",
    "local_parameters", "local_tensor", "no_view", "replicate_", "shard_parameter_", "unflattened",
]  # fmt: skip

import copyreg
import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from panther._torch import (
    buffers_of,
    forward_pre_hooks_of,
    is_view,
    parameters_of,
    put_parameters,
    tree_leaves,
    unsafe_view,
)
from panther.distributed.comm.collectives import sum_together_in_backward
from panther.distributed.tensor.unshard import remember_, unshard_module
from panther.nn.base import SketchedModule
from panther.nn.protocol import keep_own_forward

# Modules whose forward reads the parameters of their children.
_READS_CHILDREN = (nn.MultiheadAttention,)


class ShardedModule(nn.Module):
    """A module whose parameters are DTensors on ``tp_mesh``."""

    action: ClassVar[str] = "replicated"
    """Description of the sharding for the report."""
    placements: ClassVar[Mapping[str, Placement]] = {}
    """Placements of the parameters and sketches that are sharded; all others are replicated."""
    tp_mesh: DeviceMesh
    summed: tuple[str, ...] = ()
    """Replicated parameters whose gradient has to be summed over the ranks, because each rank computes a part of it."""

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks of the mesh."""
        return self.tp_mesh.get_group()

    @classmethod
    def placement(cls, name: str) -> Placement:
        """Return the placement of a parameter or sketch."""
        return cls.placements.get(name, Replicate())

    def local(self, name: str) -> Any:
        """Return this rank's shard of a parameter or buffer, as a differentiable function of it, or None."""
        return self.locals(name)[0]

    def locals(self, *names: str) -> list[Any]:
        """Return :meth:`local` of each name; gradients that have to be summed are sent in one message."""
        shards = {name: local_tensor(getattr(self, name)) for name in names}
        summed = [name for name in names if name in self.summed and shards[name] is not None]
        tensors = sum_together_in_backward([shards[name] for name in summed], self.tp_group) if summed else []
        return list((shards | dict(zip(summed, tensors, strict=True))).values())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state_dict; from full tensors, which are equal on every rank, each rank takes its shard."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            value: Any = state_dict.get(prefix + name)
            if isinstance(tensor, DTensor) and _is_full(value, tensor.shape):
                # The mesh of the tensor, which may have one more axis than tp_mesh, the axis of FSDP.
                sharded = distribute_tensor(value.detach(), tensor.device_mesh, tensor.placements, src_data_rank=None)
                state_dict[prefix + name] = sharded
        super()._load_from_state_dict(state_dict, prefix, *args)


class FullWeightOnDemand(ShardedModule):
    """A layer whose dense weight is computed from full tensors; every rank must ask for it."""

    @property
    def weight(self) -> Tensor:
        """The dense weight, full."""
        return unshard_module(self).weight  # type: ignore[return-value]

    def to_dense(self) -> Any:
        """Return the dense layer of the full weight."""
        return unshard_module(self).to_dense()  # type: ignore[operator]


class ShardedSketchedModule(FullWeightOnDemand, SketchedModule):
    """A sketched module: its fitted sketches are DTensors too."""

    def set_fitted_(self, sketches: dict[str, Tensor]) -> None:
        """Make the layer fitted, with the given full sketches, equal on every rank, which are sharded."""
        super().set_fitted_(
            {name: distribute(value, self.tp_mesh, self.placement(name)) for name, value in sketches.items()}
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state_dict, including full sketches of a fitted layer into a seeded layer."""
        for name, shape in self.sketch_shapes().items():
            value: Any = state_dict.get(prefix + name)
            if _is_full(value, shape) and not isinstance(getattr(self, name), DTensor):
                state_dict[prefix + name] = distribute(value, self.tp_mesh, self.placement(name))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _is_full(value: Any, shape: tuple[int, ...]) -> bool:
    # torch reports different shapes when it loads them.
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == torch.Size(shape)


def become_(module: nn.Module, kind: type[ShardedModule], mesh: DeviceMesh, **attributes: Any) -> Any:
    """Change a module's class, and record the original class for :func:`unshard_module`.

    The change is in place, so that all references to the module stay valid.
    """
    remember_(module, ("tp_mesh", "summed", *attributes))
    module.__class__ = kind
    vars(module).update(tp_mesh=mesh, **attributes)
    if keep_own_forward not in forward_pre_hooks_of(module).values():
        module.register_forward_pre_hook(keep_own_forward)
    return module


def local_tensor(tensor: Any) -> Any:
    """Return this rank's shard of a DTensor, and any other value unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def no_view(output: Tensor) -> Tensor:
    """Return the output, or a copy of a view, because FSDP2's backward hook is lost if a view is changed in place."""
    return output.clone() if is_view(output) else output


def flattened(x: Tensor) -> Tensor:  # (*, n) -> (rows, n)
    """Return the rows of a tensor as a matrix."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def unflattened(y: Tensor, like: Tensor) -> Tensor:  # (rows, m) -> (*, m)
    """Undo :func:`flattened` for a result without other references, with neither a copy nor a view."""
    return y if like.dim() == 2 else unsafe_view(y, [*like.shape[:-1], y.shape[-1]])


def distribute(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Place a full tensor, equal on every rank, on the mesh without sending anything."""
    if isinstance(tensor, DTensor):  # a replicated tensor that torch made from other tensors of the module
        return tensor.redistribute(mesh, [placement])
    sharded = distribute_tensor(tensor.detach(), mesh, [placement], src_data_rank=None)
    # A shard along the first dimension is a view, which would keep the full tensor alive.
    return sharded if placement.is_replicate() else sharded.clone()


def shard_parameter_(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a full parameter by a DTensor on the mesh."""
    full = parameters_of(module).get(name)
    if full is not None and not isinstance(full, DTensor):
        sharded = nn.Parameter(distribute(full, mesh, placement), requires_grad=full.requires_grad)
        module.register_parameter(name, sharded)


@contextmanager
def local_parameters(*modules: nn.Module, summed: tuple[str, ...] = (), group: Any = None) -> Iterator[None]:
    """Replace the parameters of modules by their local tensors within the block, for the modules' own forward."""
    own_parameters = [parameters_of(module) for module in modules]
    for module in modules:
        tensors = {name: local_tensor(parameter) for name, parameter in parameters_of(module).items()}
        names = [name for name in summed if tensors.get(name) is not None]
        tensors.update(zip(names, sum_together_in_backward([tensors[name] for name in names], group), strict=True))
        put_parameters(module, tensors)
    try:
        yield
    finally:
        for module, parameters in zip(modules, own_parameters, strict=True):
            put_parameters(module, parameters)


def replicate_(module: nn.Module, mesh: DeviceMesh, summed: bool = False) -> str | None:
    """Put a module's own parameters on the mesh, replicated, in place, or return why they stay plain tensors.

    A gradient norm over all parameters of a model requires that they are on one mesh. With ``summed``, gradients are
    summed over the ranks, because each rank has different inputs.
    """
    if reason := _must_stay_plain(module):
        return f"its parameters stay plain tensors, because {reason}"
    owners = list(module.modules()) if isinstance(module, _READS_CHILDREN) else [module]
    for owner in owners:
        for name in tuple(parameters_of(owner)):
            shard_parameter_(owner, name, mesh, Replicate())
    kind = _replicated_class(type(module))  # type: ignore[arg-type]  # of metaclasses, its __hash__
    become_(module, kind, mesh, summed=tuple(parameters_of(module)) if summed else ())
    return None


def _must_stay_plain(module: nn.Module) -> str | None:
    if type(module).forward is nn.Module.forward or "forward" in vars(module):
        return "other modules read them"
    sketch_names = getattr(module, "sketch_names", ())  # packed ones are such tensors
    leaves = [
        leaf
        for key, value in vars(module).items()
        if not key.startswith("_forward") and key not in sketch_names
        for leaf in _leaves(value)
    ]
    registered = {id(tensor) for values in (parameters_of(module), buffers_of(module)) for tensor in values.values()}
    # nn.LSTM and similar modules also keep their weights in a list, which would not be updated.
    if any(isinstance(leaf, Tensor) and id(leaf) not in registered for leaf in leaves) or isinstance(
        module, nn.RNNBase
    ):
        return "it keeps tensors in other attributes too"
    return None


def _leaves(value: Any) -> list[Any]:
    return tree_leaves(value) if isinstance(value, Tensor | list | tuple | dict) else []


@functools.cache
def _replicated_class(plain: type[nn.Module]) -> type[ShardedModule]:
    """Make a subclass whose forward uses local tensors, unless its inputs are DTensors."""

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
        # pickle and copy look up a class by its name, and this class is not an attribute of any module.
        if type(self) is replicated_class and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return _new_replicated, (plain,), *reduced[2:]
        return reduced

    body = {"forward": forward, "__reduce_ex__": reduce, "__doc__": plain.__doc__, "__module__": __name__}
    base = ShardedSketchedModule if issubclass(plain, SketchedModule) else ShardedModule
    replicated_class: type[ShardedModule] = type(f"Replicated{plain.__name__}", (base, plain), body)
    return replicated_class


def _new_replicated(plain: type[nn.Module]) -> nn.Module:
    cls = _replicated_class(plain)  # type: ignore[arg-type]
    return cls.__new__(cls)
