"""What SketchedAdamW refuses: settings, shapes, and saved moments of other matrices."""

__all__ = [
    "check_group_settings",
    "check_moments",
    "check_saved_moments",
    "check_sketch",
    "is_sketched",
    "plain_name",
]

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from panther.errors import CheckpointError, ShapeError, check_flag, check_size
from panther.optim.sketched_update import UPDATES

# Under these names wrappers hold a module: DistributedDataParallel, DataParallel and AveragedModel, torch.compile,
# activation checkpointing, the older FSDP, and Lightning Fabric.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
_OTHER_SETTINGS = {
    "update_proj_gap": "period= takes its value",
    "scale": "updates have the size of Adam's at the same lr, so leave it out",
    "scale_type": "update='channel' or 'tensor' takes its value",
    "proj": "projections have random signs, so leave it out",
    "proj_type": "projections act on the shorter side, so leave it out",
}
"""What to do with settings of GaLore and APOLLO."""


def plain_name(name: str) -> str:
    """Return the name of a parameter without the parts that wrappers add, and without modules that are named so.

    A model may have an attribute ``module`` of its own. Every layout has its name, whatever wraps the model there, so
    the name loses this part in every layout.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_sketched(p: Tensor, group: Mapping[str, Any]) -> bool:
    """Return whether the moments of a parameter are sketches, as those of real matrices in groups with a rank are."""
    return group["rank"] is not None and p.dim() == 2 and p.numel() > 0 and not p.is_complex()


def check_group_settings(group: Mapping[str, Any]) -> None:
    """Raise an error if a setting of a group is out of range, or belongs to GaLore or APOLLO."""
    for key, advice in _OTHER_SETTINGS.items():
        if key in group:
            raise ValueError(f"a group has {key}={group[key]!r}, and SketchedAdamW has no such setting: {advice}")
    if group["update"] not in UPDATES:
        raise ValueError(f"update={group['update']!r} must be one of {', '.join(map(repr, UPDATES))}")
    check_size("period", group["period"], least=1)
    check_flag("bf16_stochastic_round", group["bf16_stochastic_round"])
    if group["rank"] is not None:
        check_size("rank", group["rank"], least=1)


def check_sketch(name: str, p: Tensor, group: Mapping[str, Any]) -> None:
    """Raise ShapeError if the rank is above the shorter side of a matrix."""
    if is_sketched(p, group) and group["rank"] > min(p.shape):
        raise ShapeError(
            f"rank={group['rank']} is above the shorter side of {name}, of shape {tuple(p.shape)}: give a smaller "
            "rank, or a group with rank=None, as panther.optim.sketched_param_groups does"
        )


def check_moments(name: str, p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raise ShapeError if the parameter has changed its shape."""
    moment = state.get("sketch_avg", state.get("exp_avg"))
    if moment is not None and tuple(moment.shape) != _moment_shape(p, group):
        raise ShapeError(
            f"the moments of {name} have the shape {tuple(moment.shape)}, and with its shape {tuple(p.shape)} and "
            f"rank={group['rank']} they have the shape {_moment_shape(p, group)}: make a new optimizer after a change "
            "of either"
        )


def check_saved_moments(name: str, p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless saved moments fit a parameter with the settings of the saved group."""
    for key in ("sketch_avg", "sketch_avg_sq", "exp_avg", "exp_avg_sq"):
        if key in state and tuple(state[key].shape) != _moment_shape(p, group):
            raise CheckpointError(
                f"{key} of {name} in the state has the shape {tuple(state[key].shape)}, and with rank={group['rank']} "
                f"and the parameter's shape {tuple(p.shape)} it has the shape {_moment_shape(p, group)}: load the "
                "state of the same model"
            )


def _moment_shape(p: Tensor, group: Mapping[str, Any]) -> tuple[int, ...]:
    if not is_sketched(p, group):
        return tuple(p.shape)
    return (p.shape[0], group["rank"]) if p.shape[0] >= p.shape[1] else (group["rank"], p.shape[1])
