"""States of linear attention in the caches of transformers, so that ``generate`` takes constant time a token.

transformers gives each attention module a cache, whose layers grow with the sequence. Before the first call of a
converted module, a hook puts a :class:`RunningStateLayer` in the place of the layer that is still empty, and passes it
on to the attention function, which updates its state. Caches that have begun, or that are not dynamic, are left alone:
attention then reads all keys and values from them.
"""

__all__ = ["STATE", "RunningStateLayer", "pass_state", "register_layer", "takes_state"]

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn

STATE = "panther_state"
"""Keyword by which the attention function gets the layer of the cache."""


class RunningStateLayer:
    """A layer of a cache of transformers with the state of linear attention, of constant size.

    It has the methods of transformers' layers. A state cannot forget its last tokens, so that :meth:`crop` is refused.

    Attributes:
        state: The state of the module's attention; None before the first token.
        length: Tokens so far.
    """

    keys = values = None
    is_compileable = is_croppable = is_sliding = supports_early_init = False

    def __init__(self, cache: Any) -> None:
        self.state: Any = None
        self.length = 0
        self._is_pending = False
        self.watch(cache)

    def watch(self, cache: Any) -> None:
        """Remember the cache that holds this layer, without keeping it alive."""
        self._cache: Any = weakref.ref(cache)

    @property
    def is_initialized(self) -> bool:
        """Return whether there are tokens."""
        return self.length > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first token makes the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count tokens, and return their keys and values alone. The attention function updates the state."""
        if self._is_pending:
            raise RuntimeError(
                "a module of this model updates its cache and does not pass its keywords on to its attention function, "
                "so that linear attention has no state to continue from: pass use_cache=False"
            )
        self._is_pending = True
        self.length += key_states.shape[-2]
        return key_states, value_states

    def attend(
        self, attention: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Return the outputs of the tokens of the last :meth:`update`, and update the state."""
        self._is_pending = False
        y: Tensor
        if self.state is None:
            y = attention(q, k, v, key_mask, is_causal=True, scale=scale)
            self.state = attention.state_after(k, v, None, key_mask)
        else:
            y, self.state = attention.step(q, k, v, self.state, key_mask, scale=scale)
        return y

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return how many keys a mask must have, and how many tokens are before them.

        Linear attention needs a mask for new tokens alone. A mask is made for all layers together, and layers with
        softmax attention need it for all keys.
        """
        new = query_length if isinstance(query_length, int) else len(query_length)
        cache = self._cache()
        if cache is not None and all(isinstance(layer, RunningStateLayer) for layer in cache.layers):
            return new, self.length
        return self.length + new, 0

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions of transformers

    def reset(self) -> None:
        """Begin a new sequence."""
        self.state, self.length, self._is_pending = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose samples of the batch, with repetitions, as beam search does."""
        if self.state is not None:
            self.state = self.state.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sample of the batch."""
        if self.state is not None:
            self.reorder_cache(torch.arange(len(self.state.sums)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some samples of the batch."""
        if self.state is not None:
            self.reorder_cache(torch.arange(len(self.state.sums), device=indices.device)[indices])

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens: they are in sums, which cannot be undone without rounding."""
        # Versions of transformers before 5.10 pass the length to keep, a positive number.
        if tokens_to_remove == 0 or not self.length or tokens_to_remove >= self.length:
            return
        raise ValueError(
            f"crop({tokens_to_remove}): linear attention keeps sums over its {self.length} tokens and cannot forget "
            "the last of them: generate without an assistant model or prompt lookup, with "
            "cache_implementation='static', or from a copy of the cache (copy.deepcopy) that was made before them"
        )

    def offload(self) -> None:
        """Do nothing: the state is small, and it stays where the model is."""

    def prefetch(self) -> None:
        """Do nothing, as :meth:`offload`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the reference to the cache, which the next call restores."""
        return self.__dict__ | {"_cache": _nothing}

    def __repr__(self) -> str:
        """Return the number of tokens."""
        return f"RunningStateLayer(length={self.length})"


def _nothing() -> None:
    return None


def register_layer() -> None:
    """Make :class:`RunningStateLayer` count as a layer of attention in transformers, which asks for its base class."""
    from transformers.cache_utils import CacheLayerMixin

    CacheLayerMixin.register(RunningStateLayer)


def takes_state(module: nn.Module) -> bool:
    """Return whether a module of transformers can pass a state on to its attention function."""
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def pass_state(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put a state in the place of the empty layer of a module's cache and pass it on, as a forward pre-hook."""
    attention: Any = module.linear_attention
    if attention.recorder is not None or attention.shards is not None or not getattr(module, "is_causal", True):
        return None
    from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

    cache: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache | EncoderDecoderCache)), None)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    index = getattr(module, "layer_idx", None)
    if cache is None or index is None or cache.offloading:
        return None
    layers = cache.layers
    new_layer: Any = cache.layer_class_to_replicate
    while cache.layer_class_to_replicate is DynamicLayer and len(layers) <= index:
        layers.append(new_layer())
    layer = layers[index] if index < len(layers) else None
    if type(layer) is DynamicLayer and not layer.is_initialized and not torch.compiler.is_compiling():
        layer = layers[index] = RunningStateLayer(cache)
    if not isinstance(layer, RunningStateLayer):
        return None
    if layer._cache() is not cache:  # The cache was copied.
        layer.watch(cache)
    return args, kwargs | {STATE: layer}
