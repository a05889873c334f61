"""Write a quantized model of transformers as a folder in the format compressed-tensors, and read it back to compare."""

__all__ = ["ADAPTER_FOLDER", "write_adapter", "write_compressed_tensors"]

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from panther._text import counted
from panther.compression.readers import Reader, decodes_in_silence, reader_of, why_weight_is_read
from panther.errors import FormatError, PantherError, require_extra
from panther.files import read_json, write_json
from panther.files.folder import removed_after_an_error
from panther.files.tensors import write_file
from panther.files.weights import weight_files
from panther.integrations.compressed_tensors.layout import (
    PACKED,
    SCALE,
    SHAPE,
    Scheme,
    decode_weight,
    pack_weight,
    quantization_config,
    selected_scheme,
)
from panther.nn.attention.record import attention_records
from panther.nn.protocol import compressed_layers
from panther.nn.quantized.conversions import load_conversions, save_conversions

_AGAIN = "compress the original model with target='compressed-tensors'"


def write_compressed_tensors(
    model: nn.Module, dir: str | os.PathLike[str], *, reader: str = "transformers"
) -> dict[str, Scheme]:
    """Write a quantized model of transformers in the format compressed-tensors, for programs without Panther.

    The folder holds config.json and safetensors as ``save_pretrained`` writes them. Weights of
    :class:`~panther.nn.QuantizedLinear` are stored as packed codes and scales, without loss, and everything else as it
    is. The files are then read back, decoded, and compared with the model, number by number. Corrections of low rank
    become an adapter of PEFT in the folder ``adapter``, with factors of the model's dtype. PEFT loads it after the
    first forward of the model.

    Args:
        model: A PreTrainedModel that :func:`panther.compress` made with ``target="compressed-tensors"``, or another one
            whose compressed layers are all QuantizedLinear with ``symmetric=True``.
        dir: The folder for the result, new or empty.
        reader: The program that will read the folder, ``"transformers"`` or ``"vllm"``.

    Returns:
        The width and the group size of each quantized layer, by name.

    Raises:
        PantherError: If the reader does not hold a layer; the message names the layer and the reason. Nothing is
            written then.
        FormatError: If the files that were written do not hold the model's numbers.
        MissingExtraError: Without transformers.

    Cost: twice the memory of the saved model.

    Example:
        >>> import tempfile, torch, transformers, panther as pr
        >>> from panther.integrations.compressed_tensors import (
        ...     write_compressed_tensors,
        ... )
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=100,
        ...     hidden_size=64,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ...     intermediate_size=128,
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> report = pr.compress(
        ...     model,
        ...     budget=0.4,
        ...     method="svd",
        ...     forms="int4",
        ...     symmetric=True,
        ...     exclude="*embed*",
        ... )
        >>> schemes = write_compressed_tensors(model, tempfile.mkdtemp())
        >>> schemes["model.layers.0.mlp.up_proj"]
        Scheme(bits=4, group_size=0)
    """
    transformers: Any = require_extra("transformers", "transformers")
    if not isinstance(model, transformers.PreTrainedModel):
        raise PantherError(
            f"{type(model).__name__} is not a model of transformers, and readers of compressed-tensors build the model "
            "from a config.json of transformers: use another format"
        )
    folder, checked_reader = Path(dir), reader_of(reader)
    if checked_reader.format != "compressed-tensors":
        raise PantherError(
            f"reader {reader!r} reads {checked_reader.format}: use panther export --to {checked_reader.format}"
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise PantherError(f"{folder} is not empty, and might hold another model: give a new folder, or clear it")
    layers = _checked_layers(model, checked_reader)
    plain = _plain_architecture(model)
    _check_architecture(plain, layers, model)
    schemes = {name: _scheme_of(layer) for name, layer in layers.items()}
    _check_first_scheme(layers, schemes, checked_reader)
    linear_names = [name for name, module in plain.named_modules() if isinstance(module, nn.Linear)]
    if checked_reader.fused:
        _check_fused(linear_names, schemes, checked_reader)
    dense_layers = [name for name in linear_names if name not in layers]
    plain.config.quantization_config = quantization_config(schemes, dense_layers, plain.base_model_prefix)
    state = _packed_state(model, layers, plain.dtype)
    _check_names(plain, state, checked_reader)
    with removed_after_an_error(folder), _without_bars(transformers):
        # Names of files of the original model would be converted on loading, which packed codes are not made for.
        plain.save_pretrained(folder, state_dict=state, save_original_format=False)
        del state
        _check_files(folder, model, plain, layers)
        corrected = {name: layer for name, layer in layers.items() if layer.low_rank}
        if corrected:
            write_adapter(folder / ADAPTER_FOLDER, corrected, plain.dtype, task_type=_task_type(model))
    return schemes


def _checked_layers(model: Any, reader: Reader) -> dict[str, Any]:
    """Return the quantized layers by name, or raise PantherError if the reader does not hold all compressed layers."""
    refusals = {name: "is linear attention, which the format lacks" for name in attention_records(model)}
    layers: dict[str, Any] = {}
    head = model.get_output_embeddings()
    for name, layer in compressed_layers(model):
        reason = _why_not(layer, reader, is_head=layer is head)
        if reason is not None:
            refusals[name] = reason
        else:
            layers[name] = layer
    if refusals:
        name, reason = next(iter(refusals.items()))
        raise PantherError(
            f"{counted(len(refusals), 'layer')} cannot be written for reader {reader.name!r}, the first of them "
            f"{name!r}, which {reason}: {_AGAIN} and reader={reader.name!r}"
        )
    if not layers:
        raise PantherError(f"the model has no quantized layer: {_AGAIN}")
    return layers


def _why_not(module: Any, reader: Reader, *, is_head: bool) -> str | None:
    """Return why a reader does not hold a compressed layer; None if it does."""
    if module.record_mode != "quantized" or module.dense_class is not nn.Linear:
        return f"is a {type(module).__name__}, and readers hold quantized linear layers only"
    if module.bits is None:
        return "is of low rank without codes"
    if module.low_rank and not reader.takes_adapters:
        return f"has a correction of rank {module.low_rank}, and adapters on codes are not known to be right there"
    if module.activations is not None:
        return f"rounds its inputs (activations={module.activations!r})"
    if module.bits not in reader.widths:
        return f"has {module.bits} bits, and {reader.name} holds {', '.join(map(str, reader.widths))}"
    if (reason := reader.why_no_group(module.in_features, module.group_size)) is not None:
        return reason
    if is_head and not reader.packs_heads:
        return f"computes the logits, and {reader.name} does not hold such a layer in codes"
    if not module.is_symmetric:
        return "has zero points (symmetric=False)"
    return None


def _scheme_of(layer: Any) -> Scheme:
    is_row = layer.group_size is None or layer.group_size >= layer.in_features
    return Scheme(layer.bits, 0 if is_row or layer.group_size is None else layer.group_size)


def _check_first_scheme(layers: Mapping[str, Any], schemes: Mapping[str, Scheme], reader: Reader) -> None:
    """Raise if a layer would be decoded wrongly, and in silence, by the first scheme of config.json."""
    first = max(schemes.values())
    for name, scheme in schemes.items():
        columns = layers[name].in_features
        if decodes_in_silence(columns, scheme.bits, scheme.group_size or None, first.bits, first.group_size or None):
            raise PantherError(
                f"layer {name!r} has {scheme.bits} bits, and transformers with dequantize=True would read it as "
                f"{first.bits} bits without an error, because {columns} columns are few: {_AGAIN} and "
                f"reader={reader.name!r}, or with one width in forms="
            )


def _check_fused(names: Sequence[str], schemes: Mapping[str, Scheme], reader: Reader) -> None:
    """Raise PantherError if layers that the reader fuses have different schemes."""
    for fused in reader.fused:
        first_name, *_ = fused
        for parent in (name.removesuffix(first_name) for name in names if name.rpartition(".")[2] == first_name):
            fused_names = [parent + name for name in fused if parent + name in names]
            if len({schemes.get(name) for name in fused_names}) > 1:
                raise PantherError(
                    f"layers {', '.join(map(repr, fused_names))} have different widths or groups, and reader "
                    f"{reader.name!r} fuses them: {_AGAIN} and reader={reader.name!r}"
                )


def _plain_architecture(model: Any) -> Any:
    """Return the model that a reader builds, without values."""
    config = copy.deepcopy(model.config)
    for part in (config, *(vars(config).values())):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain = plain.to(model.dtype)
    if model.can_generate():
        plain.generation_config = model.generation_config
    return plain.eval()


def _check_architecture(plain: Any, layers: Mapping[str, Any], model: nn.Module) -> None:
    """Raise PantherError unless readers build an nn.Linear for each quantized layer, and all other tensors as well."""
    ties = dict(getattr(plain, "all_tied_weights_keys", None) or {})
    tied_names = {*ties, *ties.values()}
    for name, layer in layers.items():
        reason = None
        try:
            module = plain.get_submodule(name)
        except AttributeError:
            reason = f"{type(plain).__name__} of transformers does not have"
        else:
            shape = (layer.out_features, layer.in_features)
            if not isinstance(module, nn.Linear):
                reason = f"is a {type(module).__name__} in transformers, and readers hold nn.Linear only"
            elif tuple(module.weight.shape) != shape or (module.bias is None) != (layer.bias is None):
                reason = f"has the shape {shape}, and {tuple(module.weight.shape)} in transformers"
            elif f"{name}.weight" in tied_names:
                reason = "shares its weight with another layer in transformers"
            else:
                reason = why_weight_is_read(plain, name)
        if reason is not None:
            raise PantherError(f"layer {name!r} cannot be written, which {reason}: exclude={name!r} of pr.compress")
    dense_names = {name for name in model.state_dict() if name.rpartition(".")[0] not in layers}
    expected = {name for name in plain.state_dict() if name.rpartition(".")[0] not in layers}
    if differing := sorted(dense_names ^ expected):
        raise PantherError(
            f"the model has other tensors than a {type(plain).__name__} of transformers ({', '.join(differing[:3])}), "
            "which readers would not find: compress a model that is otherwise unchanged"
        )


def _check_names(plain: Any, names: Iterable[str], reader: Reader) -> None:
    """Raise PantherError if a reader would look for tensors under other names than those of the model in memory.

    transformers renames and converts the tensors of original files, for example those of ViT and of experts, and leaves
    the names of its own models alone. vLLM knows the names of original files only.
    """
    on_loading = load_conversions(plain)
    for conversion in on_loading:
        if len(conversion.target_patterns) > 1 and conversion.source_patterns[0].endswith(".weight"):
            raise PantherError(
                f"transformers cannot load a {type(plain).__name__} in this format, because it splits "
                f"{conversion.source_patterns[0]!r} of files: use another format"
            )
    on_saving = [conversion.reverse_transform() for conversion in reversed(save_conversions(plain))]
    for name in names:
        read_name = file_name = name
        for conversion in on_loading:
            read_name, _ = conversion.rename_source_key(read_name)
        if read_name != name:
            raise PantherError(
                f"{name!r} of a {type(plain).__name__} would be read as {read_name!r} by transformers, which converts "
                "such names: use another format"
            )
        if reader.fused:
            for conversion in on_saving:
                file_name, _ = conversion.rename_source_key(file_name)
            if file_name != name:
                raise PantherError(
                    f"{name!r} of a {type(plain).__name__} is {file_name!r} in files of the original model, and reader "
                    f"{reader.name!r} is known to read models whose names are equal only: use reader='transformers'"
                )


def _task_type(model: Any) -> str | None:
    """Return the task by which PEFT chooses its class; None for a class that passes all arguments to the model."""
    if not model.can_generate() or model.main_input_name != "input_ids":
        return None
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


def _packed_state(model: nn.Module, layers: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of the folder; scales are of the model's dtype, because readers compute with them."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in layers:
            state[name] = tensor
    for name, layer in layers.items():
        codes, scales, _ = layer.grid_numbers()
        if not torch.equal(scales.to(dtype).to(scales.dtype), scales):
            raise PantherError(
                f"layer {name!r} has scales that {str(dtype).removeprefix('torch.')} cannot hold: export with "
                "--dtype float32 or bfloat16"
            )
        state[f"{name}.{PACKED}"] = pack_weight(codes, layer.bits or 0)
        state[f"{name}.{SCALE}"] = scales.to(dtype)
        state[f"{name}.{SHAPE}"] = torch.tensor(codes.shape)
        if layer.bias is not None:
            state[f"{name}.bias"] = layer.bias.detach()
    return state


@contextmanager
def _without_bars(transformers: Any) -> Iterator[None]:
    """Keep transformers from printing progress."""
    logging = transformers.utils.logging
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bars:
            logging.enable_progress_bar()


@torch.no_grad()
def _check_files(folder: Path, model: Any, plain: Any, layers: Mapping[str, Any]) -> None:
    """Read the folder as a reader does, and raise FormatError unless it holds the numbers of the model."""
    config = read_json(folder / "config.json")["quantization_config"]
    dense = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in layers}
    biases = {f"{name}.bias": layer.bias for name, layer in layers.items() if layer.bias is not None}
    packed_names = {f"{name}.{key}" for name in layers for key in (PACKED, SCALE, SHAPE)}
    wrong = [
        name
        for name, module in plain.named_modules()
        if selected_scheme(name, config) != (_scheme_of(layers[name]) if name in layers else None)
    ]
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in weight_files(folder)]
        file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118  not a mapping
        ties = dict(getattr(plain, "all_tied_weights_keys", None) or {})
        untied = {name for name in dense if name in file_of or ties.get(name) not in file_of}
        wrong += sorted(file_of.keys() ^ (untied | biases.keys() | packed_names))
        for name, tensor in {**dense, **biases}.items():
            if name in file_of and not _are_equal(file_of[name].get_tensor(name), tensor):
                wrong.append(name)
        for name, layer in layers.items():
            if not {f"{name}.{key}" for key in (PACKED, SCALE, SHAPE)} <= file_of.keys():
                continue  # named above
            names = [f"{name}.{key}" for key in (PACKED, SCALE, SHAPE)]
            packed, scale, shape = (file_of[key].get_tensor(key) for key in names)
            if not torch.equal(decode_weight(packed, scale, shape.tolist(), layer.bits or 0), _exact_weight(layer)):
                wrong.append(name)
    if wrong:
        raise FormatError(
            f"the files do not hold the model under its own names and with its numbers ({', '.join(wrong[:3])}), and "
            f"were removed: transformers stores a {type(plain).__name__} differently, which is not supported"
        )


def _exact_weight(layer: Any) -> Tensor:  # (rows, columns), float64
    codes, *grids = layer.grid_numbers()
    group_size = layer.group_size or layer.in_features
    steps, zeros = (grid.double().repeat_interleave(group_size, 1)[:, : layer.in_features] for grid in grids)
    exact: Tensor = (steps * (codes.double() - zeros)).cpu()
    return exact


def _are_equal(stored: Tensor, tensor: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits."""
    if stored.shape != tensor.shape or stored.dtype is not tensor.dtype:
        return False
    return torch.equal(*(each.cpu().contiguous().flatten().view(torch.uint8) for each in (stored, tensor.detach())))


ADAPTER_FOLDER = "adapter"
"""Folder of the adapter in the folder of the model, whose own level transformers would search for adapters."""

_WEIGHTS = "adapter_model.safetensors"
_ROUNDINGS = 4.0  # Each factor is rounded once, and the norm of their product is compared.


@torch.no_grad()
def write_adapter(folder: Path, layers: Mapping[str, Any], dtype: torch.dtype, *, task_type: str | None) -> int:
    """Write the corrections of layers as an adapter, read it back, and return its bytes.

    All layers get the largest rank, and the factors of the remaining layers are padded with zeros, because readers of
    adapters expect one rank. With alpha = r, PEFT multiplies the product by 1. By ``task_type`` PEFT chooses its class.
    FormatError says that factors in the file differ from the layers' by more than their rounding to ``dtype``.
    """
    rank = max(layer.low_rank for layer in layers.values())
    tensors = {}
    for name, layer in layers.items():
        for key, factor in zip(("lora_B", "lora_A"), _padded_factors(layer, rank, dtype), strict=True):
            tensors[f"base_model.model.{name}.{key}.weight"] = factor
    folder.mkdir(parents=True)
    write_file(folder / _WEIGHTS, tensors, tensors.__getitem__)
    write_json(folder / "adapter_config.json", _config(list(layers), rank, task_type=task_type), indent=2)
    stored = load_file(folder / _WEIGHTS)
    for name, layer in layers.items():
        B, A = (stored[f"base_model.model.{name}.{key}.weight"].double() for key in ("lora_B", "lora_A"))
        left, right = layer.wide_factors(torch.float64)
        exact = (left @ right).cpu()
        if (B @ A - exact).norm() > _ROUNDINGS * torch.finfo(dtype).eps * exact.norm():
            raise FormatError(
                f"layer {name!r} has a correction that {str(dtype).removeprefix('torch.')} cannot hold, and the files "
                "were removed: export with --dtype float32 or bfloat16"
            )
    return sum(path.stat().st_size for path in folder.iterdir())


def _padded_factors(layer: Any, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return factors (out, rank) and (rank, in). The two vectors of each term have equal norms."""
    left, right = layer.wide_factors(torch.float64)
    norms = (left.norm(dim=0), right.norm(dim=1))
    balance = torch.where(norms[0] * norms[1] > 0, (norms[1] / norms[0]).sqrt(), 1.0)
    padding = rank - layer.low_rank
    B = torch.nn.functional.pad(left * balance, (0, padding))
    A = torch.nn.functional.pad(right / balance[:, None], (0, 0, 0, padding))
    return B.to(dtype).contiguous(), A.to(dtype).contiguous()


def _config(layer_names: list[str], rank: int, *, task_type: str | None) -> dict[str, Any]:
    """Return adapter_config.json; PEFT has defaults for everything that it does not name."""
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": layer_names,
    }
