"""Write a model as an ONNX file: trace it by torch.export, translate it by torch.onnx, and name its sizes."""

__all__ = ["check_operators", "named_tensors", "write_onnx"]

import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panther._process_settings import ProcessSetting, ignored_warnings
from panther.errors import PantherError, require_extra
from panther.files import new_file
from panther.integrations.onnx.layers import FOUR_BITS, onnx_layers

_DECODER = "decoder_"  # begins the names of the inputs of a decoder
_OPSET = 21  # the first one with types of 4 bits, and with scales of groups
_FEW_LOGS = ProcessSetting(lambda: logging.root.manager.disable, logging.disable, logging.WARNING)
_LARGEST_FILE = 2_000_000_000  # bytes of weights in one file; protobuf reads no more than 2^31


@torch.no_grad()
def write_onnx(model: nn.Module, path: str | os.PathLike[str], sample: Mapping[str, Tensor]) -> None:
    """Write a model as an ONNX file, whose batch size and length may change.

    Weights of :class:`~panther.nn.QuantizedLinear`, :class:`~panther.nn.QuantizedConv2d` and
    :class:`~panther.nn.QuantizedEmbedding` are stored in ONNX's types of 4 and 8 bits; 2 and 3 bits take 4, and 5 to 7
    bits take 8. Codes up to 4 bits in groups that a power of two from 16 divides become ``MatMulNBits`` of onnxruntime,
    and other codes ``DequantizeLinear``. Layers with ``activations="int8"`` become a ``MatMulNBits`` that rounds its
    input to 8 bits, with one step for each block of columns instead of one for each row.

    Args:
        model: The model, in eval mode. It is not changed.
        path: The file. More than 2 GB of weights are written beside it, to a file whose name ends with ``.data``.
        sample: Inputs by the names of the forward's arguments, in the order that the file's inputs will have. The first
            dimension is the batch, and the second dimension of an integer matrix the length; both must be at least 2.

    Raises:
        PantherError: If the model contains operators that ONNX does not have, is in training mode, or returns one of
            its inputs, or if a size of the sample that may change is 1.
        MissingExtraError: Without onnx or onnxscript.
        OSError: If the file cannot be written.

    Cost: a trace of the model, and twice the memory of the file.

    Example:
        >>> import tempfile, torch
        >>> from panther.integrations.onnx import compare_onnx, write_onnx
        >>> from panther.nn import QuantizedLinear
        >>> layers = (
        ...     QuantizedLinear(64, 32),
        ...     torch.nn.ReLU(),
        ...     QuantizedLinear(32, 4),
        ... )
        >>> model = torch.nn.Sequential(*layers).eval()
        >>> path = tempfile.mkdtemp() + "/model.onnx"
        >>> sample = {"input": torch.randn(3, 64)}
        >>> write_onnx(model, path, sample)
        >>> compare_onnx(model, path, [sample]).error < 1e-5
        True
    """
    for module in ("onnx", "onnxscript"):
        require_extra(module, "onnx")
    passes: Any = require_extra("onnx_ir.passes.common", "onnx")
    if model.training:
        raise PantherError(f"{type(model).__name__} is in training mode, which a file would keep: call model.eval()")
    _check_sizes(sample)
    outputs = named_tensors(model(**sample))
    for name, output in outputs.items():
        if any(output is tensor for tensor in sample.values()):
            raise PantherError(
                f"output {name!r} of the {type(model).__name__} is one of its inputs, and torch.onnx then writes a "
                "file that cannot be read: leave it out of the outputs"
            )
    output_names = list(outputs)
    # torch's own modules warn, and torch would list its optional packages that are missing.
    with ignored_warnings(), _FEW_LOGS.held(), onnx_layers(model):
        program = torch.export.export(model, (), dict(sample), dynamic_shapes=_dynamic_shapes(sample))
        check_operators(type(model).__name__, program)
        num_outputs = sum(output is not None for output in program.graph_signature.user_outputs)
        names = output_names if num_outputs == len(output_names) else None
        onnx_program: Any = torch.onnx.export(
            program, (), dynamo=True, verbose=False, opset_version=_OPSET, output_names=names
        )
    onnx_model = onnx_program.model
    passes.ClearMetadataAndDocStringPass()(onnx_model)  # a stack trace for each operator
    _narrow_types_(onnx_model.graph)
    _name_sizes_(onnx_model.graph, sample)
    _write(onnx_model, Path(path))


def check_operators(kind: str, program: Any) -> None:
    """Raise PantherError if a program contains operators that ONNX lacks: of linear attention, or of experts."""
    graphs = (module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    targets = [node.target for graph in graphs for node in graph.nodes]
    names = sorted({str(target) for target in targets if getattr(target, "namespace", "") == "panther"})
    if names:
        raise PantherError(
            f"{kind} contains {', '.join(names)}, of linear attention, and ONNX has no such operator: use --to torch, "
            "or export the model with softmax attention"
        )
    if grouped := [str(target) for target in targets if "grouped_mm" in str(target)]:
        raise PantherError(
            f"{kind} contains {grouped[0]}, a product of experts, and ONNX has no such operator: use --to torch, "
            "or call model.set_experts_implementation('batched_mm'), which gathers weights for each token"
        )


def _narrow_types_(graph: Any) -> None:
    """Change the type of weights of 4 bits, which torch has no type for, from UINT8 to UINT4."""
    ml_dtypes: Any = require_extra("ml_dtypes", "onnx")
    onnx_ir: Any = require_extra("onnx_ir", "onnx")
    for name, value in graph.initializers.items():
        if name.endswith(FOUR_BITS):
            numbers = value.const_value.numpy().astype(ml_dtypes.uint4)
            value.const_value = onnx_ir.Tensor(numbers, name=name)
            value.dtype = onnx_ir.DataType.UINT4


def _name_sizes_(graph: Any, sample: Mapping[str, Tensor]) -> None:
    """Put the inputs in the order of the sample, and give the symbols of their sizes one name each."""
    onnx_ir: Any = require_extra("onnx_ir", "onnx")
    inputs = {value.name: value for value in graph.inputs}
    graph.inputs[:] = [inputs[name] for name in sample if name in inputs]
    symbols: dict[str, str] = {}
    for name, sizes in _size_names(sample).items():
        for dimension, size_name in sizes.items():
            size = inputs[name].shape[dimension] if name in inputs else None
            if isinstance(size, onnx_ir.SymbolicDim) and size.value is not None:
                symbols.setdefault(str(size.value), size_name)
    if not symbols:
        return
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, symbols)) + r")\b")
    for value in _values(graph):
        for dimension, size in enumerate(value.shape or ()):
            if isinstance(size, onnx_ir.SymbolicDim) and size.value is not None:
                text = pattern.sub(lambda match: symbols[match[0]], str(size.value))
                value.shape[dimension] = onnx_ir.SymbolicDim(text)


def _values(graph: Any) -> Iterable[Any]:
    onnx_ir: Any = require_extra("onnx_ir", "onnx")
    yield from graph.inputs
    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs


def _write(onnx_model: Any, path: Path) -> None:
    onnx_ir: Any = require_extra("onnx_ir", "onnx")
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = (value.const_value for value in onnx_model.graph.initializers.values())
    if sum(weight.nbytes for weight in weights if weight is not None) > _LARGEST_FILE:
        onnx_ir.save(onnx_model, path, external_data=f"{path.name}.data")
        return
    contents = onnx_ir.to_proto(onnx_model).SerializeToString()
    with new_file(path) as file:
        file.write(contents)


def _size_names(sample: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
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


def _check_sizes(sample: Mapping[str, Tensor]) -> None:
    """Raise PantherError if a size of the sample that may change is 1, which torch.export takes for fixed."""
    for name, sizes in _size_names(sample).items():
        for dimension, size_name in sizes.items():
            if sample[name].shape[dimension] < 2:
                raise PantherError(
                    f"input {name!r} of the sample has the shape {tuple(sample[name].shape)}, and the {size_name} must "
                    "be at least 2 in order to change later: give a larger sample"
                )


def _dynamic_shapes(sample: Mapping[str, Tensor]) -> dict[str, dict[int, Any]]:
    """Return the sizes that may change as torch.export takes them."""
    dynamic = torch.export.Dim.DYNAMIC
    return {name: dict.fromkeys(names, dynamic) for name, names in _size_names(sample).items()}


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
