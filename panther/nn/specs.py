"""The record of every compressed module that a file carries, and the modules built from it again."""

__all__ = [
    "CONFIG_VERSION",
    "QUANTIZATION_METHOD",
    "SYMMETRIC",
    "TRAINED_SCALES",
    "allow_saving",
    "build_modules",
    "config_entry",
    "is_symmetric_record",
    "load_modules",
    "module_names_of",
    "module_specs",
]

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from panther._process_settings import ignored_warnings
from panther._torch import buffers_of, parameters_of, plain_name
from panther._version import __version__
from panther.errors import FormatError, PerformanceWarning, SketchMismatchError
from panther.nn.attention.record import attention_records
from panther.nn.base import SketchedModule
from panther.nn.conv import SKConv1d, SKConv2d, SKConv3d
from panther.nn.interpolative import InterpolativeLinear
from panther.nn.linear import SKLinear
from panther.nn.low_rank import LowRankConv2d, LowRankLinear
from panther.nn.protocol import (
    TRAINED_SCALES,
    CompressedModule,
    allow_saving,
    allowed_layers,
    arguments_of,
    recorded_class,
)
from panther.nn.quantized import (
    QuantizedConv2d,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    QuantizedExperts,
    QuantizedLinear,
)
from panther.nn.quantized.linear import check_activations
from panther.nn.quantized.matrix import QuantizedMatrix
from panther.nn.quantized.stacked import stacked_layers
from panther.nn.sketch_record import plain_state

allow_saving(
    *(SKLinear, SKConv1d, SKConv2d, SKConv3d, LowRankLinear, LowRankConv2d),
    *(QuantizedLinear, QuantizedConv2d, QuantizedEmbedding, QuantizedEmbeddingBag, QuantizedExperts),
    InterpolativeLinear,
)
_CLASSES = allowed_layers()

_LARGEST_SIZE = 1 << 40  # Products of larger sizes could overflow torch's integers.

# Version of the entry ``quantization_config`` in transformers' config.json, which panther.integrations.transformers
# reads. Version 2, which is no longer written, has parts, whose layers have their names within the part.
# Version 3 has symmetric layers without zero points, see SYMMETRIC.
QUANTIZATION_METHOD, CONFIG_VERSION = "panther", 3

# Key of a record in a folder: the grids are symmetric, and the folder has no zero points, which are the middle codes.
SYMMETRIC = "symmetric"


def is_symmetric_record(spec: Any) -> bool:
    """Return whether a layer's record says that the files lack its zero points."""
    return isinstance(spec, Mapping) and spec.get(SYMMETRIC) is True


def module_specs(model: nn.Module, *, in_training: bool = False) -> dict[str, dict[str, Any]]:
    """Return a record of each compressed module by name, from which the unsharded module can be built.

    Attention that :func:`panther.linearize_` converted is included.

    Raises FormatError if the format does not know a module, or it is parametrized or pruned, and SketchMismatchError if
    a seed is damaged. With ``in_training``, scales of quantized layers may have another dtype than the format's, and
    the records mark layers whose scales are trained.
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
        kind = recorded_class(module)
        if kind is None:
            raise FormatError(
                f"module {name!r} is a {type(module).__name__}, which the format does not know: it knows "
                f"{', '.join(_CLASSES)}"
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
        if getattr(module, "packed", False):  # optional, because it does not change the function
            modules[name]["packed"] = True
        if (activations := getattr(module, "activations", None)) is not None:
            modules[name]["activations"] = activations
    return modules | attention_records(model)


def config_entry(specs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry ``quantization_config`` of config.json that records the compressed layers of a model."""
    return {
        "quant_method": QUANTIZATION_METHOD,
        "version": CONFIG_VERSION if any(map(is_symmetric_record, specs.values())) else 1,
        "panther_version": __version__,
        "modules": dict(specs),
    }


def load_modules(specs: dict[str, Any], model: nn.Module, state: dict[str, Tensor]) -> dict[str, CompressedModule]:
    """Return the sketched modules by name, loaded from ``state``; ``model`` is not changed.

    Raises FormatError if they do not fit the model or the state, and SketchMismatchError if a seed is damaged.
    """
    entries = _entries_of_modules(specs, state)

    def load(name: str, spec: dict[str, Any], old: nn.Module) -> CompressedModule:
        return _load_module(name, spec, old, entries[name])

    built = _build_each(specs, model, load)
    for name, spec in specs.items():
        if "alias_of" in spec:
            stored, first_stored = entries[name], entries[spec["alias_of"]]
            names = plain_state(built[name]).keys() - ({"zeros"} if is_symmetric_record(spec) else set())
            if stored.keys() != names or any(first_stored.get(key) is not stored[key] for key in names):
                raise FormatError(f"module {name!r} is an alias of {spec['alias_of']!r}, but their weights differ")
    return built


def module_names_of(key: str) -> Iterator[str]:
    """Yield the names of the modules that contain an entry of a state_dict, beginning with the model's, ``""``.

    The last name is that of the entry itself: a compressed layer can have the name of a parameter.
    """
    yield ""
    position = key.find(".")
    while position >= 0:
        yield key[:position]
        position = key.find(".", position + 1)
    yield key


def _entries_of_modules(names: Collection[str], state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the entries of a state_dict in each of some modules, by the entries' names within the module.

    Cost: one pass over the entries, however many modules there are.
    """
    entries: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, value in state.items():
        for name in module_names_of(key):
            if name in entries:
                entries[name][key[len(name) + 1 :] if name else key] = value
    return entries


def build_modules(
    specs: dict[str, Any], model: nn.Module, device: torch.device | str | None = None
) -> dict[str, CompressedModule]:
    """Return the compressed modules by name, newly initialised, with the device and dtype of the modules they replace.

    The dtype of ``model`` has precedence over the saved dtype. A module that replaces one on the meta device is on the
    meta device too. Raises FormatError if the modules do not fit ``model``.
    """

    def build(name: str, spec: dict[str, Any], old: nn.Module) -> CompressedModule:
        is_empty = any(tensor.is_meta for tensor in (*old.parameters(), *old.buffers()))
        where = device or _device_of(old, "meta" if is_empty else "cpu")
        make, args, dtype = _checked_spec(name, spec, old)
        module = make(**args, dtype=_dtype_in_place(old) or dtype, device=where)
        if isinstance(module, SketchedModule) and spec.get("mode") == "fitted":
            like = module.sketch_like()
            module.set_fitted_({key: like.new_zeros(shape) for key, shape in module.sketch_shapes().items()})
        return _with_saved_settings(module, spec, old)

    return _build_each(specs, model, build)


def _build_each(
    specs: dict[str, Any], model: nn.Module, make: Callable[[str, dict[str, Any], nn.Module], CompressedModule]
) -> dict[str, CompressedModule]:
    """Build a module for each record. Aliases share the module of the name that they stand for."""
    present = dict(model.named_modules(remove_duplicate=False)) | stacked_layers(model)
    for name in specs:
        if name not in present:
            raise FormatError(
                f"the file has a compressed module {name!r}, and the model has no module of this name: build the saved "
                "architecture"
            )
    with ignored_warnings(category=PerformanceWarning):  # The warning was given when the layer was first built.
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
        # The meta device allocates nothing, even if the file claims sizes that its tensors do not have.
        seed = {"seed": 0} if issubclass(make, SketchedModule) else {}
        module = make(**args, dtype=dtype, device="meta", **seed)
        if is_symmetric_record(spec) and isinstance(module, QuantizedMatrix):
            state = {**state, "zeros": module.middle_zeros("cpu")}
        module.load_state_dict({key: value.to(device) for key, value in state.items()}, assign=True)
    except SketchMismatchError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        # torch writes a title, and a line for each tensor that does not fit.
        text = "; ".join(line.strip() for line in str(error).splitlines() if not line.startswith("Error(s) in loading"))
        raise FormatError(f"module {name!r} cannot be built from the folder: {text.rstrip('.')}") from error
    dtypes, mode = _dtypes_of(module), _mode_of(module)
    if mode != spec.get("mode") or dtypes != {dtype}:
        names = ", ".join(sorted(map(str, dtypes)))
        raise FormatError(f"module {name!r} should be {spec.get('mode')}, {dtype}, and its tensors are {mode}, {names}")
    return _with_saved_settings(module, spec, old)


def _checked_spec(name: str, spec: dict[str, Any], old: nn.Module) -> tuple[type[Any], dict[str, Any], torch.dtype]:
    """Return class, arguments and dtype of a record, or raise unless they are allowed and fit the replaced module."""
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
    return make, _checked_arguments(name, make, old, args), dtype


def _checked_arguments(name: str, make: type[Any], old: nn.Module, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, or raise if the replaced module has another class or other sizes."""
    arguments: dict[str, Any] = {}
    if isinstance(old, make.dense_class) or getattr(old, "dense_class", None) is make.dense_class:
        arguments = arguments_of(old, make.dense_arguments)
    elif make.dense_class is nn.Linear:  # for example transformers' Conv1D, whose weight is (in, out)
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
    # They are equal, but the values of the model have the types of the constructor: 1 == True == 1.0.
    return args | arguments


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
            f"module {name!r} has scales in {module.scales_dtype()}, and a file would change them to bfloat16: "
            "call hold_scales_(torch.bfloat16) first"
        )
    extra = sorted(plain_state(module).keys() ^ saved_names)
    if extra:
        raise FormatError(
            f"module {name!r} is saved as its {', '.join(sorted(saved_names))}, but its state_dict differs by "
            f"{', '.join(extra)}: remove the parametrization or pruning first"
        )


def _with_saved_settings(module: CompressedModule, spec: dict[str, Any], old: nn.Module) -> CompressedModule:
    """Freeze, pack and set the training mode of a module like the replaced module and the record."""
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
    if isinstance(module, QuantizedMatrix):
        return "quantized"
    return "interpolative" if isinstance(module, InterpolativeLinear) else "stored"


def _dtype_of(module: Any) -> torch.dtype:
    return module.sketch_like().dtype if isinstance(module, SketchedModule) else module.dtype


def _dtypes_of(module: CompressedModule) -> set[torch.dtype]:
    """Return the dtypes of the parameters, except for scales, which are bfloat16 in a layer of any dtype."""
    if isinstance(module, QuantizedMatrix):
        return {module.dtype}
    return {parameter.dtype for parameter in module.parameters()} or {_dtype_of(module)}
