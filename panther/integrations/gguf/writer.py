"""Write a model of transformers, compressed or not, as one file in the format GGUF."""

__all__ = ["write_gguf"]

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panther._text import counted
from panther.errors import PantherError, require_extra
from panther.files import new_file
from panther.integrations.gguf.architectures import architecture_of, rope_divisors, row_order, write_sizes
from panther.integrations.gguf.blocks import block_type, pack_blocks, weight_shape, why_no_blocks
from panther.integrations.gguf.vocabulary import write_vocabulary
from panther.nn.attention.record import attention_records
from panther.nn.protocol import compressed_layers

_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file: its name in the model and the file, its type, and a function that makes its bytes."""

    source: str
    name: str
    type_name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def write_gguf(model: nn.Module, path: str | os.PathLike[str], *, tokenizer: Any = None) -> dict[str, str]:
    """Write a model of transformers as a GGUF file, for llama.cpp and other programs without Panther.

    Codes of quantized layers and embeddings are carried over as they are: 4 bits become Q4_0, or Q4_1 if there are zero
    points, 5 bits Q5_0 or Q5_1, and 8 bits Q8_0. Scales are stored in fp16, which holds those of bfloat16 from 2^-17 to
    65,504 exactly and rounds smaller ones to multiples of 2^-24. A minimum of Q4_1 and Q5_1, the scale times the zero
    point, is rounded to 11 bits, which moves the weights of a group by at most 1/128 and 1/64 of a step. Weights that
    are not compressed keep their dtype, and norms and biases are float32. llama.cpp multiplies inputs that it has
    rounded to 8 bits, so its logits differ by some percent from the model's.

    Args:
        model: A causal language model of Llama (SmolLM2 is one), Mistral, Qwen2, Qwen3, Gemma, Gemma 2 or Gemma 3,
            which :func:`panther.compress` made with ``target="gguf"``, or another one without other compressed layers
            than quantized linear layers and embeddings in groups of 32 columns.
        path: The file, which is replaced if it exists.
        tokenizer: A fast tokenizer of transformers, whose vocabulary and chat template are written as well. Without one
            the file has no vocabulary, and programs take the numbers of tokens only.

    Returns:
        The type of each weight that is stored in blocks, by the name of its layer.

    Raises:
        PantherError: If llama.cpp has no such model, layer or tokenizer; the message names it. Nothing is written then.
        MissingExtraError: Without the package gguf.

    Cost: the memory of the largest weight, and of its codes with one byte each.

    Example:
        >>> import tempfile, transformers, panther as pr
        >>> from panther.integrations.gguf import write_gguf
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=100,
        ...     hidden_size=64,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ...     intermediate_size=128,
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> report = pr.compress(
        ...     model, bits=4.5, method="svd", target="gguf", symmetric=True
        ... )
        >>> types = write_gguf(model, f"{tempfile.mkdtemp()}/model.gguf")
        >>> types["model.layers.0.mlp.up_proj"]
        'Q4_0'

    Reference: G. Gerganov and others, "GGUF", https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
    """
    gguf: Any = require_extra("gguf", "gguf")
    any_model: Any = model
    architecture = architecture_of(model)
    entries = list(_entries(any_model, gguf))
    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_name(Path(path).stem)
    write_sizes(writer, model, architecture)
    write_vocabulary(writer, tokenizer, any_model.config.vocab_size, gguf.TokenType)
    packed = {entry.source: entry.type_name for entry in entries if entry.type_name.startswith("Q")}
    kinds = list(packed.values()) or [_FLOATS.get(any_model.dtype, "F32")]
    most = max(sorted(set(kinds)), key=kinds.count)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if most == "F32" else f"MOSTLY_{most}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.type_name]
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = torch.Size(entry.shape).numel() // block * num_bytes
        writer.add_tensor_info(entry.name, entry.shape, None, size, raw_dtype=kind)
    with new_file(path) as file:
        writer.fout, writer.state = [file], gguf.gguf_writer.WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_padding(file, file.tell())
            file.write(entry.make().cpu().contiguous().view(torch.uint8).numpy().data)
        writer.write_padding(file, file.tell())
    return packed


def _entries(model: Any, gguf: Any) -> Iterator[_Entry]:
    """Yield the tensors of the file; raise PantherError for a tensor or a layer that it cannot have."""
    architecture, state = architecture_of(model), model.state_dict()  # This refuses codes that other code damaged.
    layers = _checked_layers(model)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    is_tied = _is_tied(model)
    if not is_tied and not architecture.has_head:
        raise PantherError(
            f"the head of this {type(model).__name__} is not its embedding, and llama.cpp has one weight for both: "
            "compress the original model with target='gguf'"
        )
    sources = {f"{name}.weight": layer for name, layer in layers.items()}
    sources |= {f"{name}.bias": layer.bias for name, layer in layers.items() if layer.bias is not None}
    sources |= {key: tensor for key, tensor in state.items() if key.rpartition(".")[0] not in layers}
    for key, source in sources.items():
        layer_name, _, suffix = key.rpartition(".")
        if is_tied and layer_name == _HEAD:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        is_norm = layer_name.endswith("norm")
        if name is None or (suffix == "bias" and (is_norm or not architecture.has_biases)):
            raise PantherError(
                f"tensor {key!r} has no counterpart in llama.cpp's {architecture.name}: export the model without it"
            )
        order = row_order(model, architecture, layer_name)
        if isinstance(source, Tensor):
            yield _dense_entry(key, name, source, order, architecture.norm_offset if is_norm else 0.0)
        else:
            yield _packed_entry(layer_name, name, source, order)
    if (divisors := rope_divisors(model)) is not None:
        yield _dense_entry("rope_freqs", "rope_freqs.weight", divisors, None, 0.0)


def _checked_layers(model: Any) -> dict[str, Any]:
    """Return the compressed layers by name, or raise PantherError if there is one that blocks cannot hold."""
    layers = dict(compressed_layers(model))
    refusals = {name: "is linear attention" for name in attention_records(model)}
    refusals |= {name: reason for name, layer in layers.items() if (reason := why_no_blocks(layer)) is not None}
    if refusals:
        name, reason = next(iter(refusals.items()))
        raise PantherError(
            f"{counted(len(refusals), 'layer')} cannot be written in GGUF, the first of them {name!r}, which {reason}: "
            "compress the original model with target='gguf'"
        )
    return layers


def _is_tied(model: Any) -> bool:
    """Return whether the head and the embedding have the same tensor."""
    head, embedding = (model.get_submodule(name) for name in (_HEAD, _EMBEDDING))
    tensors = [module.codes if hasattr(module, "codes") else module.weight for module in (head, embedding)]
    return tensors[0].data_ptr() == tensors[1].data_ptr()


def _dense_entry(source: str, name: str, tensor: Tensor, order: Tensor | None, offset: float) -> _Entry:
    dtype = tensor.dtype if tensor.dim() > 1 and tensor.dtype in _FLOATS else torch.float32

    def make() -> Tensor:
        rows = tensor.detach() if order is None else tensor.detach()[order.to(tensor.device)]
        return (rows.float() + offset if offset else rows).to(dtype)

    return _Entry(source, name, _FLOATS[dtype], tuple(tensor.shape), make)


def _packed_entry(source: str, name: str, layer: Any, order: Tensor | None) -> _Entry:
    type_name = block_type(layer)

    def make() -> Tensor:
        codes, scales, zeros = layer.grid_numbers()
        if order is not None:
            codes, scales, zeros = (numbers[order.to(numbers.device)] for numbers in (codes, scales, zeros))
        return pack_blocks(codes, scales, zeros, type_name)

    return _Entry(source, name, type_name, weight_shape(layer), make)
