"""The feature map of a layer of attention: its state, how it is drawn and loaded, and attention through it."""

__all__ = ["KERNELS", "FeatureMap"]

import struct
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther.errors import ShapeError, SketchMismatchError
from panther.kernels.reference.attention import no_autocast
from panther.nn.attention._features import (
    optimal_shift,
    orthogonal_gaussian,
    positive_features,
    relu_features,
    taylor_features,
)
from panther.nn.attention._hermite import balanced_directions, hermite_features
from panther.nn.functional import linear_attention
from panther.nn.sketch_record import has_values, read_integers

KERNELS = ("hermite", "softmax", "oprf", "relu", "taylor")  # Files store the index of a kernel, so append new kernels.
_FORWARD_BITS = 40


class FeatureMap(nn.Module):
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
    Wq: nn.Parameter
    Wk: nn.Parameter
    _default_kernel: bool
    _centered: bool
    _draws: int
    _forwards: int

    def redraw_features_(self) -> Self:
        """Draw the next directions of the seed, the same on every device and every rank."""
        self._draws += 1
        self._draw_directions()
        return self

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
            return self
        assert self.directions is not None
        means = torch.stack((q.mean(1), k.mean(1)), 1)
        q, k = q - means[:, :1], k - means[:, 1:]
        self.center.copy_(means)
        self._note_center()
        of_q, of_k = q.mT @ q / q.shape[1], k.mT @ k / k.shape[1]
        self.directions.copy_(balanced_directions(of_q, of_k, self.directions.shape[1] // 2))
        return self

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, exponent: Tensor | None, causal: bool) -> Tensor:
        """Return the heads' outputs (N, H, L, d), from queries and keys that are not yet scaled."""
        if causal and q.shape[-2] != k.shape[-2]:  # Otherwise features would be broadcast to the other length.
            raise ShapeError(
                f"causal attention needs as many keys as queries, and got {k.shape[-2]} and "
                f"{q.shape[-2]}: pass is_causal=False for attention to a different sequence, or queries for all keys"
            )
        root = self.head_dim**-0.25
        # A product of strided heads with few directions would take up to 6 times as long.
        dtype, q, k = q.dtype, (q * root).contiguous(), (k * root).contiguous()
        if self.kernel_fn == "hermite":
            assert self.directions is not None
            center = self.center if self._centered else None
            phi_q, phi_k, scale = hermite_features(q, k, self.directions, center, exponent, causal)
            with no_autocast(v.device):  # Autocast would round the features.
                return linear_attention(phi_q, phi_k, v, scale, is_causal=causal)
        phi_q, phi_k, scale = self._features(q, k, dtype)
        if exponent is not None:
            scale = (exponent if scale is None else scale + exponent).expand(phi_k.shape[:-1])
        return linear_attention(phi_q, phi_k, v, scale, is_causal=causal)

    def _features(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return features of queries and keys, and the keys' exponents in float32.

        Features of float16 inputs stay in float32: with large logits most are far below the smallest float16 number.
        """
        if self.kernel_fn == "taylor":
            return taylor_features(q), taylor_features(k), None
        assert self.directions is not None
        if self.kernel_fn == "relu":
            return relu_features(q, self.directions), relu_features(k, self.directions), None
        shift = optimal_shift(self.feature_norm, self.feature_width) if self.kernel_fn == "oprf" else 0.0
        phi_q, _ = positive_features(q, self.directions, shift)  # A query's exponent cancels.
        phi_k, exponent = positive_features(k, self.directions, shift)
        if dtype is torch.bfloat16:
            phi_q, phi_k = phi_q.to(dtype), phi_k.to(dtype)
        return phi_q, phi_k, exponent
