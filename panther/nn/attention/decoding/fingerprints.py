"""Fingerprints of feature maps, by which a decoding state knows the map that made it.

A state has sums of features of the keys so far, so that it is wrong for every other map, and no shape shows this. The
fingerprint is a checksum of the map's tensors and numbers. Reading tensors takes milliseconds and waits for a GPU.
Therefore the checksum is computed again only if a tensor was written to or replaced, which its version counter and its
address show. Writes through ``tensor.data`` are not counted by torch.
"""

__all__ = ["check_map", "fingerprint_of", "renew_fingerprint"]

import zlib
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from panther._torch import untracked_shard, version_of
from panther.files.tensors import bytes_of
from panther.nn.attention._check import is_plain

# For each module, aliases of its tensors with their versions, its numbers, and the fingerprint. The aliases keep the
# memory of replaced tensors, so that no new tensor gets the address of an old one.
_Entry = tuple[list[tuple[Tensor, int]], tuple[Any, ...], str]
_entries: MutableMapping[nn.Module, _Entry] = WeakKeyDictionary()


def fingerprint_of(attention: Any) -> str | None:
    """Return the fingerprint of a module's feature map; None if the tensors of the map cannot be read.

    A graph cannot read tensors: compiled code uses the fingerprint that was computed last.
    """
    if torch.compiler.is_compiling():
        return attention.map_fingerprint  # type: ignore[no-any-return]
    tensors = [untracked_shard(x) for x in attention.map_tensors()]
    if tensors and not is_plain(tensors[0].detach()):
        return None
    numbers, entry = attention.map_numbers(), _entries.get(attention)
    if entry is None or entry[1] != numbers or not _are_unchanged(tensors, entry[0]):
        checksum = zlib.crc32(repr((numbers, [tuple(x.shape) for x in tensors])).encode())
        for x in tensors:  # in float64, so that a cast that changes no value gives the same map
            checksum = zlib.crc32(bytes_of(x.detach().cpu().double()), checksum)
        aliases = [(x.detach(), 0 if x.is_inference() else version_of(x)) for x in tensors]
        entry = _entries[attention] = (aliases, numbers, f"{checksum:08x}")
        attention.map_fingerprint = entry[2]
    return entry[2]


def renew_fingerprint(attention: Any) -> None:
    """Compute the fingerprint of a map that was changed, if there may be states, for compiled code."""
    if attention.map_fingerprint is not None:
        fingerprint_of(attention)


def check_map(state: Any, attention: Any) -> None:
    """Raise ValueError if a state was made by another feature map than the one that a module has now."""
    fingerprint = fingerprint_of(attention)
    if state.feature_map != fingerprint and None not in (state.feature_map, fingerprint):
        raise ValueError(
            f"the state was made with the feature map {state.feature_map} and this layer has the map {fingerprint}, "
            "whose features cannot be added to its sums: make a new state by init_state after the last redraw, "
            "calibration, load or training step (redraw_interval=None keeps the directions)"
        )


def _are_unchanged(tensors: list[Tensor], aliases: list[tuple[Tensor, int]]) -> bool:
    return len(tensors) == len(aliases) and all(
        not x.is_inference()  # torch does not count writes to such a tensor
        and x.data_ptr() == alias.data_ptr()
        and version == version_of(x) == version_of(alias)  # `x.data = y` leaves the version of x
        for x, (alias, version) in zip(tensors, aliases, strict=True)
    )
