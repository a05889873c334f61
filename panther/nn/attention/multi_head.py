"""Multi-head attention by random features, in time and memory linear in the length of the sequence."""

__all__ = ["RandMultiHeadAttention", "make_performer"]

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther._torch import is_backward_running
from panther.errors import ShapeError, check_device, check_flag, check_floating, check_size
from panther.nn.attention._check import ApproximationError, errors_of_layer_and_mean, is_plain, sample, warn_if_worse
from panther.nn.attention._features import batched_first, check_inputs, is_causal_mask, key_exponent
from panther.nn.attention.decoding.states import AttentionState, check_state
from panther.nn.attention.feature_map import FeatureMap
from panther.nn.attention.positional import sinSRPE
from panther.nn.factors import check_dense, inherit_attributes
from panther.nn.protocol import keep_own_forward

# The approximation is not checked on fewer keys.
_LEAST_KEYS = 32


class _NotATensor:
    """A stand-in for the projections of nn.MultiheadAttention, which nn.TransformerEncoder reads.

    An object with a __torch_function__ prevents the encoder's fast path, which would use the projections.
    """

    weight = bias = None

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented


class RandMultiHeadAttention(FeatureMap):
    r"""A replacement for :class:`torch.nn.MultiheadAttention`, with feature maps instead of the softmax.

    The weights of softmax attention, :math:`\exp(q \cdot k / \sqrt d)`, are replaced by inner products of features of
    q and k, so that the sum over keys is taken once for all queries (K. Choromanski et al., "Rethinking attention with
    Performers", ICLR 2021, arXiv:2009.14794). There are three differences: ``batch_first=True`` is the default, no
    weights are returned, and masks are causal masks or masks of keys only. Queries and keys are projected, split into
    heads, divided by :math:`d^{1/4}` (d the head's width), and mapped:

    ``"hermite"``
        The default, by measured error: a polynomial of each query's logits about their mean over the keys it sees, of
        first order, and of second order in r directions, as many as ``num_random_features`` allows in
        :math:`1 + d + r(r+1)/2` features. It uses no fewer than 1 + d, and needs no randomness. With large logits it
        falls back to the mean of the values. :meth:`calibrate_` fits its directions and means to data.
    ``"softmax"``
        FAVOR+: positive orthogonal random features of the exponential kernel.
    ``"oprf"``
        The same with the exponent of least variance if :math:`\|q + k\|^2` is ``feature_norm`` on average: better if
        that is about right, worse if the norms are much smaller or many times larger.
    ``"relu"``
        ReLU features: not an approximation of the softmax; for layers trained with them.
    ``"taylor"``
        The second-order Taylor polynomial of the exponential, :math:`1 + d + d(d+1)/2` features without any randomness
        (``num_random_features`` is not used): accurate while logits stay below about 1, and far off above.

    In causal attention no bit of an output depends on later positions, even if they are NaN. A masked or padded
    key has no influence at all.

    Checkpoints of other libraries with a ``projection_matrix`` (features, head width) for all heads are loaded as
    ``directions``.

    Args:
        embed_dim: Width of queries and of the output.
        num_heads: Number of heads; must divide ``embed_dim``.
        num_random_features: Number of features of each head; for ``"hermite"`` the most, or 1 + d.
        dropout: Probability with which inputs of the output projection are zeroed in training; the attention weights,
            which nn.MultiheadAttention drops, are never formed here.
        bias: Whether projections have biases.
        kernel_fn: ``"hermite"``, ``"softmax"``, ``"oprf"``, ``"relu"`` or ``"taylor"``. None is ``"hermite"``, until a
            checkpoint with ``directions`` of random features is loaded, the default of older versions: then the layer
            becomes ``"softmax"``.
        iscausal: Whether a position attends to itself and earlier ones only, unless the call gives ``is_causal``.
            nn.TransformerEncoderLayer and nn.TransformerDecoderLayer always give it: pass the mask to those.
        SRPE: A module that maps per-head queries and keys to ones that carry their relative positions, such as
            :class:`sinSRPE`.
        kdim: Width of keys; None is ``embed_dim``.
        vdim: Width of values; None is ``embed_dim``.
        batch_first: Whether inputs are (batch, length, width).
        redraw_interval: Number of training forwards after which new directions are drawn, not counting those that
            activation checkpointing repeats; None keeps them. Compiled code is compiled anew for every count: there
            keep None, and call :meth:`redraw_features_` between steps.
        seed: The seed of the directions; None draws one from torch's default CPU generator. To redraw on several
            processes give all of them the same.
        device: None is torch's default.
        dtype: Floating dtype; None is torch's default.

    Attributes:
        Wq: Projection of queries in nn.Linear's layout, (out, in).
        Wk: Projection of keys.
        Wv: Projection of values.
        W0: Projection of the heads' results.
        bq: Bias of the projection of queries, or None.
        bk: Bias of the projection of keys, or None.
        bv: Bias of the projection of values, or None.
        b0: Bias of the projection of the heads' results, or None.
        directions: Random directions (num_heads, features, width of a head or of the results of ``SRPE``), in the
            state_dict; None for ``"taylor"``. For ``"hermite"`` r directions of queries, then r of keys.
        center: For ``"hermite"``, vectors (num_heads, 2, width) subtracted from scaled queries and keys, 0 until
            :meth:`calibrate_` sets them, in the state_dict. The softmax they approximate does not depend on them.
        feature_norm: For ``"oprf"``, the expected :math:`\|q + k\|^2` of scaled queries and keys; saved with the rest.

    Raises:
        ShapeError: If ``num_heads`` does not divide ``embed_dim``, or a size is not positive.
        ValueError: If ``kernel_fn`` is unknown, or ``dropout`` is not a probability.
        TypeError: If an argument has the wrong type.
        DTypeError: If ``dtype`` is not floating.

    Cost: for lengths L and S, ``4 m E (L + S)`` flops with m random features, about half with ``"hermite"``, besides
    the projections; E is ``embed_dim``.

    Example:
        >>> import torch
        >>> attention = RandMultiHeadAttention(
        ...     64, 4, num_random_features=32, seed=0
        ... )
        >>> x = torch.randn(2, 100, 64)
        >>> output, weights = attention(x, x, x)
        >>> output.shape, weights
        (torch.Size([2, 100, 64]), None)
    """

    in_proj_bias = None  # nn.TransformerEncoder(Layer) reads it, and then does not take its fast path.
    in_proj_weight = out_proj = _NotATensor()
    bq: nn.Parameter | None
    bk: nn.Parameter | None
    bv: nn.Parameter | None
    b0: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_random_features: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        kernel_fn: str | None = None,
        iscausal: bool = False,
        SRPE: nn.Module | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        redraw_interval: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = check_size("embed_dim", embed_dim, least=1)
        self.num_heads = check_size("num_heads", num_heads, least=1)
        if embed_dim % num_heads:
            raise ShapeError(f"num_heads={num_heads} must divide embed_dim={embed_dim}: change one of them")
        self.head_dim = embed_dim // num_heads
        if isinstance(dropout, bool) or not isinstance(dropout, int | float):
            raise TypeError(f"dropout must be a number, not {type(dropout).__name__}: use 0.0 for none")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout={dropout} must be a probability, from 0 to 1")
        for name, flag in (("bias", bias), ("iscausal", iscausal), ("batch_first", batch_first)):
            check_flag(name, flag)
        if SRPE is not None and not isinstance(SRPE, nn.Module):
            raise TypeError(f"SRPE must be a module, such as sinSRPE, or None, not {type(SRPE).__name__}")
        check_device(device)
        check_floating("dtype", dtype)
        self.dropout, self.iscausal, self.batch_first = dropout, iscausal, batch_first
        self.kdim = embed_dim if kdim is None else check_size("kdim", kdim, least=1)
        self.vdim = embed_dim if vdim is None else check_size("vdim", vdim, least=1)
        self._qkv_same_embed_dim = self.kdim == self.vdim == embed_dim
        if redraw_interval is not None:
            check_size("redraw_interval", redraw_interval, least=1)
        self.redraw_interval = redraw_interval
        self.SRPE = SRPE

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        self.Wq, self.Wk = parameter(embed_dim, embed_dim), parameter(embed_dim, self.kdim)
        self.Wv, self.W0 = parameter(embed_dim, self.vdim), parameter(embed_dim, embed_dim)
        for name in ("bq", "bk", "bv", "b0"):
            self.register_parameter(name, parameter(embed_dim) if bias else None)
        width = getattr(SRPE, "num_realizations", self.head_dim)
        kernel = "hermite" if kernel_fn is None else kernel_fn
        self._set_up_map(kernel, num_random_features, width, seed, device, dtype)
        self._default_kernel, self._unchecked = kernel_fn is None, False
        self.register_forward_pre_hook(keep_own_forward)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections as nn.MultiheadAttention does, and the directions of the present seed again."""
        for weight in (self.Wq, self.Wk, self.Wv):
            if self._qkv_same_embed_dim:  # nn.MultiheadAttention draws q, k and v as one matrix.
                bound = (6 / (4 * self.embed_dim)) ** 0.5
                nn.init.uniform_(weight, -bound, bound)
            else:
                nn.init.xavier_uniform_(weight)
        nn.init.uniform_(self.W0, -(self.embed_dim**-0.5), self.embed_dim**-0.5)
        for bias in (self.bq, self.bk, self.bv, self.b0):
            if bias is not None:
                nn.init.zeros_(bias)
        self._draws = self._forwards = 0
        if self.kernel_fn == "hermite":
            nn.init.zeros_(self.center)
        self._centered = False
        self._draw_directions()

    @torch.no_grad()
    def calibrate_(self, query: Tensor, key: Tensor | None = None) -> Self:
        """Fit the feature map to inputs: ``"hermite"``'s centers and directions, ``"oprf"``'s ``feature_norm``.

        Means of queries and keys are subtracted, which changes nothing in a softmax and makes logits small, and the
        second order goes to the directions in which the logits vary most. In a pretrained model features are useful
        only after this step. The weights do not change. Call it again to fit to other inputs; nothing is accumulated.

        Args:
            query: Queries, as for a call; a few hundred positions are enough.
            key: Keys; None takes the queries.

        Raises:
            ValueError: If the layer's kernel has nothing to fit.

        Example:
            >>> import torch
            >>> layer = RandMultiHeadAttention(64, 4, 32, seed=0)
            >>> layer = layer.calibrate_(torch.randn(2, 100, 64))
        """
        if self.kernel_fn not in ("hermite", "oprf"):
            raise ValueError(f"kernel_fn={self.kernel_fn!r} has nothing to calibrate: use 'hermite' or 'oprf'")
        key = query if key is None else key
        q, k = self._projected(query, key)
        return self._fit_(q, k)

    @torch.no_grad()
    def approximation_error(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *, is_causal: bool | None = None
    ) -> ApproximationError:
        """Measure how far this layer is from softmax attention with its weights, on the first 256 positions given.

        Args:
            query: Queries, as for a call.
            key: Keys; None takes the queries.
            value: Values; None takes the keys.
            is_causal: None means the constructor's ``iscausal``.

        Returns:
            The relative errors of the outputs of the heads. ``layer`` is the error of this layer, and
            ``mean_of_values`` is the error of giving all keys the same weight. A layer with a larger error than the
            mean is worse than no attention.

        Cost: softmax attention of 256 positions.

        Example:
            >>> import torch
            >>> mha = torch.nn.MultiheadAttention(64, 4, batch_first=True)
            >>> layer = RandMultiHeadAttention.from_mha(mha, 128)
            >>> error = layer.approximation_error(torch.randn(2, 100, 64))
            >>> error.layer < error.mean_of_values
            True
        """
        key = query if key is None else key
        value = key if value is None else value
        check_inputs(self, query, key, value, None)
        q, k = self._projected(query, key)
        value = batched_first(value, self.batch_first)
        causal = self.iscausal if is_causal is None else is_causal
        return self._errors(*sample(q, k, self._heads(value, self.Wv, self.bv), None, causal), causal)

    def _errors(self, q: Tensor, k: Tensor, v: Tensor, exponent: Tensor | None, causal: bool) -> ApproximationError:
        output = self._attend(q, k, v, exponent, causal)
        root = self.head_dim**-0.25
        return errors_of_layer_and_mean(q * root, k * root, v, exponent, causal, output)

    def _projected(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return unscaled queries and keys by heads, with relative positions."""
        query, key = (batched_first(x, self.batch_first) for x in (query, key))
        q, k = self._heads(query, self.Wq, self.bq), self._heads(key, self.Wk, self.bk)
        return (q, k) if self.SRPE is None else self.SRPE(q, k)

    def forward(
        self,
        query: Tensor,  # (N, L, embed_dim), or (L, N, embed_dim), or (L, embed_dim)
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,  # (N, S) or (S,)
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Attend; arguments have the order and the meaning that they have for nn.MultiheadAttention.

        In causal attention there may be more keys than queries: the queries then have the last positions, as with a
        cache, and the causal mask has its diagonal at the lower right.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            key_padding_mask: True where a key is to be ignored, or numbers to be added to its logits.
            need_weights: Must be False.
            attn_mask: None, an empty mask, or the causal mask. With ``is_causal=True`` any mask counts as the causal
                mask, if there are as many keys as queries.
            average_attn_weights: Ignored, because no weights are returned.
            is_causal: None means the constructor's ``iscausal``.

        Returns:
            The output, shaped as the query, and None.

        Raises:
            ValueError: If weights are asked for, or ``attn_mask`` is neither empty nor causal.
            ShapeError: If shapes do not fit, or causal attention has more queries than keys.
            DTypeError: If an input's dtype differs from the layer's, outside autocast.
        """
        if need_weights:
            raise ValueError(
                "need_weights=True is not supported: attention by features never forms its L x S weights: pass "
                "need_weights=False"
            )
        check_inputs(self, query, key, value, key_padding_mask)
        batched = query.dim() == 3
        query, key, value = (batched_first(x, self.batch_first) for x in (query, key, value))
        if not batched:
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        causal = self.iscausal if is_causal is None else is_causal
        if attn_mask is not None and not (is_causal and query.shape[1] == key.shape[1]):
            causal = is_causal_mask(attn_mask, query.shape[1], key.shape[1]) or causal
        if self.training and self.redraw_interval is not None and not _is_recomputing():
            self._forwards += 1
            if self._forwards % self.redraw_interval == 0:
                self.redraw_features_()

        q, k, v, exponent = self._operands(query, key, value, key_padding_mask)
        if self.SRPE is not None and self.shards is not None:
            q, k = self._with_positions(q, k, self.shards.rank * q.shape[-2])
        elif self.SRPE is not None:
            if causal and q.shape[-2] != k.shape[-2]:
                raise ShapeError(
                    f"SRPE counts positions from 0 for queries and keys, and {q.shape[-2]} queries would be the last "
                    f"of {k.shape[-2]} keys: pass as many queries as keys, or use step"
                )
            q, k = self.SRPE(q, k)
        if self._unchecked and self.shards is None and is_plain(q) and k.shape[-2] >= _LEAST_KEYS:
            self._unchecked = False
            with torch.no_grad():
                warn_if_worse(self, self._errors(*sample(q, k, v, exponent, causal), causal))
        attend = self._attend if self.shards is None else self._attend_shard
        output = self._projected_back(attend(q, k, v, exponent, causal))
        if not batched:
            return output[0], None
        return (output if self.batch_first else output.transpose(0, 1)), None

    def init_state(self, batch_size: int) -> AttentionState:
        r"""Return the state of an empty sequence, for :meth:`step`.

        Args:
            batch_size: Sequences that are read side by side.

        Returns:
            The sums over keys. For each sequence and head, D (E + 1) numbers in float32, or float64 for layers in
            float64, with D features and heads of width E. Layers whose map has exponents, ``"softmax"`` and ``"oprf"``,
            also keep the largest exponent so far, and ``"hermite"`` keeps the sum of the keys' squared norms.

        Example:
            >>> layer = RandMultiHeadAttention(64, 4, 32, seed=0)
            >>> layer.init_state(2).sums.shape
            torch.Size([2, 4, 32, 17])
        """
        check_size("batch_size", batch_size, least=0)
        like = self.Wq.new_empty(batch_size, self.num_heads, 0, self.head_dim)
        return self._first_state(like, like)

    def step(
        self,
        x: Tensor,  # (N, T, embed_dim), or (T, N, embed_dim) without batch_first
        state: AttentionState,
        key_padding_mask: Tensor | None = None,  # (N, T)
    ) -> tuple[Tensor, AttentionState]:
        """Attend from the next tokens of a sequence to themselves and to all earlier tokens, in constant time a token.

        Causal self-attention: the outputs of a sequence that is passed in any chunks are the outputs of the whole
        sequence with ``is_causal=True``, up to rounding. A prompt is one chunk, and generated tokens are chunks of one.
        Directions are not redrawn here.

        Args:
            x: The next T tokens of each sequence, at least 0.
            state: The result of :meth:`init_state` or of the previous step. It is not changed.
            key_padding_mask: As for a call, for these tokens. It is not needed again later.

        Returns:
            The output, shaped as ``x``, and the state after these tokens.

        Raises:
            ShapeError: If shapes do not fit, or the state has a different batch size.
            DTypeError: If a dtype or the device differs from the layer's.
            TypeError: If ``state`` is not a state of this kind of layer.
            ValueError: If the state was made by another feature map, for example before :meth:`calibrate_`, or
                ``SRPE`` cannot count from a later position.

        Cost: ``8 m E`` flops a token for m random features, about half with ``"hermite"``, besides the projections; the
        state does not grow.

        Example:
            >>> import torch
            >>> layer = RandMultiHeadAttention(64, 4, 32, seed=0)
            >>> prompt, token = torch.randn(2, 100, 64), torch.randn(2, 1, 64)
            >>> output, state = layer.step(prompt, layer.init_state(2))
            >>> output, state = layer.step(token, state)
            >>> output.shape, state.length
            (torch.Size([2, 1, 64]), 101)

        Reference: A. Katharopoulos et al., "Transformers are RNNs", ICML 2020, arXiv:2006.16236.
        """
        check_inputs(self, x, x, x, key_padding_mask)
        if x.dim() != 3:
            raise ShapeError(f"step takes x with three dimensions, a batch included, not {tuple(x.shape)}: x[None]")
        x = x if self.batch_first else x.transpose(0, 1)
        check_state(state, AttentionState, len(x), self.Wq, self)
        q, k, v, exponent = self._operands(x, x, x, key_padding_mask)
        if self.SRPE is not None:
            q, k = self._with_positions(q, k, state.length)
        output, state = self._extend(state, q, k, v, exponent)
        output = self._projected_back(output)
        return (output if self.batch_first else output.transpose(0, 1)), state

    def _operands(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values by heads, without relative positions, and the keys' exponents."""
        exponent = key_exponent(mask, key)
        if exponent is not None:  # Masked keys may be NaN, which would reach the gradients of weights.
            left_out = (exponent == -torch.inf).mT  # (N, S, 1)
            key, value = key.masked_fill(left_out, 0), value.masked_fill(left_out, 0)
        q = self._heads(query, self.Wq, self.bq)  # (N, H, L, d)
        k, v = self._heads(key, self.Wk, self.bk), self._heads(value, self.Wv, self.bv)  # (N, H, S, d)
        return q, k, v, exponent

    def _with_positions(self, q: Tensor, k: Tensor, first_position: int) -> tuple[Tensor, Tensor]:
        """Return queries and keys with relative positions that count from ``first_position``."""
        if not isinstance(self.SRPE, sinSRPE):
            raise ValueError(
                f"positions have to count from {first_position}, the number of earlier tokens, and "
                f"{type(self.SRPE).__name__} counts from 0: use sinSRPE or no SRPE"
            )
        encoded: tuple[Tensor, Tensor] = self.SRPE(q, k, first_position=first_position)
        return encoded

    def _projected_back(self, output: Tensor) -> Tensor:  # (N, H, n, d) -> (N, n, embed_dim)
        output = F.dropout(output.transpose(1, 2).flatten(2), self.dropout, self.training)
        return F.linear(output, self.W0, self.b0)

    def _heads(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # (N, n, in) -> (N, H, n, d)
        heads: Tensor = F.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return heads

    def extra_repr(self) -> str:
        """Return sizes and kernel, as shown by print."""
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_random_features={self.num_random_features}, "
            f"kernel_fn={self.kernel_fn!r}, iscausal={self.iscausal}, batch_first={self.batch_first}"
        )

    @classmethod
    def from_mha(cls, mha: nn.MultiheadAttention, num_random_features: int, **kwargs: Any) -> Self:
        """Return a layer with the projections of a softmax attention, copied, in its dtype and on its device.

        Args:
            mha: The layer to copy from; it is not changed.
            num_random_features: Features of each head.
            **kwargs: ``kernel_fn``, ``iscausal``, ``SRPE``, ``seed``, ``redraw_interval`` of the constructor.

        Raises:
            TypeError: If ``mha`` is not an nn.MultiheadAttention.
            ValueError: If it has ``add_bias_kv`` or ``add_zero_attn``.

        Example:
            >>> import torch
            >>> mha = torch.nn.MultiheadAttention(64, 4, batch_first=True)
            >>> RandMultiHeadAttention.from_mha(
            ...     mha, 32, kernel_fn="taylor"
            ... ).batch_first
            True
        """
        check_dense(mha, nn.MultiheadAttention, "from_mha")
        if mha.bias_k is not None or mha.add_zero_attn:
            raise ValueError(
                "add_bias_kv and add_zero_attn append keys, which this layer cannot do: use a layer without them"
            )
        weight = mha.out_proj.weight
        layer = cls(
            mha.embed_dim, mha.num_heads, num_random_features, dropout=mha.dropout, bias=mha.in_proj_bias is not None,
            kdim=mha.kdim, vdim=mha.vdim, batch_first=mha.batch_first, device=weight.device, dtype=weight.dtype,
            **kwargs,
        )  # fmt: skip
        packed: list[Any] = [mha.in_proj_weight] * 3
        if not mha._qkv_same_embed_dim:
            packed = [mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight]
        pairs = dict(zip(("Wq", "Wk", "Wv", "W0"), (*packed, weight), strict=True))
        if mha.in_proj_bias is not None:
            pairs |= dict(zip(("bq", "bk", "bv", "b0"), (*[mha.in_proj_bias] * 3, mha.out_proj.bias), strict=True))
        with torch.no_grad():
            for i, (name, source) in enumerate(pairs.items()):
                parameter = layer.get_parameter(name)
                is_packed = len(source) > len(parameter)
                parameter.copy_(source.chunk(3)[i % 4] if is_packed else source).requires_grad_(source.requires_grad)
                vars(parameter).update(vars(source))
            layer._align_with_weights()
        inherit_attributes(layer, mha)
        layer._unchecked = True
        return layer.train(mha.training)


make_performer = RandMultiHeadAttention.from_mha


def _is_recomputing() -> bool:
    """Return whether a backward pass is running, for example when activation checkpointing repeats a forward."""
    return not torch.compiler.is_compiling() and is_backward_running()
