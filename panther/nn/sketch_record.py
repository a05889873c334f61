"""The record of a sketch in checkpoints, ``sketch_seed``: seed (-1: fitted), num_terms, stream version, checksum."""

__all__ = ["has_values", "integers_checksum", "is_rounded", "make_record", "read_integers", "read_record"]

import struct
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from panther._torch import FakeTensor
from panther.errors import SketchMismatchError
from panther.files.tensors import bytes_of
from panther.sketch import STREAM_VERSION

_FITTED = -1


def make_record(seed: int | None, num_terms: int) -> list[int]:
    """Return the record of a layer with this seed, None for a fitted one."""
    head = [_FITTED if seed is None else seed, num_terms, STREAM_VERSION]
    return [*head, zlib.crc32(struct.pack("<3q", *head))]


def read_record(record: Tensor, num_terms: int, key: str) -> int | None:
    """Return the seed in a record, or None if the layer is fitted. Raise SketchMismatchError if it is not valid."""
    if record.dtype is not torch.int64:
        raise SketchMismatchError(
            f"{key} is {record.dtype} and must be torch.int64: cast only the floating tensors of a state_dict"
        )
    seed, terms, version, checksum = values = record.tolist()
    if zlib.crc32(struct.pack("<3q", *values[:3])) != checksum:
        raise SketchMismatchError(
            f"{key}={values} does not match its checksum, as when seeds are averaged or the file is damaged: use "
            "models that share their seeds, or a sound checkpoint"
        )
    if version != STREAM_VERSION:
        raise SketchMismatchError(
            f"{key} is of stream version {version} and this Panther knows {STREAM_VERSION}: use the Panther that wrote "
            "it, or a newer one"
        )
    if terms != num_terms:
        raise SketchMismatchError(
            f"{key} was saved with num_terms={terms} and the layer has num_terms={num_terms}: build the layer with "
            f"num_terms={terms}"
        )
    return None if seed == _FITTED else seed


def is_rounded(record: Tensor, expected: list[int]) -> bool:
    """Return whether the numbers of a record are the expected ones except for the rounding of an average.

    Many steps of an average in float32 round by less than averages of two seeds differ, except where the other seed has
    so little weight that it does not matter.
    """
    return all(abs(a - b) <= 2**-9 * abs(b) + 1 for a, b in zip(record.tolist(), expected, strict=True))


def read_integers(state: Tensor) -> list[int] | None:
    """Return the numbers of an ``_extra_state``, None if it has no values."""
    if not has_values(state):
        return None
    if state.dtype is not torch.int64:
        raise SketchMismatchError(
            f"_extra_state is {state.dtype} and must be torch.int64: cast and average only the floating tensors of a "
            "state_dict"
        )
    return state.tolist()


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values: it is neither on the meta device nor a fake tensor."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def integers_checksum(tensors: Iterable[Tensor | None]) -> int | None:
    """Return a checksum of the values of tensors, in [1, 2^23); None if a tensor has no values or is a shard."""
    checksum = 0
    for tensor in tensors:
        if tensor is not None:
            if type(tensor) is not Tensor or not has_values(tensor):
                return None
            checksum = zlib.crc32(bytes_of(tensor), checksum)
    return checksum % (2**23 - 1) + 1
