"""``panther.from_pretrained``: a transformers model from its folder. transformers is imported by the call."""

__all__ = ["from_pretrained", "read_config", "without_hub_kernels"]

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from panther._text import list_names
from panther.errors import FormatError, PantherError, check_flag, require_extra
from panther.files.reader import read_json
from panther.files.tensors import StoredTensor, stored_tensors
from panther.files.weights import check_weight_files, has_usual_weights, weight_files
from panther.integrations.import_hook import MARKS
from panther.nn.attention.record import check_recorded
from panther.nn.io import INFERENCE_MANIFEST, check_folder, inference_manifest, saved_manifest, weights_path
from panther.nn.linears import expanded
from panther.nn.quantized import pack_
from panther.nn.quantized.state import inference_state
from panther.nn.specs import QUANTIZATION_METHOD, is_symmetric_record

_log = logging.getLogger("panther.integrations")
_BLOCK = 1 << 20  # elements that are compared at a time
_SCALED = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.itemsize == 1}
_SCALED -= {torch.bool}
# Implementations that transformers has itself.
_IMPLEMENTATIONS = {
    "attn_implementation": (None, "eager", "sdpa", "flex_attention"),
    "experts_implementation": (None, "eager", "batched_mm", "grouped_mm"),
}

# Arguments by which the loaded model has other tensors than the folder.
_CHANGING = {"config", "quantization_config", "distributed_config", "tp_plan", "device_mesh", "state_dict"}


def from_pretrained(dir: str | os.PathLike[str], *, expand: bool = False, packed: bool = False, **kwargs: Any) -> Any:
    """Load the transformers model of a folder, compressed or not, in the class that its config.json names.

    The folder was written by :func:`panther.save_compressed`, ``panther compress`` or ``save_pretrained``. Nothing is
    downloaded, pickles are not opened, and code in the folder is not run. :func:`panther.save_compressed` and
    ``panther compress`` write checksums, which are verified, including the one of config.json; the model that
    transformers has built is then compared with the saved tensors, by names and values. A model is refused if some of
    its weights would be new, or if weights of compressed layers would not be used. ``AutoModel*.from_pretrained`` of
    transformers loads such a folder too, in any class and without checksums. Weights of
    ``save_pretrained(folder, variant="panther")`` are also found.

    Args:
        dir: The folder.
        expand: Whether to expand every compressed layer once, as in :func:`panther.load_compressed`: plain layers'
            speed and memory from a small file. Of a model that ``AutoModel*.from_pretrained`` loaded,
            ``model.dequantize()`` expands the layers.
        packed: Whether to call :func:`panther.pack_` at the end, for few rows on this processor.
        **kwargs: Arguments of transformers' ``from_pretrained``, such as ``dtype`` and ``device_map``.

    Returns:
        The model, in eval mode.

    Raises:
        MissingExtraError: Without transformers.
        FormatError: If the folder has no config.json, names a class that transformers does not have, a file is
            damaged or missing, or the weights do not fill the model.

    Example:
        >>> import tempfile, transformers, panther as pr
        >>> config = transformers.BertConfig(
        ...     vocab_size=50,
        ...     hidden_size=64,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ...     intermediate_size=128,
        ... )
        >>> model = transformers.BertModel(config)
        >>> report = pr.sketch_layers_(model, pr.SketchConfig(low_rank=4))
        >>> folder = pr.save_compressed(model, tempfile.mkdtemp())
        >>> type(
        ...     pr.from_pretrained(folder).encoder.layer[0].intermediate.dense
        ... ).__name__
        'SKLinear'
    """
    require_extra("panther.integrations.transformers", "transformers")  # registers the method "panther"
    transformers: Any = require_extra("transformers", "transformers")
    check_flag("expand", expand)
    check_flag("packed", packed)
    folder = Path(dir, kwargs.pop("subfolder", None) or "")
    if not folder.is_dir():
        raise FormatError(f"there is no folder {folder}: give one that pr.save_compressed or save_pretrained wrote")
    manifest = saved_manifest(folder)
    if manifest is not None:
        check_folder(folder)  # first, because it completes an interrupted save by renaming its files
        manifest = inference_manifest(folder)
    if not (folder / "config.json").is_file():
        raise FormatError(
            f"{folder} holds no config.json, which would name the architecture: build it, and call "
            "pr.load_compressed(folder, model)"
        )
    config = read_config(folder)
    make = _model_class(transformers, config, folder)
    argument_names = set(kwargs)
    if not has_usual_weights(folder) and any(folder.glob(f"model.{QUANTIZATION_METHOD}*.safetensors")):
        kwargs.setdefault("variant", QUANTIZATION_METHOD)  # transformers does not look for this variant by itself
    if manifest is None:
        check_weight_files(folder, make.__name__, kwargs.get("variant"))
    stored = {name: each for path in weight_files(folder) for name, each in stored_tensors(path).items()}
    kwargs = without_hub_kernels(config) | {"trust_remote_code": False} | kwargs
    with_new_sizes = bool(kwargs.get("ignore_mismatched_sizes"))
    kwargs |= {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    kwargs["ignore_mismatched_sizes"] = True  # they are refused below, by name
    try:
        model, info = make.from_pretrained(folder, **kwargs)
    except SafetensorError as error:
        raise FormatError(f"a weights file in {folder} is damaged ({error}): copy or write it again") from error
    except (PantherError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # The caller's arguments may be the cause too. The folder is damaged only if its config describes no model.
        reason = _why_no_model(transformers, make, folder) if argument_names else error
        if reason is None:
            raise
        text = " ".join(str(reason).split())
        raise FormatError(
            f"{type(reason).__name__}: {text[:300]}: {folder} cannot be loaded, because config.json or another of its "
            "files is damaged or was written for a different version of transformers: copy or write the folder again"
        ) from error
    check_recorded(stored.keys(), model, folder)
    _check_scales(model, info["unexpected_keys"], stored, config, folder)
    is_compressed = manifest is not None or _is_compressed(config)
    _check_filled(
        model, info, folder, manifest,
        is_compressed=is_compressed, with_new_sizes=with_new_sizes, names_class=bool(config.get("architectures")),
    )  # fmt: skip
    if manifest is not None and not argument_names & _CHANGING and not with_new_sizes:
        _check_as_saved(model, manifest, folder)
    model = expanded(model) if expand else model
    if packed:
        pack_(model)
    return model.eval()


def without_hub_kernels(config: Mapping[str, Any]) -> dict[str, None]:
    """Return arguments of ``from_pretrained`` that replace settings of a config.json by transformers' defaults.

    transformers asks the hub for an implementation of attention or of experts that it does not have itself, also with
    ``local_files_only=True``. All implementations compute the same up to rounding.
    """
    arguments: dict[str, None] = {}
    for key, value in _settings_in(config):
        name = key.strip("_").removesuffix("_internal")
        if name in _IMPLEMENTATIONS and value not in _IMPLEMENTATIONS[name]:
            arguments[name] = None
            _log.warning(
                "config.json asks for %s=%r, which may be code of the hub: the default is used, and "
                "from_pretrained(folder, %s=...) chooses another one",
                name, value, name,
            )  # fmt: skip
    return arguments


def _settings_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of all settings in a config and in the configs in it."""
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _settings_in(inner)
    if isinstance(value, Mapping):
        yield from value.items()


def _check_scales(
    model: Any, unexpected: Iterable[str], stored: Mapping[str, StoredTensor], config: Mapping[str, Any], folder: Path
) -> None:
    """Raise FormatError if weights of 8 bits were loaded as they are, without the scales that they need."""
    state = model.state_dict()
    prefix = f"{model.base_model_prefix}."
    has_quantizer = bool(config.get("quantization_config")) and not _is_compressed(config)
    unexpected = sorted(map(str, unexpected))
    compressed = {name.rpartition(".")[0] for name in stored if name.rpartition(".")[2] in MARKS}
    for name, place in stored.items():
        spellings = (name, prefix + name, name.removeprefix(prefix))
        present = next((state[each] for each in spellings if each in state), None)
        is_used = name not in unexpected and name.rpartition(".")[0] not in compressed
        if place.dtype not in _SCALED or not is_used or (present is not None and present.dtype is place.dtype):
            continue
        layer = name.removesuffix(".weight").removeprefix(prefix)
        scale = next((each for each in unexpected if f".{layer}" in f".{each}" or "scale" in each), None)
        if scale is not None or not (has_quantizer or place.dtype.is_floating_point):
            raise FormatError(
                f"{name!r} in {folder} is {place.dtype}, and its scales{f' {scale!r}' if scale else ''} would not be "
                "applied: restore the entry 'quantization_config' of the original config.json, or write the folder "
                "again with the weights multiplied by their scales"
            )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json, after checking the types of the entries that Panther reads."""
    path = folder / "config.json"
    try:
        config = read_json(path)
        if not isinstance(config, dict):
            raise ValueError("it must be a JSON object")
        names = config.get("architectures")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError(f"'architectures' is {names!r} and must be a list of names")
        entry = config.get("quantization_config")
        if entry is not None and not isinstance(entry, dict):
            raise ValueError(f"'quantization_config' is {entry!r} and must be an object")
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be used ({error}): copy or write the folder again") from None
    return config


def _is_compressed(config: Mapping[str, Any]) -> bool:
    return (config.get("quantization_config") or {}).get("quant_method") == QUANTIZATION_METHOD


def _model_class(transformers: Any, config: Mapping[str, Any], folder: Path) -> Any:
    """Return the class of transformers that a folder's config.json names."""
    name = next(iter(config.get("architectures") or ()), "AutoModel")
    make = getattr(transformers, name, None)
    # The common base of the Auto classes is not public.
    kinds = (transformers.PreTrainedModel, *transformers.AutoModel.__mro__[:-1])
    is_known = isinstance(make, type) and issubclass(make, kinds)
    config_class = getattr(make, "config_class", None)
    if is_known and config.get("auto_map") and config_class is not None:
        is_known = config.get("model_type") == config_class.model_type  # otherwise the code replaces the class
    if not is_known:
        fix = "load it by from_pretrained of the class itself"
        if (folder / INFERENCE_MANIFEST).exists():
            fix = "build it, and call pr.load_compressed(folder, model)"
        if config.get("auto_map"):
            fix = (
                "its code is in the folder, and runs if you trust it: "
                f"transformers.AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True)"
            )
        raise FormatError(
            f"{folder / 'config.json'} names the architecture {name} of the type {config.get('model_type')!r}, which "
            f"transformers {transformers.__version__} does not have: {fix}"
        )
    return make


def _why_no_model(transformers: Any, make: Any, folder: Path) -> Exception | None:
    """Return the error of building the model of a folder's config.json without weights, or None if there is none."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for name in without_hub_kernels(read_config(folder)):
            setattr(config, f"_{name}", None)
        with torch.device("meta"):
            (make.from_config if hasattr(make, "from_config") else make)(config)
    except Exception as error:
        return error
    return None


def _check_filled(
    model: Any,
    info: Mapping[str, Any],
    folder: Path,
    manifest: Mapping[str, Any] | None,
    *,
    is_compressed: bool,
    with_new_sizes: bool,
    names_class: bool,
) -> None:
    """Raise FormatError if weights of the model are new, or weights of compressed layers were not used."""
    shared = set() if manifest is None else manifest["aliases"].keys()
    missing = sorted(set(map(str, info["missing_keys"])) - shared)
    unexpected = sorted(map(str, info["unexpected_keys"]))
    resized = sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if with_new_sizes:
        missing, resized = sorted(set(missing) - set(resized)), []
    if not is_compressed:  # dense folders often hold the weights of more heads than the class has
        unexpected = [name for name in unexpected if name.rpartition(".")[2] in MARKS]
    if missing or unexpected or resized:
        reason = " that its config.json describes" if names_class else ", built because its config.json names no class"
        raise FormatError(
            f"{folder} does not fit the {type(model).__name__}{reason}: missing "
            f"{list_names(missing, 3)}; unexpected {list_names(unexpected, 3)}; of a different size "
            f"{list_names(resized, 3)}. config.json was damaged or changed, or the files are of different saves: copy "
            "or write the folder again. For weights that are new on purpose call from_pretrained of transformers"
        )


def _check_as_saved(model: Any, manifest: Mapping[str, Any], folder: Path) -> None:
    """Raise FormatError unless the model holds what was saved, by name and value, in its own dtypes."""
    state = inference_state(model)
    for name, spec in manifest["modules"].items():
        if is_symmetric_record(spec):  # the file has no zero points
            state.pop(f"{name}.zeros", None)
    changed = []
    with safe_open(weights_path(folder, manifest), "pt") as weights:
        saved_names = set(weights.keys())
        if differing := sorted((saved_names | manifest["aliases"].keys()) ^ state.keys()):
            raise FormatError(
                f"the {type(model).__name__} that transformers builds for {folder} has other tensors than the saved "
                f"one ({list_names(differing, 3)}): build the architecture, and call pr.load_compressed(folder, model)"
            )
        for name in sorted(saved_names):
            tensor = state[name]
            is_held = type(tensor) is torch.Tensor and not tensor.is_meta  # not sharded, and not on a disk
            if is_held and not _has_values(tensor, weights.get_tensor(name)):
                changed.append(name)
    if changed:
        raise FormatError(
            f"transformers {_version()} changed tensors while it loaded {folder} ({list_names(changed, 3)}): build the "
            "architecture, and call pr.load_compressed(folder, model)"
        )


def _has_values(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    """Return whether a tensor has the saved values in its own dtype, compared in blocks of a few megabytes."""
    pairs = zip(tensor.reshape(-1).split(_BLOCK), saved.reshape(-1).split(_BLOCK), strict=True)
    return tensor.shape == saved.shape and all(_are_equal(part, expected) for part, expected in pairs)


def _are_equal(part: torch.Tensor, expected: torch.Tensor) -> bool:
    expected = expected.to(part.device, part.dtype)
    return torch.equal(part, expected) or torch.allclose(part, expected, 0, 0, equal_nan=True)


def _version() -> str:
    return str(require_extra("transformers", "transformers").__version__)
