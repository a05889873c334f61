"""What torch is doing: modes, backward passes, and the operators that it calls with nested arguments."""

__all__ = [
    "ASSERT_TENSOR_METADATA", "FAKE_LOG", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "assign_attribute",
    "disable_dispatch_modes", "is_backward_running", "is_dispatch_mode_active", "is_mutable_operator", "operator_name",
    "schema_of", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten",
]  # fmt: skip

import logging
from typing import Any

import torch

# Tensors with a shape, a dtype and a device but without values, on which a model runs without memory. The meta device
# is the public fallback. Its tensors have no other device, and the code path of some layers depends on the device.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Assigns a tensor or module to a GraphModule under a dotted name, and makes the modules between. fx fills a GraphModule
# with it. The public fallback is add_submodule with register_buffer and register_parameter.
from torch.fx.graph_module import _assign_attr as assign_attribute

# A mode sees every operation of a block of code. torch documents modes for extensions, but has no public name for the
# class, and no public function that leaves all modes, so that code computes with real tensors, or that returns the
# active mode. The fallback, a subclass of torch.Tensor, would have to be passed through the user's model.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._python_dispatch import _disable_current_modes as disable_dispatch_modes

# These functions work on nested lists, tuples and dictionaries of tensors. torch 2.11 to 2.14 have no public name for
# them. The fallback is the package optree, which is not a dependency.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""The logger of the errors of fake tensors, which are raised as well. Since torch 2.14 they reach standard error. The
name is private. The public fallback is the environment variable TORCH_LOGS, which torch reads once."""

ASSERT_TENSOR_METADATA = torch.ops.aten._assert_tensor_metadata.default
"""The operator that torch.export adds after a cast. It must be removed, because a stage may get a different dtype, for
example under autocast. torch has no public name for it."""


def is_dispatch_mode_active() -> bool:
    """Return whether a dispatch mode is active, such as the mode of fake tensors, in which tensors have no values.

    torch has no public function that returns the active mode. The fallback is never to read values.
    """
    return _get_current_dispatch_mode() is not None


def is_backward_running() -> bool:
    """Return whether a backward pass is running, as when activation checkpointing repeats a forward.

    The id of the running graph is -1 outside of a backward pass. torch has no public function that returns it.
    """
    return torch._C._current_graph_task_id() != -1


def is_mutable_operator(target: Any) -> bool:
    """Return whether an operator of a graph changes a tensor in place. The schema has no public name."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def schema_of(operator: Any) -> Any:
    """Return an operator's schema, which names its arguments. The public ``str(operator)`` has only the name."""
    return operator._schema


def operator_name(packet: Any) -> str:
    """Return the name of an overload packet, such as "aten::add". The public ``str(packet)`` is "aten.add"."""
    return packet._qualified_op_name
