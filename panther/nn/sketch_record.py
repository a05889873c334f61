"""The record of a sketch in checkpoints, ``sketch_seed``: seed (-1: fitted), num_terms, version, checksum.

The version says the kind of the sketch and its stream of random numbers.
"""

__all__ = [
    "RECORD_MARK", "SKETCH_VERSIONS", "DrawnModule", "check_mark", "has_values", "integers_checksum", "is_rounded",
    "make_record", "plain_state", "read_integers", "read_record", "record_mark", "recorded_sketch", "without_marks",
]  # fmt: skip

import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import FakeTensor
from panther.errors import SketchMismatchError
from panther.sketch import STREAM_VERSION

_FITTED = -1

SKETCH_VERSIONS = {"signs": STREAM_VERSION, "sparse": 2}
"""The version in the record of each kind of sketch. Version 2 includes places ``i mod R`` and the scale 1/(4 L)."""

RECORD_MARK = "record_mark"
"""Name of four floating numbers in a ``state_dict()``, which stand for the record, a tensor of integers.

An average of the floating tensors of two models that keeps the integers of one of them averages these numbers too, and
no longer fits the record. Files that Panther writes do not contain them: their formats are older, and have checksums.
"""


def make_record(seed: int | None, num_terms: int, sketch: str = "signs") -> list[int]:
    """Return the record of a layer with this seed, None for a fitted one, and this kind of sketch."""
    head = [_FITTED if seed is None else seed, num_terms, SKETCH_VERSIONS[sketch]]
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
    if version not in SKETCH_VERSIONS.values():
        raise SketchMismatchError(
            f"{key} is of stream version {version} and this Panther knows {sorted(SKETCH_VERSIONS.values())}: use the "
            "Panther that wrote it, or a newer one"
        )
    if terms != num_terms:
        raise SketchMismatchError(
            f"{key} was saved with num_terms={terms} and the layer has num_terms={num_terms}: build the layer with "
            f"num_terms={terms}"
        )
    return None if seed == _FITTED else seed


def recorded_sketch(record: Tensor) -> str:
    """Return the kind of sketch in a valid record."""
    version = int(record[2])
    return next(sketch for sketch, each in SKETCH_VERSIONS.items() if each == version)


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
            checksum = zlib.crc32(_bytes_of(tensor), checksum)
    return checksum % (2**23 - 1) + 1


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.ravel().view(torch.uint8).numpy(force=True).data


def record_mark(record: Any) -> Tensor | None:
    """Return the mark of a record, multiples of 1/128 in [1, 2); None if the record has no values or is a shard.

    A cast to bfloat16 or float16 does not round these numbers.
    """
    if type(record) is not Tensor or not has_values(record):
        return None
    # Not a CRC, which is the same for all records that end with their own CRC.
    digest = hashlib.blake2b(_bytes_of(record), digest_size=4).digest()
    return torch.tensor([1 + byte % 128 / 128 for byte in digest], device=record.device)


def check_mark(mark: Any, record: Any, prefix: str = "") -> None:
    """Raise SketchMismatchError, with the layer's name, if a mark and a record have values that do not belong together.

    ``prefix`` is the name of the layer with a dot, as ``load_state_dict`` passes it.
    """
    expected = record_mark(record)
    if expected is None or type(mark) is not Tensor or not has_values(mark):
        return
    # Numbers of two marks differ by 1/128 or more, and an average of many equal numbers is rounded.
    if mark.shape != expected.shape or not bool(((mark.double().cpu() - expected.cpu()).abs() < 2**-9).all()):
        raise SketchMismatchError(
            (f"layer {prefix[:-1]!r}: " if prefix else "")
            + "the floating tensors do not belong to the seed or the integers beside them, as after an average of the "
            "floating tensors of two models: average models that share seeds and integers"
        )


def plain_state(module: nn.Module, keep_vars: bool = False) -> dict[str, Any]:
    """Return the ``state_dict()`` of a module without marks, as files have it."""
    return without_marks(module.state_dict(keep_vars=keep_vars))


def without_marks(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a ``state_dict()`` that are not marks."""
    return {name: value for name, value in state.items() if name.rpartition(".")[2] != RECORD_MARK}


class DrawnModule(nn.Module):
    """A module whose ``_extra_state`` begins with the seed of its random buffers and how often they were drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(RECORD_MARK, None)  # Tools that look up the names of a state_dict find this one.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        mark = record_mark(_draws_in(destination.get(f"{prefix}_extra_state")))
        buffers = list(self.buffers(recurse=False))
        if mark is not None and buffers and all(map(has_values, buffers)):
            destination[prefix + RECORD_MARK] = mark

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, if the mark, which earlier versions did not save, belongs to the seed."""
        state_dict = dict(state_dict)
        mark = state_dict.pop(prefix + RECORD_MARK, None)
        check_mark(mark, _draws_in(state_dict.get(f"{prefix}_extra_state")), prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _draws_in(state: Any) -> Any:
    """Return the seed and the number of draws, or None if these are not integers, which are refused later."""
    return state[:2].clone() if isinstance(state, Tensor) and state.dim() and state.dtype is torch.int64 else None
