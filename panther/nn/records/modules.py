"""The record of every compressed module that a file carries, and the modules built from it again."""

__all__ = [
    "TRAINED_SCALES",
    "build_modules",
    "load_modules",
    "module_specs",
    "place",
]

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import buffers_of, parameters_of, plain_name
from panther.errors import FormatError, PerformanceWarning, SketchMismatchError
from panther.nn.attention.record import attention_records
from panther.nn.base import CompressedModule, SketchedModule, arguments_of
from panther.nn.conv import SKConv1d, SKConv2d, SKConv3d
from panther.nn.interpolative import InterpolativeLinear
from panther.nn.linear import SKLinear
from panther.nn.quantized import QuantizedConv2d, QuantizedLinear
from panther.nn.quantized.activations import check_activations
from panther.nn.quantized.matrix import QuantizedMatrix

# Only these classes are ever built from a file, each from the arguments of its dense class and those of its own size.
_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (SKLinear, SKConv1d, SKConv2d, SKConv3d, QuantizedLinear, QuantizedConv2d, InterpolativeLinear)
}
_LARGEST_SIZE = 1 << 40  # beyond it, products of sizes need not fit the integers of torch

# Of a record in a training checkpoint: the layer has parameters that train its scales. Inference files have no others.
TRAINED_SCALES = "trained_scales"


def module_specs(model: nn.Module, *, in_training: bool = False) -> dict[str, dict[str, Any]]:
    """Return by name what is needed to build each compressed module; of a sharded layer, the unsharded one.

    Attention that :func:`panther.linearize_` converted is among them.

    Raises FormatError if the format does not know a module, or it is parametrized or pruned, and SketchMismatchError if
    a seed is damaged. ``in_training``, scales of quantized layers may be in another dtype than the format's, and the
    records name layers whose scales are trained.
    """
    modules: dict[str, dict[str, Any]] = {}
    first_name: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, CompressedModule):
            continue
        name = plain_name(f"{name}.").removesuffix(".")
        if module in first_name:
            modules[name] = {"alias_of": first_name[module]}
            continue
        first_name[module] = name
        kind = _class_of(module)
        if kind not in _CLASSES:
            raise FormatError(
                f"module {name!r} is a {kind}, which the format does not know: it knows {', '.join(_CLASSES)}"
            )
        _check_plain(name, module, in_training)
        modules[name] = {
            "class": kind,
            "args": arguments_of(module, (*module.dense_arguments, *module.size_arguments)),
            "mode": _mode_of(module),
            "dtype": str(_dtype_of(module)).removeprefix("torch."),
        }
        if in_training and isinstance(module, QuantizedMatrix) and module.trains_scales:
            modules[name][TRAINED_SCALES] = True
        if getattr(module, "packed", False):  # how signs are held, which does not change the function: optional
            modules[name]["packed"] = True
        if (activations := getattr(module, "activations", None)) is not None:
            modules[name]["activations"] = activations
    return modules | attention_records(model)


def load_modules(specs: dict[str, Any], model: nn.Module, state: dict[str, Tensor]) -> dict[str, CompressedModule]:
    """Return the sketched modules by name, loaded from ``state``; ``model`` is left as it is.

    Raises FormatError if they do not fit the model or the state, and SketchMismatchError if a seed is damaged.
    """

    def load(name: str, spec: dict[str, Any], old: nn.Module) -> CompressedModule:
        prefix = name + "." if name else ""
        layer_state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        return _load_module(name, spec, old, layer_state)

    built = _for_each(specs, model, load)
    for name, spec in specs.items():
        if "alias_of" in spec:
            first = spec["alias_of"]
            stored = {key for key in state if key.startswith(name + ".")}
            same = {f"{name}.{key}": state.get(f"{first}.{key}") for key in built[first].state_dict()}
            if stored != same.keys() or any(state[key] is not tensor for key, tensor in same.items()):
                raise FormatError(f"module {name!r} is an alias of {first!r}, but the weights hold different ones")
    return built


def build_modules(
    specs: dict[str, Any], model: nn.Module, device: torch.device | str | None = None
) -> dict[str, CompressedModule]:
    """Return the compressed modules by name, freshly initialised, each on the device of the one in its place.

    It also takes that one's dtype, which is then the dtype of the whole model, whatever was saved. What replaces a
    module on the meta device is there too. Raises FormatError if they do not fit ``model``.
    """

    def build(name: str, spec: dict[str, Any], old: nn.Module) -> CompressedModule:
        is_empty = any(tensor.is_meta for tensor in (*old.parameters(), *old.buffers()))
        where = device or _device_of(old, "meta" if is_empty else "cpu")
        make, args, dtype = _checked_spec(name, spec, old)
        module = _construct(make, args, _dtype_in_place(old) or dtype, device=where)
        if isinstance(module, SketchedModule) and spec.get("mode") == "fitted":
            like = module.sketch_like()
            module.set_fitted_({key: like.new_zeros(shape) for key, shape in module.sketch_shapes().items()})
        return _finished(module, spec, old)

    return _for_each(specs, model, build)


def _for_each(
    specs: dict[str, Any], model: nn.Module, make: Callable[[str, dict[str, Any], nn.Module], CompressedModule]
) -> dict[str, CompressedModule]:
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


def _load_module(name: str, spec: dict[str, Any], old: nn.Module, state: dict[str, Tensor]) -> CompressedModule:
    make, args, dtype = _checked_spec(name, spec, old)
    device = _device_of(old)
    try:
        # On the meta device nothing is allocated for sizes that the tensors do not have.
        seed = {"seed": 0} if issubclass(make, SketchedModule) else {}
        module = _construct(make, args, dtype, device="meta", **seed)
        module.load_state_dict({key: place(value, device) for key, value in state.items()}, assign=True)
    except SketchMismatchError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        # torch writes a line for each tensor that does not fit, below a title.
        text = "; ".join(line.strip() for line in str(error).splitlines() if not line.startswith("Error(s) in loading"))
        raise FormatError(f"module {name!r} cannot be built from the folder: {text.rstrip('.')}") from error
    dtypes, mode = _dtypes_of(module), _mode_of(module)
    if mode != spec.get("mode") or dtypes != {dtype}:
        names = ", ".join(sorted(map(str, dtypes)))
        raise FormatError(f"module {name!r} should be {spec.get('mode')}, {dtype}, and its tensors are {mode}, {names}")
    return _finished(module, spec, old)


def _construct(make: type[Any], args: dict[str, Any], dtype: torch.dtype, **kwargs: Any) -> CompressedModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # it was given when the layer was first made
        module: CompressedModule = make(**args, dtype=dtype, **kwargs)
        return module


def _checked_spec(name: str, spec: dict[str, Any], old: nn.Module) -> tuple[type[Any], dict[str, Any], torch.dtype]:
    """Return class, arguments and dtype of a module, if they are allowed and fit the module in its place."""
    kind, args, dtype = spec.get("class"), spec.get("args"), getattr(torch, str(spec.get("dtype")), None)
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise FormatError(f"module {name!r} has class {kind!r}, which is not allowed: only {', '.join(_CLASSES)}")
    make = _CLASSES[kind]
    names = (*make.dense_arguments, *make.size_arguments)
    if (
        not isinstance(args, dict)
        or args.keys() != set(names)
        or not all(_is_size(args[size], issubclass(make, QuantizedMatrix)) for size in make.size_arguments)
    ):
        raise FormatError(f"module {name!r} has arguments {args!r}: {kind} is built from {', '.join(names)}")
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"module {name!r} has dtype {spec.get('dtype')!r}: it must name a torch dtype")
    return make, _matched(name, make, old, args), dtype


def _matched(name: str, make: type[Any], old: nn.Module, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, unless the architecture has a different kind of module there, or one of other sizes."""
    arguments: dict[str, Any] = {}
    if isinstance(old, make | make.dense_class):
        arguments = arguments_of(old, make.dense_arguments)
    elif make.dense_class is nn.Linear:  # such as transformers' Conv1D, whose weight is (in, out)
        shape = tuple(getattr(parameters_of(old).get("weight"), "shape", ()))
        if shape == (args["out_features"], args["in_features"]):
            shape = shape[::-1]
        arguments = dict(zip(("in_features", "out_features"), shape, strict=False)) if len(shape) == 2 else {}
        arguments["bias"] = parameters_of(old).get("bias") is not None
    differ = {key: args[key] for key in make.dense_arguments if arguments.get(key) != args[key]}
    if differ:
        there = {key: arguments[key] for key in differ if key in arguments} or "no such sizes"
        raise FormatError(
            f"module {name!r} was saved for a {make.dense_class.__name__} with {differ}, and the model has a "
            f"{type(old).__name__} there, with {there}: give the architecture that was saved"
        )
    return args | arguments  # equal, but those of the model have the types that a constructor takes: 1 == True == 1.0


def _is_size(value: Any, optional: bool) -> bool:
    return (optional and value is None) or (type(value) is int and value < _LARGEST_SIZE)


def _check_plain(name: str, module: CompressedModule, in_training: bool) -> None:
    module.check_record()
    saved_names = {key for key, tensor in parameters_of(module).items() if tensor is not None}
    saved_names |= {key for key in module.saved_buffer_names if buffers_of(module).get(key) is not None}
    dtypes = _dtypes_of(module)
    if len(dtypes) > 1:
        raise FormatError(f"module {name!r} mixes {', '.join(sorted(map(str, dtypes)))}: cast it to one dtype")
    if isinstance(module, QuantizedMatrix) and not in_training and not module.has_stored_scales():
        raise FormatError(
            f"module {name!r} holds its scales in {module.scales_dtype()}, and a file would hold different ones, in "
            "bfloat16: call hold_scales_(torch.bfloat16) first"
        )
    extra = sorted(module.state_dict().keys() ^ saved_names)
    if extra:
        raise FormatError(
            f"module {name!r} is saved as its {', '.join(sorted(saved_names))}, but its state_dict differs by "
            f"{', '.join(extra)}: remove the parametrization or pruning first"
        )


def _class_of(module: CompressedModule) -> str:
    """Return the name of a layer's class, below those that fully_shard and tensor parallelism put on top of it."""
    for kind in type(module).__mro__:
        if _CLASSES.get(kind.__name__) is kind:
            return kind.__name__
        if not kind.__module__.startswith(("torch.distributed.", "panther.distributed.")):
            break
    return type(module).__name__


def _finished(module: CompressedModule, spec: dict[str, Any], old: nn.Module) -> CompressedModule:
    """Freeze, pack and put into training or eval mode as the module in its place, or its record, says."""
    if spec.get(TRAINED_SCALES) is True and isinstance(module, QuantizedMatrix):
        module.train_scales_()
    trained = {key: parameter.requires_grad for key, parameter in old.named_parameters(recurse=False)}
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(trained.get(key, trained.get("weight", True)))
    if spec.get("packed") is True and isinstance(module, SKLinear) and not module.is_fitted:
        module.pack_()
    if isinstance(module, QuantizedLinear):
        try:
            module.activations = check_activations(spec.get("activations"))
        except ValueError as error:
            raise FormatError(f"a saved {type(module).__name__} has {error}") from error
    return module.train(old.training)


def place(value: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to memory that torch allocates: at a file's odd addresses, products can differ in the last bit."""
    return value.to(device, copy=True)


def _device_of(old: nn.Module, without: str = "cpu") -> torch.device | str:
    """Return the device on which a module has values, or ``without`` if it has none."""
    return next((tensor.device for tensor in (*old.parameters(), *old.buffers()) if not tensor.is_meta), without)


def _dtype_in_place(old: nn.Module) -> torch.dtype | None:
    if isinstance(old, CompressedModule):
        return _dtype_of(old)
    return next((tensor.dtype for tensor in old.parameters() if tensor.is_floating_point()), None)


def _mode_of(module: CompressedModule) -> str:
    if isinstance(module, SketchedModule):
        return "fitted" if module.is_fitted else "seeded"
    return "quantized" if isinstance(module, QuantizedMatrix) else "interpolative"


def _dtype_of(module: Any) -> torch.dtype:
    return module.sketch_like().dtype if isinstance(module, SketchedModule) else module.dtype


def _dtypes_of(module: CompressedModule) -> set[torch.dtype]:
    """Return the dtypes of the parameters without those of scales, which are bfloat16 in a layer of any dtype."""
    if isinstance(module, QuantizedMatrix):
        return {module.dtype}
    return {parameter.dtype for parameter in module.parameters()}
