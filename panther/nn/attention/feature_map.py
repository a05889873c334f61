"""The feature map of a layer of attention: its state, how it is drawn and loaded, and attention through it."""

__all__ = ["KERNELS", "FeatureMap"]

import struct
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther._hints import explain_keywords_of_class
from panther.errors import ShapeError, SketchMismatchError, check_size
from panther.kernels.reference.attention import absorb_keys, continued_attention, no_autocast
from panther.nn.attention._features import (
    optimal_shift,
    orthogonal_gaussian,
    positive_features,
    relu_features,
    taylor_features,
)
from panther.nn.attention._hermite import (
    balanced_directions,
    hermite_features,
    hermite_keys,
    hermite_queries,
    hermite_rank,
    key_norms,
)
from panther.nn.attention.decoding.fingerprints import fingerprint_of, renew_fingerprint
from panther.nn.attention.decoding.states import AttentionState, units_with
from panther.nn.functional import linear_attention
from panther.nn.sketch_record import DrawnModule, has_values, read_integers
from panther.sketch import check_seed

KERNELS = ("hermite", "softmax", "oprf", "relu", "taylor")  # Files store the index of a kernel, so append new kernels.
_FORWARD_BITS = 40


class FeatureMap(DrawnModule):
    """Base of :class:`RandMultiHeadAttention`, which makes the buffers and explains them."""

    directions: Tensor | None
    center: Tensor
    kernel_fn: str
    seed: int
    seed_is_given: bool = True
    num_heads: int
    head_dim: int
    num_random_features: int
    feature_width: int
    feature_norm: float
    iscausal: bool = False
    SRPE: nn.Module | None
    shards: Any = None
    """The ranks that hold the sequence in shards: :class:`panther.distributed.context.SequenceShards`."""
    Wq: nn.Parameter
    Wk: nn.Parameter
    _default_kernel: bool
    _centered: bool
    _draws: int
    _forwards: int
    map_fingerprint: str | None = None
    """The fingerprint of the map that was computed last, see ``decoding/fingerprints.py``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        explain_keywords_of_class(cls)

    def _set_up_map(
        self,
        kernel_fn: str,
        num_random_features: int,
        feature_width: int,
        seed: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Make the seed and the buffers of the map, without values. The layer has its number and width of heads."""
        if kernel_fn not in KERNELS:
            raise ValueError(f"kernel_fn={kernel_fn!r} is unknown: use one of {', '.join(map(repr, KERNELS))}")
        rows = self.num_random_features = check_size("num_random_features", num_random_features, least=1)
        self.kernel_fn, self.feature_width, self.feature_norm = kernel_fn, feature_width, self.head_dim**0.5
        self.seed_is_given, self.seed, self._draws, self._forwards = seed is not None, check_seed(seed), 0, 0
        self._default_kernel = self._centered = False
        if kernel_fn == "hermite":
            rows = 2 * hermite_rank(rows, feature_width)
            center = torch.zeros(self.num_heads, 2, feature_width, dtype=dtype, device=device)
            self.register_buffer("center", center)
        shape = (self.num_heads, rows, feature_width)
        directions = None if kernel_fn == "taylor" else torch.empty(shape, dtype=dtype, device=device)
        self.register_buffer("directions", directions)

    def redraw_features_(self) -> Self:
        """Draw the next directions of the seed, the same on every device and every rank."""
        self._draws += 1
        self._draw_directions()
        renew_fingerprint(self)
        return self

    def map_tensors(self) -> list[Tensor]:
        """Return the tensors that features of queries and keys depend on."""
        tensors: list[Tensor | None] = [self.directions, self.center if self.kernel_fn == "hermite" else None]
        if self.SRPE is not None:
            tensors += [*self.SRPE.parameters(), *self.SRPE.buffers()]
        return [x for x in tensors if x is not None]

    def map_numbers(self) -> tuple[Any, ...]:
        """Return everything else that features depend on, the formula of a subclass among it."""
        return self.kernel_fn, self.feature_norm, type(self)._features.__qualname__

    def _draw_directions(self) -> None:
        if self.directions is not None:
            with torch.no_grad():
                self.directions.copy_(self._current_directions())

    def _current_directions(self, only: range | None = None) -> Tensor:
        """Return the directions of the current draw, for the heads in ``only``. Those of "hermite" have norm 1."""
        assert self.directions is not None
        _, rows, d = self.directions.shape
        stream = 2 * self._draws  # Each draw uses two streams.
        if self.kernel_fn != "hermite":
            return orthogonal_gaussian(rows, d, heads=self.num_heads, seed=self.seed, stream=stream, only=only)
        directions = orthogonal_gaussian(rows // 2, d, heads=self.num_heads, seed=self.seed, stream=stream, only=only)
        return nn.functional.normalize(directions, dim=-1).repeat(1, 2, 1)

    def get_extra_state(self) -> Tensor:
        """Return the seed, how often directions were drawn, forwards counted, and the bits of ``feature_norm``.

        The upper bits of the third number encode the kernel and whether attention is causal.
        """
        (bits,) = struct.unpack("<q", struct.pack("<d", self.feature_norm))
        kind = 1 + 2 * KERNELS.index(self.kernel_fn) + self.iscausal
        counted = (kind << _FORWARD_BITS) + self._forwards
        return torch.tensor([self.seed, self._draws, counted, bits], dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the result of :meth:`get_extra_state`; states of earlier versions have no kernel to compare.

        Raises:
            SketchMismatchError: If the state has another kernel, or only one of the two layers is causal.
        """
        if (integers := read_integers(state)) is None:
            return
        seed, draws, counted, bits = integers
        kind, forwards = divmod(counted, 1 << _FORWARD_BITS)
        if kind:
            index, causal = divmod(kind - 1, 2)
            saved = (KERNELS[index] if index < len(KERNELS) else f"number {index}", bool(causal))
            if saved != (self.kernel_fn, self.iscausal):
                raise SketchMismatchError(
                    f"the attention was saved with kernel_fn={saved[0]!r} and iscausal={saved[1]}, and this layer has "
                    f"kernel_fn={self.kernel_fn!r} and iscausal={self.iscausal}, with which the same weights give "
                    "other outputs: build the layer with the saved arguments"
                )
        self.seed, self._draws, self._forwards = seed, draws, forwards
        (self.feature_norm,) = struct.unpack("<d", struct.pack("<q", bits))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, using the ``projection_matrix`` of other libraries, one for all heads, as directions."""
        shared, directions = (state_dict.get(prefix + name) for name in ("projection_matrix", "directions"))
        if self._default_kernel and self.kernel_fn == "hermite" and f"{prefix}center" not in state_dict:
            loaded = directions if directions is not None else shared
            if isinstance(loaded, Tensor) and loaded.shape[-2:] == (self.num_random_features, self.feature_width):
                self._become_softmax_()
        if self.directions is not None and isinstance(shared, Tensor) and directions is None:
            if self.kernel_fn == "hermite" or shared.shape != self.directions.shape[1:]:
                args[-1].append(
                    f"RandMultiHeadAttention {prefix[:-1]!r} cannot take a projection_matrix of shape "
                    f"{tuple(shared.shape)}: it must be (num_random_features, feature width) = "
                    f"{(self.num_random_features, self.feature_width)}, so build the layer with kernel_fn='softmax' "
                    f"and num_random_features={len(shared)}"
                )
                return
            state_dict = {key: value for key, value in state_dict.items() if key != f"{prefix}projection_matrix"}
            state_dict[f"{prefix}directions"] = shared.expand_as(self.directions)
            state_dict[f"{prefix}_extra_state"] = self.get_extra_state()
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._note_center()
        renew_fingerprint(self)

    def _become_softmax_(self) -> None:
        """Change the kernel to "softmax", the default of the version that wrote the checkpoint."""
        self.kernel_fn = "softmax"
        old = self.directions
        assert old is not None
        self.directions = old.new_empty(self.num_heads, self.num_random_features, self.feature_width)
        del self.center

    def _note_center(self) -> None:
        # A forward must not read the tensor, because this would wait for a GPU.
        hermite = self.kernel_fn == "hermite"
        self._centered = hermite and has_values(self.center) and bool((self.center != 0).any())

    def _align_with_weights(self) -> None:
        """Set the directions in which logits would vary most if inputs were white noise."""
        if self.kernel_fn != "hermite" or self.SRPE is not None or self.Wq.is_meta:
            return
        assert self.directions is not None
        root = self.head_dim**-0.25
        W_q, W_k = (W.double().unflatten(0, (self.num_heads, -1)) * root for W in (self.Wq, self.Wk))
        directions = balanced_directions(W_q @ W_q.mT, W_k @ W_k.mT, self.directions.shape[1] // 2)
        self.directions.copy_(directions)

    def _fit_(self, q: Tensor, k: Tensor) -> Self:
        """Fit the map to queries and keys (N, H, n, d) that are not yet scaled, if the kernel has something to fit."""
        if self.kernel_fn not in ("hermite", "oprf"):
            return self
        root = self.head_dim**-0.25
        q, k = (x.transpose(0, 1).flatten(1, 2).double() * root for x in (q, k))  # (H, N n, d)
        if self.kernel_fn == "oprf":
            norms = q.square().sum(-1).mean() + k.square().sum(-1).mean() + 2 * (q.mean(1) * k.mean(1)).sum(-1).mean()
            self.feature_norm = norms.item()
            renew_fingerprint(self)
            return self
        assert self.directions is not None
        means = torch.stack((q.mean(1), k.mean(1)), 1)
        q, k = q - means[:, :1], k - means[:, 1:]
        self.center.copy_(means)
        self._note_center()
        of_q, of_k = q.mT @ q / q.shape[1], k.mT @ k / k.shape[1]
        self.directions.copy_(balanced_directions(of_q, of_k, self.directions.shape[1] // 2))
        renew_fingerprint(self)
        return self

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, exponent: Tensor | None, causal: bool) -> Tensor:
        """Return the heads' outputs (N, H, L, d), from queries and keys that are not yet scaled.

        In causal attention to more keys than queries, the queries have the last positions, as with a cache.
        """
        L, S = q.shape[-2], k.shape[-2]
        if not causal or L == S:
            phi_q, phi_k, scale = self._mapped(q, k, exponent, causal)
            return self._combined(phi_q, phi_k, v, scale, causal)
        if L > S:
            raise ShapeError(
                f"causal attention needs at least as many keys as queries, and got {S} and {L}: pass is_causal=False "
                "for attention to a different sequence"
            )
        parts = ((x[:, :, : S - L], x[:, :, S - L :]) for x in (k, v))
        (k_before, k_here), (v_before, v_here) = parts
        e_before, e_here = (None, None) if exponent is None else exponent.split((S - L, L), -1)
        state = self._absorb(self._no_state(k, v), k_before, v_before, e_before)
        return self._extend(state, q, k_here, v_here, e_here)[0]

    def _attend_shard(
        self, q: Tensor, k: Tensor, v: Tensor, exponent: Tensor | None, causal: bool
    ) -> Tensor:  # (N, H, n, E)
        """Return the outputs of one of the equal shards of a sequence, which the ranks of ``shards`` hold in order."""
        if not causal or q.shape[-2] != k.shape[-2]:
            raise ShapeError(
                "attention that is sharded along the sequence is causal and has as many keys as queries, and this "
                f"call has is_causal={causal}, {k.shape[-2]} keys and {q.shape[-2]} queries: pass is_causal=True and "
                "each rank its shard"
            )
        self.shards.check(k)
        earlier_state = self.shards.state_before(self._absorb(self._no_state(k, v), k, v, exponent))
        y: Tensor
        y, _ = self._extend(earlier_state, q, k, v, exponent)
        # The first rank does not use the state, and has to take part in the exchange of gradients. This adds 0.
        return torch.add(y, earlier_state.sums[..., :0].sum().to(y.dtype))

    def _combined(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, scale: Tensor | None, causal: bool) -> Tensor:
        if self.kernel_fn != "hermite":
            return linear_attention(phi_q, phi_k, v, scale, is_causal=causal)
        with no_autocast(v.device):  # Autocast would round the features.
            return linear_attention(phi_q, phi_k, v, scale, is_causal=causal)

    def _no_state(self, k: Tensor, v: Tensor) -> AttentionState:
        """Return the state before the first key, for keys and values like these, (N, H, S, d) and (N, H, S, E)."""
        N, H, E = k.shape[0], k.shape[1], v.shape[-1]
        d = self.feature_width
        if self.kernel_fn == "hermite":
            assert self.directions is not None
            r = self.directions.shape[1] // 2
            features = 1 + d + r * (r + 1) // 2
        else:
            features = 1 + d + d * (d + 1) // 2 if self.directions is None else self.directions.shape[1]
        wide = torch.promote_types(k.dtype, torch.float32)
        sums = torch.zeros(N, H, features, E + 1, dtype=wide, device=k.device)
        norms = units = num_keys = None
        if self.kernel_fn == "hermite":
            norms, num_keys = sums.new_zeros(N, H, 1), sums.new_zeros(N, 1)
        elif self.kernel_fn in ("softmax", "oprf"):
            units = sums.new_full((N, H, 1), -torch.inf)
        return AttentionState(sums, units, norms, num_keys, 0)

    def _first_state(self, k: Tensor, v: Tensor) -> AttentionState:
        """Return the state before the first key, for a caller who may keep it while the map changes."""
        return self._no_state(k, v)._replace(feature_map=fingerprint_of(self))

    def _absorb(self, state: AttentionState, k: Tensor, v: Tensor, exponent: Tensor | None) -> AttentionState:
        """Return the state after these keys, from keys that are not yet scaled."""
        _, phi_k, scale = self._mapped(None, k, exponent, causal=True)
        return self._absorb_features(state, phi_k, v, scale)

    def _absorb_features(self, state: AttentionState, phi_k: Tensor, v: Tensor, scale: Tensor | None) -> AttentionState:
        earlier_units, scale = _with_units(state, scale, phi_k)
        sums, units = absorb_keys(phi_k, v, scale, state.sums, earlier_units)
        norms, num_keys = state.norms, state.num_keys
        if norms is not None and num_keys is not None:
            squares = key_norms(phi_k, self.feature_width)
            norms = absorb_keys(squares, v[..., :0], scale, norms[..., None], earlier_units)[0][..., 0]
            num_keys = num_keys + _num_keys(phi_k, scale)[..., -1:] if phi_k.shape[-2] else num_keys
        return AttentionState(sums, units, norms, num_keys, state.length + phi_k.shape[-2], state.feature_map)

    def _extend(
        self, state: AttentionState, q: Tensor, k: Tensor, v: Tensor, exponent: Tensor | None
    ) -> tuple[Tensor, AttentionState]:
        """Return the outputs at the positions after a state, and the state after them."""
        if state.length == 0 and k.shape[-2] > 1:  # the operators of a whole sequence
            phi_q, phi_k, scale = self._mapped(q, k, exponent, causal=True)
            return self._combined(phi_q, phi_k, v, scale, True), self._absorb_features(state, phi_k, v, scale)
        norms: Tensor | None = None
        num_keys: Tensor | None = None
        if self.kernel_fn == "hermite":
            _, phi_k, scale = self._mapped(None, k, exponent, causal=True)
            units, scale = _with_units(state, scale, phi_k)
            phi_q, norms, num_keys = self._hermite_queries(state, q, phi_k, scale, units)
        else:
            phi_q, phi_k, scale = self._mapped(q, k, exponent, causal=True)
            units, scale = _with_units(state, scale, phi_k)
        y, sums, units = continued_attention(phi_q, phi_k, v, scale, state.sums, units)
        return y, AttentionState(sums, units, norms, num_keys, state.length + k.shape[-2], state.feature_map)

    def _hermite_queries(
        self, state: AttentionState, q: Tensor, phi_k: Tensor, scale: Tensor | None, units: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return features of queries after a state, and the state's norms and number of keys after these keys."""
        assert self.directions is not None
        assert state.norms is not None
        assert state.num_keys is not None
        with no_autocast(q.device):
            weight = phi_k[..., :1]
            summands = torch.cat((phi_k[..., 1:], key_norms(phi_k, self.feature_width)), -1) / weight
            # The normaliser of the state has the sums of the weight and of all summands but the norm.
            column = state.sums[..., -1]  # (N, H, D)
            row = torch.cat((column[..., 1:], state.norms, column[..., :1]), -1)[..., None, :]
            means, row, _ = continued_attention(torch.ones_like(weight), weight, summands, scale, row, units)
            counts = state.num_keys + _num_keys(phi_k, scale)  # (N, T)
            center = self.center if self._centered else None
            q = (q * self.head_dim**-0.25).contiguous()
            log_num_keys = counts.clamp_min(2).log()[:, None, :, None]
            phi_q = hermite_queries(q, self.directions, center, means, log_num_keys)
        return phi_q, row[..., 0, -2:-1], counts[:, -1:] if phi_k.shape[-2] else state.num_keys

    def _mapped(
        self, q: Tensor | None, k: Tensor, exponent: Tensor | None, causal: bool
    ) -> tuple[Any, Tensor, Tensor | None]:
        """Return features of queries and keys, and the keys' exponents (N, H, S), of queries and keys not yet scaled.

        Without queries only causal attention's features of keys are computed.
        """
        root = self.head_dim**-0.25
        # A product of strided heads with few directions would take up to 6 times as long.
        dtype, k = k.dtype, (k * root).contiguous()
        q = None if q is None else (q * root).contiguous()
        if self.kernel_fn == "hermite":
            assert self.directions is not None
            center = self.center if self._centered else None
            if q is not None:
                return hermite_features(q, k, self.directions, center, exponent, causal)
            with no_autocast(k.device):
                phi_k = hermite_keys(k, self.directions, center)
            return None, phi_k, None if exponent is None else exponent.expand(k.shape[:-1])
        phi_q, phi_k, scale = self._features(q, k, dtype)
        if exponent is not None:
            scale = (exponent if scale is None else scale + exponent).expand(phi_k.shape[:-1])
        return phi_q, phi_k, scale

    def _features(self, q: Tensor | None, k: Tensor, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor | None]:
        """Return features of queries and keys, and the keys' exponents in float32.

        Features of float16 inputs stay in float32: with large logits most are far below the smallest float16 number.
        """
        if self.kernel_fn == "taylor":
            return None if q is None else taylor_features(q), taylor_features(k), None
        directions = self.directions
        assert directions is not None
        if self.kernel_fn == "relu":
            return None if q is None else relu_features(q, directions), relu_features(k, directions), None
        shift = optimal_shift(self.feature_norm, self.feature_width) if self.kernel_fn == "oprf" else 0.0
        # A query's exponent cancels.
        phi_q = None if q is None else positive_features(q, directions, shift)[0]
        phi_k, exponent = positive_features(k, directions, shift)
        if dtype is torch.bfloat16:
            phi_q, phi_k = None if phi_q is None else phi_q.to(dtype), phi_k.to(dtype)
        return phi_q, phi_k, exponent


def _with_units(state: AttentionState, scale: Tensor | None, phi_k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the units of a state and the exponents of new keys: both or none."""
    units = units_with(state, scale)
    if units is not None and scale is None:
        scale = units.new_zeros(phi_k.shape[:-1])
    return units, scale


def _num_keys(phi_k: Tensor, scale: Tensor | None) -> Tensor:  # (N, S)
    """Return the number of keys up to each that are not masked; masks are equal in all heads."""
    if scale is None:
        count = torch.arange(1, phi_k.shape[-2] + 1, device=phi_k.device, dtype=phi_k.dtype)
        return count.expand(len(phi_k), -1)
    return (scale[:, 0] != -torch.inf).to(phi_k.dtype).cumsum(-1)
