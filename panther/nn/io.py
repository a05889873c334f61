"""The one inference format: a folder with ``model.safetensors`` and ``panther.json``.

The tensors are the model's state_dict, each stored once. The JSON holds the format's version, the record of every
compressed module from which it is built (name, class, constructor arguments, mode, dtype), the aliases of shared
tensors, and checksums of every tensor and of itself. Nothing is pickled, so a file from an untrusted source can at
worst be refused.
"""

__all__ = ["load_compressed", "save_compressed"]

import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from panther._hints import explain_keywords
from panther._model_libraries import layers_replaced, model_files
from panther._text import list_names
from panther._torch import (
    buffers_of,
    original_of_compiled,
    parameters_of,
    plain_name,
    unsaved_buffers_of,
    without_inner_wrappers,
)
from panther._version import __version__
from panther.errors import FormatError, check_flag
from panther.files.folder import commit_files, committed_path, finish_commit
from panther.files.reader import check_plain_name
from panther.files.records import read_record, read_valid_json, record_checksum
from panther.files.tensors import OpenTensor, StoredTensor, bytes_of, open_tensors, stored_metadata, write_tensors
from panther.files.writer import Draft
from panther.nn.attention.record import attention_as_saved, check_recorded, optional_names
from panther.nn.linears import expanded
from panther.nn.module_state import ModuleState
from panther.nn.protocol import compressed_layers
from panther.nn.quantized.packing import pack_
from panther.nn.quantized.stacked import put_layer
from panther.nn.quantized.state import inference_state
from panther.nn.sketch_record import plain_state
from panther.nn.specs import (
    SYMMETRIC,
    as_low_rank_layers,
    is_symmetric_record,
    load_modules,
    module_names_of,
    module_specs,
)

# All versions can be read. 1 has no checksums; 1 and 2 have fitted layers for low rank. 4 has symmetric layers without
# zero points, and is written for models with such layers. Other models have version 3, which older versions read.
_log = logging.getLogger("panther.nn")
_FORMAT, _VERSIONS = "panther", range(1, 5)
_WEIGHTS, INFERENCE_MANIFEST, _CONFIG = "model.safetensors", "panther.json", "config.json"
# Key of a mark in the metadata of the weights, which the manifest has too. Weights with a mark belong to a manifest,
# which may be lost, and weights without the mark of a manifest are of a different program, which saved them later.
_MARK = "panther_manifest"


@explain_keywords
def save_compressed(model: nn.Module, dir: str | os.PathLike[str]) -> Path:
    """Write a model with sketched or quantized layers to a folder, for inference.

    A seeded sketch is stored as its seed, and a shared tensor once. Names are those of the model without wrappers:
    torch.compile, activation checkpointing, DistributedDataParallel, DataParallel and AveragedModel leave no trace. A
    process that is killed at any moment leaves the old model or the new one, and of processes that save to one folder
    at the same time the last one wins.

    Of a transformers model, config.json, generation_config.json and the code of a model that was loaded with
    ``trust_remote_code=True`` are written as well: :func:`panther.from_pretrained` then needs no architecture.
    transformers' own ``from_pretrained`` and all that builds on it need none either, in a process that has imported
    Panther, which lets ``panther.integrations.transformers`` build the layers.

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
        OSError: If the folder cannot be written, or a file that would be replaced is a link or not a regular file.

    Example:
        >>> import tempfile, torch, panther as pr
        >>> model = torch.nn.Sequential(
        ...     pr.nn.SKLinear(256, 64, 2), torch.nn.ReLU()
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pr.save_compressed(model, folder)
        ...     plain = torch.nn.Sequential(
        ...         torch.nn.Linear(256, 64), torch.nn.ReLU()
        ...     )
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
    _leave_out_zeros(model, tensors, aliases, specs)
    return write_folder(dir, tensors, tensors.__getitem__, specs, aliases, model_files(model, specs))


def write_folder(
    dir: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    value_of: Callable[[str], Tensor],
    modules: dict[str, Any],
    aliases: dict[str, str],
    files: Mapping[str, bytes],
) -> Path:
    """Write the files of the format, and further ``files`` by name, and rename them when they are complete.

    ``tensors`` has the dtypes and shapes. ``value_of`` returns a tensor with values. Only one is in memory at a time.
    """
    checksums: dict[str, int] = {}

    def value(name: str) -> Tensor:
        tensor = value_of(name)
        checksums[name] = zlib.crc32(bytes_of(tensor), _description_checksum(tensor))
        return tensor

    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as drafts_to_close:

        def draft(name: str) -> Draft:
            new = Draft(folder / name)
            drafts_to_close.callback(new.close)
            return new

        drafts, manifest_draft = {_WEIGHTS: draft(_WEIGHTS)}, draft(INFERENCE_MANIFEST)
        mark = f"{record_checksum({'modules': modules, 'aliases': aliases, 'names': sorted(tensors)}):08x}"
        write_tensors(drafts[_WEIGHTS].file, tensors, value, {_MARK: mark})
        for name, contents in files.items():
            drafts[name] = draft(name)
            drafts[name].file.write(contents)
        manifest = _manifest(modules, aliases, checksums, files, mark)
        manifest_draft.file.write((json.dumps(manifest, indent=1) + "\n").encode())
        commit_files(folder, drafts, manifest_draft, _commit_of(manifest), _committed_names(manifest))
    return folder


def _committed_names(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the files that one rename of the manifest replaces."""
    return [_WEIGHTS, _CONFIG, *manifest.get("files", ())]


def _commit_of(manifest: Mapping[str, Any]) -> str:
    """Return the identifier of a commit, by which the pending names of its files are known: the manifest's checksum."""
    return f"{manifest['checksum']:08x}"


def _manifest(
    modules: dict[str, Any], aliases: dict[str, str], checksums: dict[str, int], files: Mapping[str, bytes], mark: str
) -> dict[str, Any]:
    manifest = {
        "format": _FORMAT,
        "format_version": _VERSIONS[-1] if any(map(is_symmetric_record, modules.values())) else 3,
        "panther_version": __version__,
        "weights": _WEIGHTS,
        "modules": modules,
        "aliases": aliases,
        "checksums": checksums,
        "mark": mark,
    }
    if _CONFIG in files:
        manifest["config_checksum"] = record_checksum(json.loads(files[_CONFIG]))
    if further_names := sorted(files.keys() - {_CONFIG}):
        manifest["files"] = further_names
    return manifest | {"checksum": record_checksum(manifest)}


@explain_keywords
def load_compressed(
    dir: str | os.PathLike[str], model: nn.Module, *, expand: bool = False, packed: bool = False
) -> nn.Module:
    """Turn a model of the original architecture into the saved one, in place.

    Modules that the folder names as sketched are replaced, as in the example of :func:`save_compressed`. All weights
    take the saved dtype and the device they had in ``model`` (the CPU, for a model on the meta device). A model on the
    meta device must not have non-persistent buffers, such as tables of positions, because no file has their
    values; transformers' ``from_pretrained``, with :mod:`panther.integrations.transformers`, computes them. Everything
    is checked before anything is changed, and if a module's own method or hook refuses its state, or the load is
    interrupted, the model is as it was.

    Args:
        dir: Folder written by :func:`save_compressed`.
        model: The architecture, with dense or with sketched layers.
        expand: Whether to expand every compressed layer once, as :func:`panther.to_linears_` does: a layer with codes
            becomes the nn.Linear or nn.Conv2d of its weight, and a layer of factors a pair of plain layers. The file
            stays small, and the model runs at the speed of plain layers, with their memory: the report of
            :func:`panther.compress` and the table of ``to_linears_`` state the bytes. While it loads, the file and the
            expanded layers are in memory together. Layers that ``to_linears_`` leaves as they are stay compressed.
        packed: Whether to call :func:`panther.pack_` at the end, for few rows on this processor.

    Returns:
        ``model``, without a wrapper around the whole, with the saved layers and weights; the new layer, if the model
        is itself one. Wrappers of torch.compile and activation checkpointing inside of the model stay.

    Raises:
        FormatError: If a file is missing, damaged, changed since it was saved, of a different format or of a newer
            version, or does not fit the model.
        SketchMismatchError: If a seed is damaged in a file of format version 1, which has no checksums.

    Cost: the bytes of the file in memory, once, on top of what ``model`` takes before; a second for each GB, a third of
    it for checksums, and half a millisecond for each compressed layer. The tensors of ``model`` are copied if one of
    its modules has a load hook or a load method of its own.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"load_compressed takes a folder and a model, in this order, not a {type(model).__name__} second"
        )
    check_flag("expand", expand)
    check_flag("packed", packed)
    folder, model = Path(dir), unwrapped(model)
    if folder.is_file():
        raise FormatError(f"{folder} is a file: give the folder that pr.save_compressed wrote")
    manifest, state = _read_folder(folder)
    previous_state = ModuleState([model])
    try:
        loaded = _load_into(model, manifest, state, folder, expand)
    except BaseException:
        previous_state.restore()
        raise
    if packed:
        pack_(loaded)
    return loaded


def _load_into(
    model: nn.Module, manifest: dict[str, Any], state: dict[str, Tensor], folder: Path, expand: bool
) -> nn.Module:
    """Turn a model into the saved one, in place; an error may leave it half changed."""
    for alias, name in manifest["aliases"].items():
        if name not in state or alias in state:
            raise FormatError(
                f"{folder / INFERENCE_MANIFEST} makes {alias!r} an alias of {name!r}, but the weights do not: the save "
                "is damaged, write it again"
            )
        state[alias] = state[name]
    modules, aliases = manifest["modules"], manifest["aliases"]
    if manifest["format_version"] < 3:
        modules, aliases, state = as_low_rank_layers(modules, aliases, state)

    with without_inner_wrappers(model), attention_as_saved(model, modules) as records:
        _check_unsaved(model, records)
        built = load_modules(records, model, state)
        state = {key: value for key, value in state.items() if built.keys().isdisjoint(module_names_of(key))}
        absent = optional_names(model) - state.keys()
        model_state = {
            key: value
            for key, value in plain_state(model).items()
            if key not in absent and built.keys().isdisjoint(module_names_of(key))
        }
        check_recorded(state.keys(), model, folder)
        _check_fit(state, model_state, folder)
        if "" in built:
            return expanded(built[""]) if expand else built[""]

        for name, module in built.items():
            put_layer(model, name, module)
        # strict=False: the sketched layers are already loaded, and the rest was checked above.
        placed = {
            key: value if model_state[key].is_meta else value.to(model_state[key].device)
            for key, value in state.items()
        }
        model.load_state_dict(placed, strict=False, assign=True)
        _tie(model, {**aliases, **_zeros_aliases(aliases, records)})
    layers_replaced(model)
    return expanded(model) if expand else model


def check_folder(dir: Path) -> None:
    """Raise FormatError if a file of a folder is missing, damaged, or not that which was saved.

    If the process that saved was killed before it gave all files their names, they get them now, so that programs that
    know nothing of Panther find them.
    """
    try:
        names = _committed_names(inference_manifest(dir))
        finish_commit(dir, names, lambda: inference_manifest(dir)["commit"])
    except OSError as error:
        raise FormatError(
            f"the process that saved to {dir} was killed, and this process cannot give the new files their names "
            f"({error}): call pr.from_pretrained once where the folder can be written"
        ) from None
    _read_folder(dir, _check_config, keep=False)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's wrapper, and inside wrappers that prefix its names by "module.".

    The averaged weights of an AveragedModel are the weights of its model.
    """
    while True:
        if isinstance(model, (DistributedDataParallel, nn.DataParallel, AveragedModel)):
            model = model.module
        elif (inner := original_of_compiled(model)) is not None:
            model = inner
        else:
            return model


def _unique_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the state_dict with each tensor once, and the first name of each tensor that has several."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names_by_place: dict[tuple[Any, ...], str] = {}
    for name, value in inference_state(model).items():
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
        if value.numel() and place in names_by_place:
            aliases[name] = names_by_place[place]
        else:
            names_by_place[place] = name
            tensors[name] = value
    return tensors, aliases


def _alias_copies(tensors: dict[str, Tensor], aliases: dict[str, str], specs: Mapping[str, Any]) -> None:
    """Make aliases of the tensors of a shared module that have no address to compare, because they are empty."""
    for module_name, spec in specs.items():
        if "alias_of" in spec:
            for name in [name for name in tensors if name.startswith(f"{module_name}.")]:
                first = spec["alias_of"] + name.removeprefix(module_name)
                aliases[name] = aliases.get(first, first)
                del tensors[name]


def _leave_out_zeros(
    model: nn.Module, tensors: dict[str, Tensor], aliases: dict[str, str], specs: Mapping[str, dict[str, Any]]
) -> None:
    """Remove the zero points of symmetric layers, which are all the middle code, and note this in their records."""
    for module_name, layer in compressed_layers(model, remove_duplicate=False):
        name = plain_name(f"{module_name}.").removesuffix(".")
        if name in specs and layer.is_symmetric:
            specs[name][SYMMETRIC] = True
            for tensor_name in layer.implied_tensors("meta"):
                key = f"{name}.{tensor_name}".removeprefix(".")
                tensors.pop(key, None)
                aliases.pop(key, None)


def _description_checksum(tensor: Tensor | StoredTensor) -> int:
    """Return the CRC-32 of dtype and shape, which the CRC-32 of the contents continues.

    The header of a safetensors file has no checksum.
    """
    return zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())


def tensor_checksum(reader: OpenTensor) -> int:
    """Return the checksum of a tensor as the manifest has it."""
    return reader.checksum(_description_checksum(reader.stored))


def inference_manifest(folder: Path) -> dict[str, Any]:
    """Return the checked contents of a folder's panther.json, with the ``"commit"`` that pending files are named by."""
    path = folder / INFERENCE_MANIFEST
    if not os.path.lexists(path) and (folder / _CONFIG).is_file():
        raise FormatError(
            f"{path} is missing, and config.json is there: pr.from_pretrained(folder) loads what save_pretrained wrote"
        )
    manifest = read_record(path, _FORMAT, _VERSIONS, "pr.save_compressed", "the save is damaged, write it again")
    manifest["commit"] = f"{record_checksum(manifest):08x}"
    if manifest["format_version"] == 1:
        manifest["checksums"] = None
    keys = ("weights", "modules", "aliases", "checksums")
    weights, modules, aliases, checksums = (manifest.get(key) for key in keys)
    if not isinstance(files := manifest.get("files", []), list):
        raise FormatError(f"{path}: 'files' must be a list of names")
    for name in (weights, *files):
        check_plain_name(name, path)
    if not isinstance(modules, dict) or not all(isinstance(spec, dict) for spec in modules.values()):
        raise FormatError(f"{path}: 'modules' must map names to objects")
    for name, spec in modules.items():
        if not isinstance(spec.get("alias_of", ""), str):
            raise FormatError(f"{path}: module {name!r} is an alias of {spec['alias_of']!r}, which is not a name")
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise FormatError(f"{path}: 'aliases' must map names to names")
    numbers = checksums.values() if isinstance(checksums, dict) else [None]
    if manifest["format_version"] > 1 and not all(type(number) is int for number in numbers):
        raise FormatError(f"{path}: 'checksums' must map names to numbers")
    return manifest


def saved_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the checked contents of a folder's panther.json; None if a different program wrote the folder's weights.

    That program may have replaced the weights of an older save, and left its panther.json.

    Raises:
        FormatError: If the manifest is damaged or no regular file, or is lost.
    """
    weights, manifest = folder / _WEIGHTS, None
    if os.path.lexists(folder / INFERENCE_MANIFEST):
        manifest = inference_manifest(folder)
        weights = weights_path(folder, manifest)
    if manifest is not None and not weights.exists() and (folder / f"{_WEIGHTS}.index.json").is_file():
        return None  # the weights were saved again, in shards
    metadata = stored_metadata(weights)
    if manifest is None and metadata and _MARK in metadata:
        raise FormatError(
            f"{folder / INFERENCE_MANIFEST} is lost, and with it the checksums and shared tensors of {_WEIGHTS}, which "
            "pr.save_compressed wrote: copy or write the folder again"
        )
    if manifest is not None and "mark" in manifest and metadata is not None and _MARK not in metadata:
        try:
            _read_folder(folder, keep=False)
        except FormatError:
            _log.warning(
                "%s is of an older save, whose weights were replaced: it is ignored", folder / INFERENCE_MANIFEST
            )
            return None
    return manifest


def weights_path(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Return the file with the weights of a manifest that :func:`inference_manifest` returned."""
    return committed_path(folder, manifest["weights"], manifest["commit"])


def _read_folder(
    folder: Path, check: Callable[[Path, Mapping[str, Any]], None] | None = None, *, keep: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the manifest and the checked tensors of one save, also while other processes save to the folder.

    Without ``keep``, the tensors are checked and not returned, and a few megabytes of them are in memory at a time.
    """
    manifest, is_repeated = inference_manifest(folder), False
    while True:
        try:
            tensors = _read_tensors(folder, manifest, keep)
            if check is not None:
                check(folder, manifest)
            return manifest, tensors
        except FormatError:
            # Between the manifest and the weights another process may have replaced both, or given the weights of this
            # manifest their own name, which happens once.
            last, manifest = manifest, inference_manifest(folder)
            if is_repeated and manifest == last:
                raise
            is_repeated = manifest == last


def _check_config(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise FormatError unless config.json is the saved one; folders of earlier versions have no checksum of it."""
    if (checksum := manifest.get("config_checksum")) is None:
        return
    path = committed_path(folder, _CONFIG, manifest["commit"])
    advice = "copy or write the folder again"
    config = read_valid_json(path, missing=advice, damaged=advice)
    if not isinstance(config, dict) or record_checksum(config) != checksum:
        raise FormatError(
            f"{path} does not match its checksum in {INFERENCE_MANIFEST}: it was damaged or changed after it was "
            "saved; change the model's config and save the model again"
        )


def _read_tensors(folder: Path, manifest: Mapping[str, Any], keep: bool) -> dict[str, Tensor]:
    path, checksums = weights_path(folder, manifest), manifest["checksums"]
    tensors = {}
    with ExitStack() as files:
        try:
            readers = files.enter_context(open_tensors(path))
        except FormatError as error:
            raise _as_damaged_save(path, error) from None
        if checksums is not None and (differing := sorted(checksums.keys() ^ readers.keys())):
            raise FormatError(
                f"{path} and {INFERENCE_MANIFEST} in its folder name different tensors ({list_names(differing, 5)}): "
                "both files must be of one save, write it again"
            )
        for name, reader in readers.items():
            try:
                if keep:
                    tensors[name] = reader.read()
                    checksum = zlib.crc32(bytes_of(tensors[name]), _description_checksum(reader.stored))
                else:
                    checksum = tensor_checksum(reader)
            except FormatError as error:
                raise _as_damaged_save(path, error) from None
            if checksums is not None and checksums[name] != checksum:
                raise FormatError(
                    f"tensor {name!r} in {path} does not match its checksum ({checksum!r} instead of "
                    f"{checksums[name]!r}): the file was damaged or changed after it was saved, copy or write it again"
                )
    return tensors


def _as_damaged_save(path: Path, error: FormatError) -> FormatError:
    """Return an error about a file of weights with advice."""
    if path.exists():
        return FormatError(f"{error}: the save is damaged, write it again")
    return FormatError(f"{path} is missing: give a folder that pr.save_compressed wrote")


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
            "the model is on the meta device, and no file has the values of its non-persistent buffers "
            f"{list_names(lost, 5)}: build it on the CPU, or load a folder of transformers' save_pretrained with "
            "from_pretrained"
        )


def _check_fit(state: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    missing, extra = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    wrong = [
        f"{key} {tuple(state[key].shape)}, {state[key].dtype} for {tuple(expected[key].shape)}, {expected[key].dtype}"
        for key in sorted(expected.keys() & state.keys())
        if expected[key].shape != state[key].shape
        or expected[key].is_floating_point() != state[key].is_floating_point()
    ]
    if missing or extra or wrong:
        raise FormatError(
            f"{folder} does not fit the model: missing {list_names(missing, 5)}; unexpected {list_names(extra, 5)}; "
            f"of a different shape or dtype {list_names(wrong, 5)}. Give the architecture that was saved"
        )


def _zeros_aliases(aliases: Mapping[str, str], records: Mapping[str, Any]) -> dict[str, str]:
    """Return which zero points were shared that the folder does not have: those of layers that share their codes."""
    shared = {}
    for alias, name in aliases.items():
        layers = [each.removesuffix(".codes") for each in (alias, name)]
        if alias.endswith(".codes") and all(is_symmetric_record(records.get(layer)) for layer in layers):
            shared[f"{layers[0]}.zeros"] = f"{layers[1]}.zeros"
    return shared


def _tie(model: nn.Module, aliases: dict[str, str]) -> None:
    """Make the parameters and buffers that were shared when saved one object again."""
    for alias, name in aliases.items():
        (to, to_key), (source, key) = (
            (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in (alias, name)
        )
        for tensors_of in (parameters_of, buffers_of):
            if key in tensors_of(source) and to_key in tensors_of(to):
                setattr(to, to_key, tensors_of(source)[key])
