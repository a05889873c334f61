"""The one inference format: a folder with ``model.safetensors`` and ``panther.json``.

The tensors are the model's state_dict, each stored once. The JSON holds the format's version, what is needed to build
every sketched module (name, class, constructor arguments, mode, dtype) and the aliases of shared tensors. Nothing is
pickled, so a file from a stranger can at worst be refused.
"""

__all__ = ["load_compressed", "save_compressed"]

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from panther._version import __version__
from panther.errors import FormatError, PerformanceWarning, SketchMismatchError
from panther.nn._sketched import SketchedModule
from panther.nn.conv import SKConv1d, SKConv2d, SKConv3d
from panther.nn.linear import SKLinear

_FORMAT, _VERSION = "panther", 1
_WEIGHTS, _MANIFEST = "model.safetensors", "panther.json"

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


def save_compressed(model: nn.Module, dir: str | os.PathLike[str]) -> Path:
    """Write a model with sketched layers to a folder, for inference.

    Seeded sketches cost their seed, and tensors that are shared are stored once. A wrapper of the whole model, by
    torch.compile or DistributedDataParallel, is left out. Both files are written beside their final names and renamed
    when whole, so a crash while writing leaves an older save as it was.

    Args:
        model: Any module, with sketched layers or without.
        dir: Folder to write to, made if missing; its ``model.safetensors`` and ``panther.json`` are replaced.

    Returns:
        The folder.

    Raises:
        FormatError: If the state_dict holds something other than tensors, or a tensor on the meta device, or a sketched
            layer is parametrized or pruned.
        SketchMismatchError: If a seed is damaged, so that nobody could load the file.
        OSError: If the folder cannot be written.

    Example:
        >>> import tempfile, torch, panther as pr
        >>> model = torch.nn.Sequential(pr.nn.SKLinear(256, 64, 2), torch.nn.ReLU())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pr.save_compressed(model, folder)
        ...     plain = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.ReLU())
        ...     restored = pr.load_compressed(path, plain)
        >>> x = torch.randn(2, 256)
        >>> torch.equal(model(x), restored(x))
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"save_compressed takes a model and a folder, in this order, not a {type(model).__name__} first"
        )
    model = unwrapped(model)
    tensors, aliases = _unique_tensors(model)
    return write_folder(dir, tensors, module_specs(model), aliases)


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


def write_folder(
    dir: str | os.PathLike[str], tensors: dict[str, Tensor], modules: dict[str, Any], aliases: dict[str, str]
) -> Path:
    """Write both files of the format, and rename them when they are whole."""
    manifest = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "panther_version": __version__,
        "weights": _WEIGHTS,
        "modules": modules,
        "aliases": aliases,
    }
    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    weights, text = folder / (_WEIGHTS + ".tmp"), folder / (_MANIFEST + ".tmp")
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
        text.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for part in (weights, text):
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        shutil.copymode(text, weights)  # safetensors keeps others from reading it, whatever the umask
        os.replace(weights, folder / _WEIGHTS)
        os.replace(text, folder / _MANIFEST)
    finally:
        weights.unlink(missing_ok=True)
        text.unlink(missing_ok=True)
    return folder


def load_compressed(dir: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """Turn a model of the original architecture into the saved one, in place.

    Modules that the folder names as sketched are replaced. All weights take the saved dtype and the device they had in
    ``model`` (the CPU, for a model on the meta device). Everything is checked before anything is changed.

    Args:
        dir: Folder written by :func:`save_compressed`.
        model: The architecture, with dense or with sketched layers.

    Returns:
        ``model``, without wrappers, with the saved layers and weights; the new layer, if the model is one itself.

    Raises:
        FormatError: If a file is missing, foreign, damaged or truncated, or does not fit the model.
        SketchMismatchError: If a seed is damaged.

    Example:
        See :func:`save_compressed`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"load_compressed takes a folder and a model, in this order, not a {type(model).__name__} second"
        )
    folder, model = Path(dir), unwrapped(model)
    if folder.is_file():
        raise FormatError(f"{folder} is a file: give the folder that pr.save_compressed wrote")
    manifest = _read_manifest(folder / _MANIFEST)
    state = _read_tensors(folder, manifest["weights"])
    for alias, name in manifest["aliases"].items():
        if name not in state or alias in state:
            raise FormatError(f"{folder / _MANIFEST} makes {alias!r} an alias of {name!r}: the weights disagree")
        state[alias] = state[name]

    built = _build_modules(manifest["modules"], model, state)
    prefixes = tuple(name + "." if name else "" for name in built)
    state = {key: value for key, value in state.items() if not key.startswith(prefixes)}
    ours = {key: value for key, value in model.state_dict().items() if not key.startswith(prefixes)}
    _check_fit(state, ours, folder)
    if "" in built:
        return built[""]

    for name, module in built.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module)
    # strict=False: the sketched layers are loaded already, and the rest was found to fit.
    placed = {key: _place(value, "cpu" if ours[key].is_meta else ours[key].device) for key, value in state.items()}
    model.load_state_dict(placed, strict=False, assign=True)
    _tie(model, manifest["aliases"])
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and DistributedDataParallel's wrappers, which would prefix its names."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


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


def _unique_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state_dict with each tensor once, and the other names it goes by."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise FormatError(f"state_dict entry {name!r} is a {type(value).__name__}: only tensors can be saved")
        if value.is_meta:
            raise FormatError(f"{name!r} is on the meta device and has no values: load or initialise the model first")
        if value.layout is not torch.strided:
            raise FormatError(f"{name!r} has layout {value.layout}: only dense tensors can be saved")
        value = value.detach().resolve_conj().resolve_neg()
        place = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        if value.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = value.contiguous()
    storages: set[int] = set()
    for name, value in tensors.items():  # views of one storage that differ: safetensors wants them apart
        if value.numel():
            pointer = value.untyped_storage().data_ptr()
            if pointer in storages:
                tensors[name] = value.clone()
            storages.add(pointer)
    return tensors, aliases


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{path} is missing: give a folder that pr.save_compressed wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read as JSON ({error}): the save is damaged, write it again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise FormatError(f"{path} is not Panther's: its 'format' must be {_FORMAT!r}")
    if manifest.get("format_version") != _VERSION:
        raise FormatError(
            f"{path} has format_version {manifest.get('format_version')!r} and this Panther reads {_VERSION}: "
            "use the Panther that wrote it, or a newer one"
        )
    weights, modules, aliases = (manifest.get(key) for key in ("weights", "modules", "aliases"))
    if not isinstance(weights, str) or weights in ("", ".", "..") or set(weights) & set("/\\:\0"):
        raise FormatError(f"{path} names the weights file {weights!r}: it must be a plain file name in that folder")
    if not isinstance(modules, dict) or not all(isinstance(spec, dict) for spec in modules.values()):
        raise FormatError(f"{path}: 'modules' must map names to objects")
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise FormatError(f"{path}: 'aliases' must map names to names")
    return manifest


def _read_tensors(folder: Path, weights: str) -> dict[str, Tensor]:
    path = folder / weights
    try:
        return load_file(path)
    except FileNotFoundError:
        raise FormatError(f"{path} is missing: give a folder that pr.save_compressed wrote") from None
    except (SafetensorError, OSError) as error:
        raise FormatError(
            f"{path} is no sound safetensors file ({error}): the save is damaged, write it again"
        ) from None


def _build_modules(specs: dict[str, Any], model: nn.Module, state: dict[str, Tensor]) -> dict[str, SketchedModule]:
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
        module.load_state_dict({key: _place(value, device) for key, value in state.items()}, assign=True)
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


def _place(value: Tensor, device: torch.device | str) -> Tensor:
    """A copy in memory torch allocates: at a file's odd addresses, products can differ in the last bit."""
    return value.to(device, copy=True)


def _check_fit(state: dict[str, Tensor], ours: dict[str, Tensor], folder: Path) -> None:
    missing, extra = sorted(ours.keys() - state.keys()), sorted(state.keys() - ours.keys())
    wrong = [
        f"{key} {tuple(state[key].shape)}, {state[key].dtype} for {tuple(ours[key].shape)}, {ours[key].dtype}"
        for key in sorted(ours.keys() & state.keys())
        if ours[key].shape != state[key].shape or ours[key].is_floating_point() != state[key].is_floating_point()
    ]
    if missing or extra or wrong:
        raise FormatError(
            f"{folder} does not fit the model: missing {_some(missing)}; unexpected {_some(extra)}; other shapes or "
            f"kinds {_some(wrong)}. Give the architecture that was saved"
        )


def _tie(model: nn.Module, aliases: dict[str, str]) -> None:
    """Share again, as one object, the parameters that were shared when saved."""
    for alias, name in aliases.items():
        (to, to_key), (source, key) = (
            (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in (alias, name)
        )
        if key in source._parameters and to_key in to._parameters:
            setattr(to, to_key, source._parameters[key])


def _some(items: list[str]) -> str:
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "") or "none"


def _known() -> str:
    return ", ".join(_CLASSES)
