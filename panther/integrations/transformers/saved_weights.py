"""The weights files from which transformers loads a compressed model, compared with the layers that they are for."""

__all__ = ["SavedWeights", "check_loaded", "leave_out_zeros_", "read_saved_weights", "set_zeros_", "share_tied_"]

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from panther._torch import buffers_of, parameters_of
from panther.errors import FormatError
from panther.files.tensors import open_tensors, stored_tensors
from panther.integrations.import_hook import MARKS
from panther.nn.io import saved_manifest, tensor_checksum
from panther.nn.protocol import TRAINED_SCALES, CompressedModule, compressed_layers
from panther.nn.quantized.state import SCALE_LOGS
from panther.nn.quantized.ties import tied_layers
from panther.nn.sketch_record import plain_state
from panther.nn.specs import is_symmetric_record


@dataclass(frozen=True)
class SavedWeights:
    """The names and shapes of the tensors in weights files, and the names of shared tensors in panther.json."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    """Names that have no tensor in the files, each with the name of the tensor that it shares."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors in the files."""
        return frozenset(self.shapes)

    def train_scales_(self, model: Any) -> None:
        """Make the scales trainable of layers that ``save_pretrained`` saved during training."""
        for name, layer in compressed_layers(model):
            logs = [f"{name}.{logs_name}" for logs_name in SCALE_LOGS.values()]
            if any(self._saved_name(model, each, self.names) for each in logs):
                layer.follow_record_(layer.to_record() | {TRAINED_SCALES: True})

    def prefixes_of(self, part_names: Iterable[str]) -> list[str]:
        """Return the prefixes with which the files name all layers of a part, given the names in the part."""
        names = list(part_names)
        tensor_names = self.names | self.aliases.keys()
        layers = {name.rpartition(".")[0] for name in tensor_names if name.rpartition(".")[2] in MARKS}
        prefixes = {layer.removesuffix(names[0]) for layer in layers if f".{layer}".endswith(f".{names[0]}")}
        return sorted(prefix for prefix in prefixes if all(prefix + name in layers for name in names))

    def holds(self, layers: Mapping[str, nn.Module]) -> bool:
        """Return whether the files hold the tensors of these layers, by name and shape."""
        return all(
            f"{name}.{key}" in self.aliases or self.shapes.get(f"{name}.{key}") == tuple(tensor.shape)
            for name, layer in layers.items()
            for key, tensor in plain_state(layer).items()
        )

    def check(self, model: Any, specs: Mapping[str, Any]) -> None:
        """Raise FormatError if the files lack tensors of compressed layers, which would get random numbers.

        ``specs`` are the records of the layers. Those of symmetric layers have no zero points in the files.

        Tensors are counted by the last part of their names, because transformers renames the first parts of some
        models.
        """
        tensors = {  # by identity, because tied layers share buffers, which the files hold once
            id(tensor): (name, key)
            for name, layer in compressed_layers(model)
            for key, tensor in plain_state(layer, keep_vars=True).items()
        }
        needed = Counter(
            key
            for name, key in tensors.values()
            if key != "bias"
            and not (key == "zeros" and is_symmetric_record(specs.get(name)))
            and not self._saved_name(model, f"{name}.{key}", self.aliases)
        )
        by_name = dict(model.named_modules(remove_duplicate=False))
        for tensor_name in sorted(self.names):
            layer, _, key = tensor_name.rpartition(".")
            own_name = self._saved_name(model, layer, by_name) if key in MARKS else None
            if own_name is not None and not isinstance(by_name[own_name], CompressedModule):
                raise _unnamed(layer)
        saved = Counter(name.rpartition(".")[2] for name in self.names)
        for key, count in needed.items():
            if saved[key] < count:
                raise FormatError(
                    f"config.json in {self.folder} names {count} compressed layers with {key!r}, and the weights files "
                    f"hold {saved[key]}: the folder is damaged or its files are of different saves, save it again"
                )

    def share_(self, model: Any) -> None:
        """Assign shared tensors, which the files hold once, to the compressed layers that share them."""
        for name, layer in compressed_layers(model):
            for key in plain_state(layer):
                alias = self._saved_name(model, f"{name}.{key}", self.aliases)
                first = alias and next(iter(self._own_names(model, self.aliases[alias])), None)
                if first:
                    owner_name, _, owner_key = first.rpartition(".")
                    owner = model.get_submodule(owner_name)
                    tensors_of = parameters_of if key in parameters_of(layer) else buffers_of
                    tensors_of(layer)[key] = tensors_of(owner)[owner_key]  # type: ignore[assignment]

    def has_layer(self, model: Any, name: str) -> bool:
        """Return whether the files hold scales of a layer; its codes may be the ones of another layer."""
        return self._saved_name(model, f"{name}.scales", self.names) is not None

    def _saved_name(self, model: Any, name: str, saved: Iterable[str]) -> str | None:
        """Return the name under which a tensor of the model was saved, with or without the prefix of the body."""
        return next((each for each in _spellings(model, name) if each in saved), None)

    def _own_names(self, model: Any, saved_name: str) -> Iterator[str]:
        """Yield the names in the model that a saved name may have."""
        for name in _spellings(model, saved_name):
            module_name, _, key = name.rpartition(".")
            try:
                module = model.get_submodule(module_name)
            except AttributeError:
                continue
            if key in parameters_of(module) or key in buffers_of(module):
                yield name


def leave_out_zeros_(model: Any, specs: Mapping[str, Any]) -> None:
    """Let transformers load files that lack the zero points of symmetric layers."""
    patterns = {rf"^{re.escape(name)}\.zeros$" for name, spec in specs.items() if is_symmetric_record(spec)}
    if patterns:
        model._keys_to_ignore_on_load_missing = set(model._keys_to_ignore_on_load_missing or ()) | patterns


def set_zeros_(model: nn.Module, specs: Mapping[str, Any]) -> None:
    """Set the zero points of symmetric layers, which the files lack, to the middle code."""
    for name, layer in compressed_layers(model):
        if is_symmetric_record(specs.get(name)):
            device = next(iter(layer.stored().values())).device
            for key, tensor in layer.implied_tensors(device).items():
                setattr(layer, key, tensor)


def share_tied_(model: Any, saved: SavedWeights | None) -> list[tuple[str, str]]:
    """Share the buffers of compressed layers that a model ties, before loading, and return pairs of names.

    transformers ties parameters only. The pairs of compressed layers are therefore removed from its list, and tensors
    of the second layer, which is not loaded, do not count as missing. Layers that were saved separately are not shared.
    """
    ties: dict[str, str] = dict(model.all_tied_weights_keys)
    pairs: list[tuple[str, str]] = []
    for names in [*tied_layers(model, ties)]:
        del ties[f"{names[0]}.weight"]
        target, source = (model.get_submodule(name) for name in names)
        is_saved = [saved is not None and saved.has_layer(model, name) for name in names]
        if all(is_saved) or not _share_form(target, source):
            continue
        loaded, other = names if is_saved[0] else names[::-1]
        buffers_of(model.get_submodule(other)).update(buffers_of(model.get_submodule(loaded)))
        ignored = {rf"^{re.escape(other)}\.{key}$" for key in buffers_of(source)}
        model._keys_to_ignore_on_load_missing = set(model._keys_to_ignore_on_load_missing or ()) | ignored
        pairs.append((loaded, other))
    model.all_tied_weights_keys = ties
    return pairs


def _share_form(first: Any, second: Any) -> bool:
    """Return whether two compressed layers have codes of equal shapes, so that they can share them."""
    shapes = [
        {key: tensor.shape for key, tensor in buffers_of(module).items() if tensor is not None}
        for module in (first, second)
    ]
    return first.record_mode == second.record_mode == "quantized" and shapes[0] == shapes[1]


def check_loaded(model: nn.Module, info: Mapping[str, Iterable[str]]) -> None:
    """Raise FormatError if compressed layers are new, or weights that the files hold as a compressed layer.

    ``info`` is the second result of ``from_pretrained(..., output_loading_info=True)`` of transformers. A part of a
    model can have shorter names than the files, and a model around it longer ones.
    """
    state, missing_names = model.state_dict(keep_vars=True), set(info["missing_keys"])
    loaded = {id(tensor) for name, tensor in state.items() if name not in missing_names}
    for name in sorted(missing_names):
        # Tensors that layers share are in the files once.
        is_new = name.rpartition(".")[2] in MARKS and name in state and id(state[name]) not in loaded
        if is_new and isinstance(model.get_submodule(name.rpartition(".")[0]), CompressedModule):
            raise FormatError(
                f"the weights files do not hold {name!r} of a compressed layer that the config names, under the names "
                f"of a {type(model).__name__}: load the folder in the class that was saved, by "
                "pr.from_pretrained(folder), and take a part from that model"
            )
    unexpected = set(info["unexpected_keys"])
    compressed = {
        layer
        for layer, _, key in (name.rpartition(".") for name in unexpected)
        if key in MARKS and (key != "scales" or f"{layer}.record" in unexpected)  # GPTQ and AWQ have scales, too
    }
    endings = {end: layer for layer in compressed for end in _endings(layer)}
    for missing_name in sorted(missing_names):
        name = missing_name.removesuffix(".weight")
        if layer := endings.get(name) or next((end for end in _endings(name) if end in compressed), None):
            raise _unnamed(layer)


def _unnamed(layer: str) -> FormatError:
    return FormatError(
        f"the weights files hold {layer!r} as a compressed layer of Panther, and the config that was used does not "
        "name it, so that it would be filled with random numbers: load the folder by pr.from_pretrained(folder), in "
        "the class that was saved and without config=, and take a part from that model; if config.json has no entry "
        "'quantization_config', save the model again by its save_pretrained or pr.save_compressed, which write it"
    )


def _endings(name: str) -> Iterator[str]:
    """Yield a name without its first 0, 1, 2, ... parts."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _spellings(model: Any, name: str) -> tuple[str, str, str]:
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def read_saved_weights(files: Iterable[str] | None) -> SavedWeights | None:
    """Return names and shapes of safetensors files; None without files, as for weights given as a state_dict."""
    paths = [Path(file) for file in files or () if str(file).endswith(".safetensors")]
    if not paths:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        shapes |= {name: stored.shape for name, stored in stored_tensors(path).items()}
    folder = paths[0].parent
    return SavedWeights(folder, shapes, _aliases(folder, paths, shapes))


def _aliases(folder: Path, paths: Iterable[Path], names: Collection[str]) -> dict[str, str]:
    """Return the aliases in panther.json, if it describes these files: ``save_pretrained`` leaves an older one there.

    It describes them if its aliases are in no file and the tensors that they share have its checksums. For speed the
    other tensors are not read.
    """
    manifest = saved_manifest(folder)
    aliases: dict[str, str] = {} if manifest is None else manifest["aliases"]
    shared = set(aliases.values())
    if manifest is None or not shared <= set(names) or not aliases.keys().isdisjoint(names):
        return {}
    checksums = manifest["checksums"]
    if checksums is not None and not shared <= checksums.keys():
        return {}
    for path in paths if checksums is not None else ():
        with open_tensors(path) as readers:
            for name in shared & readers.keys():
                if tensor_checksum(readers[name]) != checksums[name]:
                    return {}
    return aliases
