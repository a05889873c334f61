"""Tensors: their versions, views, memory and entries, tensors without values, and nested collections of them."""

__all__ = [
    "Alias", "FakeTensor", "FakeTensorMode", "base_of_view", "first_infinities", "is_transformed", "is_view",
    "number_of_entries", "storage_key", "stored_entries", "tree_flatten", "tree_leaves", "tree_map",
    "tree_map_only", "tree_unflatten", "unsafe_view", "untracked_shard", "version_of",
]  # fmt: skip

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Tensors with a shape, a dtype and a device but without values, on which a model runs without memory. The meta device
# is the public fallback. Its tensors have no other device, and the code path of some layers depends on the device.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# These functions work on nested lists, tuples and dictionaries of tensors. torch 2.11 to 2.14 have no public name for
# them. The fallback is the package optree, which is not a dependency.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten


def version_of(x: Tensor) -> int:
    """Return the number of writes to the memory of a tensor, which must not be an inference tensor.

    Autograd counts writes. The address does not change with a write. The public fallback is a checksum of the values.
    """
    return x._version


def base_of_view(tensor: Tensor) -> Tensor | None:
    """Return the base of a tensor that autograd regards as a view; None for other tensors.

    torch has no public function that returns the base.
    """
    return tensor._base


class Alias(torch.autograd.Function):
    """Return a separate tensor on the memory and with the version counter of x, from ``Alias.apply(x)``.

    A forward may write to it, even if x is a leaf. It is not a view, whose node in the graph a write would replace.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input as a separate tensor."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return gradient


def is_view(x: Tensor) -> bool:
    """Return whether autograd regards a tensor as a view. The public fallback is a copy in every case."""
    return x._is_view()


def is_transformed(x: Tensor) -> bool:
    """Return whether a tensor belongs to vmap, grad or another transform of torch.func, and so has no memory.

    The public fallback is the RuntimeError that ``data_ptr()`` raises.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def storage_key(x: Tensor) -> int:
    """Return an integer that is equal for two existing tensors only if they are views of the same memory.

    The public ``data_ptr()`` is 0 for tensors without entries and raises an error for fake tensors.
    """
    return int(x.untyped_storage()._cdata)


def untracked_shard(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor itself.

    The public ``to_local()`` would record a node for autograd, although the tensor is only inspected.
    """
    return getattr(x, "_local_tensor", x)


def stored_entries(coo: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a COO tensor, in any order and with repeated indices.

    The public ``indices()`` and ``values()`` need a coalesced tensor, which takes a sort; they are the fallback.
    """
    return coo._indices(), coo._values()


def number_of_entries(A: Tensor) -> int:
    """Return the number of stored entries of a sparse tensor. The public ``values()`` needs a coalesced tensor."""
    return A._nnz()


def unsafe_view(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a result in another shape, without a copy, that autograd does not regard as a view.

    No other tensor may share the memory of the result. FSDP2 warns of views if a stage ends in a view. The public
    fallback is ``y.reshape(shape).clone()``.
    """
    return torch.ops.aten._unsafe_view(y, shape)


def first_infinities(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return a number for each device, which is not 0 if gradients that a scaler unscaled are not finite.

    The public fallback is to compare ``get_scale()`` before and after, which waits for the optimizer's step on a GPU.
    """
    return list(scaler._found_inf_per_device(optimizer).values())
