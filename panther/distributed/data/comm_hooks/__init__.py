"""Compression of gradients before they are sent."""

from .registration import (
    DEFAULTS,
    HOOKS,
    check_hook,
    follow_loss_scale,
    hold_group,
    hook_state,
    load_hook_state,
    register_hook,
    register_replica_hook,
)

__all__ = [
    "DEFAULTS",
    "HOOKS",
    "check_hook",
    "follow_loss_scale",
    "hold_group",
    "hook_state",
    "load_hook_state",
    "register_hook",
    "register_replica_hook",
]
