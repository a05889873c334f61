"""Descriptions of settings, functions and objects, which are equal in every process where these are equal."""

__all__ = ["describe_function", "describe_value", "digest", "digest_of_tensors"]

import enum
import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_RANK_NAMES = ("device", "rank", "local_rank", "training")  # attributes that may differ between ranks
_PLAIN = (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.Size)
_KINDS = (*_PLAIN, Tensor, np.ndarray, list, tuple, set, frozenset, dict, functools.partial, nn.Module)
_SLOT = types.MemberDescriptorType
_OF_MODULES = frozenset(vars(nn.Module()))
_STANDARD = sys.stdlib_module_names - {"__main__", "types", "functools"}
_DEPTH, _WHOLE_DEPTH = 3, 7  # levels of objects in objects that are compared
_ITEMS = 16  # number of items that are compared at both ends of a long list
_BYTES = 1 << 16  # number of bytes that are compared at both ends of a large tensor


def describe_function(function: Callable[..., Any] | None) -> str:
    """Return a text that is equal in every run for equal functions, and differs where functions differ.

    What :func:`describe_value` describes counts, and also global variables, the methods of a class, private attributes
    with plain values, and all values of modules and tensors. Unseen are the code of libraries, objects in private
    attributes, and what a function reads from files or as attributes of modules.
    """
    return "none" if function is None else describe_value(function, _WHOLE_DEPTH, is_whole=True)


def describe_value(
    value: Any, depth: int = _DEPTH, *, is_whole: bool = False, described: dict[int, tuple[int, Any]] | None = None
) -> str:
    """Return a text that is equal in every process for equal plain values, functions and objects.

    An object is described by its type and public attributes, down to ``depth`` levels, a function by its name, code,
    defaults and enclosed variables, a tensor by a digest. With ``is_whole`` everything counts as in
    :func:`describe_function`, also what may differ between ranks; ``described`` then has the objects so far, by their
    id.
    """
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {tuple(value.shape)} with the digest {_digest_of(value, is_whole)}"
    name = type(value).__qualname__
    if isinstance(value, type):
        return value.__qualname__ + (_code_of_class(value) if is_whole else "")
    if depth == 0:
        return name
    if is_whole:
        described = {} if described is None else described
        if described.get(id(value), (0, None))[0] >= depth:
            return name
        described[id(value)] = depth, value
    inner = functools.partial(describe_value, depth=depth - 1, is_whole=is_whole, described=described)
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{key!r}: {inner(item)}" for key, item in value.items())) + "}"
    if isinstance(value, list | tuple):
        is_short = is_whole or len(value) <= 2 * _ITEMS
        return "[" + ", ".join(map(inner, value if is_short else (*value[:_ITEMS], len(value), *value[-_ITEMS:]))) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    if isinstance(value, types.MethodType):
        return f"{inner(value.__func__)} of {inner(value.__self__)}"
    if isinstance(value, types.FunctionType):
        settings: list[tuple[Any, Any]] = [*_settings_of(value, is_whole)]
        name = f"{value.__qualname__} with the digest {digest(_describe_code(value.__code__).encode())}"
    elif isinstance(value, functools.partial):
        name, settings = "partial", [("function", value.func), ("args", value.args), *value.keywords.items()]
    elif isinstance(value, types.ModuleType):
        return value.__name__
    elif isinstance(value, nn.Module) and not is_whole and depth < _DEPTH:
        return name  # it may be the model, whose buffers may differ before it is distributed
    else:
        settings = [*_attributes(value, is_whole)]
        if isinstance(value, nn.Module):
            settings += _content_of_module(value, is_whole)
        elif callable(value) and not settings and hasattr(value, "__name__"):  # a built-in function, or a method of one
            owner = getattr(value, "__self__", None)
            name = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', value.__name__)}"
            settings = [] if owner is None or isinstance(owner, types.ModuleType) else [("of", owner)]
        elif not settings and (is_whole or not isinstance(value, torch.device | os.PathLike)):
            text = repr(value)  # of a path or a range, for example; an address differs in every process
            name = name if "<" in text else text
        name += _code_of_class(type(value)) if is_whole else ""
    return f"{name}({', '.join(f'{key}={inner(item)}' for key, item in settings)})" if settings else name


def _attributes(value: Any, is_whole: bool) -> Iterable[tuple[str, Any]]:
    """Yield the attributes of an object, except for those of nn.Module itself and those that may differ by rank."""
    bases = [kind for kind in type(value).__mro__ if _library(kind) not in _STANDARD]
    slots = [
        name for kind in bases for name, slot in vars(kind).items() if isinstance(slot, _SLOT) and name[:2] != "__"
    ]
    for name in dict.fromkeys([*slots, *(getattr(value, "__dict__", {}) if type(value) in bases else ())]):
        if name.strip("_") in _RANK_NAMES or (isinstance(value, nn.Module) and name in _OF_MODULES):
            continue
        item = getattr(value, name, None)
        # Private attributes may be caches and locks: only plain values, containers and modules count.
        if not name.startswith("_") or (is_whole and (name == "__wrapped__" or isinstance(item, _KINDS))):
            yield name, item


def _content_of_module(module: nn.Module, is_whole: bool) -> Iterable[tuple[str, Any]]:
    """Yield the tensors of a module, and its submodules."""
    yield from module.named_buffers(recurse=not is_whole)
    for name, parameter in module.named_parameters(recurse=not is_whole):
        yield name, parameter if is_whole else f"{parameter.dtype} {tuple(parameter.shape)}"
    if is_whole:
        yield from module.named_children()


def _settings_of(function: types.FunctionType, is_whole: bool) -> Iterable[tuple[Any, Any]]:
    """Yield the defaults and enclosed variables of a function; of a whole one also attributes and global variables."""
    code = function.__code__
    yield from enumerate(function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            yield name, "not assigned"
    if is_whole:
        yield from ((name, item) for name, item in vars(function).items() if name != "__wrapped__")
        for name in sorted(_names_of(code) & function.__globals__.keys()):
            item = function.__globals__[name]
            if isinstance(item, _KINDS) or getattr(item, "__module__", None) == function.__module__:
                yield name, item


def _names_of(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_of(item) for item in code.co_consts if isinstance(item, types.CodeType)))


def _code_of_class(kind: type) -> str:
    """Return a digest of the methods of a class that is not a library's."""
    bases = [base for base in kind.__mro__ if _library(base) not in _STANDARD | {"torch", "numpy"}]
    members = [member for base in bases for member in vars(base).values()]
    functions = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in members]
    codes = [_describe_code(each.__code__) for each in functions if isinstance(each, types.FunctionType)]
    return f" with the digest {digest(''.join(codes).encode())}" if codes else ""


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _describe_code(code: types.CodeType) -> str:
    """Return the instructions and constants of a function, without file names and line numbers."""
    constants = []
    for item in code.co_consts:
        # The order of a set of strings differs between processes.
        plain = sorted(map(repr, item)) if isinstance(item, frozenset) else repr(item)
        constants.append(_describe_code(item) if isinstance(item, types.CodeType) else plain)
    return repr((code.co_code, code.co_names, code.co_varnames, constants))


def digest_of_tensors(values: Iterable[Any]) -> int:
    """Return a digest of the tensors among some values, of large ones of both ends. Other values do not count."""
    digests = [_digest_of(value) for value in values if isinstance(value, Tensor)]
    return int(digest("".join(digests).encode()), 16)


def _digest_of(array: Any, is_whole: bool = False) -> str:
    if isinstance(array, Tensor):
        if array.is_meta or array.layout != torch.strided or array.is_quantized:
            return "unknown"
        flat = array.detach().reshape(-1)
        count = _BYTES // array.element_size()
        # The ends are taken before they are copied from a GPU.
        flat = flat if is_whole or len(flat) <= 2 * count else torch.cat([flat[:count], flat[-count:]])
        return digest(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if array.dtype.hasobject:
        return "unknown"
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    is_short = is_whole or len(data) <= 2 * _BYTES
    return digest((data if is_short else np.concatenate([data[:_BYTES], data[-_BYTES:]])).tobytes())


def digest(data: bytes) -> str:
    """Return a digest of some bytes, in eight hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=4).hexdigest()
