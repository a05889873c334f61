"""Hashes of models and batches: what must be the same after an evaluation, and in a study that is continued."""

__all__ = ["difference", "fingerprint", "identity"]

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther._torch import tree_leaves, version_of
from panther.compression.targets import select_targets
from panther.tuning.goal import Goal
from panther.tuning.prepared import Settings
from panther.tuning.spaces.layers import Line

_LONG = 80  # characters of an entry, beyond which its beginning and a hash stand for it
_BLOCK = 1 << 20  # bytes that are hashed at once on a device
_ODD = 0x2545F4914F6CDD1D  # multiplies well: the multiplier of xorshift64*, S. Vigna, arXiv:1402.6246
_PLAIN = (str, bytes, int, float, bool, type(None))


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return what the user's functions may not change, by name.

    These are the modules, a forward that is set on one, hooks, the bits of tensors, and which parameters are trained.
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        own, label = vars(module), f"module {name!r}" if name else "the model"
        found[label] = id(module)
        if not isinstance(module, torch.jit.ScriptModule):  # which sets its forward when it is first called
            found[f"forward of {label}"] = id(own.get("forward"))
        # Every table of hooks, by torch's naming; their keys are unique in a process.
        found[f"hooks of {label}"] = [
            (key, *table) for key, table in own.items() if key.endswith("_hooks") and isinstance(table, Mapping)
        ]
    for name, parameter in model.named_parameters():
        found[f"parameter {name!r}"] = _hash(parameter)
        found[f"requires_grad of parameter {name!r}"] = parameter.requires_grad
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
    space = "auto" if lines is None else "; ".join(map(_line, lines))
    if heal is not None:
        space += f"; heal {dict(heal)}"
    forms = settings.forms
    survey = select_targets(model, settings.include, settings.exclude, smallest=forms.smallest_bytes)
    layers = " ".join(target.name for target in survey.targets) or "none"
    return {
        "objective": goal.name,
        "constraint": " and ".join(one.text for one in goal.constraints) or "none",
        "direction": "maximize" if goal.higher_is_better else "minimize",
        "space": _short(space),
        "forms": " ".join(forms.names),
        "layers": _short(layers),
        "settings": f"rank_multiple {forms.rank_multiple}, group_size {forms.group_size}, activations "
        f"{forms.activations}",
        **{name: function_name(getattr(settings, name)) for name in ("forward_fn", "loss_fn", "mask_fn")},
        "repeats": str(repeats),
        "model": f"{type(model).__name__} {_checksum(tensors):08x}",
        "calibration": "none" if calibration is None else _batches(calibration),
    }


def function_name(function: Callable[..., Any] | None) -> str:
    """Return the name of a function, with a hash of its code, because all lambdas have the same name."""
    if function is None:
        return "none"
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return name if code is None else f"{name} {zlib.crc32(repr(_code(code)).encode()):08x}"


def _code(code: CodeType) -> list[Any]:
    """Return what a function does, without addresses and places in files."""
    constants = [_code(one) if isinstance(one, CodeType) else one for one in code.co_consts]
    return [code.co_code, code.co_names, [one for one in constants if isinstance(one, (*_PLAIN, list))]]


def _line(line: Line) -> str:
    names = "" if line.names == (line.label,) else f" ({' '.join(line.names)})"
    return f"{line.label}{names} {dict(line.specs) or 'auto'}"


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({zlib.crc32(text.encode()):08x})"


def _batches(calibration: Any) -> str:
    """Return the number of batches, and a hash of the tensors of the batches that are available, as a list's are."""
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
    """Return shape, dtype, device and a hash of the bits in their order, in one pass over the memory."""
    if is_lazy(tensor):
        return (str(tensor.dtype), str(tensor.device))
    value = tensor.detach()
    about = tuple(value.shape), str(value.dtype), str(value.device)
    if not value.numel() or value.is_meta:
        return about
    try:
        bits = value.contiguous().view(-1).view(torch.uint8)
        memory: Any = bits.numpy() if bits.is_cpu else None
        return *about, mixed(bits) if memory is None else zlib.crc32(memory)
    except (RuntimeError, TypeError, NotImplementedError):  # a subclass of Tensor, whose memory is its own
        return *about, version_of(tensor)


def mixed(bits: Tensor) -> int:  # (n) uint8
    """Return a hash of bytes that is computed where they are: products with weights that depend on the position."""
    weights = _weights(bits.device)
    found = torch.zeros((), dtype=torch.int64, device=bits.device)
    for block in bits.split(_BLOCK):
        found = found * _ODD + (block * weights[: len(block)]).sum()
    return int(found.item())


@functools.cache
def _weights(device: torch.device) -> Tensor:
    x = torch.arange(1, _BLOCK + 1, device=device) * _ODD
    return (x ^ (x >> 32)) * _ODD | 1
