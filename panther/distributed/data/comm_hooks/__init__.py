"""Compression of gradients before they are sent: communication hooks by name."""

__all__ = ["DEFAULTS", "HOOKS", "check_hook", "hook_state", "load_hook_state", "register_hook", "register_replica_hook"]

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from panther._hints import value_hint
from panther.distributed.data.comm_hooks.powersgd import PowerSGD
from panther.distributed.data.comm_hooks.replicas import reduce_over_replicas
from panther.distributed.data.comm_hooks.sketch import Sketch
from panther.errors import check_size

HOOKS = ("fp16", "bf16", "powersgd", "sketch")
DEFAULTS: dict[str, Any] = {"powersgd_rank": 4, "powersgd_start_step": 10, "sketch_fraction": 0.1}
"""The settings of hooks, which begin with the names of their hooks, and the value that None stands for."""

_states: WeakKeyDictionary[nn.Module, PowerSGD | Sketch] = WeakKeyDictionary()
"""The states that the hooks of wrapped or sharded models keep between steps."""

_groups_with_hooks: set[dist.ProcessGroup] = set()


def check_hook(name: str | None, settings: dict[str, Any]) -> None:
    """Raise ValueError or TypeError if a hook is unknown, or a setting is out of range or belongs to another hook."""
    if name is not None and name not in HOOKS:
        raise ValueError(f"comm_hook={name!r} is unknown: {value_hint('comm_hook', name, (*HOOKS, None))}")
    for key, value in settings.items():
        if value is None:
            continue
        hook = key.partition("_")[0]
        if name != hook:
            raise ValueError(f"{key}={value} needs comm_hook={hook!r}, not {name!r}: set both")
        if not key.endswith("_fraction"):
            check_size(key, value, least=1 if key == "powersgd_rank" else 2)  # in its first step DDP forms its buckets
        elif not isinstance(value, int | float) or not 0 < value <= 1:
            raise ValueError(f"{key}={value!r} must be a number above 0 and at most 1")


def register_hook(parallel: DistributedDataParallel, name: str, settings: dict[str, Any]) -> None:
    """Register a hook of DDP by its name; None as a setting is its default."""
    parallel.register_comm_hook(*_state_and_hook(parallel, name, settings, parallel.process_group))


def register_replica_hook(model: nn.Module, name: str, settings: dict[str, Any], mesh: DeviceMesh) -> None:
    """Register a hook between the replicas of a model that is sharded along the second axis of the mesh."""
    state, hook = _state_and_hook(model, name, settings, mesh.get_group(0))
    reduce_over_replicas(model, partial(hook, state))


def _state_and_hook(model: nn.Module, name: str, settings: dict[str, Any], group: dist.ProcessGroup) -> tuple[Any, Any]:
    # A hook's last futures hold its group, and are freed on gloo's own thread. If they held the last reference, this
    # thread would destroy the group, wait for itself, and abort the process.
    _groups_with_hooks.add(group)
    values = {key: settings[key] or default for key, default in DEFAULTS.items()}
    state: PowerSGD | Sketch
    if name == "powersgd":
        state = PowerSGD(group, values["powersgd_rank"], values["powersgd_start_step"])
    elif name == "sketch":
        state = Sketch(group, values["sketch_fraction"])
    else:
        return group, {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16_hook}[name]
    _states[model] = state
    return state, type(state).send


def hook_state(model: nn.Module | list[nn.Module]) -> dict[str, Any] | None:
    """Return the state of a model's hook on this rank, for checkpoints; None if the hook has no state."""
    if isinstance(model, list) or model not in _states:
        return None
    return {type(_states[model]).__name__: _states[model].state_dict(_inner(model))}


def load_hook_state(model: nn.Module | list[nn.Module], saved: dict[str, Any] | None) -> None:
    """Load the result of :func:`hook_state`; the hook is reset if this is None or the state of a different hook.

    PowerSGD stores its state by the buckets that DDP forms after its first step, so that this step must come before.
    """
    if not isinstance(model, list) and model in _states:
        _states[model].load_state_dict(_inner(model), (saved or {}).get(type(_states[model]).__name__))


def _inner(model: nn.Module) -> nn.Module:
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def _bf16_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's hook; DDP refuses the original by its name on gloo, although gloo can sum bfloat16."""
    return default_hooks.bf16_compress_hook(group, bucket)
