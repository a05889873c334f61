"""Shapes of the outputs of sharded operations, kept from test to test in the processes of a pool.

For every new operation and shape, DTensor runs the operation on fake tensors, which takes 2 ms: an eighth of the
processor time of tests of sharded models. DTensor keeps the results for a mesh, and a test has meshes of its own.
"""

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._sharding_prop import ShardingPropagator


def keep_output_shapes():
    """Let DTensor find the shapes of the outputs of an operation once for the same shapes of its inputs.

    The shapes depend on the operation and its arguments, on the default dtype, and on no mesh or process group.
    """
    find_shapes, kept = ShardingPropagator._propagate_tensor_meta_non_cached, {}

    def find_shapes_once(self, op_schema):
        if detect_fake_mode() is not None:  # The shapes may have symbols of this mode.
            return find_shapes(self, op_schema)
        try:
            arguments = _by_shape(op_schema.args_schema), _by_shape(tuple(op_schema.kwargs_schema.items()))
            key = op_schema.op, arguments, torch.get_default_dtype()
            if key not in kept:
                kept[key] = find_shapes(self, op_schema)
        except TypeError:  # An argument cannot be hashed.
            return find_shapes(self, op_schema)
        return kept[key]

    ShardingPropagator._propagate_tensor_meta_non_cached = find_shapes_once


def _by_shape(argument):
    """Return an argument in a form that can be compared, with the shape of a tensor in its place."""
    if isinstance(argument, DTensorSpec):
        return DTensorSpec, argument.tensor_meta
    if isinstance(argument, (list, tuple)):
        return tuple(map(_by_shape, argument))
    return type(argument), argument  # True, 1 and 1.0 are equal.
