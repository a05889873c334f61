"""Run an ONNX file with onnxruntime, and compare its outputs with the model's."""

__all__ = ["Agreement", "compare_onnx"]

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from panther.errors import require_extra
from panther.integrations.onnx.writer import named_tensors
from panther.nn.protocol import CompressedModule, compressed_layers

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
