"""Hashes of models and batches: what must be the same after an evaluation, and in a study that is continued."""

__all__ = ["difference", "fingerprint", "identity"]

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from panther.tuning.goal import Goal
from panther.tuning.prepared import Settings
from panther.tuning.spaces.layers import Line

_LONG = 80  # characters of a space, beyond which its beginning and a hash stand for it


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return what an evaluation may not change, by name: the modules, and the bits of tensors."""
    found: dict[str, Any] = {f"module {name!r}": id(module) for name, module in model.named_modules()}
    found |= {f"parameter {name!r}": _hash(parameter) for name, parameter in model.named_parameters()}
    return found | {f"buffer {name!r}": _hash(buffer) for name, buffer in model.named_buffers()}


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the first name by which two fingerprints differ, "" if they are the same."""
    return next((name for name in {**after, **before} if before.get(name) != after.get(name)), "")


def identity(
    model: nn.Module,
    calibration: Any,
    goal: Goal,
    lines: Sequence[Line] | None,
    settings: Settings,
    repeats: int,
    heal: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return what must be the same in a study that is continued, in words."""
    tensors = [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    space = "auto" if lines is None else "; ".join(f"{line.label} {dict(line.specs) or 'auto'}" for line in lines)
    if heal is not None:
        space += f"; heal {dict(heal)}"
    forms = settings.forms
    return {
        "objective": goal.name,
        "constraint": " and ".join(one.text for one in goal.constraints) or "none",
        "direction": "maximize" if goal.higher_is_better else "minimize",
        "space": space if len(space) <= _LONG else f"{space[:_LONG]}... ({zlib.crc32(space.encode()):08x})",
        "forms": " ".join(forms.names),
        "layers": f"of rank_multiple {forms.rank_multiple}, group_size {forms.group_size}, activations "
        f"{forms.activations}",
        "repeats": str(repeats),
        "model": f"{type(model).__name__} {_checksum(tensors):08x}",
        "calibration": "none" if calibration is None else _batches(calibration),
    }


def _batches(calibration: Any) -> str:
    """Return the number of batches, and a hash of the tensors of those that are at hand, as a list's are."""
    if not isinstance(calibration, Sequence):
        return f"a {type(calibration).__name__}"
    leaves = [
        leaf for batch in calibration for leaf in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    ]
    return f"{len(calibration)} batches {_checksum(enumerate(leaves)):08x}"


def _checksum(entries: Iterable[tuple[Any, Any]]) -> int:
    found = 0
    for name, value in entries:
        shown = _hash(value) if isinstance(value, Tensor) else value
        found = zlib.crc32(f"{name} {shown}".encode(), found)
    return found


def _hash(tensor: Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, device and a hash of the bits, in one pass over the memory."""
    value = tensor.detach()
    bits = torch.hash_tensor(value).view(torch.int64).item() if value.numel() and not value.is_meta else 0
    return tuple(value.shape), str(value.dtype), str(value.device), bits
