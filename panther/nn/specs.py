"""The record of every compressed module that a file carries, and the modules built from it again."""

__all__ = [
    "CONFIG_VERSION", "QUANTIZATION_METHOD", "SYMMETRIC", "TRAINED_SCALES", "as_low_rank_layers", "build_modules",
    "config_entry", "is_symmetric_record", "load_modules", "module_names_of", "module_specs",
]  # fmt: skip

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from panther._process_settings import ignored_warnings
from panther._torch import buffers_of, parameters_of, plain_name
from panther._version import __version__
from panther.errors import FormatError, PerformanceWarning, SketchMismatchError
from panther.nn.attention.record import attention_records
from panther.nn.protocol import (
    TRAINED_SCALES,
    CompressedModule,
    allowed_layers,
    arguments_of,
    compressed_layers,
    recorded_class,
)
from panther.nn.quantized.stacked import stacked_layers
from panther.nn.sketch_record import plain_state, read_record

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
    for name, layer in compressed_layers(model, remove_duplicate=False):
        name = plain_name(f"{name}.").removesuffix(".")
        if layer in first_name:
            modules[name] = {"alias_of": first_name[layer]}
            continue
        first_name[layer] = name
        if recorded_class(layer) is None:
            raise FormatError(
                f"module {name!r} is a {type(layer).__name__}, which the format does not know: it knows "
                f"{', '.join(sorted(allowed_layers()))}"
            )
        _check_plain(name, layer, in_training)
        modules[name] = layer.to_record(in_training=in_training)
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
        place = device or _device_of(old, "meta" if is_empty else "cpu")
        kind, record, dtype = _checked_record(name, spec, old)
        layer = kind.from_record(record, dtype=_dtype_in_place(old) or dtype, device=place)
        return _with_saved_settings(layer, record, old)

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
    kind, record, dtype = _checked_record(name, spec, old)
    device = _device_of(old)
    try:
        # The meta device allocates nothing, even if the file claims sizes that its tensors do not have.
        layer = kind.from_record(record, dtype=dtype, device="meta", seed=0)
        if is_symmetric_record(spec):
            state = state | layer.implied_tensors("cpu")
        layer.load_state_dict({key: value.to(device) for key, value in state.items()}, assign=True)
    except SketchMismatchError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        # torch writes a title, and a line for each tensor that does not fit.
        lines = (line.strip() for line in str(error).splitlines() if not line.startswith("Error(s) in loading"))
        reason = "; ".join(lines).rstrip(".")
        raise FormatError(f"module {name!r} cannot be built from the folder: {reason}") from error
    dtypes, mode = layer.recorded_dtypes(), layer.record_mode
    if mode != spec.get("mode") or dtypes != {dtype}:
        names = ", ".join(sorted(map(str, dtypes)))
        raise FormatError(f"module {name!r} should be {spec.get('mode')}, {dtype}, and its tensors are {mode}, {names}")
    return _with_saved_settings(layer, record, old)


def _checked_record(
    name: str, spec: dict[str, Any], old: nn.Module
) -> tuple[type[CompressedModule], dict[str, Any], torch.dtype]:
    """Return the class, the record and the dtype of a layer, or raise unless they fit the module that it replaces.

    The arguments in the returned record have the types that the constructor takes.
    """
    class_name, args, dtype = spec.get("class"), spec.get("args"), getattr(torch, str(spec.get("dtype")), None)
    kinds = allowed_layers()
    if not isinstance(class_name, str) or class_name not in kinds:
        raise FormatError(
            f"module {name!r} has class {class_name!r}, which is not allowed: only {', '.join(sorted(kinds))}"
        )
    kind = kinds[class_name]
    names = (*kind.dense_arguments, *kind.size_arguments)
    if (
        not isinstance(args, dict)
        or args.keys() != set(names)
        or not all(_is_size(args[size], kind.sizes_may_be_none) for size in kind.size_arguments)
    ):
        raise FormatError(f"module {name!r} has arguments {args!r}: {class_name} is built from {', '.join(names)}")
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"module {name!r} has dtype {spec.get('dtype')!r}: it must name a torch dtype")
    return kind, spec | {"args": _checked_arguments(name, kind, old, args)}, dtype


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
    """Return whether a value of a record is a size, or a list of a size for each side of the weight."""
    if type(value) is list:
        return len(value) == 2 and all(_is_size(size, False) for size in value)
    return (optional and value is None) or (type(value) is int and value < _LARGEST_SIZE)


def _check_plain(name: str, module: CompressedModule, in_training: bool) -> None:
    module.check_record()
    saved_names = {key for key, tensor in parameters_of(module).items() if tensor is not None}
    saved_names |= {key for key in module.saved_buffer_names if buffers_of(module).get(key) is not None}
    dtypes = module.recorded_dtypes()
    if len(dtypes) > 1:
        raise FormatError(f"module {name!r} mixes {', '.join(sorted(map(str, dtypes)))}: cast it to one dtype")
    if not in_training and (reason := module.why_not_saved()):
        raise FormatError(f"module {name!r} {reason}")
    extra = sorted(plain_state(module).keys() ^ saved_names)
    if extra:
        raise FormatError(
            f"module {name!r} is saved as its {', '.join(sorted(saved_names))}, but its state_dict differs by "
            f"{', '.join(extra)}: remove the parametrization or pruning first"
        )


def _with_saved_settings(layer: CompressedModule, record: dict[str, Any], old: nn.Module) -> CompressedModule:
    """Freeze, pack and set the training mode of a layer like the replaced module and the record."""
    try:
        layer.follow_record_(record)
    except ValueError as error:
        raise FormatError(f"a saved {type(layer).__name__} has {error}") from error
    trained = {key: parameter.requires_grad for key, parameter in old.named_parameters(recurse=False)}
    for key, parameter in layer.named_parameters():
        parameter.requires_grad_(trained.get(key, trained.get("weight", True)))
    return layer.train(old.training)


def _device_of(old: nn.Module, without: str = "cpu") -> torch.device | str:
    """Return the device on which a module has values, or ``without`` if it has none."""
    return next((tensor.device for tensor in (*old.parameters(), *old.buffers()) if not tensor.is_meta), without)


def _dtype_in_place(old: nn.Module) -> torch.dtype | None:
    if isinstance(old, CompressedModule):
        return old.dtype
    return next((tensor.dtype for tensor in old.parameters() if tensor.is_floating_point()), None)


# Fitted layers in folders of formats 1 and 2, and the low-rank layers that they load as.
_LOW_RANK_CLASSES = {"SKLinear": "LowRankLinear", "SKConv2d": "LowRankConv2d"}
_FITTED_FACTORS = {"SKLinear": ("S1", "U2", "U1", "S2"), "SKConv2d": ("S", "U")}
_FITTED_SIZES = ("num_terms", "low_rank")


def as_low_rank_layers(
    modules: Mapping[str, Any], aliases: Mapping[str, str], state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, str], dict[str, Tensor]]:
    """Return records, aliases and tensors of a folder with low-rank layers in the place of fitted layers.

    Formats 1 and 2 stored a weight of low rank as a fitted SKLinear of four factors, or as a fitted SKConv2d.
    """
    new_modules, new_aliases, new_state = dict(modules), dict(aliases), dict(state)
    factors_by_id: dict[tuple[int, ...], tuple[str, tuple[Tensor, Tensor]]] = {}
    for name, spec in modules.items():
        record = modules.get(spec.get("alias_of", name), spec)
        kind, args = record.get("class"), record.get("args")
        if (
            not isinstance(kind, str)
            or kind not in _LOW_RANK_CLASSES
            or record.get("mode") != "fitted"
            or not isinstance(args, dict)
        ):
            continue
        prefix = f"{name}." if name else ""
        keys = [prefix + key for key in (*_FITTED_FACTORS[kind], "sketch_seed")]
        if not all(type(args.get(size)) is int for size in _FITTED_SIZES) or not all(key in state for key in keys):
            continue  # Loading the layer says what is wrong.
        *old_factors, seed_record = (new_state.pop(key) for key in keys)
        read_record(seed_record, args["num_terms"], keys[-1])
        for key in keys:
            new_aliases.pop(key, None)
        identity = tuple(map(id, old_factors))
        if identity not in factors_by_id:
            factors_by_id[identity] = prefix, _joined(old_factors, name)
        first_prefix, factors = factors_by_id[identity]
        for key, factor in zip(("down", "up"), factors, strict=True):
            new_state[prefix + key] = factor
            if prefix != first_prefix:
                new_aliases[prefix + key] = first_prefix + key
        if "alias_of" not in spec:
            dense_arguments = {key: value for key, value in args.items() if key not in _FITTED_SIZES}
            rank = 2 * args["num_terms"] * args["low_rank"]
            new_modules[name] = {
                **spec, "class": _LOW_RANK_CLASSES[kind], "args": dense_arguments | {"rank": rank}, "mode": "stored",
            }  # fmt: skip
    return new_modules, new_aliases, new_state


def _joined(factors: list[Tensor], name: str) -> tuple[Tensor, Tensor]:
    if len(factors) == 2:
        return factors[0], factors[1]
    S1, U2, U1, S2 = factors
    try:
        return torch.cat((S1, U2), 1), torch.cat((U1, S2))
    except (RuntimeError, IndexError) as error:
        raise FormatError(f"module {name!r} has factors that do not fit together ({error})") from None
