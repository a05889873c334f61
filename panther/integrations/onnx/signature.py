"""The names of an ONNX file: its inputs and outputs, and the sizes that may change."""

__all__ = ["check_sizes", "dynamic_shapes", "named_tensors", "size_names"]

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from panther.errors import PantherError

_DECODER = "decoder_"


def size_names(sample: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """Return for each input the names of its dimensions that may change.

    The first dimension is ``batch``. The second dimension of integer matrices is ``length``: one name for all matrices
    as long as the first of them, and ``decoder_length`` for the inputs of a decoder.
    """
    names: dict[str, dict[int, str]] = {}
    common_length = None
    for name, tensor in sample.items():
        names[name] = {0: "batch"} if tensor.dim() else {}
        if tensor.dim() == 2 and not tensor.is_floating_point():
            length = tensor.shape[1]
            if name.startswith(_DECODER):
                names[name][1] = f"{_DECODER}length"
            elif common_length in (None, length):
                names[name][1], common_length = "length", length
            else:
                names[name][1] = f"{name}_length"
    return names


def check_sizes(sample: Mapping[str, Tensor]) -> None:
    """Raise PantherError if a size of the sample that may change is 1, which torch.export takes for fixed."""
    for name, sizes in size_names(sample).items():
        for dimension, size_name in sizes.items():
            if sample[name].shape[dimension] < 2:
                raise PantherError(
                    f"input {name!r} of the sample has the shape {tuple(sample[name].shape)}, and the {size_name} must "
                    "be at least 2 in order to change later: give a larger sample"
                )


def dynamic_shapes(sample: Mapping[str, Tensor]) -> dict[str, dict[int, Any]]:
    """Return the sizes that may change as torch.export takes them."""
    dynamic = torch.export.Dim.DYNAMIC
    return {name: dict.fromkeys(names, dynamic) for name, names in size_names(sample).items()}


def named_tensors(output: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors of a model's output by name, as torch.export orders them.

    A mapping, for example an output class of transformers, names them by its keys, and a sequence by numbers. A single
    tensor is ``output``.
    """
    if isinstance(output, Tensor):
        return {name or "output": output}
    if isinstance(output, Mapping):
        entries = [(f"{name}.{key}" if name else str(key), value) for key, value in output.items()]
    elif isinstance(output, list | tuple):
        entries = [(f"{name or 'output'}.{index}", value) for index, value in enumerate(output)]
    else:
        return {}
    return {key: tensor for entry, value in entries for key, tensor in named_tensors(value, entry).items()}
