"""transformers' caches as those that mixers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from pararnn.lm.cache import LayerCache

NAMES = ("cache", "past_key_values")
"""Names of a cache in transformers: since 5.24, and before."""

NAME = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in NAMES)
"""Name of a cache in the installed version."""


def either(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return the cache that was passed by one of its names; ValueError for both."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument: give one")
    return past_key_values if cache is None else cache


COUNTING = LinearAttentionAndFullAttentionLayer, LinearAttentionAndStaticFullAttentionLayer
"""Recurrent layers with keys too, which count tokens."""


class LayerView(LayerCache):
    """One layer of a transformers cache as a `LayerCache`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        # A static layer returns all its positions, and attention gets a mask.
        self.grows = not isinstance(layer, StaticLayer)

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the layer's states, see `LayerCache.read`."""
        if not self.layer.has_previous_state[0]:
            return None, None
        return self.layer.conv_states[0], self.layer.recurrent_states[0]

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """Replace the layer's states; RuntimeError where the cache is to be cropped later."""
        if self.layer.record_past:
            raise RuntimeError(
                "this cache records the past in order to be cropped, and a recurrent state cannot "
                "go back to an earlier token: assisted generation and cropping are for attention. "
                "Use a cache without activate_past_recording()"
            )
        if inputs is None:  # a layer without convolution, whose state tells that there were tokens
            inputs = states.new_zeros(len(states), states.shape[2], 0)
        self.layer.update_conv_state(inputs, conv_kernel_size=inputs.shape[-1])
        self.layer.update_recurrent_state(states)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values, see `LayerCache.extend`."""
        return self.layer.update(keys, values)


def with_count(cache: Cache, layer_types: Sequence[str]) -> Cache:
    """Let a cache count its tokens, for layers of these types, and return it.

    Recurrent layers do not count, and `generate` needs the number. In a model without attention the
    first layer gets keys too, which nothing attends to. Raises ValueError for a cache that was made
    for other layers.
    """
    recurrent = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers]
    if recurrent != [word == "linear_attention" for word in layer_types]:
        raise ValueError(
            f"this cache is for other layers than the model's, got {cache}: make it by "
            "DynamicCache(config=model.config), or StaticCache(config=model.config, ...)"
        )
    if not any(hasattr(layer, "get_seq_length") for layer in cache.layers):
        # Without channels keys take no memory, and may be of more tokens than any row will have.
        counter: Any = (
            LinearAttentionAndStaticFullAttentionLayer(max_cache_len=1 << 24)
            if isinstance(cache, StaticCache)
            else LinearAttentionAndFullAttentionLayer()
        )
        counter.record_past = getattr(cache.layers[0], "record_past", False)
        cache.layers[0] = counter
    return cache


def count(cache: Cache, x: Tensor) -> None:
    """Count the tokens of x (B, T, d) in the keys of `with_count`, if there are any."""
    counter: Any = cache.layers[0]
    if isinstance(counter, COUNTING):
        keys = x[:, None]
        # A dynamic layer reads keys without channels as no keys at all.
        width = 0 if isinstance(counter, StaticLayer) else 1
        counter.update(keys[..., :width], keys[..., :0])
