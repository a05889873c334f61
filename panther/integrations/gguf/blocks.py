"""Blocks of GGUF: 32 codes of a row, a scale in fp16, and in the types with zero points a minimum in fp16."""

__all__ = ["block_type", "pack_blocks", "weight_shape", "why_no_blocks"]

from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.readers import BLOCK, READERS
from panther.errors import PantherError

_READER = READERS["llama.cpp"]


def why_no_blocks(layer: Any) -> str | None:
    """Return why a compressed layer cannot be written in blocks; None if it can."""
    if layer.record_mode != "quantized" or layer.dense_class not in (nn.Linear, nn.Embedding):
        return f"is a {type(layer).__name__}, and GGUF holds quantized linear layers and embeddings only"
    if layer.bits is None:
        return "is of low rank without codes"
    if layer.low_rank:
        return f"has a correction of rank {layer.low_rank}"
    if getattr(layer, "activations", None) is not None:
        return f"rounds its inputs (activations={layer.activations!r})"
    if layer.bits not in _READER.widths:
        return f"has {layer.bits} bits, and GGUF holds {', '.join(map(str, _READER.widths))}"
    if layer.bits not in _READER.zero_point_widths and not layer.is_symmetric:
        return f"has {layer.bits} bits with zero points, which GGUF has with 4 and 5 bits only"
    return _READER.why_no_group(weight_shape(layer)[1], layer.group_size)


def weight_shape(layer: Any) -> tuple[int, int]:
    """Return the rows and columns of the weight of a quantized linear layer or embedding."""
    return len(layer.codes), layer.in_features if layer.dense_class is nn.Linear else layer.embedding_dim


def block_type(layer: Any) -> str:
    """Return the name of the type of a layer's blocks, such as ``"Q4_0"``; types that end in 1 have a minimum."""
    return f"Q{layer.bits}_{0 if layer.is_symmetric else 1}"


def pack_blocks(
    codes: Tensor,  # (rows, columns) uint8
    scales: Tensor,  # (rows, groups)
    zeros: Tensor,  # (rows, groups) uint8
    type_name: str,
) -> Tensor:  # (rows, bytes) uint8
    """Return codes, scales and zero points in blocks of a type.

    Codes do not change. A scale in bfloat16 from 2^-17 to 65,504 does not change either, and smaller scales are rounded
    to multiples of 2^-24. A minimum, which is minus the scale times the zero point, is rounded to the 11 bits of fp16.

    Raises:
        PantherError: If a scale or a minimum is beyond the range of fp16.
    """
    grouped = codes.view(len(codes), -1, BLOCK)
    half_precision = [scales.to(torch.float16)]
    if type_name.endswith("1"):
        half_precision.append((-scales.double() * zeros).to(torch.float16))
    if not all(bool(numbers.isfinite().all()) for numbers in half_precision):
        raise PantherError("the scales are beyond the range of fp16, up to 65,504: compress a model of smaller weights")
    parts = [numbers[..., None].contiguous().view(torch.uint8) for numbers in half_precision]
    if type_name == "Q8_0":
        parts.append(grouped ^ 128)  # the byte of code - 128 in two's complement
    else:
        if type_name.startswith("Q5"):
            powers = 2 ** torch.arange(8, device=codes.device)
            parts.append(((grouped >> 4).unflatten(-1, (4, 8)) * powers).sum(-1).to(torch.uint8))
        low, high = (grouped & 15).split(BLOCK // 2, -1)
        parts.append(low | high << 4)
    return torch.cat(parts, -1).flatten(1)
