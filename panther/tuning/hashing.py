"""Hashes of models and batches, which must not change in an evaluation or in a resumed study."""

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
from panther.compression.calibration.targets import select_targets
from panther.tuning.goal import Goal
from panther.tuning.prepared import Settings
from panther.tuning.spaces.layers import Line

_LONG = 80  # An entry with more characters is replaced by its beginning and a hash.
_BLOCK = 1 << 20  # bytes that are hashed at once on a device
_ODD = 0x2545F4914F6CDD1D  # the multiplier of xorshift64*, S. Vigna, arXiv:1402.6246
_PLAIN = (str, bytes, int, float, bool, type(None))


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return the values that a user's function must not change, by name.

    They are the modules, forwards that are set on modules, hooks, hashes of tensors, and which parameters are trained.
    """
    entries: dict[str, Any] = {}
    for name, module in model.named_modules():
        attributes, label = vars(module), f"module {name!r}" if name else "the model"
        entries[label] = id(module)
        if not isinstance(module, torch.jit.ScriptModule):  # It sets its forward in the first call.
            entries[f"forward of {label}"] = id(attributes.get("forward"))
        # In torch the names of all tables of hooks end so. The keys are unique in a process.
        entries[f"hooks of {label}"] = [
            (key, *table) for key, table in attributes.items() if key.endswith("_hooks") and isinstance(table, Mapping)
        ]
    for name, parameter in model.named_parameters():
        entries[f"parameter {name!r}"] = _hash(parameter)
        entries[f"requires_grad of parameter {name!r}"] = parameter.requires_grad
    return entries | {f"buffer {name!r}": _hash(buffer) for name, buffer in model.named_buffers()}


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the first name in which two fingerprints differ, or "" if they are equal."""
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
    """Describe the properties of a search that must not change when its study is resumed."""
    tensors = [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    space = "auto" if lines is None else "; ".join(map(_line, lines))
    if heal is not None:
        space += f"; heal {dict(heal)}"
    forms = settings.forms
    survey = select_targets(model, settings.include, settings.exclude, smallest=forms.smallest_bytes)
    layers = " ".join(target.name for target in survey.targets) or "none"
    return {
        "objective": goal.name,
        "constraint": " and ".join(constraint.text for constraint in goal.constraints) or "none",
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
    """Return the bytecode, names and constants of a function, without addresses and line numbers."""
    constants = [_code(constant) if isinstance(constant, CodeType) else constant for constant in code.co_consts]
    return [code.co_code, code.co_names, [constant for constant in constants if isinstance(constant, (*_PLAIN, list))]]


def _line(line: Line) -> str:
    names = "" if line.names == (line.label,) else f" ({' '.join(line.names)})"
    return f"{line.label}{names} {dict(line.specs) or 'auto'}"


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({zlib.crc32(text.encode()):08x})"


def _batches(calibration: Any) -> str:
    """Return the number of batches and a hash of their tensors, or only the type if the batches are no sequence."""
    if not isinstance(calibration, Sequence):
        return f"a {type(calibration).__name__}"
    leaves = [
        leaf for batch in calibration for leaf in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    ]
    return f"{len(calibration)} batches {_checksum(enumerate(leaves)):08x}"


def _checksum(entries: Iterable[tuple[Any, Any]]) -> int:
    checksum = 0
    for name, value in entries:
        content = _hash(value) if isinstance(value, Tensor) else value
        checksum = zlib.crc32(f"{name} {content}".encode(), checksum)
    return checksum


def _hash(tensor: Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, device and a hash of the memory."""
    if is_lazy(tensor):
        return (str(tensor.dtype), str(tensor.device))
    value = tensor.detach()
    about = tuple(value.shape), str(value.dtype), str(value.device)
    if not value.numel() or value.is_meta:
        return about
    try:
        bits = value.contiguous().view(-1).view(torch.uint8)
        memory: Any = bits.numpy() if bits.is_cpu else None
        return *about, hash_on_device(bits) if memory is None else zlib.crc32(memory)
    except (RuntimeError, TypeError, NotImplementedError):  # a subclass of Tensor with another kind of memory
        return *about, version_of(tensor)


def hash_on_device(bits: Tensor) -> int:  # (n) uint8
    """Return a hash of bytes, computed on their device: a sum of products with weights that depend on the position."""
    weights = _weights(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for block in bits.split(_BLOCK):
        total = total * _ODD + (block * weights[: len(block)]).sum()
    return int(total.item())


@functools.cache
def _weights(device: torch.device) -> Tensor:
    x = torch.arange(1, _BLOCK + 1, device=device) * _ODD
    return (x ^ (x >> 32)) * _ODD | 1
