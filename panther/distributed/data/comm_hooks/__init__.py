"""Compression of gradients before they are sent."""

from .registration import (
    DEFAULTS,
    HOOKS,
    REPLICA_HOOKS,
    check_hook,
    check_replica_hook,
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
    "REPLICA_HOOKS",
    "check_hook",
    "check_replica_hook",
    "follow_loss_scale",
    "hold_group",
    "hook_state",
    "load_hook_state",
    "register_hook",
    "register_replica_hook",
]
