"""What trains in parallel: DDP, FSDP2, ZeRO, stages of a pipeline, and activation checkpointing."""

__all__ = [
    "before_fsdp", "checkpoint_wrapped_", "forget_shapes", "fsdp_shards", "ignore_in_ddp", "ignored_in_ddp",
    "sync_zero_groups", "unreduced_positions", "watch_fsdp_unit",
]  # fmt: skip

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn


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
