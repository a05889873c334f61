"""Compression of DDP's gradients before they are sent: torch's communication hooks, and top-k, by name."""

__all__ = [
    "HOOKS",
    "check_hook",
    "follow_loss_scale",
    "hold_group",
    "hook_state",
    "load_hook_state",
    "register_hook",
]

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from panther._setting_names import value_hint
from panther.distributed.data.error_feedback import PowerSGD, TopK
from panther.errors import check_size

HOOKS = ("fp16", "bf16", "powersgd", "topk")
_RANK, _START_STEP, _FRACTION = 4, 10, 0.01  # defaults of a hook's settings
_HOOK_OF = {"powersgd_rank": "powersgd", "powersgd_start_step": "powersgd", "topk_fraction": "topk"}

_groups_with_hooks: set[dist.ProcessGroup] = set()
_states: WeakKeyDictionary[DistributedDataParallel, Any] = WeakKeyDictionary()
"""The states that the hooks of models keep between steps."""


def hold_group(group: dist.ProcessGroup) -> None:
    """Keep the group of a communication hook alive until the process ends. Call it for every registered hook.

    A hook's last futures hold its group, and are freed on gloo's own thread. If they held the last reference, this
    thread would destroy the group, wait for itself, and abort the process.
    """
    _groups_with_hooks.add(group)


def check_hook(name: str | None, settings: dict[str, Any]) -> None:
    """Raise ValueError or TypeError if a hook is unknown, or a setting is out of range or belongs to another hook."""
    if name is not None and name not in HOOKS:
        raise ValueError(f"comm_hook={name!r} is unknown: {value_hint('comm_hook', name, (*HOOKS, None))}")
    for key, value in settings.items():
        if value is None:
            continue
        if name != _HOOK_OF[key]:
            raise ValueError(f"{key}={value} needs comm_hook={_HOOK_OF[key]!r}, not {name!r}: set both")
        if key != "topk_fraction":
            check_size(key, value, least=1 if key == "powersgd_rank" else 2)  # in its first step DDP forms its buckets
        elif not isinstance(value, int | float) or not 0 < value <= 1:
            raise ValueError(f"topk_fraction={value!r} must be a number above 0 and at most 1")


def register_hook(parallel: DistributedDataParallel, name: str, settings: dict[str, Any]) -> None:
    """Register a hook by its name; None as a setting is its default."""
    state: Any = parallel.process_group
    hold_group(state)
    hook: Any = {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16_hook}.get(name)
    if name == "powersgd":
        rank, start_step = settings["powersgd_rank"] or _RANK, settings["powersgd_start_step"] or _START_STEP
        state = _states[parallel] = PowerSGD(state, rank, start_step)
        hook = PowerSGD.send
    elif name == "topk":
        state = _states[parallel] = TopK(state, settings["topk_fraction"] or _FRACTION)
        hook = TopK.send
    parallel.register_comm_hook(state, hook)


def follow_loss_scale(model: nn.Module, scale: Callable[[], Tensor]) -> None:
    """Give a hook with error feedback a function that returns the loss scale, a tensor on the model's device."""
    if isinstance(model, DistributedDataParallel) and model in _states:
        _states[model].loss_scale = scale


def hook_state(model: nn.Module | list[nn.Module]) -> dict[str, Any] | None:
    """Return the state of a model's hook on this rank, for checkpoints; None if the hook has no state.

    Without it, a resumed run would lose the entries that were not sent yet, up to a few gradients.
    """
    if not isinstance(model, DistributedDataParallel) or model not in _states:
        return None
    return {type(_states[model]).__name__: _states[model].state_dict(model.module)}


def load_hook_state(model: nn.Module | list[nn.Module], saved: dict[str, Any] | None) -> None:
    """Load the result of :func:`hook_state`; the hook is reset if this is None or the state of a different hook.

    PowerSGD stores its state by the buckets that DDP forms after its first step, so that this step must come before.
    """
    if isinstance(model, DistributedDataParallel) and model in _states:
        _states[model].load_state_dict(model.module, (saved or {}).get(type(_states[model]).__name__))


def _bf16_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's hook; DDP refuses the original by its name on gloo, although gloo can sum bfloat16."""
    return default_hooks.bf16_compress_hook(group, bucket)
