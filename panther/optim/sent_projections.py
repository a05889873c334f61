"""The projections of an optimizer's gradients, for the communication hook that sends nothing else of a matrix."""

__all__ = ["register_projections"]

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from panther.optim.sketched_update import columns_of, projection_seed

if TYPE_CHECKING:
    from panther.distributed.data.comm_hooks.projected import Projection
    from panther.optim.sketched_adamw import SketchedAdamW


def register_projections(optimizer: "SketchedAdamW", group: dict[str, Any], names: Sequence[str]) -> None:
    """Let ``comm_hook="projected"`` send the projections of a group's matrices, if its update needs nothing else."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from panther.distributed.data.comm_hooks.projected import PROJECTIONS

    # The table refers weakly to its keys, so its values must not hold the optimizer, which holds the parameters.
    reference = weakref.ref(optimizer)
    for name, p in zip(names, group["params"], strict=True):
        if group["rank"] is not None and p.dim() == 2 and p.numel() > 0:
            PROJECTIONS[p] = partial(_projection_of, reference, weakref.ref(p), name)


def _projection_of(
    optimizer_reference: "weakref.ref[SketchedAdamW]", parameter_reference: "weakref.ref[Tensor]", name: str
) -> "Projection | None":
    """Return the projection of the next step of a matrix; None if its update needs the whole gradient."""
    from panther.distributed.data.comm_hooks.projected import Projection
    from panther.optim.shards import layout_of

    optimizer, p = optimizer_reference(), parameter_reference()
    if optimizer is None or p is None:
        return None
    group = next((group for group in optimizer.param_groups if any(p is q for q in group["params"])), None)
    if group is None or group["update"] != "projected":
        return None
    is_transposed, _, columns = columns_of(p, layout_of(p))
    steps_done = int(optimizer.state[p]["step"]) if optimizer.state.get(p) else 0
    seed = projection_seed(name, group["seed"], steps_done // group["period"])
    dtype = torch.promote_types(p.dtype, torch.float32)
    P = optimizer.period_signs.matrix(name, seed, group["rank"], columns, dtype=dtype, device=p.device)
    return Projection(P.mul_(group["rank"] ** -0.5), is_transposed)
