"""Folders of weights in any supported format: names, shapes and compressed layers, with values read by slices."""

__all__ = ["StoredWeights", "check_architecture", "saved_modules", "stored_weights", "with_saved_layers"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from panther._torch import put_module, without_inner_wrappers
from panther.distributed.checkpoint import state as states
from panther.distributed.checkpoint.folders import checkpoints, folder_of
from panther.distributed.checkpoint.manifest import MANIFEST, read_manifest
from panther.distributed.checkpoint.storage import Chunk, TensorReader, read_tensors, reader_of, tensor_reader
from panther.errors import CheckpointError, FormatError
from panther.files import read_json
from panther.files.tensors import stored_tensors
from panther.nn.attention.record import convert_as_saved_
from panther.nn.io import INFERENCE_MANIFEST, saved_manifest, weights_path
from panther.nn.specs import QUANTIZATION_METHOD, TRAINED_SCALES, build_modules, is_symmetric_record, module_specs


@dataclass
class StoredWeights:
    """The tensors and compressed layers of a folder."""

    folder: Path
    reader: StorageReader
    modules: Mapping[str, Any]
    """The records of the compressed layers, by name."""
    places: dict[str, str]
    """The reader's name of a tensor, by each name that the tensor has in a model."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Entries that are not tensors, in the encoding of Panther's checkpoints."""
    is_latest: bool = False
    """Whether the user named a directory, and this is its latest checkpoint."""

    @cached_property
    def _tensors(self) -> Mapping[str, Any]:
        return self.reader.read_metadata().state_dict_metadata

    def names(self) -> set[str]:
        """Return the names of everything that the folder holds."""
        return {*self.places, *self.values}

    def difference(self, name: str, value: Any) -> str | None:
        """Return a message if a value of a model differs in kind or shape from the stored value, and otherwise None."""
        stored = self._tensors.get(self.places.get(name, ""))
        if not (isinstance(stored, TensorStorageMetadata) and isinstance(value, Tensor)):
            same = name in self.values and not isinstance(value, Tensor)
            return None if same else f"is a {type(value).__name__} and something else"
        if stored.size != value.shape:
            return f"has the shape {tuple(value.shape)}, and {tuple(stored.size)}"
        dtype = stored.properties.dtype
        # float32 may be read into bfloat16. Floats and integers mean that the model is a different one.
        return f"is {value.dtype}, and {dtype}" if value.is_floating_point() != dtype.is_floating_point else None

    def read(self, name: str, like: Any) -> Any:
        """Return a value; for a tensor, the shard with the placement, device and floating dtype of ``like``."""
        if name in self.values:
            return states.decode(self.values[name], {})
        stored = self._tensors[self.places[name]].properties.dtype
        # Integers keep the stored dtype, which the module checks.
        target = torch.empty_like(like, dtype=like.dtype if like.is_floating_point() else stored, requires_grad=False)
        read_tensors(self.reader, {self.places[name]: target}, alone=True)
        return target


class _DCPReader(dcp.FileSystemReader):
    """The reader of torch.distributed.checkpoint, which reads the metadata once and not for every module."""

    _metadata: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def stored_weights(folder: Path) -> StoredWeights:
    """Return the weights of a folder; raise CheckpointError if it holds none, and FormatError if a file is damaged."""
    if _has_checkpoint(folder):
        named_path, folder = folder, folder_of(folder)
        manifest = read_manifest(folder)
        entries = manifest["model"]
        places = {name: entry["$tensor"] for name, entry in entries.items() if states.is_tensor(entry)}
        values = {name: entry for name, entry in entries.items() if name not in places}
        reader = reader_of(folder, manifest)
        return StoredWeights(folder, reader, manifest["modules"], places, values, is_latest=folder != named_path)
    if (folder / ".metadata").is_file():
        files = _DCPReader(folder)
        return StoredWeights(folder, files, {}, {name: name for name in files.read_metadata().state_dict_metadata})
    if (inference := saved_manifest(folder)) is not None:
        return _inference_weights(folder, inference)
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} holds no weights: give a folder with safetensors, a checkpoint of "
            "torch.distributed.checkpoint, or one of Panther's"
        )
    for path in folder.glob("*.safetensors"):
        stored_tensors(path)  # which opens regular files only, and names the one that is damaged
    metadata = dcp.HuggingFaceStorageReader(str(folder)).read_metadata()
    chunks = {index: Chunk(Path(info.relative_path), index.fqn) for index, info in metadata.storage_data.items()}
    places = {name: name for name in metadata.state_dict_metadata}
    return StoredWeights(folder, TensorReader(metadata, chunks), saved_modules(folder), places)


def _inference_weights(folder: Path, manifest: Mapping[str, Any]) -> StoredWeights:
    """Return the weights of a folder of ``save_compressed``, which are in one file that the manifest names."""
    path = weights_path(folder, manifest)
    tensors: dict[str, tuple[torch.dtype, Sequence[int], list[Any]]] = {}

    def add(chunk: Chunk, shape: Sequence[int], dtype: torch.dtype) -> None:
        tensors[chunk.key] = dtype, shape, [([0] * len(shape), shape, chunk)]

    for name, stored in stored_tensors(path).items():
        add(Chunk(path, name), stored.shape, stored.dtype)
    places = {name: name for name in tensors} | manifest["aliases"]
    for key, value in _middle_zeros(manifest["modules"]).items():
        # A layer of symmetric grids has no zero points in the file, and as many of them as scales.
        scales = places.get(f"{key.removesuffix('zeros')}scales", "")
        if scales in tensors:
            add(Chunk(path, key, constant=value), tensors[scales][1], torch.uint8)
            places[key] = key
    if strangers := sorted(set(places.values()) - tensors.keys()):
        raise FormatError(f"{folder / INFERENCE_MANIFEST} names the tensor {strangers[0]!r}, which {path} lacks")
    return StoredWeights(folder, tensor_reader(tensors), manifest["modules"], places)


def _middle_zeros(modules: Mapping[str, Any]) -> dict[str, int]:
    """Return the value of the zero points that a folder does not hold, by the names of the tensors."""
    values = {}
    for name, spec in modules.items():
        arguments = modules.get(spec.get("alias_of", name), spec).get("args")
        bits = arguments.get("bits") if isinstance(arguments, dict) else None
        if is_symmetric_record(spec) and type(bits) is int and 1 <= bits <= 8:
            values[f"{name}.zeros" if name else "zeros"] = 2 ** (bits - 1)
    return values


def _has_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or bool(checkpoints(folder))


def saved_modules(folder: Path) -> Mapping[str, Any]:
    """Return the records of the compressed layers of a folder, by name; raise FormatError if it holds no model."""
    if (manifest := saved_manifest(folder)) is not None:
        return manifest["modules"]
    if (folder / ".metadata").is_file():
        return {}
    if _has_checkpoint(folder):
        return read_manifest(folder_of(folder))["modules"]
    if not any(folder.glob("*.safetensors")):
        raise FormatError(
            f"{folder} holds no model: give a folder that panther.distributed.checkpoint, pr.save_compressed or "
            "save_pretrained of transformers wrote"
        )
    config = folder / "config.json"
    try:
        entry = read_json(config).get("quantization_config") if config.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise FormatError(f"{config} cannot be read as JSON ({error}): write the folder again") from None
    if isinstance(entry, dict) and entry.get("quant_method") == QUANTIZATION_METHOD:
        return entry.get("modules") or {}  # written by transformers' save_pretrained
    return {}


def with_saved_layers(model: nn.Module, saved: Mapping[str, Any]) -> nn.Module:
    """Replace layers that differ from their records by freshly initialised ones; return the model, or the new layer."""
    with without_inner_wrappers(model):
        saved, _ = convert_as_saved_(model, saved)
        present = {name for name, _ in model.named_modules(remove_duplicate=False)}
        wrong = _differing([model], saved).keys() | (saved.keys() - present)
        records = {name: spec for name, spec in saved.items() if {name, spec.get("alias_of")} & wrong}
        built = build_modules(records, model)
        if "" in built:
            return built[""]
        for name, module in built.items():
            put_module(model, name, module)
    return model


def _differing(parts: Sequence[nn.Module], saved: Mapping[str, Any]) -> dict[str, str]:
    """Return messages about compressed layers that differ from their records in class, arguments or mode, by name."""
    differences = {}
    for part in parts:
        specs = module_specs(part, in_training=True)
        present = {states.module_name(name): module for name, module in part.named_modules()}
        for name in dict.fromkeys([*specs, *saved]):
            if name not in present or specs.get(name) == saved.get(name):
                continue
            if name not in specs:
                kind, saved_kind = type(present[name]).__name__, saved[name].get("class")
                differences[name] = f"a {kind} is not the {saved_kind} that was saved"
                continue
            spec, was = specs[name], saved.get(name, {})
            compared = ("class", "args", "mode", "activations", TRAINED_SCALES)
            differ = [key for key in compared if spec.get(key) != was.get(key)]
            if {spec.get("mode"), was.get("mode")} == {"seeded", "sparse"}:  # A layer follows the record of its seed.
                differ.remove("mode")
            if differ:
                differences[name] = "; ".join(f"{key} is {spec.get(key)} and was {was.get(key)}" for key in differ)
    return differences


def check_architecture(parts: Sequence[nn.Module], saved: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError unless compressed layers have the saved class, arguments and mode."""
    for name, how in _differing(parts, saved).items():
        raise CheckpointError(
            f"{folder} does not fit layer {name!r}: {how}: call restore_architecture on the model first"
        )
