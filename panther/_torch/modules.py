"""Modules and their tensors: dictionaries, hooks, wrappers and compilation; versions, views, memory and entries.

The methods that Panther overrides are listed here too.
"""

__all__ = [
    "COMPILED", "FLAT_WEIGHTS", "MODULE_DICTIONARIES", "OVERRIDDEN_METHODS", "Alias", "apply_to_tensors",
    "base_of_view", "buffers_of", "children_of", "compiler_stance", "drawing_method", "first_infinities",
    "forward_pre_hooks_of", "has_forward_of_convolution", "has_gradient_hooks", "has_hooks", "has_packed_weights",
    "is_dynamo_loaded", "is_transformed", "is_view", "loading_code_of", "number_of_entries", "original_of_compiled",
    "parameters_of", "plain_name", "put_child", "put_module", "put_parameters", "refresh_flat_weights",
    "set_compiler_stance", "storage_key", "stored_entries", "unsafe_view", "unsaved_buffers_of", "untracked_shard",
    "version_of", "without_forward_hooks", "without_inner_wrappers",
]  # fmt: skip

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# The names under which the wrappers of torch.compile and of activation checkpointing hold their modules.
COMPILED = "_orig_mod"
_WRAPPED = (COMPILED, "_checkpoint_wrapped_module")

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
    "_start_workers": "limit how long the end of the workers takes, and pass on signals",
    # FlopCounterMode calls this method once for each operation, after composite operations are decomposed. The fallback
    # is a TorchDispatchMode, which sees composite operations as well.
    "_count_flops": "count the bytes that each operation moves",
}
"""Methods of torch's classes that Panther overrides, with the purpose of each."""

MODULE_DICTIONARIES = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
"""Attributes of a module that a shallow copy shares with the original. ``copy.deepcopy`` would copy the weights too."""

FLAT_WEIGHTS = "_flat_weights"
"""Attribute of nn.LSTM and similar modules; see :func:`refresh_flat_weights`."""


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

    The hook of every compressed layer, which keeps its own forward, does not count, and neither do the hooks that
    transformers leaves on modules after a forward that returned hidden states. torch has no public function that
    returns hooks.
    """
    tables = [module._forward_hooks, module._backward_hooks, module._backward_pre_hooks]
    if not beside_forward_pre:
        tables.append(module._forward_pre_hooks)
    ignored = ("transformers.utils.output_capturing", "panther.nn.protocol")
    return any(
        table and any(getattr(hook, "__module__", None) not in ignored for hook in table.values()) for table in tables
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


def has_packed_weights(module: nn.Module) -> bool:
    """Return whether torch.ao has quantized a module. The public fallback is a list of its about thirty classes."""
    return "quantized" in type(module).__module__ and hasattr(module, "_packed_params")


def original_of_compiled(model: nn.Module) -> nn.Module | None:
    """Return the model inside of torch.compile's wrapper; None for other models. Its name is not public."""
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else None


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
