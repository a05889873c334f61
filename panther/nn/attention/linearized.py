"""Attention modules of torch and of transformers whose softmax is replaced by learned linear attention.

A converted module is a shallow copy of the original that shares its projections and has a
:class:`~panther.nn.LearnedLinearAttention` as the child ``linear_attention``.
"""

__all__ = ["CHILD", "LinearizedMultiheadAttention", "convert_attention"]

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther._torch import MODULE_DICTIONARIES
from panther.errors import ShapeError
from panther.nn.attention._features import batched_first, is_causal_mask
from panther.nn.attention.decoding.cache import pass_state, takes_state
from panther.nn.attention.decoding.states import WindowedAttentionState
from panther.nn.attention.interface import NAME, UnsupportedCallError, check_dropout, register
from panther.nn.attention.learned import LearnedLinearAttention
from panther.nn.protocol import keep_own_forward

CHILD = "linear_attention"


def convert_attention(module: nn.Module, attention: nn.Module) -> Any:
    """Return a copy of a module that shares its parameters and buffers, with linear attention.

    ``attention`` is a :class:`LearnedLinearAttention`, or another module that is called as one.
    """
    new = copy.copy(module)
    # The copy adds to these dictionaries, so it gets copies of them. They share the parameters.
    for name in MODULE_DICTIONARIES:
        new.__dict__[name] = copy.copy(module.__dict__[name])
    new.add_module(CHILD, attention.train(module.training))
    if isinstance(module, nn.MultiheadAttention):
        # The class adds no state, so that a copy of any nn.MultiheadAttention can become an instance.
        new.__class__ = LinearizedMultiheadAttention
        new.register_forward_pre_hook(keep_own_forward)  # disables the fast path of nn.TransformerEncoderLayer
    else:
        register()
        config: Any = copy.copy(module.config)  # Modules of transformers share a config.
        config._attn_implementation_internal = NAME  # The public setter would also set it in nested configurations.
        new.config = config
        if takes_state(module):
            new.register_forward_pre_hook(pass_state, with_kwargs=True)
    return new


class LinearizedMultiheadAttention(nn.MultiheadAttention):
    """A :class:`torch.nn.MultiheadAttention` with :class:`LearnedLinearAttention`, made by :func:`panther.linearize_`.

    It has the original's projections and takes the same arguments, and returns no weights. Masks can be causal or
    masks of keys. In causal attention there may be more keys than queries, which then have the last positions. In
    training mode ``dropout`` must be 0.

    Raises:
        ValueError: If a mask has another kind, queries and keys have different lengths, or weights would be dropped.
    """

    linear_attention: LearnedLinearAttention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return the output, and None instead of weights."""
        recorder: Any = self.linear_attention.recorder
        try:
            return self._attend(query, key, value, key_padding_mask, attn_mask, is_causal), None
        except UnsupportedCallError as error:
            if recorder is None:
                raise UnsupportedCallError(f"linear attention cannot be used, because this attention {error}") from None
            recorder.refuse(str(error))
        masks: Any = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "is_causal": is_causal}
        return super().forward(query, key, value, need_weights=False, **masks)[0], None

    def init_state(self, batch_size: int) -> WindowedAttentionState:
        """Return the state of an empty sequence, for :meth:`step`."""
        return self.linear_attention.init_state(batch_size)

    def step(
        self,
        x: Tensor,  # (N, T, embed_dim), or (T, N, embed_dim) without batch_first
        state: WindowedAttentionState,
        key_padding_mask: Tensor | None = None,  # (N, T)
    ) -> tuple[Tensor, WindowedAttentionState]:
        """Attend from the next tokens of a sequence to themselves and to all earlier tokens, in constant time a token.

        It is causal self-attention, as :meth:`panther.nn.LearnedLinearAttention.step` describes it;
        ``key_padding_mask`` is True where one of these tokens is to be ignored.
        """
        if x.dim() != 3:
            raise ShapeError(f"step takes x with three dimensions, a batch included, not {tuple(x.shape)}: x[None]")
        check_dropout(self.dropout if self.training else 0.0)
        x = x if self.batch_first else x.transpose(0, 1)
        q, k, v = self._heads(x, x, x)
        y, state = self.linear_attention.step(q, k, v, state, _key_mask(key_padding_mask))
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        return (y if self.batch_first else y.transpose(0, 1)), state

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        check_dropout(self.dropout if self.training else 0.0)
        # The window cannot tell apart two sequences of the same length. They are refused only during conversion.
        recorder = self.linear_attention.recorder
        is_cross, batched = query is not key, query.dim() == 3
        query, key, value = (batched_first(x, self.batch_first) for x in (query, key, value))
        if not batched:
            padding = None if padding is None else padding[None]
        L, S = query.shape[1], key.shape[1]
        if mask is not None:
            try:
                # The causal mask of one query masks nothing.
                is_causal = is_causal_mask(mask, L, S) or (is_causal and L == 1)
            except ValueError:
                raise UnsupportedCallError(
                    "masks pairs of positions in a way that is neither causal nor one of keys"
                ) from None
        fits = L == S or (is_causal and L < S and recorder is None)
        if not fits or (recorder is not None and is_cross):
            raise UnsupportedCallError("attends from one sequence to another, whose positions no window relates")
        q, k, v = self._heads(query, key, value)
        y: Tensor = self.linear_attention(q, k, v, _key_mask(padding), is_causal=is_causal)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if not batched:
            return y[0]
        return y if self.batch_first else y.transpose(0, 1)

    def _heads(self, *inputs: Tensor) -> tuple[Tensor, ...]:  # (N, n, in) -> (N, H, n, d)
        """Return projected queries, keys and values by heads."""
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )


def _key_mask(padding: Tensor | None) -> Tensor | None:
    """Return True where a key takes part, from a mask of keys as for nn.MultiheadAttention."""
    if padding is None:
        return None
    key_mask: Tensor = ~padding if padding.dtype is torch.bool else padding > -torch.inf
    if padding.is_floating_point() and (padding.masked_fill(~key_mask, 0) != 0).any():
        raise UnsupportedCallError("adds numbers to the logits of single keys: leave keys out, or not")
    return key_mask
