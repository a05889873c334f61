"""Attention by a feature map, of queries, keys and values that another module has projected."""

__all__ = ["RandomFeatureAttention"]

from typing import Any

import torch
from torch import Tensor

from panther.errors import check_size
from panther.nn.attention.decoding.states import AttentionState, check_state
from panther.nn.attention.decoding.windowed import of_query_heads, without_masked
from panther.nn.attention.feature_map import FeatureMap
from panther.nn.attention.interface import UnsupportedCallError


class RandomFeatureAttention(FeatureMap):
    """The attention of :class:`panther.nn.RandMultiHeadAttention` without its projections.

    Converted modules of transformers can have it instead of :class:`panther.nn.LearnedLinearAttention`, which is called
    in the same way.
    """

    recorder: Any = None  # linearize_ sets a recorder in LearnedLinearAttention.

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_random_features: int,
        *,
        kernel_fn: str = "hermite",
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = check_size("num_heads", num_heads, least=1)
        self.head_dim = check_size("head_dim", head_dim, least=1)
        self.SRPE = None
        self._set_up_map(kernel_fn, num_random_features, self.head_dim, seed, device, dtype)
        self._draw_directions()

    def forward(
        self,
        q: Tensor,  # (N, H, L, d)
        k: Tensor,  # (N, heads of keys, S, d)
        v: Tensor,  # (N, heads of keys, S, E)
        key_mask: Tensor | None = None,  # (N, S)
        *,
        is_causal: bool = False,
        scale: float | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:  # (N, H, L, E)
        """Attend; ``key_mask`` is True where a key may be attended to, and ``scale`` multiplies the logits.

        In causal attention to more keys than queries, the queries have the last positions.

        Raises:
            UnsupportedCallError: If queries have other positions than the last, as with a static cache.
        """
        if positions is not None:
            raise UnsupportedCallError(
                "attends to a static cache, whose later entries are empty, and features of this kind read the last "
                "entries: use a dynamic cache"
            )
        q, k, v, exponent = self._inputs(q, k, v, key_mask, scale)
        attend = self._attend if self.shards is None else self._attend_shard
        return attend(q, k, v, exponent, is_causal)

    def step(
        self,
        q: Tensor,  # (N, H, T, d)
        k: Tensor,  # (N, heads of keys, T, d)
        v: Tensor,  # (N, heads of keys, T, E)
        state: AttentionState,
        key_mask: Tensor | None = None,  # (N, T)
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, AttentionState]:  # (N, H, T, E)
        """Attend from the next tokens to themselves and to all earlier tokens; return the output and the new state."""
        check_state(state, AttentionState, len(q), q, self)
        return self._extend(state, *self._inputs(q, k, v, key_mask, scale))

    def state_after(
        self, k: Tensor, v: Tensor, state: AttentionState | None = None, key_mask: Tensor | None = None
    ) -> AttentionState:
        """Return the state after these keys and values, without attending; None is the state before the first key."""
        like = k.new_empty(len(k), self.num_heads, 0, k.shape[-1])
        _, k, v, exponent = self._inputs(like, k, v, key_mask, None)
        return self._absorb(self._first_state(k, v) if state is None else state, k, v, exponent)

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return scaled queries, keys and values of all heads, and the keys' exponents."""
        k, v = (of_query_heads(x, q.shape[1]) for x in (k, v))
        if scale is not None:
            q = q * (scale * self.head_dim**0.5)
        exponent = None
        if key_mask is not None:
            k, v = without_masked(k, v, key_mask)
            exponent = torch.zeros(key_mask.shape, dtype=q.dtype, device=q.device)
            exponent = exponent.masked_fill(~key_mask, -torch.inf)[:, None]
        return q, k, v, exponent

    @torch.no_grad()
    def calibrate_(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> None:
        """Fit the map to queries and keys, as :meth:`panther.nn.RandMultiHeadAttention.calibrate_` does."""
        q, k, _, _ = self._inputs(q, k, k, None, scale)
        if key_mask is not None:
            is_used = key_mask.any(0)  # positions that at least one sample has
            k = k[:, :, is_used]
            q = q[:, :, is_used] if q.shape[-2] == len(is_used) else q
        self._fit_(q, k)

    def extra_repr(self) -> str:
        """Return sizes and kernel, as shown by print."""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_random_features={self.num_random_features}, "
            f"kernel_fn={self.kernel_fn!r}"
        )
