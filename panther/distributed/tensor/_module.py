"""What modules of a tensor-parallel model share: their parameters are DTensors, and what computes is the local part.

A module changes its class, not its name or place, and remembers what it was; :func:`panther.distributed.unshard_module`
reads that.
"""

__all__ = [
    "ShardedModule",
    "check_mesh",
    "local_parameters",
    "local_part",
    "no_view",
    "shard_parameter_",
]

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from panther.distributed.comm.collectives import sum_in_backward
from panther.errors import ShapeError


class ShardedModule(nn.Module):
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


def shard_parameter_(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Put a parameter on the mesh, with the values of the mesh's first rank."""
    whole = module._parameters.get(name)
    if whole is not None and not isinstance(whole, DTensor):
        cut = distribute_tensor(whole.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(cut, requires_grad=whole.requires_grad))


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
