"""The projections of an optimizer's gradients, for the communication hook that sends nothing else of a matrix."""

__all__ = ["projection_of"]

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from panther.optim.sketched_checks import is_sketched
from panther.optim.sketched_update import columns_of, projection_seed

if TYPE_CHECKING:
    from panther.distributed.data.comm_hooks.projected import Projection
    from panther.optim.sketched_adamw import SketchedAdamW


def projection_of(optimizer: "SketchedAdamW", p: Tensor) -> "Projection | None":
    """Return the projection of the next step of a parameter; None if its update needs the whole gradient."""
    from panther.distributed.data.comm_hooks.projected import Projection
    from panther.optim.shards import layout_of

    place = next(
        (
            (number, index)
            for number, group in enumerate(optimizer.param_groups)
            if group["update"] == "projected"
            for index, q in enumerate(group["params"])
            if q is p
        ),
        None,
    )
    if place is None:
        return None
    name, _, group = optimizer.entry(*place)
    if not is_sketched(p, group):
        return None
    is_transposed, _, columns = columns_of(p, layout_of(p))
    steps_done = int(optimizer.state[p]["step"]) if optimizer.state.get(p) else 0
    seed = projection_seed(name, group["seed"], steps_done // group["period"])
    dtype = torch.promote_types(p.dtype, torch.float32)
    P = optimizer.period_signs.matrix(name, seed, group["rank"], columns, dtype=dtype, device=p.device)
    source = f"{name}, seed {group['seed']}, period {group['period']}"
    return Projection(P.mul_(group["rank"] ** -0.5), is_transposed, source)
