"""Private names of torch, each with its reason and its public fallback.

A private name may change in any release of torch. Then only this file has to change, because no other module of Panther
uses a private name of torch: ``tests/test_private_torch.py`` refuses it. The kernels do not import Panther, and have
their private names in ``kernels/_torch.py``.

Names are imported when a function first needs them if their import is slow, or if they need a torch that was built with
``torch.distributed``.
"""

__all__ = [
    "ASSERT_TENSOR_METADATA", "COLLECTIVE_NAMESPACES", "COMPILED", "FLAT_WEIGHTS", "MODULE_DICTIONARIES",
    "OVERRIDDEN_METHODS", "Alias", "BaseFuture", "FakeTensor", "FakeTensorMode", "TorchDispatchMode",
    "apply_to_tensors", "assign_attribute", "base_of_view", "before_fsdp", "buffers_of", "checkpoint_wrapped_",
    "children_of", "compiler_stance", "default_store", "default_timeout_set", "disable_dispatch_modes",
    "drawing_method", "end_with_parent", "end_workers", "error_files", "fake_group", "first_infinities", "flat_mesh",
    "forget_shapes", "forward_pre_hooks_of", "fsdp_shards", "functional_collectives", "group_timeout",
    "has_forward_of_convolution", "has_gradient_hooks", "has_hooks", "has_packed_weights", "hides_weights",
    "ignore_in_ddp", "ignored_in_ddp",
    "is_backward_running", "is_dispatch_mode_active", "is_dynamo_loaded", "is_forked_from_cuda", "is_mutable_operator",
    "is_this_host", "is_transformed", "is_view", "kill_loader_workers", "limit_closing", "loading_code_of",
    "local_offsets", "logs_of", "number_of_entries", "operator_name", "original_of_compiled", "parameters_of",
    "plain_name", "put_child", "put_forward_pre_hooks", "put_module", "put_parameters", "refresh_flat_weights",
    "run_backward", "running_backward_id", "saved_tensor_hooks_are_set", "schema_of", "set_compiler_stance",
    "set_group_timeout", "storage_key", "sync_zero_groups", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only",
    "tree_unflatten", "unreduced_positions", "unsafe_view", "unsaved_buffers_of", "untracked_shard", "usable_cores",
    "version_of", "watch_fsdp_unit", "with_agent_class", "with_inner_axis", "without_fake_log", "without_forward_hooks",
    "without_inner_wrappers", "worker_exit_codes", "worker_processes",
]  # fmt: skip

import inspect
import logging
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

# Tensors with a shape, a dtype and a device but without values, on which a model runs without memory. The meta device
# is the public fallback. Its tensors have no other device, and the code path of some layers depends on the device.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Backward pass of a loss and a second root. torch.autograd.backward ends in the same function, after checks in Python
# that took 2 % of a step of 1 ms; it is the public fallback.
from torch.autograd.graph import _engine_run_backward as run_backward

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

from panther._process_settings import Block, ProcessSetting

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

# The names under which the wrappers of torch.compile and of activation checkpointing hold their modules.
COMPILED = "_orig_mod"
_WRAPPED = (COMPILED, "_checkpoint_wrapped_module")
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_NO_FAKE_LOG = ProcessSetting(lambda: _FAKE_LOG.disabled, partial(setattr, _FAKE_LOG, "disabled"), True)

OVERRIDDEN_METHODS = {
    # torch.nn.Module says that a subclass may override these three, although their names are private. The hooks of
    # state dictionaries (register_state_dict_pre_hook and so on) are a public fallback for two of them. They are not
    # copied with a module's class, which a sharded layer changes in place.
    "_apply": "follow to(), cuda(), to_empty() and casts",
    "_load_from_state_dict": "load all tensors of a layer or none",
    "_save_to_state_dict": "bring a layer's record up to date before it is saved",
    # torch.distributed.pipelining runs every stage on memory without values. No public fallback exists.
    "_compute_outputs": "keep buffers and gradients of a stage when torch looks for the shapes of its outputs",
    "_post_metadata_inference_cleanup": "put these buffers and gradients back",
    "_shape_inference": "do both in torch 2.11, which lacks these two methods",
    "_get_init_p2p_neighbors_ops": "leave out the messages of a rank to itself, which torch 2.11 sends first",
    # torch.distributed.elastic has no public function that detects a worker without a result, or sets the signal.
    "_monitor_workers": "detect workers that end without a result",
    "_shutdown": "end the workers with SIGTERM",
    "_start_workers": "give the workers a guardian, and limit how long their end takes",
    # FlopCounterMode calls this method once for each operation, after composite operations are decomposed. The fallback
    # is a TorchDispatchMode, which sees composite operations as well.
    "_count_flops": "count the bytes that each operation moves",
}
"""Methods of torch's classes that Panther overrides, with the purpose of each."""

MODULE_DICTIONARIES = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
"""Attributes of a module that a shallow copy shares with the original. ``copy.deepcopy`` would copy the weights too."""

FLAT_WEIGHTS = "_flat_weights"
"""Attribute of nn.LSTM and similar modules; see :func:`refresh_flat_weights`."""

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of torch's collectives, in place and functional. A mode sees an operator only under its full name."""

functional_collectives = torch.ops._c10d_functional
"""Collectives that return their result, which activation checkpointing can save. The collectives of torch.distributed
are the public fallback. They write in place, so that the recomputation in the backward pass sends them again."""

BaseFuture: Any = torch._C.Future
"""The base class of all futures. Panther replaces its method ``then`` to count callbacks. The public
torch.futures.Future is a subclass, and the futures of gloo's collectives are not instances of this subclass."""

ASSERT_TENSOR_METADATA = torch.ops.aten._assert_tensor_metadata.default
"""The operator that torch.export adds after a cast. It must be removed, because a stage may get a different dtype, for
example under autocast. torch has no public name for it."""


# ----- tensors


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


# ----- modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's dictionary of parameters, including entries that are None.

    The public ``named_parameters(recurse=False)`` leaves out None, and takes microseconds in each forward. torch has no
    public function that puts a plain tensor in the place of a registered parameter.
    """
    return module._parameters


def put_parameters(module: nn.Module, tensors: dict[str, Any]) -> None:
    """Replace a module's dictionary of parameters, also by plain tensors, which ``nn.Module.__setattr__`` refuses.

    The public fallback is ``torch.func.functional_call``, which calls a module as a whole.
    """
    module.__dict__["_parameters"] = tensors


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's dictionary of buffers, including entries that are None; see :func:`parameters_of`."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's dictionary of children, including entries that are None.

    The public ``named_children()`` leaves out a child that occurs twice, and ``setattr`` moves a name to the end of the
    order that state dictionaries have.
    """
    return module._modules


def put_child(parent: nn.Module, name: str, child: nn.Module | nn.Parameter) -> None:
    """Put a module in the place of a child, also of the module in torch.compile's wrapper.

    Modules and parameters also take the places of each other.

    The wrapper binds the forward of its module when it is constructed, and would continue to call the old module. torch
    has no public function that binds it again. The fallback is to compile the new module, with options that are not
    known here.
    """
    if isinstance(child, nn.Parameter):
        children_of(parent).pop(name, None)
        parameters_of(parent)[name] = child
        return
    parameters_of(parent).pop(name, None)
    children_of(parent)[name] = child
    if original_of_compiled(parent) is child:
        parent._initialize()  # type: ignore[operator]


def put_module(model: nn.Module, name: str, module: nn.Module | nn.Parameter) -> None:
    """Put a module in the place of the module with a dotted name; see :func:`put_child`."""
    parent, _, attribute = name.rpartition(".")
    put_child(model.get_submodule(parent), attribute, module)


@contextmanager
def without_inner_wrappers(model: nn.Module, names: Sequence[str] = _WRAPPED) -> Iterator[None]:
    """Give the modules in a model the names that they have without torch.compile and activation checkpointing.

    Inside the block, the modules stand in the places of their wrappers. At the end of the block, each wrapper gets the
    module that then stands in its place.

    Args:
        model: The model; a wrapper of the model itself stays.
        names: Names under which the wrappers hold their modules; the names of both kinds of wrappers by default.
    """
    wrapped: list[tuple[nn.Module, str, list[tuple[nn.Module, str]]]] = []
    for parent in [*model.modules()]:
        for name, child in [*children_of(parent).items()]:
            wrappers: list[tuple[nn.Module, str]] = []
            while child is not None and (inner := _inner_name(child, names)):
                wrappers.append((child, inner))
                child = children_of(child)[inner]
            if child is not None and wrappers and not _inner_name(parent, names):
                wrapped.append((parent, name, wrappers))
                children_of(parent)[name] = child
    try:
        yield
    finally:
        for parent, name, wrappers in wrapped:
            child = children_of(parent)[name]
            for wrapper, inner in reversed(wrappers):
                if child is not None and children_of(wrapper)[inner] is not child:
                    put_child(wrapper, inner, child)
                child = wrapper
            children_of(parent)[name] = child


def _inner_name(module: nn.Module, names: Sequence[str]) -> str | None:
    """Return the name, one of ``names``, under which a wrapper holds its module; None for other modules."""
    return next((name for name in names if name in children_of(module)), None)


def plain_name(name: str) -> str:
    """Return the name of a tensor without the names of torch.compile's and activation checkpointing's wrappers.

    torch.compile's wrapper keeps its name in state dictionaries. Neither name is public.
    """
    for wrapped in _WRAPPED:
        name = name.replace(f"{wrapped}.", "")
    return name


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """Return a module's set of the names of buffers that are not saved.

    The public fallback is the buffers whose names are not in ``state_dict()``, which a module may change.
    """
    return module._non_persistent_buffers_set


def apply_to_tensors(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Replace each tensor of a module, in place, as ``module.to`` does.

    The public ``to`` refuses the meta device, and the public ``to_empty`` drops the values of other tensors.
    """
    module._apply(fn)


def forward_pre_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return a module's forward pre-hooks. torch has no public function that returns them."""
    return module._forward_pre_hooks


def put_forward_pre_hooks(module: nn.Module, hooks: Any) -> None:
    """Replace a module's dictionary of forward pre-hooks. torch has no public function that replaces it."""
    module._forward_pre_hooks = hooks


def loading_code_of(module: nn.Module) -> list[Any]:
    """Return the functions that run when a module loads a state: its class's methods and its hooks.

    No public fallback exists. Without this function, every load would need a copy of the model to undo a failure.
    """
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    methods = [getattr(type(module), name) for name in ("load_state_dict", "_load_from_state_dict", "set_extra_state")]
    return [*methods, *(getattr(hook, "hook", hook) for hook in hooks)]  # torch wraps the hooks before it


def has_forward_of_convolution(module: nn.Module) -> bool:
    """Return whether a module computes its output by the methods of a convolution of torch.nn.

    A subclass may define the private method, which the public method calls. No public fallback exists.
    """
    kind: Any = type(module)
    return any(
        isinstance(module, base) and kind.forward is base.forward and kind._conv_forward is base._conv_forward
        for base in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    )


def has_hooks(module: nn.Module, *, beside_forward_pre: bool = False) -> bool:
    """Return whether a module has forward or backward hooks, optionally ignoring forward pre-hooks.

    The hooks that transformers leaves on modules after a forward that returned hidden states do not count. torch has no
    public function that returns hooks.
    """
    tables = [module._forward_hooks, module._backward_hooks, module._backward_pre_hooks]
    if not beside_forward_pre:
        tables.append(module._forward_pre_hooks)
    capturing = "transformers.utils.output_capturing"
    return any(
        table and any(getattr(hook, "__module__", None) != capturing for hook in table.values()) for table in tables
    )


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether a tensor has hooks on its gradient. torch has no public function that returns them."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


@contextmanager
def without_forward_hooks(module: nn.Module) -> Iterator[None]:
    """Remove a module's forward hooks and forward pre-hooks inside the block. torch has no public function for it."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    hooks_by_name = {name: module.__dict__[name] for name in names}
    module.__dict__.update({name: type(hooks)() for name, hooks in hooks_by_name.items()})
    try:
        yield
    finally:
        module.__dict__.update(hooks_by_name)


def drawing_method(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method that draws a module's parameters; None if it has none.

    The method of nn.MultiheadAttention and nn.Transformer is private. The public fallback is to build a new module.
    """
    method: Callable[[], Any] | None = getattr(module, "reset_parameters", None)
    return method or getattr(module, "_reset_parameters", None)


def refresh_flat_weights(rnn: nn.RNNBase) -> None:
    """Let nn.LSTM and similar modules compute with their current attributes.

    These modules also keep their weights in a list. The public fallback is ``setattr`` for each weight, which takes
    Parameters.
    """
    rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]


def hides_weights(module: nn.Module) -> bool:
    """Return whether :func:`refresh_flat_weights` applies to a module. The public fallback is the class nn.RNNBase."""
    return "_flat_weights" in vars(module)


def has_packed_weights(module: nn.Module) -> bool:
    """Return whether torch.ao has quantized a module. The public fallback is a list of its about thirty classes."""
    return "quantized" in type(module).__module__ and hasattr(module, "_packed_params")


def original_of_compiled(model: nn.Module) -> nn.Module | None:
    """Return the model inside of torch.compile's wrapper; None for other models. Its name is not public."""
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else None


# ----- what torch is doing


def is_dispatch_mode_active() -> bool:
    """Return whether a dispatch mode is active, such as the mode of fake tensors, in which tensors have no values.

    torch has no public function that returns the active mode. The fallback is never to read values.
    """
    return _get_current_dispatch_mode() is not None


def is_backward_running() -> bool:
    """Return whether a backward pass is running, as when activation checkpointing repeats a forward.

    The id of the running graph is -1 outside of a backward pass. torch has no public function that returns it.
    """
    return running_backward_id() != -1


def running_backward_id() -> int:
    """Return the number of the running backward pass, -1 outside of one. torch has no public function that returns it.

    The fallback is to take a backward pass for a new one if it reaches a module for the second time.
    """
    return torch._C._current_graph_task_id()


def saved_tensor_hooks_are_set() -> bool:
    """Return whether hooks for saved tensors are active, for example of activation checkpointing.

    The public functions set such hooks, and no public function returns whether hooks are set.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_dynamo_loaded() -> bool:
    """Return whether the compiler is loaded. Loading, the public fallback, takes a second and 40 MB."""
    return "torch._dynamo" in sys.modules


def compiler_stance() -> tuple[Any, ...]:
    """Return the stance of the compiler, which a block that sets one keeps to restore it.

    torch has no public function that returns the stance. The fallback is to restore the default.
    """
    block = torch.compiler.set_stance("force_eager")
    block.__exit__(None, None, None)
    stance: Any = block.prev
    return stance.stance, stance.skip_guard_eval_unsafe, stance.backend


def set_compiler_stance(stance: tuple[Any, ...]) -> None:
    """Set a stance that :func:`compiler_stance` returned."""
    torch.compiler.set_stance(stance[0], skip_guard_eval_unsafe=stance[1], force_backend=stance[2])


def is_mutable_operator(target: Any) -> bool:
    """Return whether an operator of a graph changes a tensor in place. The schema has no public name."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def schema_of(operator: Any) -> Any:
    """Return an operator's schema, which names its arguments. The public ``str(operator)`` has only the name."""
    return operator._schema


def operator_name(packet: Any) -> str:
    """Return the name of an overload packet, such as "aten::add". The public ``str(packet)`` is "aten.add"."""
    return packet._qualified_op_name


def first_infinities(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return a number for each device, which is not 0 if gradients that a scaler unscaled are not finite.

    The public fallback is to compare ``get_scale()`` before and after, which waits for the optimizer's step on a GPU.
    """
    return list(scaler._found_inf_per_device(optimizer).values())


# ----- torch.distributed


def default_store() -> "dist.Store":
    """Return the store of the default process group. The public fallback is a second store on another port."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def group_timeout(group: "dist.ProcessGroup", device: torch.device) -> timedelta:
    """Return the timeout of a group's operations on a device. The public fallback is to keep it from init."""
    return group._get_backend(device).options._timeout


def set_group_timeout(group: "dist.ProcessGroup", timeout: timedelta) -> None:
    """Set the timeout of a group's operations. Torch 2.14 has a public function; before it, make another group."""
    from torch.distributed import distributed_c10d

    if hasattr(distributed_c10d, "set_timeout"):
        distributed_c10d.set_timeout(timeout, group)
    else:
        distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def default_timeout_set(timeout: timedelta | None) -> Iterator[None]:
    """Give this timeout to groups that are made without one, also while their ranks connect; None changes nothing.

    Neither ``init_device_mesh`` nor the methods of a mesh take a timeout. The public fallback is to make each group by
    ``new_group`` and the mesh by ``DeviceMesh.from_group``, which names groups differently on each rank.
    """
    from torch.distributed import distributed_c10d

    if timeout is None:
        yield
        return
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    for name in names:
        setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(distributed_c10d, name, value)


def flat_mesh(mesh: "DeviceMesh", name: str) -> "DeviceMesh":
    """Flatten a mesh of several axes to one axis.

    The public fallback is ``torch.distributed.new_group``, which all ranks of the world have to call.
    """
    return mesh._flatten(name)


def with_inner_axis(mesh: "DeviceMesh", names: tuple[str, str]) -> "DeviceMesh":
    """Append an inner axis of size 1 to a mesh of one axis. The public fallback is ``torch.distributed.new_group``."""
    return mesh._unflatten(0, (mesh.size(), 1), names)


def local_offsets(x: Any) -> tuple[int, ...]:
    """Return the position of this rank's shard in a DTensor, as torch.distributed.checkpoint places it.

    The public fallback is ``Shard.local_shard_size_and_offset``, which knows one mesh axis at a time.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1])


def unreduced_positions(model: Any) -> list[int]:
    """Return the positions of the parameters whose gradients DistributedDataParallel still waits for after a backward.

    DDP itself checks this before the next forward, after the optimizer has taken a step with gradients that were not
    averaged. The check takes 1 us if DDP waits for no gradient. The public fallback, to look for gradients that are
    None, misses parameters that an earlier batch of an accumulated step has reached.
    """
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError as error:
        positions = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if positions is None:
            raise
        return [int(position) for position in positions[1].split()]
    return []


def ignored_in_ddp(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that DistributedDataParallel will leave out."""
    return getattr(model, "_ddp_params_and_buffers_to_ignore", [])


def ignore_in_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Exclude parameters and buffers from DistributedDataParallel, which must wrap the model afterwards.

    The public ``broadcast_buffers=False`` leaves out all buffers.
    """
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def before_fsdp(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module had before ``fully_shard`` derived a class from it and FSDPModule.

    FSDP2 stores the index of the original class in the ``__mro__``. The public fallback is today's ``cls.__mro__[2]``.
    """
    return cls.__mro__[cls._orig_cls_mro_index]  # type: ignore[attr-defined]


def watch_fsdp_unit(unit: Any, on_forward: Callable[[], None], missing: dict[int, nn.Parameter]) -> None:
    """Call ``on_forward`` in each forward of a unit of FSDP2, and let it reduce zeros for the gradients that it lacks.

    The parameters that had no gradient since ``missing`` was cleared are added to it, by their ids. The public
    ``set_reduce_scatter_unused_params``, since torch 2.13, reduces zeros as well, but does not tell for which
    parameters; a public forward hook would be traced by torch.compile.
    """
    for number, group in enumerate(_fsdp_groups(unit)):
        if number == 0:
            group.pre_forward = _called_after(on_forward, group.pre_forward)
        group.post_backward = _called_after(partial(_fill_gradients, group, missing), group.post_backward)


def fsdp_shards(unit: Any) -> list[tuple[nn.Parameter, int]]:
    """Return the sharded parameters of a unit of FSDP2, in the order in which its flat gradients have them.

    The number is that of a shard's entries with padding. The hook of the public ``set_all_reduce_hook`` gets the flat
    gradients without names. The public fallback is to repeat FSDP2's traversal of the modules.
    """
    return [
        (place.sharded_param, place.padded_sharded_param_size.numel())
        for group in _fsdp_groups(unit)
        for place in group.fsdp_params
    ]


def _fsdp_groups(unit: Any) -> list[Any]:
    """Return the groups of parameters that a unit of FSDP2 gathers and reduces together."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.13
        groups: list[Any] = state._fsdp_param_groups
        return groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _called_after(first: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``first`` and then the method."""

    def called(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    return called


def _fill_gradients(group: Any, missing: dict[int, nn.Parameter]) -> None:
    """Give zero gradients to the trained parameters of a group of FSDP2 that has run and is about to reduce."""
    if not group.reduce_grads:
        return
    sums = [place.unsharded_accumulated_grad for place in group.fsdp_params]  # of passes that did not reduce
    dtypes = [gradient.dtype for gradient in sums if gradient is not None]
    if not (group.is_unsharded or dtypes):
        return
    exists = [
        gradient is not None or place.unsharded_param.grad is not None
        for place, gradient in zip(group.fsdp_params, sums, strict=True)
    ]
    if not any(exists) and any(place.sharded_param.grad is not None for place in group.fsdp_params):
        return  # a pipeline calls the method once more after the group has reduced
    for place, has_gradient in zip(group.fsdp_params, exists, strict=True):
        parameter, shard = place.unsharded_param, place.sharded_param
        if has_gradient:
            missing.pop(id(shard), None)
        elif parameter.requires_grad:
            if shard.grad is None:
                missing[id(shard)] = shard
            if dtypes:  # all gradients of a group have one dtype
                place.unsharded_accumulated_grad = torch.zeros_like(parameter, dtype=dtypes[0])
            else:
                parameter.grad = torch.zeros_like(parameter)


def sync_zero_groups(optimizer: Any, inner: torch.optim.Optimizer) -> None:
    """Copy the settings of a ZeroRedundancyOptimizer's inner optimizer to its public groups.

    Its ``load_state_dict`` ends with the same call. The public fallback is to assign each setting.
    """
    optimizer._sync_param_groups(inner.param_groups, optimizer.param_groups)


def forget_shapes(stage: Any) -> None:
    """Let a pipeline stage infer the shapes of its outputs again, for microbatches of another size.

    torch 2.11 keeps the first shapes. Later versions infer them for every new schedule. The public fallback is to make
    new stages, whose parameters no optimizer would have.
    """
    from torch.distributed.pipelining import PipelineStage

    if hasattr(PipelineStage, "_shape_inference"):
        stage.inputs_meta = stage._outputs_meta = None


def checkpoint_wrapped_(
    model: nn.Module, blocks: Collection[nn.Module], options: Callable[[nn.Module], dict[str, Any]]
) -> None:
    """Wrap blocks of a model, in place, in activation checkpointing, with options that a function returns for a block.

    The wrapper keeps the names of parameters in state dictionaries. The public ``torch.utils.checkpoint.checkpoint``
    has to be called in the model's own forward.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    # In torch 2.14 the caller chooses whether hooks, for example of save_on_cpu, get the tensors that a selective
    # policy saves. The default will change. Panther keeps the behaviour of earlier versions, where hooks do not get
    # them.
    parameters = inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    choice: dict[str, Any] = (
        {"respect_saved_tensors_hooks": False} if "respect_saved_tensors_hooks" in parameters else {}
    )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda block: checkpoint_wrapper(block, **choice, **options(block)),
        check_fn=lambda module: module in blocks,
    )


def without_fake_log() -> Block:
    """Return a block that keeps torch from logging the errors of fake tensors, which are raised as well.

    Since torch 2.14 they reach standard error. The name of the logger is private. The public fallback is the
    environment variable TORCH_LOGS, which torch reads once.
    """
    return _NO_FAKE_LOG.held()


def fake_group(ranks: int, name: str) -> "dist.ProcessGroup":
    """Return a process group of ``ranks`` ranks that sends nothing, with this process as its first rank.

    Without a default group, a fake default group of one rank is made. The public ``new_group`` needs a process for
    every rank, and torch has no public fake backend.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    # Its import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    members = list(range(dist.get_rank(), dist.get_rank() + ranks))
    group, _ = distributed_c10d._new_process_group_helper(
        ranks, 0, members, "fake", FakeStore(), distributed_c10d.GroupName(name), timeout=timedelta(minutes=1)
    )
    # DeviceMesh reads the global rank of each rank of the group.
    distributed_c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(members)}
    return group


def is_forked_from_cuda() -> bool:
    """Return whether this process was forked after its parent used the GPU, so that it cannot use the GPU.

    torch has no public function that tells it. The fallback is to use the GPU, and to read the message of the error.
    """
    return torch.cuda._is_in_bad_fork()


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let the system send this process a signal when its parent ends, as torch does for its workers.

    The public fallback is ``ctypes`` with ``prctl(PR_SET_PDEATHSIG)``, on Linux.
    """
    torch.multiprocessing._prctl_pr_set_pdeathsig(number)  # type: ignore[attr-defined]


def kill_loader_workers(loader: Any, iterator: Any, wait_s: float) -> list[int]:
    """End the worker processes of a DataLoader's iterator by SIGKILL.

    Return the numbers of the signals that ended workers before, or within ``wait_s``.

    The iterator's own method waits for a lock that a killed worker may hold, and 5 seconds for each worker that hangs.
    The public fallback is to kill the children of this process whose names begin like the names of DataLoader workers.
    """
    workers = getattr(iterator, "_workers", None)
    if not workers or getattr(iterator, "_shutdown", True):
        return []
    iterator._shutdown = True
    if iterator._worker_pids_set:  # Otherwise the end of a worker would raise here.
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    if hasattr(iterator, "_pin_memory_thread"):
        iterator._pin_memory_thread_done_event.set()
    ended = connection.wait([worker.sentinel for worker in workers], wait_s)
    for worker in workers:
        if worker.sentinel in ended:  # The system closes a process's files before it says how the process ended.
            worker.join()
    signals = [-worker.exitcode for worker in workers if not worker.is_alive() and worker.exitcode < 0]
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
        queue.close()
    if getattr(loader, "_iterator", None) is iterator:  # The loader would reuse its persistent workers.
        loader._iterator = None
    return signals


def usable_cores() -> int:
    """Return the number of cores that this process may use. torchrun divides threads by this number.

    torch 2.13 has it as ``torch._utils.cpu_count``, which torch 2.11 lacks. Python 3.13 has ``os.process_cpu_count``.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_this_host(host: str) -> bool:
    """Return whether torch considers a name or address to be this machine, which then hosts the rendezvous.

    The public fallback is to compare the addresses of ``socket.getaddrinfo``, as this function does.

    Raises:
        OSError: If the name of this machine has no address.
    """
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    return _matches_machine_hostname(host)


def worker_processes(agent: Any) -> list[Any]:
    """Return the processes that an agent of torch.distributed.elastic started last.

    torch has no public function that returns all exit codes. The agent's result only has the code of the first failure.
    """
    context = getattr(agent._pcontext, "_pc", None)
    return [] if context is None else context.processes


def worker_exit_codes(agent: Any) -> dict[int, int | None]:
    """Return the exit code of each local rank of an agent, None while it runs; see :func:`worker_processes`."""
    scripts = getattr(agent._pcontext, "subprocess_handlers", {})
    return {rank: handler.proc.poll() for rank, handler in scripts.items()} or {
        rank: process.exitcode for rank, process in enumerate(worker_processes(agent))
    }


def logs_of(agent: Any) -> Any:
    """Return the object that chooses the files of an agent's workers. The public fallback is to keep it."""
    return agent._logs_specs


def limit_closing(agent: Any, timeout_s: int, before: Callable[[Any], None]) -> None:
    """Let an agent end its workers within ``timeout_s`` once one of them has failed, whenever it has failed.

    ``before(agent)`` is called first.

    The context of the agent's functions waits 30 seconds for them. Then the agent calls ``close`` without a timeout,
    which waits 30 seconds as well. torch has no public setting for these times; the fallback is to wait. The timeout of
    the agent's own shutdown, after a signal, stays.
    """
    # Weak references: a cycle would keep the log files of the workers open until the garbage collector comes.
    context, watching_agent = weakref.proxy(agent._pcontext), weakref.proxy(agent)
    close = type(agent._pcontext).close

    def limited(death_sig: signal.Signals | None = None, timeout: int = timeout_s) -> None:
        before(watching_agent)
        close(context, death_sig, timeout)

    agent._pcontext.close = limited
    if (finished := getattr(agent._pcontext, "_worker_finished_event", None)) is not None:
        # Workers wait for this event after their results, and setting it waits for ever for one that has been killed
        # there. From a thread, the agent continues, and finds the exit code of that worker.
        set_finished = finished.set
        finished.set = lambda: threading.Thread(target=set_finished, daemon=True).start()
    processes = getattr(agent._pcontext, "_pc", None)
    if processes is not None and hasattr(processes, "_join_procs_with_timeout"):
        join, functions = type(processes)._join_procs_with_timeout, weakref.proxy(processes)
        processes._join_procs_with_timeout = lambda timeout: join(functions, min(timeout, timeout_s))


@contextmanager
def with_agent_class(agent_class: type) -> Iterator[None]:
    """Let torch's launcher of scripts create an agent of this class; it has no setting for the class.

    The public fallback is a separate launcher with WorkerSpec, a rendezvous handler and the agent's ``run``.
    """
    from torch.distributed.launcher import api

    before = api.LocalElasticAgent
    api.LocalElasticAgent = agent_class  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        api.LocalElasticAgent = before  # type: ignore[misc]


def end_workers(agent: Any, signal_number: signal.Signals, timeout_s: int) -> None:
    """Send a signal to an agent's workers, and SIGKILL to the workers that still run after the timeout.

    torch 2.11 always waits 30 seconds. Later versions have ``shutdown_timeout``, the public fallback.
    """
    if agent._pcontext is not None:
        agent._pcontext.close(signal_number, timeout_s)


def error_files(agent: Any) -> dict[int, str]:
    """Return the error file of each local rank of an agent; see :func:`worker_processes`."""
    return {} if agent._pcontext is None else agent._pcontext.error_files
