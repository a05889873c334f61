"""Write corrections of low rank as a LoRA adapter of PEFT, beside the quantized model that they belong to."""

__all__ = ["ADAPTER_FOLDER", "write_adapter"]

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from panther.errors import FormatError
from panther.files import write_json
from panther.files.tensors import write_file

ADAPTER_FOLDER = "adapter"
"""Folder of the adapter in the folder of the model, whose own level transformers would search for adapters."""

_WEIGHTS = "adapter_model.safetensors"
_ROUNDINGS = 4.0  # Each factor is rounded once, and the norm of their product is compared.


@torch.no_grad()
def write_adapter(folder: Path, layers: Mapping[str, Any], dtype: torch.dtype, *, task_type: str | None) -> int:
    """Write the corrections of layers as an adapter, read it back, and return its bytes.

    All layers get the largest rank, and the factors of the remaining layers are padded with zeros, because readers of
    adapters expect one rank. With alpha = r, PEFT multiplies the product by 1.

    Args:
        folder: The folder of the adapter, new.
        layers: Layers with a correction, by name.
        dtype: The dtype of the factors, which is that of the model.
        task_type: The task by which PEFT chooses its class, such as "CAUSAL_LM".

    Raises:
        FormatError: If the factors in the file differ from the layers' by more than their rounding to ``dtype``.
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
