"""What ``save_pretrained`` writes about compressed layers: the record of the layers that the saved model has.

The record is made when a model is saved, and is in the model's config until then only if transformers read it there.
Each model of transformers inside the saved one, such as the text tower of CLIP, gets the record of its layers in its
config, because transformers may load it alone from the folder.
"""

__all__ = ["layers_replaced", "model_files", "saving"]

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from panther._torch import plain_name
from panther.errors import FormatError, require_extra
from panther.integrations.transformers.quantizer import PantherConfig, PantherQuantizer, is_ours
from panther.nn.linears import plain_pairs
from panther.nn.protocol import compressed_layers
from panther.nn.quantized.conversions import keep_expert_names_
from panther.nn.quantized.ties import declare_ties_
from panther.nn.specs import config_entry, module_specs

transformers: Any = require_extra("transformers", "transformers")
_dynamic_modules: Any = require_extra("transformers.dynamic_module_utils", "transformers")

# Models share configs with their parts and with other models, and different threads may save these models.
_one_save = threading.RLock()


def layers_replaced(model: Any) -> None:
    """Name the tied tensors of a model of transformers, and the weights that it converts, for its present layers."""
    declare_ties_(model, transformers.PreTrainedModel)
    keep_expert_names_(model)


@contextmanager
def saving(
    model: Any,
    folder: str | os.PathLike[str] | None = None,
    specs: Mapping[str, Any] | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> Iterator[None]:
    """Make the configs of a model describe its layers, and give it a quantizer, while it is saved.

    Weights in one file of an older save in ``folder`` are removed if the new ones are shards, because transformers
    would read the one file. ``specs`` are the records of the layers, and ``state`` the tensors of a caller that
    gathered them; None is the model's own. FormatError says that ``from_pretrained`` could not build the model again.
    """
    single, index = (Path(folder or ".") / name for name in ("model.safetensors", "model.safetensors.index.json"))
    previous = [_modified(path) for path in (single, index)]
    with _one_save:
        yield from _described(model, specs, state)
    is_sharded = folder is not None and _modified(index) not in (None, previous[1])
    if is_sharded and _modified(single) == previous[0] and any(compressed_layers(model)):
        single.unlink(missing_ok=True)


def _modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def _described(model: Any, specs: Mapping[str, Any] | None, state: Mapping[str, Tensor] | None) -> Iterator[None]:
    if getattr(model, "_hf_peft_config_loaded", False):  # only adapters are saved, without a config
        yield
        return
    if pairs := plain_pairs(model):
        raise FormatError(
            f"{len(pairs)} of the layers are pairs of plain layers, which to_linears_ made (first {pairs[0]!r}), and "
            "from_pretrained cannot build them: save the model before to_linears_, and make the pairs by "
            "pr.from_pretrained(folder, expand=True)"
        )
    specs = module_specs(model) if specs is None else specs
    if specs and (adapters := _adapters_in(model)):
        raise FormatError(
            f"{len(adapters)} of the layers have adapters of PEFT (first {adapters[0]!r}), which from_pretrained does "
            "not build: save the adapters by save_pretrained of the PeftModel, or of the part with adapters, and the "
            "model before it gets them, or after unload() of the PeftModel"
        )
    quantizer = present = getattr(model, "hf_quantizer", None)
    if specs and not isinstance(quantizer, PantherQuantizer | None):
        raise FormatError(
            f"this {type(model).__name__} is quantized by {type(quantizer).__name__} too, and config.json has room "
            "for one method: save it by pr.save_compressed, and load it by pr.load_compressed into a model that is "
            "built in the same way"
        )
    settings = _settings(model, specs)
    previous = [(config, _set(config, values)) for config, values in settings]
    if specs and quantizer is None:
        quantizer = model.hf_quantizer = PantherQuantizer(PantherConfig(modules=specs))
    if isinstance(quantizer, PantherQuantizer):
        quantizer.state = state
    try:
        yield
    finally:
        if isinstance(quantizer, PantherQuantizer):
            quantizer.state = None
        if present is None:
            vars(model).pop("hf_quantizer", None)
        for config, values in previous:
            # The quantizer of a model that was loaded keeps the entry up to date.
            if present is None or config is not model.config or not is_ours(values["quantization_config"]):
                _set(config, values)


def _adapters_in(model: Any) -> list[str]:
    """Return the names of the modules of PEFT in a model, which stand around layers of the model."""
    return [
        name
        for name, module in model.named_modules()
        if any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)
    ]


def _settings(model: Any, specs: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the configs of a model and of all models in it, with the settings that describe their layers.

    An entry of a different method is left as it is. A part is loaded in the dtype in its config; without one it would
    be loaded in the dtype of its first tensor, which may be scales in bfloat16.
    """
    settings: dict[int, tuple[Any, dict[str, Any]]] = {}
    for name, module in model.named_modules():  # the model that is saved is the first one
        if isinstance(module, transformers.PreTrainedModel) and id(module.config) not in settings:
            records = _records_in(specs, plain_name(f"{name}.") if name else "")
            values: dict[str, Any] = {"quantization_config": config_entry(records) if records else None}
            if records and name:
                values["dtype"] = str(module.dtype).removeprefix("torch.")
            settings[id(module.config)] = module.config, values
    for config in _configs_in(model.config):
        settings.setdefault(id(config), (config, {"quantization_config": None}))
    return [
        (config, values)
        for config, values in settings.values()
        if values["quantization_config"] is not None or is_ours(getattr(config, "quantization_config", None))
    ]


def _set(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set attributes of a config, and return their previous values."""
    previous = {name: vars(config).get(name) for name in values}
    for name, value in values.items():
        if value is None and name == "quantization_config":
            vars(config).pop(name, None)  # transformers asks whether it is there
        else:
            setattr(config, name, value)
    return previous


def _records_in(specs: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the records of the layers whose names begin with a prefix, by the rest of their names."""
    records: dict[str, Any] = {}
    first_names: dict[str, str] = {}
    for name, spec in specs.items():
        if name.startswith(prefix):
            layer, owner = name.removeprefix(prefix), spec.get("alias_of", name)
            records[layer] = {"alias_of": first_names[owner]} if owner in first_names else specs[owner]
            first_names.setdefault(owner, layer)
    return records


def _configs_in(config: Any) -> Iterator[Any]:
    """Yield a config and the configs in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PreTrainedConfig):
            yield from _configs_in(value)


def model_files(model: Any, specs: Mapping[str, Any]) -> dict[str, bytes]:
    """Return what ``save_pretrained`` writes beside the weights of a model, by file name.

    These are config.json, generation_config.json of a model that generates, and the code of a model that was loaded
    with ``trust_remote_code=True``.
    """
    if not isinstance(getattr(model, "hf_quantizer", None), PantherQuantizer | None) or _adapters_in(model):
        return {}  # config.json describes the layers of a different method, or names no adapters
    config, entry = model.config, config_entry(specs) if specs else None
    with saving(model, specs=specs), tempfile.TemporaryDirectory() as folder:
        previous_values = dict(vars(config))
        try:
            if entry is not None or is_ours(getattr(config, "quantization_config", None)):
                _set(config, {"quantization_config": entry})
            config.architectures = [type(model).__name__]
            dtype = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)
            config.dtype = str(dtype).removeprefix("torch.")
            if getattr(model, "_auto_class", None) is not None:
                config.auto_map = dict(getattr(config, "auto_map", None) or {})
                _dynamic_modules.custom_object_save(model, folder, config=config)
            config.save_pretrained(folder)
            if model.can_generate() and model.generation_config is not None:
                model.generation_config.save_pretrained(folder)
        finally:
            vars(config).clear()
            vars(config).update(previous_values)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
