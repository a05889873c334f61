"""Load a model of transformers with all large weights mapped from files, also those that transformers converts."""

__all__ = ["mapped_from_pretrained"]

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from panther._process_settings import ProcessSetting
from panther.compression.streaming.spool import freed_blocks_returned
from panther.errors import CompressionError
from panther.files.tensors import MAPPED, mapped_copy
from panther.integrations.pretrained import from_pretrained

_SMALLEST_BYTES = 1 << 16  # vectors are smaller, and a process may hold 65,530 mappings
# With this variable transformers converts in this thread, and each weight when the one before is in the model. By
# default threads convert weights before they are needed, in memory and outside of this thread's modes. A version of
# transformers that does not know the variable still does so: the values are equal, and more memory is taken.
_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
_ONE_WEIGHT_AT_A_TIME = ProcessSetting(
    lambda: os.environ.get(_SEQUENTIAL),
    lambda value: os.environ.pop(_SEQUENTIAL, None) if value is None else os.environ.update({_SEQUENTIAL: value}),
    "1",
)


def mapped_from_pretrained(source: str | os.PathLike[str], folder: Path, **kwargs: Any) -> Any:
    """Load a folder as :func:`panther.from_pretrained` does, with the weights in files.

    transformers maps the weights from their files, except for those that it converts: experts that the files hold one
    by one and the model stacked, weights that are transposed, split or fused, and weights of a different dtype. The
    result of each step of a conversion is moved to a file of ``folder`` before the next step, so that the process holds
    one result at a time. The values are those of transformers, which does the conversions.

    Memory that a conversion allocates and then writes to, and results that are not contiguous, stay in memory.

    Args:
        source: The folder of the model.
        folder: An existing folder for the files, for this process alone. They are removed as soon as they are mapped,
            and their space is free when the model is.
        **kwargs: Arguments of :func:`panther.from_pretrained`.

    Raises:
        CompressionError: If the folder cannot take the weights.
        FormatError, MissingExtraError: As for :func:`panther.from_pretrained`.
    """
    for path in folder.glob(f"{MAPPED}*"):  # of a process that was killed
        path.unlink()
    try:
        with freed_blocks_returned(), _ONE_WEIGHT_AT_A_TIME.held(), _ResultsInFiles(folder):
            return from_pretrained(source, **kwargs)
    except _WriteError as error:
        raise CompressionError(
            f"{folder} cannot take the weights that transformers converts as it loads {source} ({error}): free "
            "some of the disk and start again, or name a folder of a larger disk"
        ) from error.__cause__


class _WriteError(BaseException):
    """No Exception, because transformers collects the exceptions of conversions and continues with the next weight."""


class _ResultsInFiles(TorchFunctionMode):
    """Moves the result of every function of tensors on the CPU to a file, if the result is large and in new memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_movable(result):
            return result
        addresses = {tensor.untyped_storage().data_ptr() for tensor in _cpu_tensors([args, kwargs])}
        # What is made of no tensor is mapped already, as the weights of safetensors are, or is about to be filled.
        if not addresses or result.untyped_storage().data_ptr() in addresses:
            return result
        try:
            return mapped_copy(result, self._folder)
        except OSError as error:
            raise _WriteError(error.strerror or error) from error


def _is_movable(result: Any) -> bool:
    return (
        type(result) is Tensor
        and result.is_cpu
        and result.layout is torch.strided
        and result.nbytes >= _SMALLEST_BYTES
        and result.is_contiguous()
        and not result.requires_grad
    )


def _cpu_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_cpu and value.layout is torch.strided:
            yield value
    elif isinstance(value, Mapping):
        yield from _cpu_tensors([*value.values()])
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _cpu_tensors(entry)
