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

# Only these classes are ever built from a file, each from these arguments, of these types; list: a size a dimension.
_CLASSES: dict[str, tuple[Callable[..., SketchedModule], dict[str, tuple[type, ...]]]] = {
    "SKLinear": (
        SKLinear,
        {"in_features": (int,), "out_features": (int,), "num_terms": (int,), "low_rank": (int,), "bias": (bool,)},
    )
}
_CLASSES |= {
    layer.__name__: (
        layer,
        {
            "in_channels": (int,),
            "out_channels": (int,),
            "kernel_size": (list,),
            "stride": (list,),
            "padding": (list, str),
            "dilation": (list,),
            "groups": (int,),
            "bias": (bool,),
            "padding_mode": (str,),
            "num_terms": (int,),
            "low_rank": (int,),
        },
    )
    for layer in (SKConv1d, SKConv2d, SKConv3d)
}


def module_specs(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What is needed to build every sketched module, by name; of layers that are cut over ranks, the whole ones.

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
            "mode": "fitted" if module.is_fitted else "seeded",
            "dtype": str(module.sketch_like().dtype).removeprefix("torch."),
        }
        if getattr(module, "packed", False):  # how it was held, not what it is: a reader may leave it
            modules[name]["packed"] = True
    return modules


def _class_of(module: SketchedModule) -> str:
    """The name of its class, under what fully_shard and tensor parallelism put over it."""
    for kind in type(module).__mro__:
        known = _CLASSES.get(kind.__name__)
        if known is not None and known[0] is kind:
            return kind.__name__
        if not kind.__module__.startswith(("torch.distributed.", "panther.distributed.")):
            break
    return type(module).__name__


def load_modules(specs: dict[str, Any], model: nn.Module, state: dict[str, Tensor]) -> dict[str, SketchedModule]:
    """The sketched modules by name, loaded; ``model`` is not touched."""
    present = dict(model.named_modules(remove_duplicate=False))
    built: dict[str, SketchedModule] = {}
    for name, spec in specs.items():
        if name not in present:
            raise _no_such_module(name)
        if "alias_of" not in spec:
            prefix = name + "." if name else ""
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            built[name] = _build_module(name, spec, present[name], own)
    for name, spec in specs.items():
        if "alias_of" in spec:
            first = spec["alias_of"]
            if not isinstance(first, str) or first not in built:
                raise FormatError(f"module {name!r} is an alias of {first!r}, which is not a saved module")
            stored = {key for key in state if key.startswith(name + ".")}
            same = {f"{name}.{key}": state.get(f"{first}.{key}") for key in built[first].state_dict()}
            if stored != same.keys() or any(state[key] is not tensor for key, tensor in same.items()):
                raise FormatError(f"module {name!r} is an alias of {first!r}, and the weights hold another for it")
            built[name] = built[first]
    return built


def build_modules(specs: dict[str, Any], model: nn.Module) -> dict[str, SketchedModule]:
    """The sketched modules by name, as they were built and not trained yet; ``model`` is not touched.

    Raises:
        FormatError: If they do not fit the model.
    """
    present = dict(model.named_modules(remove_duplicate=False))
    built: dict[str, SketchedModule] = {}
    for name, spec in specs.items():
        if name not in present:
            raise _no_such_module(name)
        if "alias_of" in spec:
            built[name] = built[spec["alias_of"]]
            continue
        make, args, dtype = _checked_spec(name, spec, present[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # it was said when the layer was first made
            module = make(**args, dtype=dtype, device=_device_of(present[name]))
        if spec.get("mode") == "fitted":
            like = module.sketch_like()
            module.set_fitted_({key: like.new_zeros(shape) for key, shape in module.sketch_shapes().items()})
        built[name] = _finished(module, spec, present[name])
    return built


def _build_module(name: str, spec: dict[str, Any], old: nn.Module, state: dict[str, Tensor]) -> SketchedModule:
    make, args, dtype = _checked_spec(name, spec, old)
    device = _device_of(old)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # it was said when the layer was first made
            module = make(**args, dtype=dtype, device="meta", seed=0)
        # On the meta device nothing is allocated for sizes that the tensors do not bear out.
        module.load_state_dict({key: place(value, device) for key, value in state.items()}, assign=True)
    except SketchMismatchError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"module {name!r} cannot be built from the folder: {error}") from error
    dtypes = {parameter.dtype for parameter in module.parameters()}
    mode = "fitted" if module.is_fitted else "seeded"
    if mode != spec.get("mode") or dtypes != {dtype}:
        found = ", ".join(sorted(map(str, dtypes)))
        raise FormatError(f"module {name!r} should be {spec.get('mode')}, {dtype}, and its tensors are {mode}, {found}")
    return _finished(module, spec, old)


def _checked_spec(
    name: str, spec: dict[str, Any], old: nn.Module
) -> tuple[Callable[..., SketchedModule], dict[str, Any], torch.dtype]:
    """Class, arguments and dtype of a module, if they are allowed and fit the one in its place."""
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
    _check_replaced(name, kind, old, args)
    return make, args, dtype


def _device_of(old: nn.Module) -> torch.device | str:
    return next((tensor.device for tensor in (*old.parameters(), *old.buffers()) if not tensor.is_meta), "cpu")


def _finished(module: SketchedModule, spec: dict[str, Any], old: nn.Module) -> SketchedModule:
    """Frozen, packed and in the mode for training as the module in its place, or its record, says."""
    trained = {key: parameter.requires_grad for key, parameter in old.named_parameters(recurse=False)}
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(trained.get(key, trained.get("weight", True)))
    if spec.get("packed") is True and isinstance(module, SKLinear) and not module.is_fitted:
        module.pack_()
    return module.train(old.training)


def _no_such_module(name: str) -> FormatError:
    return FormatError(f"module {name!r} is sketched and the model has none of that name: give the saved architecture")


def _argument(module: nn.Module, key: str) -> Any:
    """A constructor's argument as JSON has it, read from the layer, or from the dense one in its place."""
    value = getattr(module, key, None)
    if key == "bias":
        return value is not None
    return list(value) if isinstance(value, tuple) else value


def _sound(value: Any, types: tuple[type, ...]) -> bool:
    if type(value) not in types:
        return False
    sizes = value if isinstance(value, list) else [value] if type(value) is int else []
    return len(sizes) <= 3 and all(type(size) is int and size < 1 << 40 for size in sizes)


def _check_replaced(name: str, kind: str, old: nn.Module, args: dict[str, Any]) -> None:
    """Refuse to put a layer where the architecture has another kind of module, or one of another size."""
    if kind != "SKLinear":
        _check_replaced_conv(name, kind, old, args)
        return
    sizes = args["in_features"], args["out_features"]
    if isinstance(old, nn.Linear | SKLinear):
        found: Any = old.in_features, old.out_features
        bias = old.bias is not None
    else:  # such as transformers' Conv1D, whose weight is (in, out)
        weight = old._parameters.get("weight")
        found = None if weight is None else tuple(weight.shape)
        found = sizes if found == sizes[::-1] else found
        bias = old._parameters.get("bias") is not None
    if found != sizes or bias != args["bias"]:
        raise FormatError(
            f"module {name!r} was saved for {sizes[0]} to {sizes[1]} features, bias={args['bias']}, and the model has "
            f"{type(old).__name__} there, of {found}, bias={bias}: give the architecture that was saved"
        )


def _check_replaced_conv(name: str, kind: str, old: nn.Module, args: dict[str, Any]) -> None:
    layer: Any = _CLASSES[kind][0]
    wanted = {key: value for key, value in args.items() if key not in ("num_terms", "low_rank")}
    found = {key: _argument(old, key) for key in wanted} if isinstance(old, layer | layer.dense_class) else {}
    if found != wanted:
        differ = {key: value for key, value in wanted.items() if found.get(key) != value}
        there = {key: found[key] for key in differ} if found else "no such layer"
        raise FormatError(
            f"module {name!r} was saved for a {layer.dense_class.__name__} with {differ}, and the model has "
            f"{type(old).__name__} there, with {there}: give the architecture that was saved"
        )


def place(value: Tensor, device: torch.device | str) -> Tensor:
    """A copy in memory torch allocates: at a file's odd addresses, products can differ in the last bit."""
    return value.to(device, copy=True)


def _check_plain(name: str, module: SketchedModule) -> None:
    module.check_record()
    own = {key for key, tensor in module._parameters.items() if tensor is not None} | {"sketch_seed"}
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) > 1:
        raise FormatError(f"module {name!r} mixes {', '.join(sorted(map(str, dtypes)))}: cast it to one dtype")
    extra = sorted(module.state_dict().keys() ^ own)
    if extra:
        raise FormatError(
            f"module {name!r} is saved from its factors and its seed, and has {', '.join(extra)} besides or instead: "
            "remove the parametrization or pruning first"
        )


def _known() -> str:
    return ", ".join(_CLASSES)
