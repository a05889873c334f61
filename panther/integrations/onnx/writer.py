"""Write a model as an ONNX file: trace it by torch.export, translate it by torch.onnx, and name its sizes."""

__all__ = ["Agreement", "check_operators", "compare_onnx", "named_tensors", "write_onnx"]

import copy
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panther._process_settings import ProcessSetting, ignored_warnings
from panther.errors import PantherError, require_extra
from panther.files import new_file
from panther.integrations.onnx.layers import FOUR_BITS, onnx_layers
from panther.nn.protocol import CompressedModule, compressed_layers

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


_MAX_ERROR = 1e-4  # relative error of a file in float32
# Error of a file that rounds, divided by the error of the model itself, which rounds as well.
_MAX_ERROR_RATIO = 4.0


@dataclass(frozen=True)
class Agreement:
    """How much the outputs of a file differ from a model's."""

    error: float
    """The largest relative difference of an output, by norms; NaN if an output is not finite."""
    limit: float
    """The largest difference that rounding explains."""
    reference: str
    """What the file was compared with, as a noun phrase."""

    @property
    def is_close(self) -> bool:
        """Whether the difference is within the limit."""
        return self.error <= self.limit


@torch.no_grad()
def compare_onnx(
    model: nn.Module, path: str | os.PathLike[str], samples: Sequence[Mapping[str, Tensor]]
) -> Agreement | None:
    """Run a file with onnxruntime on a CPU, and compare all of its outputs with those of the model.

    A file that rounds its numbers, in float16 or with inputs of layers rounded to 8 bits, is compared with the model in
    float32 without this rounding. The limit is then a multiple of the error that the model itself has by it.

    Args:
        model: The model that the file was written from. A copy of it is cast to float32 if it is in float16.
        path: The file.
        samples: Inputs by name; several of different batch sizes and lengths test more.

    Returns:
        The agreement, or None if the model computes in bfloat16, for which onnxruntime has no kernels on CPUs.

    Raises:
        MissingExtraError: Without onnxruntime.

    Cost: two passes through the model for each sample.
    """
    runtime: Any = require_extra("onnxruntime", "onnx")
    outputs = [named_tensors(model(**sample)) for sample in samples]
    dtypes = {output.dtype for batch in outputs for output in batch.values()}
    if torch.bfloat16 in dtypes:
        return None
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    file_outputs = [_run(session, sample) for sample in samples]
    rounding = [layer for _, layer in compressed_layers(model) if layer.activations]
    is_half = torch.float16 in dtypes
    references, limit = outputs, _MAX_ERROR
    if is_half or rounding:
        references = _without_rounding(model, samples, rounding, is_half)
        least = torch.finfo(torch.float16).eps if is_half else _MAX_ERROR
        limit = _MAX_ERROR_RATIO * max(_error(outputs, references), least)
    words = "the model's output" if references is outputs else "the output of the model in float32"
    if rounding:
        words += ", with the inputs of layers not rounded"
    return Agreement(_error(file_outputs, references), limit, words)


def _run(session: Any, sample: Mapping[str, Tensor]) -> dict[str, Tensor]:
    arrays = {entry.name: sample[entry.name].cpu().numpy() for entry in session.get_inputs()}
    names = [entry.name for entry in session.get_outputs()]
    return {name: torch.from_numpy(array) for name, array in zip(names, session.run(None, arrays), strict=True)}


def _without_rounding(
    model: nn.Module, samples: Sequence[Mapping[str, Tensor]], rounding: list[CompressedModule], is_half: bool
) -> list[dict[str, Tensor]]:
    activations = [layer.activations for layer in rounding]
    try:
        for layer in rounding:
            layer.activations = None
        wide_model = copy.deepcopy(model).float() if is_half else model
        wide = [{name: x.float() if x.is_floating_point() else x for name, x in sample.items()} for sample in samples]
        return [named_tensors(wide_model(**sample)) for sample in wide]
    finally:
        for layer, previous in zip(rounding, activations, strict=True):
            layer.activations = previous


def _error(outputs: list[dict[str, Tensor]], references: list[dict[str, Tensor]]) -> float:
    """Return the largest relative difference; outputs are in the order of the references."""
    pairs = [
        pair
        for batch in zip(outputs, references, strict=True)
        for pair in zip(*(x.values() for x in batch), strict=True)
    ]
    return max((_distance(output, reference) for output, reference in pairs), key=lambda x: (x != x, x), default=0.0)


def _distance(output: Tensor, reference: Tensor) -> float:
    reference = reference.cpu().double()
    difference = torch.linalg.vector_norm(output.cpu().double() - reference)
    norm = torch.linalg.vector_norm(reference)
    return float(difference / norm if norm else difference)
