"""The layout of compressed-tensors on disk: packed codes, the names of tensors, and the schemes in config.json."""

__all__ = ["Scheme", "decode_weight", "pack_weight", "quantization_config", "schemes_in", "selected_scheme"]

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
VERSION = "0.20.0"  # of the package compressed-tensors whose format this is
_WORD = 32  # bits of an integer of PACKED


@dataclass(frozen=True, order=True)
class Scheme:
    """How a layer's weight is quantized: symmetric codes of ``bits``, with a scale for each group of columns.

    Attributes:
        bits: Width of a code.
        group_size: Columns of a group; 0 for entire rows.
    """

    bits: int
    group_size: int

    def entry(self, targets: Sequence[str]) -> dict[str, Any]:
        """Return the entry of config.json for this scheme, of the layers that ``targets`` match."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size or None,
            "dynamic": False,
        }
        unused = {"input_activations": None, "output_activations": None}
        return {"targets": list(targets), "format": FORMAT, "weights": weights, **unused}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> "Scheme":
        """Return the scheme of an entry of config.json."""
        return cls(entry["weights"]["num_bits"], entry["weights"]["group_size"] or 0)


def quantization_config(
    layers: Mapping[str, Scheme],  # by the layer's name in the model
    dense_layers: Iterable[str],
    base_prefix: str,
) -> dict[str, Any]:
    """Return the entry ``quantization_config`` of config.json.

    The widest scheme comes first: a program that decodes all layers by the first scheme then gets too few columns of
    the narrower layers, and stops. Layers are matched with and without ``base_prefix``, the name of the body in classes
    with a head, because transformers also loads a model without its head, and a body into a class with a head. vLLM
    requires each layer to have a scheme or to be in ``dense_layers``.
    """
    names_of: dict[Scheme, list[str]] = {}
    for name, scheme in layers.items():
        names_of.setdefault(scheme, []).append(name)
    groups = {
        f"group_{index}": scheme.entry([_pattern(names_of[scheme], base_prefix)])
        for index, scheme in enumerate(sorted(names_of, reverse=True))
    }
    ignored = list(dense_layers)
    return {
        "quant_method": METHOD,
        "version": VERSION,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [_pattern(ignored, base_prefix)] if ignored else [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _pattern(names: Sequence[str], base_prefix: str) -> str:
    """Return one regular expression for all names, because matching a list of many expressions takes long."""
    prefix = f"{base_prefix}." if base_prefix else ""
    alternatives = "|".join(dict.fromkeys(re.escape(name.removeprefix(prefix)) for name in names))
    return rf"re:^(?:{re.escape(prefix)})?(?:{alternatives})$" if prefix else rf"re:^(?:{alternatives})$"


def schemes_in(config: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    """Return the targets and the scheme of each group of an entry ``quantization_config``, in their order."""
    return [(entry["targets"], Scheme.from_entry(entry)) for entry in config["config_groups"].values()]


def selected_scheme(name: str, config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme that a reader takes for a layer; None if it takes the layer for a dense one."""
    if any(_matches(name, target) for target in config["ignore"]):
        return None
    selected = [scheme for targets, scheme in schemes_in(config) if any(_matches(name, target) for target in targets)]
    return selected[0] if selected else None


def _matches(name: str, target: str) -> bool:
    pattern = target.removeprefix("re:")
    return name == target if pattern == target else re.match(pattern, name) is not None


def pack_weight(
    codes: Tensor,  # (rows, columns), uint8, with the middle code for zero
    bits: int,
) -> Tensor:  # (rows, ceil(columns * bits / 32)), int32
    """Return codes as a stream of bits in each row, the lowest bits first, in words of 32 bits."""
    rows, columns = codes.shape
    num_words = -(-columns * bits // _WORD)
    words = torch.zeros(rows, num_words + 1, dtype=torch.int64, device=codes.device)
    places = torch.arange(columns, device=codes.device) * bits
    word, shift = places // _WORD, places % _WORD
    shifted = codes.to(torch.int64) << shift
    # Codes do not overlap, so that sums are unions of bits.
    words.index_add_(1, word, shifted & 0xFFFFFFFF)
    words.index_add_(1, word + 1, shifted >> _WORD)
    # The largest values become negative numbers of 32 bits.
    return torch.where(words >= 2**31, words - 2**32, words)[:, :num_words].to(torch.int32)


def decode_weight(
    packed: Tensor,  # (rows, words), int32
    scale: Tensor,  # (rows, groups)
    shape: Sequence[int],  # (rows, columns)
    bits: int,
) -> Tensor:  # (rows, columns), float64
    """Return the weight that a reader computes from stored tensors, without rounding.

    The bits of all words are spread out, so that this is independent of :func:`pack_weight`.
    """
    rows, columns = map(int, shape)
    positions = torch.arange(_WORD, device=packed.device)
    stream = ((packed[..., None] >> positions) & 1).flatten(1)[:, : columns * bits].view(rows, columns, bits)
    codes = (stream.double() * 2.0 ** torch.arange(bits, device=packed.device)).sum(-1)
    group_size = -(-columns // scale.shape[1])
    steps = scale.double().repeat_interleave(group_size, 1)[:, :columns]
    return (codes - 2.0 ** (bits - 1)) * steps
