"""The one inference format: a folder with ``model.safetensors`` and ``panther.json``.

The tensors are the model's state_dict, each stored once. The JSON holds the format's version, the record of every
compressed module from which it is built (name, class, constructor arguments, mode, dtype), the aliases of shared
tensors, and checksums of every tensor and of itself. Nothing is pickled, so a file from an untrusted source can at
worst be refused.
"""

__all__ = ["load_compressed", "save_compressed"]

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from panther._safetensors import contents_checksum, write_file
from panther._torch import buffers_of, original_of_compiled, parameters_of, unsaved_buffers_of
from panther._version import __version__
from panther.errors import FormatError
from panther.nn._specs import load_modules, model_config, module_specs, note_in_config_, place

_FORMAT, _VERSIONS = "panther", range(1, 3)  # all can be read, and the last is written; 1 has no checksums
_WEIGHTS, INFERENCE_MANIFEST, _CONFIG = "model.safetensors", "panther.json", "config.json"


def save_compressed(model: nn.Module, dir: str | os.PathLike[str]) -> Path:
    """Write a model with sketched or quantized layers to a folder, for inference.

    A seeded sketch is stored as its seed, and a shared tensor once. A wrapper of the model, by torch.compile or
    DistributedDataParallel, is removed. Files are written under temporary names and renamed when complete, so a crash
    while writing leaves an older save intact.

    Of a transformers model, config.json is written as well: :func:`panther.from_pretrained` then needs no architecture,
    and so do transformers' own ``from_pretrained`` and all that builds on it, once
    :mod:`panther.integrations.transformers` is imported.

    Args:
        model: Any module, with sketched and quantized layers or without.
        dir: Folder to write to, created if missing; its ``model.safetensors`` and ``panther.json`` are replaced.

    Returns:
        The folder.

    Raises:
        FormatError: If the state_dict holds something other than tensors, or a tensor that is sharded or on the meta
            device, or a layer is parametrized or pruned, or holds its scales in another dtype than
            bfloat16.
        SketchMismatchError: If a seed is damaged, so that the file could not be loaded.
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
    specs = module_specs(model)
    _alias_copies(tensors, aliases, specs)
    return write_folder(dir, tensors, tensors.__getitem__, specs, aliases, model_config(model, specs))


def write_folder(
    dir: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    value_of: Callable[[str], Tensor],
    modules: dict[str, Any],
    aliases: dict[str, str],
    config: dict[str, Any] | None = None,
) -> Path:
    """Write the files of the format, and config.json if there is one, and rename them when they are complete.

    ``tensors`` tells dtypes and shapes, ``value_of`` returns one with its values; only one at a time is held here.
    """
    checksums: dict[str, int] = {}

    def value(name: str) -> Tensor:
        tensor = value_of(name)
        checksums[name] = _described_checksum(tensor)
        return tensor

    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    names = (_WEIGHTS, INFERENCE_MANIFEST, *(() if config is None else (_CONFIG,)))
    parts = {name: folder / f"{name}.tmp" for name in names}
    try:
        write_file(parts[_WEIGHTS], tensors, value)
        texts = {INFERENCE_MANIFEST: _manifest(modules, aliases, checksums), _CONFIG: config}
        for name in names[1:]:
            with open(parts[name], "w", encoding="utf-8") as file:
                file.write(json.dumps(texts[name], indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
        for name, part in parts.items():
            os.replace(part, folder / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    return folder


def _manifest(modules: dict[str, Any], aliases: dict[str, str], checksums: dict[str, int]) -> dict[str, Any]:
    manifest = {
        "format": _FORMAT,
        "format_version": _VERSIONS[-1],
        "panther_version": __version__,
        "weights": _WEIGHTS,
        "modules": modules,
        "aliases": aliases,
        "checksums": checksums,
    }
    return manifest | {"checksum": record_checksum(manifest)}


def load_compressed(dir: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """Turn a model of the original architecture into the saved one, in place.

    Modules that the folder names as sketched are replaced, as in the example of :func:`save_compressed`. All weights
    take the saved dtype and the device they had in ``model`` (the CPU, for a model on the meta device). A model on the
    meta device may have no non-persistent buffers of its own, such as tables of positions, because no file has their
    values; transformers' ``from_pretrained``, with :mod:`panther.integrations.transformers`, computes them. Everything
    is checked before anything is changed.

    Args:
        dir: Folder written by :func:`save_compressed`.
        model: The architecture, with dense or with sketched layers.

    Returns:
        ``model``, without wrappers, with the saved layers and weights; the new layer, if the model is itself one.

    Raises:
        FormatError: If a file is missing, damaged, changed since it was saved, of a different format or of a newer
            version, or does not fit the model.
        SketchMismatchError: If a seed is damaged in a file of format version 1, which has no checksums.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"load_compressed takes a folder and a model, in this order, not a {type(model).__name__} second"
        )
    folder, model = Path(dir), unwrapped(model)
    if folder.is_file():
        raise FormatError(f"{folder} is a file: give the folder that pr.save_compressed wrote")
    manifest = inference_manifest(folder)
    state = _read_tensors(folder, manifest)
    for alias, name in manifest["aliases"].items():
        if name not in state or alias in state:
            raise FormatError(
                f"{folder / INFERENCE_MANIFEST} makes {alias!r} an alias of {name!r}, but the weights do not: the save "
                "is damaged, write it again"
            )
        state[alias] = state[name]

    _check_unsaved(model, manifest["modules"])
    built = load_modules(manifest["modules"], model, state)
    prefixes = tuple(name + "." if name else "" for name in built)
    state = {key: value for key, value in state.items() if not key.startswith(prefixes)}
    ours = {key: value for key, value in model.state_dict().items() if not key.startswith(prefixes)}
    _check_fit(state, ours, folder)
    if "" in built:
        return built[""]

    for name, module in built.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module)
    # strict=False: the sketched layers are already loaded, and the rest was checked above.
    placed = {key: place(value, "cpu" if ours[key].is_meta else ours[key].device) for key, value in state.items()}
    model.load_state_dict(placed, strict=False, assign=True)
    _tie(model, manifest["aliases"])
    note_in_config_(model)
    return model


def check_folder(dir: Path) -> None:
    """Raise FormatError if a file of a folder is missing, damaged, or not that which was saved."""
    _read_tensors(dir, inference_manifest(dir))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's and DistributedDataParallel's wrappers, which prefix its names."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (inner := original_of_compiled(model)) is not None:
            model = inner
        else:
            return model


def _unique_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the state_dict with each tensor once, and the first name of each tensor that has several."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise FormatError(f"state_dict entry {name!r} is a {type(value).__name__}: only tensors can be saved")
        if hasattr(value, "full_tensor"):  # a DTensor, known by its method: torch may be built without them
            raise FormatError(
                f"{name!r} is a DTensor, on a device mesh: call panther.distributed.checkpoint.export(model, dir) on "
                "every rank, or save unshard_module(model)"
            )
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
            tensors[name] = value
    return tensors, aliases


def _alias_copies(tensors: dict[str, Tensor], aliases: dict[str, str], specs: Mapping[str, Any]) -> None:
    """Make aliases of the tensors of a shared module that a state_dict copies for each name, as of a fused layer."""
    for module_name, spec in specs.items():
        if "alias_of" in spec:
            for name in [name for name in tensors if name.startswith(f"{module_name}.")]:
                first = spec["alias_of"] + name.removeprefix(module_name)
                aliases[name] = aliases.get(first, first)
                del tensors[name]


def read_record(path: Path, format: str, versions: range, writer: str, damaged: str) -> dict[str, Any]:
    """Return the JSON object of a file, or raise FormatError unless it has this ``"format"`` and one of the versions.

    Messages name the function that writes such files, and give the advice ``damaged`` if the file is not JSON or does
    not match its checksum. Files of version 1 have none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{path} is missing: give a folder that {writer} wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read as JSON ({error}): {damaged}") from None
    if not isinstance(record, dict) or record.get("format") != format:
        raise FormatError(f"{path} was not written by {writer}: its 'format' must be {format!r}")
    version = record.get("format_version")
    if type(version) is not int or version not in versions:
        reads = str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        raise FormatError(
            f"{path} has format_version {version!r} and this Panther reads {reads}: use the Panther that wrote it "
            f"({record.get('panther_version', 'of unknown version')}), or a newer one"
        )
    if version > 1 and record.pop("checksum", None) != record_checksum(record):
        raise FormatError(f"{path} does not match its checksum: {damaged}")
    return record


def record_checksum(record: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a JSON object without its checksum: of its sorted entries, so that its layout is free."""
    return zlib.crc32(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


def _described_checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of dtype, shape and contents: the header of a safetensors file has no checksum of its own."""
    return contents_checksum(tensor, zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))


def inference_manifest(folder: Path) -> dict[str, Any]:
    """Return the checked contents of a folder's panther.json."""
    path = folder / INFERENCE_MANIFEST
    if not path.is_file() and (folder / _CONFIG).is_file():
        raise FormatError(
            f"{path} is missing, and config.json is there: pr.from_pretrained(folder) loads what save_pretrained wrote"
        )
    manifest = read_record(path, _FORMAT, _VERSIONS, "pr.save_compressed", "the save is damaged, write it again")
    if manifest["format_version"] == 1:
        manifest["checksums"] = None
    keys = ("weights", "modules", "aliases", "checksums")
    weights, modules, aliases, checksums = (manifest.get(key) for key in keys)
    if not isinstance(weights, str) or weights in ("", ".", "..") or set(weights) & set("/\\:\0"):
        raise FormatError(f"{path} names the weights file {weights!r}: it must be a plain file name in that folder")
    if not isinstance(modules, dict) or not all(isinstance(spec, dict) for spec in modules.values()):
        raise FormatError(f"{path}: 'modules' must map names to objects")
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise FormatError(f"{path}: 'aliases' must map names to names")
    if manifest["format_version"] > 1 and not isinstance(checksums, dict):
        raise FormatError(f"{path}: 'checksums' must map names to numbers")
    return manifest


def _read_tensors(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    path = folder / manifest["weights"]
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise FormatError(f"{path} is missing: give a folder that pr.save_compressed wrote") from None
    except (SafetensorError, OSError) as error:
        raise FormatError(
            f"{path} is not a valid safetensors file ({error}): the save is damaged, write it again"
        ) from None
    checksums = manifest["checksums"]
    if checksums is None:
        return tensors
    if differing := sorted(checksums.keys() ^ tensors.keys()):
        raise FormatError(
            f"{path} and {INFERENCE_MANIFEST} beside it name different tensors ({_some(differing)}): both files must "
            "be of one save, write it again"
        )
    for name, tensor in tensors.items():
        if checksums[name] != (found := _described_checksum(tensor)):
            raise FormatError(
                f"tensor {name!r} in {path} does not match its checksum ({found!r} instead of {checksums[name]!r}): "
                "the file was damaged or changed after it was saved, copy or write it again"
            )
    return tensors


def _check_unsaved(model: nn.Module, replaced: Mapping[str, Any]) -> None:
    """Raise FormatError if the model would be left with a buffer without values."""
    lost = [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key in unsaved_buffers_of(module)
        if name not in replaced and (buffer := buffers_of(module).get(key)) is not None and buffer.is_meta
    ]
    if lost:
        raise FormatError(
            f"the model is on the meta device, and no file has the values of its non-persistent buffers {_some(lost)}: "
            "build it on the CPU, or load a folder of transformers' save_pretrained with from_pretrained"
        )


def _check_fit(state: dict[str, Tensor], ours: dict[str, Tensor], folder: Path) -> None:
    missing, extra = sorted(ours.keys() - state.keys()), sorted(state.keys() - ours.keys())
    wrong = [
        f"{key} {tuple(state[key].shape)}, {state[key].dtype} for {tuple(ours[key].shape)}, {ours[key].dtype}"
        for key in sorted(ours.keys() & state.keys())
        if ours[key].shape != state[key].shape or ours[key].is_floating_point() != state[key].is_floating_point()
    ]
    if missing or extra or wrong:
        raise FormatError(
            f"{folder} does not fit the model: missing {_some(missing)}; unexpected {_some(extra)}; of a different "
            f"shape or dtype {_some(wrong)}. Give the architecture that was saved"
        )


def _tie(model: nn.Module, aliases: dict[str, str]) -> None:
    """Make the parameters that were shared when saved one object again."""
    for alias, name in aliases.items():
        (to, to_key), (source, key) = (
            (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in (alias, name)
        )
        if key in parameters_of(source) and to_key in parameters_of(to):
            setattr(to, to_key, parameters_of(source)[key])


def _some(items: list[str]) -> str:
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "") or "none"
