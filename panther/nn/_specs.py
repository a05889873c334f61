"""The record of every sketched module that a file carries, and the modules built from it again."""

__all__ = ["build_modules", "load_modules", "module_specs", "place"]

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from panther.errors import FormatError, PerformanceWarning, SketchMismatchError
from panther.nn._sketched import SketchedModule
from panther.nn.conv import SKConv1d, SKConv2d, SKConv3d
from panther.nn.linear import SKLinear

_SKETCH: dict[str, tuple[type, ...]] = {"num_terms": (int,), "low_rank": (int,)}
_LINEAR: dict[str, tuple[type, ...]] = {"in_features": (int,), "out_features": (int,), "bias": (bool,)}
_CONV: dict[str, tuple[type, ...]] = {  # list: a size for each dimension
    "in_channels": (int,),
    "out_channels": (int,),
    "kernel_size": (list,),
    "stride": (list,),
    "padding": (list, str),
    "dilation": (list,),
    "groups": (int,),
    "bias": (bool,),
    "padding_mode": (str,),
}
# Only these classes are ever built from a file, each from these arguments, of these types.
_CLASSES: dict[str, tuple[type[Any], dict[str, tuple[type, ...]]]] = {
    "SKLinear": (SKLinear, _LINEAR | _SKETCH),
    "SKConv1d": (SKConv1d, _CONV | _SKETCH),
    "SKConv2d": (SKConv2d, _CONV | _SKETCH),
    "SKConv3d": (SKConv3d, _CONV | _SKETCH),
}


def module_specs(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return by name what is needed to build each sketched module; of a sharded layer, the unsharded one.

    Raises:
        FormatError: If the format does not know a module, or it is parametrized or pruned.
        SketchMismatchError: If a seed is damaged.
    """
    modules: dict[str, dict[str, Any]] = {}
    first_name: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, SketchedModule):
            continue
        if module in first_name:
            modules[name] = {"alias_of": first_name[module]}
            continue
        first_name[module] = name
        kind = _class_of(module)
        if kind not in _CLASSES:
            raise FormatError(f"module {name!r} is a {kind}, which the format does not know: it knows {_known()}")
        _check_plain(name, module)
        modules[name] = {
            "class": kind,
            "args": {key: _argument(module, key) for key in _CLASSES[kind][1]},
            "mode": _mode_of(module),
            "dtype": str(module.sketch_like().dtype).removeprefix("torch."),
        }
        if getattr(module, "packed", False):  # how signs are held, which does not change the function: optional
            modules[name]["packed"] = True
    return modules


def load_modules(specs: dict[str, Any], model: nn.Module, state: dict[str, Tensor]) -> dict[str, SketchedModule]:
    """Return the sketched modules by name, loaded from ``state``; ``model`` is left as it is.

    Raises:
        FormatError: If they do not fit the model or the state.
        SketchMismatchError: If a seed is damaged.
    """

    def load(name: str, spec: dict[str, Any], old: nn.Module) -> SketchedModule:
        prefix = name + "." if name else ""
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        return _load_module(name, spec, old, own)

    built = _for_each(specs, model, load)
    for name, spec in specs.items():
        if "alias_of" in spec:
            first = spec["alias_of"]
            stored = {key for key in state if key.startswith(name + ".")}
            same = {f"{name}.{key}": state.get(f"{first}.{key}") for key in built[first].state_dict()}
            if stored != same.keys() or any(state[key] is not tensor for key, tensor in same.items()):
                raise FormatError(f"module {name!r} is an alias of {first!r}, but the weights hold different ones")
    return built


def build_modules(specs: dict[str, Any], model: nn.Module) -> dict[str, SketchedModule]:
    """Return the sketched modules by name, freshly initialised; ``model`` is left as it is.

    Raises:
        FormatError: If they do not fit the model.
    """

    def build(name: str, spec: dict[str, Any], old: nn.Module) -> SketchedModule:
        module = _construct(*_checked_spec(name, spec, old), device=_device_of(old))
        if spec.get("mode") == "fitted":
            like = module.sketch_like()
            module.set_fitted_({key: like.new_zeros(shape) for key, shape in module.sketch_shapes().items()})
        return _finished(module, spec, old)

    return _for_each(specs, model, build)


def _for_each(
    specs: dict[str, Any], model: nn.Module, make: Callable[[str, dict[str, Any], nn.Module], SketchedModule]
) -> dict[str, SketchedModule]:
    """Make a module for each record, and let aliases share theirs."""
    present = dict(model.named_modules(remove_duplicate=False))
    for name in specs:
        if name not in present:
            raise FormatError(
                f"module {name!r} is sketched and the model has none of that name: give the saved architecture"
            )
    built = {name: make(name, spec, present[name]) for name, spec in specs.items() if "alias_of" not in spec}
    for name, spec in specs.items():
        if "alias_of" in spec:
            first = spec["alias_of"]
            if not isinstance(first, str) or "alias_of" in specs.get(first, spec):
                raise FormatError(f"module {name!r} is an alias of {first!r}, which is not a saved module")
            built[name] = built[first]
    return {name: built[name] for name in specs}


def _load_module(name: str, spec: dict[str, Any], old: nn.Module, state: dict[str, Tensor]) -> SketchedModule:
    make, args, dtype = _checked_spec(name, spec, old)
    device = _device_of(old)
    try:
        # On the meta device nothing is allocated for sizes that the tensors do not have.
        module = _construct(make, args, dtype, device="meta", seed=0)
        module.load_state_dict({key: place(value, device) for key, value in state.items()}, assign=True)
    except SketchMismatchError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"module {name!r} cannot be built from the folder: {error}") from error
    dtypes, mode = {parameter.dtype for parameter in module.parameters()}, _mode_of(module)
    if mode != spec.get("mode") or dtypes != {dtype}:
        found = ", ".join(sorted(map(str, dtypes)))
        raise FormatError(f"module {name!r} should be {spec.get('mode')}, {dtype}, and its tensors are {mode}, {found}")
    return _finished(module, spec, old)


def _construct(make: type[Any], args: dict[str, Any], dtype: torch.dtype, **kwargs: Any) -> SketchedModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # it was given when the layer was first made
        return make(**args, dtype=dtype, **kwargs)


def _checked_spec(name: str, spec: dict[str, Any], old: nn.Module) -> tuple[type[Any], dict[str, Any], torch.dtype]:
    """Return class, arguments and dtype of a module, if they are allowed and fit the module in its place."""
    kind, args, dtype = spec.get("class"), spec.get("args"), getattr(torch, str(spec.get("dtype")), None)
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise FormatError(f"module {name!r} has class {kind!r}, which is not allowed: only {_known()}")
    make, types = _CLASSES[kind]
    if (
        not isinstance(args, dict)
        or args.keys() != types.keys()
        or not all(_sound(args[key], types[key]) for key in types)
    ):
        raise FormatError(f"module {name!r} has arguments {args!r}: {kind} is built from {', '.join(types)}")
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"module {name!r} has dtype {spec.get('dtype')!r}: it must name a torch dtype")
    _check_replaced(name, make, old, args)
    return make, args, dtype


def _check_replaced(name: str, make: type[Any], old: nn.Module, args: dict[str, Any]) -> None:
    """Refuse to put a layer where the architecture has a different kind of module, or one of different sizes."""
    wanted = {key: value for key, value in args.items() if key not in _SKETCH}
    found: dict[str, Any] = {}
    if isinstance(old, make | make.dense_class):
        found = {key: _argument(old, key) for key in wanted}
    elif make is SKLinear:  # such as transformers' Conv1D, whose weight is (in, out)
        shape = tuple(getattr(old._parameters.get("weight"), "shape", ()))
        if shape == (args["out_features"], args["in_features"]):
            shape = shape[::-1]
        found = dict(zip(("in_features", "out_features"), shape, strict=False)) if len(shape) == 2 else {}
        found["bias"] = old._parameters.get("bias") is not None
    if found != wanted:
        differ = {key: value for key, value in wanted.items() if found.get(key) != value}
        there = {key: found[key] for key in differ if key in found} or "no such sizes"
        raise FormatError(
            f"module {name!r} was saved for a {make.dense_class.__name__} with {differ}, and the model has a "
            f"{type(old).__name__} there, with {there}: give the architecture that was saved"
        )


def _check_plain(name: str, module: SketchedModule) -> None:
    module.check_record()
    own = {key for key, tensor in module._parameters.items() if tensor is not None} | {"sketch_seed"}
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) > 1:
        raise FormatError(f"module {name!r} mixes {', '.join(sorted(map(str, dtypes)))}: cast it to one dtype")
    extra = sorted(module.state_dict().keys() ^ own)
    if extra:
        raise FormatError(
            f"module {name!r} is saved as its factors and its seed, but its state_dict differs by {', '.join(extra)}: "
            "remove the parametrization or pruning first"
        )


def _class_of(module: SketchedModule) -> str:
    """Return the name of a layer's class, below those that fully_shard and tensor parallelism put on top of it."""
    for kind in type(module).__mro__:
        known = _CLASSES.get(kind.__name__)
        if known is not None and known[0] is kind:
            return kind.__name__
        if not kind.__module__.startswith(("torch.distributed.", "panther.distributed.")):
            break
    return type(module).__name__


def _finished(module: SketchedModule, spec: dict[str, Any], old: nn.Module) -> SketchedModule:
    """Freeze, pack and put into training or eval mode as the module in its place, or its record, says."""
    trained = {key: parameter.requires_grad for key, parameter in old.named_parameters(recurse=False)}
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(trained.get(key, trained.get("weight", True)))
    if spec.get("packed") is True and isinstance(module, SKLinear) and not module.is_fitted:
        module.pack_()
    return module.train(old.training)


def _argument(module: nn.Module, key: str) -> Any:
    """Return a constructor's argument as JSON has it, read from the layer, or from the dense one in its place."""
    value = getattr(module, key, None)
    if key == "bias":
        return value is not None
    return list(value) if isinstance(value, tuple) else value


def _sound(value: Any, types: tuple[type, ...]) -> bool:
    if type(value) not in types:
        return False
    sizes = value if isinstance(value, list) else [value] if type(value) is int else []
    return len(sizes) <= 3 and all(type(size) is int and size < 1 << 40 for size in sizes)


def place(value: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to memory that torch allocates: at a file's odd addresses, products can differ in the last bit."""
    return value.to(device, copy=True)


def _device_of(old: nn.Module) -> torch.device | str:
    return next((tensor.device for tensor in (*old.parameters(), *old.buffers()) if not tensor.is_meta), "cpu")


def _mode_of(module: SketchedModule) -> str:
    return "fitted" if module.is_fitted else "seeded"


def _known() -> str:
    return ", ".join(_CLASSES)
