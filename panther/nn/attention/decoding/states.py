r"""The state of linear attention that reads a sequence token by token: sums over the keys that it has seen.

A state has one size for any number of tokens. It is a tuple of tensors and numbers that no call changes: a call returns
a new state, so the former state can be used again, for example to continue one prompt in several ways.
"""

__all__ = ["AttentionState", "WindowedAttentionState", "check_state", "merged", "units_with"]

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from panther.errors import DTypeError, ShapeError
from panther.nn.attention.decoding.fingerprints import check_map


class AttentionState(NamedTuple):
    r"""Sums over the keys that attention by feature maps has seen, :math:`\sum_j e^{c_j - R} \phi(k_j) [v_j \mid 1]`.

    The last column is the normaliser, and R is the running maximum of the keys' exponents, where there are exponents.
    """

    sums: Tensor
    """(N, heads, D, E + 1), in float32 or float64."""
    units: Tensor | None
    """R, (N, heads, 1); None where keys have no exponents."""
    norms: Tensor | None
    """For ``"hermite"``, the sum of the keys' weighted squared norms, (N, heads, 1)."""
    num_keys: Tensor | None
    """For ``"hermite"``, the number of keys that are not masked, (N, 1)."""
    length: int
    """Tokens so far, masked tokens included."""
    feature_map: str | None = None
    """The fingerprint of the feature map that made the sums; None if it is unknown."""

    def select(self, indices: Tensor) -> "AttentionState":
        """Return the state of the samples at ``indices`` of the batch, for example of the beams that survive."""
        return AttentionState(*_selected(self, indices))


class WindowedAttentionState(NamedTuple):
    """The state of :class:`~panther.nn.LearnedLinearAttention`: sums over far keys, and two blocks of keys and values.

    The first block of the window is the previous block of the sequence, and the second is the current block, whose
    later positions are not filled.
    """

    sums: Tensor
    """Over the keys before the window, (N, heads, m, E + 1), in float32 or float64."""
    units: Tensor
    """The largest exponent of the keys before the window, (N, heads, 1)."""
    keys: Tensor
    """(N, heads of keys, 2 window, d)."""
    values: Tensor
    """(N, heads of keys, 2 window, E)."""
    is_key: Tensor
    """(N, 2 window), True where the window has a key that takes part."""
    positions: tuple[int, ...]
    """For each sample, the number of positions from its first key that takes part."""
    length: int
    """Tokens so far, masked tokens included."""
    feature_map: str | None = None
    """The fingerprint of the feature map that made the sums; None if it is unknown."""

    def select(self, indices: Tensor) -> "WindowedAttentionState":
        """Return the state of the samples at ``indices`` of the batch, for example of the beams that survive."""
        positions = self.positions
        if len(set(positions)) == 1:  # Otherwise the values of the indices are needed, which waits for a GPU.
            positions = positions[:1] * len(indices)
        else:
            positions = tuple(positions[i] for i in indices.tolist())
        return WindowedAttentionState(*_selected(self, indices))._replace(positions=positions)


def check_state(state: Any, kind: type, batch_size: int, like: Tensor, attention: Any) -> None:
    """Raise unless ``state`` has this kind and batch size, the device and accumulation dtype of ``like``, and the map.

    The map is the feature map of the module ``attention``.
    """
    if not isinstance(state, kind):
        raise TypeError(f"state must be the result of init_state or step, not {type(state).__name__}")
    sums: Tensor = state.sums  # type: ignore[attr-defined]
    if len(sums) != batch_size:
        raise ShapeError(
            f"the state has a batch of {len(sums)} and the input one of {batch_size}: use init_state({batch_size}), or "
            "state.select to choose samples of the batch"
        )
    dtype = torch.promote_types(like.dtype, torch.float32)
    if sums.dtype != dtype or sums.device != like.device:
        raise DTypeError(
            f"the state is {sums.dtype} on {sums.device}, and {like.dtype} on {like.device} needs {dtype} there: make "
            "the state after moving the layer"
        )
    check_map(state, attention)


def units_with(state: AttentionState, log_scale: Tensor | None) -> Tensor | None:
    """Return the units of a state before keys with these exponents, which the state may lack.

    A mask of numbers gives exponents to keys whose map has none.
    """
    if log_scale is None or state.units is not None:
        return state.units
    # The keys so far have the exponent 0. Without keys, the first exponent is the maximum.
    return state.sums.new_full((*state.sums.shape[:2], 1), 0.0 if state.length else -torch.inf)


def merged(states: Sequence[AttentionState]) -> AttentionState:
    """Return the state after the keys of several states of consecutive sequences."""
    first = states[0]
    sums, norms = first.sums, first.norms
    units = first.units
    for state in states[1:]:
        if units is not None and state.units is not None:
            largest = torch.maximum(units, state.units)
            fixed = largest.masked_fill(largest == -torch.inf, 0)
            left, right = (units - fixed).exp(), (state.units - fixed).exp()
            sums = sums * left[..., None] + state.sums * right[..., None]
            norms = None if norms is None or state.norms is None else norms * left + state.norms * right
            units = largest
        else:
            sums = sums + state.sums
            norms = None if norms is None or state.norms is None else norms + state.norms
    counts = [state.num_keys for state in states if state.num_keys is not None]
    num_keys = torch.stack(counts).sum(0) if counts else None
    return AttentionState(sums, units, norms, num_keys, sum(state.length for state in states), first.feature_map)


def _selected(state: tuple[Any, ...], indices: Tensor) -> list[Any]:
    return [x.index_select(0, indices.to(x.device)) if isinstance(x, Tensor) else x for x in state]
