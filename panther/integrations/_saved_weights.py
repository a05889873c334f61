"""The weights files from which transformers loads a compressed model, compared with the layers that they are for."""

__all__ = ["SavedWeights", "read_saved_weights"]

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from panther._torch import buffers_of, parameters_of
from panther.errors import FormatError
from panther.nn._sketched import CompressedModule
from panther.nn.io import INFERENCE_MANIFEST, inference_manifest
from panther.nn.quantized.state import SCALE_LOGS, QuantizedState


@dataclass(frozen=True)
class SavedWeights:
    """The names of the tensors in weights files, and in panther.json the names of shared tensors."""

    folder: Path
    names: frozenset[str]
    aliases: Mapping[str, str]
    """Names that have no tensor in the files, each with the name of the tensor that it shares."""

    def train_scales_(self, model: Any) -> None:
        """Make the scales of layers trainable that were saved by ``save_pretrained`` in training."""
        for name, module in model.named_modules():
            logs = [f"{name}.{logs_name}" for logs_name in SCALE_LOGS.values()]
            if isinstance(module, QuantizedState) and any(self._saved_name(model, each, self.names) for each in logs):
                module.train_scales_()

    def check(self, model: Any) -> None:
        """Raise FormatError if the files lack tensors of compressed layers, which would have random numbers.

        Tensors are counted by the last part of their names: transformers renames the first parts of some models.
        """
        modules = {module: name for name, module in model.named_modules() if isinstance(module, CompressedModule)}
        needed = Counter(
            key
            for module, name in modules.items()
            for key in module.state_dict()
            if key != "bias" and not self._saved_name(model, f"{name}.{key}", self.aliases)
        )
        saved = Counter(name.rpartition(".")[2] for name in self.names)
        for key, count in needed.items():
            if saved[key] < count:
                raise FormatError(
                    f"config.json in {self.folder} names {count} compressed layers with {key!r}, and the weights files "
                    f"hold {saved[key]}: the folder is damaged or its files are of different saves, save it again"
                )

    def share_(self, model: Any) -> None:
        """Give compressed layers the tensors that they share with other layers, which the files hold once."""
        for name, module in model.named_modules():
            if not isinstance(module, CompressedModule):
                continue
            for key in [*module.state_dict()]:
                alias = self._saved_name(model, f"{name}.{key}", self.aliases)
                first = alias and next(iter(self._own_names(model, self.aliases[alias])), None)
                if first:
                    owner_name, _, owner_key = first.rpartition(".")
                    owner = model.get_submodule(owner_name)
                    held = parameters_of if key in parameters_of(module) else buffers_of
                    held(module)[key] = held(owner)[owner_key]  # type: ignore[assignment]

    def _saved_name(self, model: Any, name: str, saved: Iterable[str]) -> str | None:
        """Return the name under which a tensor of the model was saved, perhaps with or without a head."""
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


def _spellings(model: Any, name: str) -> tuple[str, str, str]:
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def read_saved_weights(files: Iterable[str] | None) -> SavedWeights | None:
    """Return what is in safetensors files; None if there are none, as for weights that are given as a state_dict."""
    paths = [Path(file) for file in files or () if str(file).endswith(".safetensors")]
    if not paths:
        return None
    names: set[str] = set()
    for path in paths:
        with safe_open(path, "pt") as tensors:
            names |= set(tensors.keys())
    folder = paths[0].parent
    aliases = inference_manifest(folder)["aliases"] if (folder / INFERENCE_MANIFEST).is_file() else {}
    return SavedWeights(folder, frozenset(names), aliases)
