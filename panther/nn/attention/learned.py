r"""Attention that is exact in a window and linear beyond it, with feature maps that are learned from a model's softmax.

For each head, with queries q that carry the logits' scale,

.. math:: e^{q \cdot k} \approx \sum_f e^{u_f \cdot q + c_f} \; e^{g \cdot k + h} \; p_f(k), \qquad
    p(k) = \operatorname{softmax}_f (w_f \cdot k + b_f):

keys are distributed over m centres, and each query weighs the centres by exponentials. With
:math:`u_f` the centre of a cluster of keys, g = 0 and p the key's cluster this is exact for keys at their centres. All
of u, c, w, b, g, h are learned. The hybrid of window and features follows M. Zhang et al., "LoLCATs: on low-rank
linearizing of large language models", ICLR 2025, arXiv:2410.10254.
"""

__all__ = ["RECORD", "LearnedLinearAttention"]

from collections.abc import Callable, MutableMapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from panther._torch import buffers_of
from panther.errors import ShapeError, SketchMismatchError, check_device, check_floating, check_size
from panther.kernels.reference.attention import no_autocast
from panther.nn.attention.decoding.fingerprints import fingerprint_of
from panther.nn.attention.decoding.states import WindowedAttentionState, check_state
from panther.nn.attention.decoding.windowed import (
    advanced,
    attend_chunk,
    attend_shard,
    attend_token,
    empty_state,
    extended,
    of_query_heads,
    take_positions,
)
from panther.nn.attention.interface import UnsupportedCallError, register, remembered
from panther.nn.functional import windowed_linear_attention
from panther.nn.sketch_record import has_values, is_rounded

RECORD = "record"
_RECORD_VERSION = 1


class LearnedLinearAttention(nn.Module):
    r"""Attention of projected queries, keys and values: exact in a window, by learned features beyond it.

    Positions fall into blocks of ``window``, counted from the first key that takes part, so that padding before a
    sequence does not change its output. A query attends exactly to its block, to the previous block and, if not
    causal, to the next block. It attends to all other keys through features, whose sums over keys are computed once for
    all queries:
    see :func:`panther.nn.functional.windowed_linear_attention`. :func:`panther.linearize_` puts this module into a
    trained model and learns its parameters. Before that the weights beyond the window are nearly uniform.

    Args:
        num_heads: Number of query heads; keys and values may have a divisor of it.
        head_dim: Width of queries and keys.
        num_features: Number of features m of each head.
        window: Positions in a block.
        device: None is torch's default.
        dtype: Floating dtype; None is torch's default.

    Attributes:
        query_weight: The rows u, (heads, m, head width).
        key_weight: The rows w, (heads, m, head width).
        query_bias: The numbers c, (heads, m).
        key_bias: The numbers b, (heads, m).
        key_scale: g, (heads, head width).
        key_offset: h, (heads,).
        record: The window, as a buffer in the state_dict: ``load_state_dict`` refuses weights of another window. A
            state_dict of an earlier version has no such entry and loads into any window: give the window that the
            weights were learned with.

    Raises:
        ShapeError: If a size is not positive.
        DTypeError: If ``dtype`` is not floating.

    Cost: ``4 m d`` flops a position and head for the features, ``4 m d`` for their sums, and ``12 w d`` for the window,
    ``8 w d`` if causal, where softmax attention takes ``4 n d``, half of it if causal.

    Example:
        >>> import torch
        >>> attention = LearnedLinearAttention(
        ...     4, 16, num_features=32, window=32
        ... )
        >>> q, k, v = torch.randn(3, 2, 4, 200, 16).unbind()
        >>> attention(q, k, v, is_causal=True).shape
        torch.Size([2, 4, 200, 16])

    References: M. Zhang et al., "The hedgehog and the porcupine", ICLR 2024, arXiv:2402.04347, for learning features
    from attention weights; A. Roy et al., "Efficient content-based sparse attention with routing transformers", 2021,
    arXiv:2003.05997, for clusters of keys.
    """

    query_weight: nn.Parameter
    query_bias: nn.Parameter
    key_weight: nn.Parameter
    key_bias: nn.Parameter
    key_scale: nn.Parameter
    key_offset: nn.Parameter
    record: Tensor
    recorder: Any = None
    """Called with the operands of each call while :func:`panther.linearize_` reads them; attention is exact then."""
    shards: Any = None
    """The ranks that hold the sequence in shards: :class:`panther.distributed.context.SequenceShards`."""
    map_fingerprint: str | None = None
    """The fingerprint of the features that was computed last, see ``decoding/fingerprints.py``."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_features: int = 64,
        *,
        window: int = 64,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_device(device)
        check_floating("dtype", dtype)
        self.num_heads = check_size("num_heads", num_heads, least=1)
        self.head_dim = check_size("head_dim", head_dim, least=1)
        self.num_features = check_size("num_features", num_features, least=1)
        self.window = check_size("window", window, least=1)
        shapes: dict[str, tuple[int, ...]] = {
            "query_weight": (num_heads, num_features, head_dim),
            "query_bias": (num_heads, num_features),
            "key_weight": (num_heads, num_features, head_dim),
            "key_bias": (num_heads, num_features),
            "key_scale": (num_heads, head_dim),
            "key_offset": (num_heads,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.register_buffer(RECORD, self._new_record(device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small random centres, and set all other parameters to zero."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        nn.init.normal_(self.query_weight, std=0.1 * self.head_dim**-0.5)
        with torch.no_grad():
            self.key_weight.copy_(self.query_weight)
            self.record.copy_(self._new_record())

    def _new_record(self, device: torch.device | str | int | None = "cpu") -> Tensor:
        return torch.tensor([_RECORD_VERSION, self.window], device=device)

    def recorded_difference(self, record: Tensor) -> str | None:
        """Return how the window in a record differs from the window of this module, or None if it does not."""
        if not has_values(record) or record.tolist() == [_RECORD_VERSION, self.window]:
            return None
        version, window = record.tolist() if record.shape == self.record.shape else (None, None)
        if version != _RECORD_VERSION:
            return f"has a record of version {version!r} and this Panther reads {_RECORD_VERSION}"
        return (
            f"was saved with window={window} and this module has window={self.window}, with which the same weights "
            "give other outputs"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, and compare the saved window, which state_dicts of earlier versions do not have."""
        record = state_dict.get(prefix + RECORD)
        if record is None:
            # The record counts as present, in a copy that leaves the caller's dictionary unchanged.
            state_dict = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
            state_dict[prefix + RECORD] = self.record
        elif isinstance(record, Tensor) and (difference := self.recorded_difference(record)):
            args[-1].append(
                f"{type(self).__name__} {prefix[:-1]!r} {difference}: convert the model as the saved one was."
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save, with a new record if an average of buffers rounded it; a record of another window is refused."""
        if RECORD in buffers_of(self) and (difference := self.recorded_difference(self.record)):
            is_valid = self.record.tolist()[0] == _RECORD_VERSION  # Otherwise it may have no value yet.
            if is_valid and not is_rounded(self.record, [_RECORD_VERSION, self.window]):
                raise SketchMismatchError(
                    f"{type(self).__name__} {prefix[:-1]!r}: its record was written in place and {difference}"
                )
            with torch.no_grad():
                self.record.copy_(self._new_record())
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def map_tensors(self) -> list[Tensor]:
        """Return the tensors that features depend on."""
        return list(self.parameters(recurse=False))

    def map_numbers(self) -> tuple[int]:
        """Return everything else that a state depends on."""
        return (self.window,)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return features of queries and of keys, (N, H, n, m) and at most 1, and their exponents, (N, H, n)."""
        (phi_q, log_q), (phi_k, log_k) = self.query_features(q), self.key_features(k)
        return phi_q, phi_k, log_q, log_k

    def query_features(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of scaled queries, (N, H, L, m), and their exponents, (N, H, L), in float32 or float64."""
        # An exponent of 20 has an error of 0.08 in bfloat16.
        dtype = torch.promote_types(q.dtype, torch.float32)
        with no_autocast(q.device):
            alpha = q.to(dtype) @ self.query_weight.to(dtype).mT + self.query_bias.to(dtype)[:, None]
            log_q = alpha.detach().amax(-1)
            return (alpha - log_q[..., None]).exp(), log_q

    def key_features(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of keys of all query heads, (N, H, S, m), and their exponents, (N, H, S)."""
        dtype = torch.promote_types(k.dtype, torch.float32)
        with no_autocast(k.device):
            k = k.to(dtype)
            phi_k = (k @ self.key_weight.to(dtype).mT + self.key_bias.to(dtype)[:, None]).softmax(-1)
            log_k = (k @ self.key_scale.to(dtype)[..., None])[..., 0] + self.key_offset.to(dtype)[:, None]
            return phi_k, log_k

    def scores(
        self,
        q: Tensor,  # (N, H, L, d)
        k: Tensor,  # (N, H, S, d)
        positions: Tensor,  # (L,) or (N, L)
        is_causal: bool,
        key_mask: Tensor | None = None,  # (N, S)
    ) -> Tensor:  # (N, H, L, S)
        """Return logits of all pairs, whose softmax gives the weights; -inf where a query does not attend.

        This takes time and memory proportional to L S. It is for a few queries at known positions.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        phi_q, phi_k, log_q, log_k = self.features(q, k)
        tiny = torch.finfo(dtype).tiny
        far = (phi_q @ phi_k.mT).clamp_min(tiny).log() + log_q[..., None] + log_k[..., None, :]
        first = None if key_mask is None else first_keys(key_mask)
        near, attended = window_masks(positions, k.shape[-2], self.window, is_causal, first)
        logits = torch.where(near, q.to(dtype) @ k.to(dtype).mT, far).masked_fill(~attended, -torch.inf)
        return logits if key_mask is None else logits.masked_fill(~key_mask[:, None, None], -torch.inf)

    def forward(
        self,
        q: Tensor,  # (N, H, L, d)
        k: Tensor,  # (N, heads of keys, S, d)
        v: Tensor,  # (N, heads of keys, S, E)
        key_mask: Tensor | None = None,  # (N, S)
        *,
        is_causal: bool,
        scale: float | None = None,
        positions: Tensor | None = None,  # (L,) or (N, L)
    ) -> Tensor:  # (N, H, L, E)
        r"""Attend.

        Args:
            q: Queries.
            k: Keys, as many as queries. If causal there may be more keys: queries then have the last positions, as with
                a cache.
            v: Values.
            key_mask: True where a key takes part.
            is_causal: Whether a query sees only the keys up to its own position.
            scale: Factor of the logits; None is :math:`1 / \sqrt d`.
            positions: Positions of the queries among the keys, if there are fewer queries; None means the last
                positions.

        Raises:
            ShapeError: If the heads do not fit, or the lengths differ and attention is not causal.
        """
        self._check_heads(q, k)
        if self.shards is None and q.shape[-2] != k.shape[-2] and not is_causal:
            raise ShapeError(
                f"{q.shape[-2]} queries and {k.shape[-2]} keys have no common positions, which the window needs: use "
                "softmax attention between different sequences"
            )
        if self.shards is None:  # The maps belong to query heads.
            k, v = of_query_heads(k, self.num_heads), of_query_heads(v, self.num_heads)
        q = q * (self.head_dim**-0.5 if scale is None else scale)
        if self.recorder is not None:
            self.recorder(q, k, v, key_mask, is_causal)
            mask = None if key_mask is None else key_mask[:, None, None]
            if is_causal and mask is not None:
                mask = mask & torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal and mask is None, scale=1.0)
        if self.shards is not None:
            self._check_shard(q, k, key_mask, is_causal)
            return attend_shard(self, self.shards, q, k, v)
        if q.shape[-2] == k.shape[-2] and positions is None:
            first = None if key_mask is None else left_padding(key_mask)
            if first is None:
                return self._attend_all(q, k, v, key_mask, is_causal)
            # The operator counts blocks from position 0, so padding before a sequence is moved to its end.
            positions, first = torch.arange(k.shape[-2], device=k.device), first[:, None]
            q, k, v = (take_positions(x, (positions + first) % k.shape[-2]) for x in (q, k, v))
            moved_mask = None if key_mask is None else key_mask.gather(-1, (positions + first) % k.shape[-2])
            y = take_positions(self._attend_all(q, k, v, moved_mask, is_causal), (positions - first) % k.shape[-2])
            # At the end of the sequence a padding query sees keys. At its original place it sees none.
            is_padding = positions < first
            return y.masked_fill(is_padding[:, None, :, None], 0) if is_causal else y
        if positions is None:
            positions = torch.arange(k.shape[-2] - q.shape[-2], k.shape[-2], device=q.device)
        logits = self.scores(q, k, positions, is_causal, key_mask)
        # A row without any key is 0, as in the operator.
        return logits.softmax(-1).nan_to_num(0.0).to(v.dtype) @ v

    def init_state(
        self, batch_size: int, *, num_key_heads: int | None = None, value_dim: int | None = None
    ) -> WindowedAttentionState:
        r"""Return the state of an empty sequence, for :meth:`step`.

        Args:
            batch_size: Sequences that are read side by side.
            num_key_heads: Heads of keys and values; None means as many as of queries.
            value_dim: Width of values; None is ``head_dim``.

        Returns:
            For each sequence, m (E + 1) sums for each of the query heads, in float32 or float64, and ``2 window`` keys
            and values of each of the heads of keys, in the dtype of the parameters.
        """
        check_size("batch_size", batch_size, least=0)
        key_heads = self.num_heads if num_key_heads is None else check_size("num_key_heads", num_key_heads, least=1)
        width = self.head_dim if value_dim is None else check_size("value_dim", value_dim, least=1)
        k, v = (self.query_weight.new_empty(0, key_heads, 0, size) for size in (self.head_dim, width))
        return self._first_state(batch_size, k, v)

    def _first_state(self, batch_size: int, k: Tensor, v: Tensor) -> WindowedAttentionState:
        state = empty_state(batch_size, self.num_heads, self.num_features, self.window, k, v)
        return state._replace(feature_map=fingerprint_of(self))

    def step(
        self,
        q: Tensor,  # (N, H, T, d)
        k: Tensor,  # (N, heads of keys, T, d)
        v: Tensor,  # (N, heads of keys, T, E)
        state: WindowedAttentionState,
        key_mask: Tensor | None = None,  # (N, T)
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, WindowedAttentionState]:  # (N, H, T, E)
        """Attend from the next tokens to themselves and to all earlier tokens, in constant time a token.

        The outputs of a sequence that is passed in any chunks are the outputs of the whole sequence with
        ``is_causal=True``, up to rounding.

        Args:
            q: Queries of the next T tokens.
            k: Keys.
            v: Values.
            state: The result of :meth:`init_state` or of the previous step. It is not changed.
            key_mask: True where one of these keys takes part. Tokens before the first key of a sequence take no
                position in its blocks, as in a call.
            scale: As for a call.

        Returns:
            The output, and the state after these tokens.

        Raises:
            ShapeError: If shapes do not fit, or the state has a different batch size.
            DTypeError: If the dtype or the device differs from the state's.
            TypeError: If ``state`` is not a state of this kind of layer.
            ValueError: If the state was made by other features, for example before a training step.

        Cost: for one token ``8 window d`` flops for each head, and ``4 m d`` for its features and the sums. Once in a
        block of ``window`` tokens its keys are added to the sums. The position of each sample in its block is known
        without reading tensors, except while masked tokens precede a first key.

        Example:
            >>> attention = LearnedLinearAttention(
            ...     4, 16, num_features=32, window=32
            ... )
            >>> q, k, v = torch.randn(3, 2, 4, 200, 16).unbind()
            >>> output, state = attention.step(q, k, v, attention.init_state(2))
            >>> output, state = attention.step(
            ...     q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], state
            ... )
            >>> output.shape, state.length
            (torch.Size([2, 4, 1, 16]), 201)
        """
        self._check_heads(q, k)
        check_state(state, WindowedAttentionState, len(q), q, self)
        if q.shape[-2] != k.shape[-2] or k.shape[1] != state.keys.shape[1] or v.shape[-1] != state.values.shape[-1]:
            raise ShapeError(
                f"step takes as many queries as keys, and keys and values with the heads and widths of the state, "
                f"{tuple(state.keys.shape)} and {tuple(state.values.shape)}, not queries {tuple(q.shape)}, keys "
                f"{tuple(k.shape)} and values {tuple(v.shape)}: see init_state"
            )
        if not k.shape[-2]:
            return v.new_zeros(*q.shape[:3], v.shape[-1]), state
        if state.length == 0:
            return self(q, k, v, key_mask, is_causal=True, scale=scale), self.state_after(k, v, state, key_mask)
        q = q * (self.head_dim**-0.5 if scale is None else scale)
        # Under autocast the dtype of the state may be wider.
        dtype, k, v = v.dtype, k.to(state.keys.dtype), v.to(state.values.dtype)
        if k.shape[-2] == 1 and all(state.positions):
            y, state = attend_token(self, state, q, k, v, key_mask)
            return y.to(dtype), state
        chunk = extended(state, k, v, key_mask, self.window)
        return attend_chunk(self, state, chunk, q).to(dtype), advanced(self, state, chunk)

    def state_after(
        self, k: Tensor, v: Tensor, state: WindowedAttentionState | None = None, key_mask: Tensor | None = None
    ) -> WindowedAttentionState:
        """Return the state after these keys and values, without attending; None is the state before the first key."""
        if state is None:
            state = self._first_state(len(k), k, v)
        k, v = k.to(state.keys.dtype), v.to(state.values.dtype)
        return advanced(self, state, extended(state, k, v, key_mask, self.window))

    def _check_shard(self, q: Tensor, k: Tensor, key_mask: Tensor | None, is_causal: bool) -> None:
        if not is_causal or q.shape[-2] != k.shape[-2]:
            raise UnsupportedCallError(
                f"is sharded along the sequence and attends from {q.shape[-2]} to {k.shape[-2]} positions, with "
                f"is_causal={is_causal}: only causal attention among the positions of the shards is, without a cache"
            )
        if key_mask is not None and not bool(key_mask.all()):
            raise UnsupportedCallError(
                "is sharded along the sequence and masks keys, which would shift the blocks of later ranks: pad after "
                "the sequence and leave the mask out, since no earlier position sees the padding"
            )

    def _check_heads(self, q: Tensor, k: Tensor) -> None:
        if q.shape[-3] != self.num_heads or q.shape[-1] != self.head_dim or self.num_heads % k.shape[-3]:
            raise ShapeError(
                f"this attention has {self.num_heads} heads of width {self.head_dim}, and queries have shape "
                f"{tuple(q.shape)}, keys {tuple(k.shape)}: give (N, heads, length, width)"
            )

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Attend from all positions to all positions, with blocks counted from position 0."""
        phi_q, phi_k, log_q, log_k = self.features(q, k)
        options: Any = {"window": self.window, "is_causal": is_causal}
        if key_mask is not None:
            options["key_mask"] = key_mask[:, None]
        return windowed_linear_attention(q, k, v, phi_q.to(q.dtype), phi_k.to(q.dtype), log_q, log_k, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn``, and keep the record in integers, which ``module.type(dtype)`` casts too."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.record.is_floating_point():
            self.record = self._new_record(self.record.device)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the module, and register linear attention with transformers in this process."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if RECORD not in buffers_of(self):  # The module was pickled by an earlier version.
            self.register_buffer(RECORD, self._new_record(self.query_weight.device))
        register()

    def extra_repr(self) -> str:
        """Return the sizes."""
        sizes = {"num_features": self.num_features, "window": self.window}
        return f"{self.num_heads}, {self.head_dim}, " + ", ".join(f"{name}={size}" for name, size in sizes.items())


def window_masks(
    positions: Tensor,  # (L,) or (N, L)
    count: int,
    window: int,
    is_causal: bool,
    first: Tensor | None = None,  # () or (N,)
) -> tuple[Tensor, Tensor]:
    """Return masks of the ``count`` keys in the window of each query, and of all keys that a query sees.

    Both have shape (L, count) or (N, 1, L, count). Blocks are counted from ``first``, the position of the first key
    that takes part; None is position 0.
    """
    keys = torch.arange(count, device=positions.device)
    start = 0 if first is None else first[..., None]
    distance = ((positions - start) // window)[..., None] - ((keys - start) // window)[..., None, :]
    attended = keys <= positions[..., None] if is_causal else torch.ones_like(distance, dtype=torch.bool)
    masks = (mask.unsqueeze(1) if mask.dim() == 3 else mask for mask in (distance.abs() <= 1, attended))
    return next(masks), next(masks)


def first_keys(key_mask: Tensor) -> Tensor:  # (*batch, S) -> (*batch,)
    """Return the position of the first key that takes part, or 0 in rows without keys."""
    return key_mask.int().argmax(-1)


_left_padding: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()


def left_padding(key_mask: Tensor) -> Tensor | None:  # (N, S) -> (N,)
    """Return the number of positions before the first key of each row, or None if it is 0 in all rows."""
    if not key_mask.shape[-1]:
        return None
    if torch.compiler.is_compiling() or not has_values(key_mask):  # A graph cannot branch on values.
        return first_keys(key_mask)

    def read() -> Tensor | None:
        first = first_keys(key_mask)
        return first if bool(first.any()) else None

    padding: Tensor | None = remembered(_left_padding, key_mask, None, read)
    return padding
