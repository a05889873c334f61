"""Learned linear attention as one of transformers' attention functions.

transformers' attention modules look a function up in a table, by the name that their configuration has. A module whose
configuration says ``"panther_linear"`` hands its projected queries, keys and values to its child ``linear_attention``.
"""

__all__ = ["NAME", "UnsupportedCallError", "attend", "calls_interface", "check_dropout", "register", "remembered"]

import inspect
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from panther._torch import version_of
from panther.nn.attention.decoding.cache import register_layer

NAME = "panther_linear"  # key in transformers' table of attention functions
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_REFUSED = {
    "position_bias": "has a position bias for each pair, which features of one position cannot have",
    "softcap": "caps its logits",
    "s_aux": "has learned sinks in the denominator",
    "cache": "reads a paged cache",
}


class UnsupportedCallError(ValueError):
    """A call that linear attention does not support. The message is a predicate whose subject is the module."""


def register() -> None:
    """Enter the function into transformers' table, if transformers is loaded; again is harmless."""
    if "transformers" in sys.modules:
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, attend)
        register_layer()


def calls_interface(module: nn.Module) -> bool:
    """Return whether a module is one of transformers' that look their attention function up by name."""
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return False
    forward = inspect.unwrap(type(module).forward)
    # The names in the bytecode say whether the forward uses the table, without running it or reading its source.
    return _TABLE in getattr(getattr(forward, "__code__", None), "co_names", ())


def check_dropout(dropout: float) -> None:
    """Raise where weights are to be dropped."""
    if dropout > 0:
        raise UnsupportedCallError(
            f"drops attention weights with probability {dropout} in training, and linear attention forms no weights: "
            "set it to 0"
        )


def attend(
    module: nn.Module,
    query: Tensor,  # (N, H, L, d)
    key: Tensor,  # (N, heads of keys, S, d)
    value: Tensor,  # (N, heads of keys, S, E)
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    panther_state: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (N, L, H, E)
    """Attend, with the arguments that transformers gives its attention functions.

    ``panther_state`` is the module's :class:`~panther.nn.attention.decoding.cache.RunningStateLayer`, if its cache has
    one. Keys and values are then of the new tokens alone.

    Raises:
        UnsupportedCallError: If weights would be dropped, or pairs are masked or weighted one by one.
    """
    attention: Any = module.linear_attention
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    try:
        check_dropout(dropout)
        _check_arguments(kwargs, key.shape[-2])
        if panther_state is not None:
            key_mask = _mask_of_new_keys(attention_mask, query.shape[-2])
            y = panther_state.attend(attention, query, key, value, key_mask, scaling)
            return y.transpose(1, 2).contiguous(), None
        if attention_mask is None:
            key_mask = positions = None
            if causal and query.shape[-2] > 1:  # a prefill of a static cache with empty entries
                key, value = (x[..., : query.shape[-2], :] for x in (key, value))
        else:
            key_mask, positions, causal = _read_mask(attention_mask, query.shape[-2], key.shape[-2], causal)
        if not causal and query.shape[-2] != key.shape[-2]:
            raise UnsupportedCallError("attends from one sequence to another, whose positions no window relates")
        y = attention(query, key, value, key_mask, is_causal=causal, scale=scaling, positions=positions)
    except UnsupportedCallError as error:
        if attention.recorder is None:
            raise UnsupportedCallError(
                f"linear attention cannot be used, because {type(module).__name__} {error}"
            ) from None
        attention.recorder.refuse(str(error))
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options: Any = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal} | kwargs
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return y.transpose(1, 2).contiguous(), None


def _check_arguments(kwargs: dict[str, Any], keys: int) -> None:
    for name, reason in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedCallError(reason)
    window = kwargs.get("sliding_window")
    if window is not None and window < keys:
        raise UnsupportedCallError(f"has a sliding window of {window} positions, which already makes its cost linear")


def _mask_of_new_keys(mask: Tensor | None, L: int) -> Tensor | None:
    """Return the mask (N, L) of the keys of new tokens, whose queries see all earlier keys that take part."""
    if mask is None:
        return None
    key_mask, _, causal = _read_mask(mask, L, L, True, last=True)
    if not causal and L > 1 and key_mask is not None and bool(key_mask.any()):
        raise UnsupportedCallError("attends to later tokens, which a state cannot have")
    return key_mask


_ReadMask = tuple[Tensor | None, Tensor | None, bool]
_read: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()


def _read_mask(mask: Tensor, L: int, S: int, causal: bool, *, last: bool = False) -> _ReadMask:
    """Return the mask of keys (N, S), the positions of queries if some are missing, and whether it is causal.

    With ``last`` the mask may have more keys, and the last ones are read.
    """
    if mask.dim() == 2:
        return mask[:, -S:].bool(), None, causal
    if torch.compiler.is_compiling():
        return _parse(mask[..., -S:] if last else mask, L, S, causal)
    call: tuple[int, int, bool] = L, S, causal
    result: _ReadMask = remembered(_read, mask, (*call, last), lambda: _parse(mask[..., -S:] if last else mask, *call))
    return result


def remembered(memory: MutableMapping[Tensor, Any], mask: Tensor, settings: object, read: Callable[[], Any]) -> Any:
    """Return what ``read()`` returned for this mask and these settings, until the mask is written to.

    Layers share a mask, and reading its values waits for the device.
    """
    key = (0 if mask.is_inference() else version_of(mask), settings)  # Inference tensors do not count writes.
    entry = memory.get(mask)
    if entry is None or entry[0] != key:
        entry = memory[mask] = key, read()
    return entry[1]


def _parse(mask: Tensor, L: int, S: int, causal: bool) -> _ReadMask:
    look = not torch.compiler.is_compiling()  # A graph cannot branch on values.
    if mask.dtype is torch.bool:
        allowed = mask
    else:
        allowed = mask == 0
        if look and (mask.masked_fill(allowed, -torch.inf) > torch.finfo(mask.dtype).min / 2).any():
            raise UnsupportedCallError("adds numbers to single logits, which features of one position cannot")
    if allowed.dim() != 4 or allowed.shape[1] != 1 or allowed.shape[-2:] != (L, S):
        raise UnsupportedCallError(
            f"has a mask of shape {tuple(mask.shape)}: only one for all heads, (N, 1, {L}, {S}), is read"
        )
    allowed = allowed[:, 0]
    key_mask = allowed[:, -1]
    if look and L > 1:
        causal = not bool((allowed == key_mask[:, None]).all())
    if not causal:
        return key_mask, None, False
    keys = torch.arange(S, device=mask.device)
    positions = keys[None] if L == S else (allowed * keys).amax(-1)
    if look and not bool((allowed == (keys <= positions[..., None]) & key_mask[:, None]).all()):
        raise UnsupportedCallError("masks pairs of positions in a way that is neither causal nor one of keys")
    return key_mask, None if L == S else positions, True
