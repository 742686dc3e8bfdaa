"""transformers' caches, as mixers know them."""

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

NAMES = ("cache", "past_key_values")
"""How transformers calls a cache: since 5.24, and before."""

NAME = next(each.name for each in fields(BaseModelOutputWithPast) if each.name in NAMES)
"""How the installed one does."""


def either(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache that was given by one of its names; ValueError for both."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument: give one")
    return past_key_values if cache is None else cache


COUNTING = LinearAttentionAndFullAttentionLayer, LinearAttentionAndStaticFullAttentionLayer
"""Recurrent layers that have keys too, and so know how many tokens there were."""


class LayerView:
    """One layer of a transformers cache as a `LayerCache`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def grows(self) -> bool:
        """As in `LayerCache`: a static layer gives all its places, and attention gets a mask."""
        return not isinstance(self.layer, StaticLayer)

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        """As in `LayerCache`."""
        if not self.layer.has_previous_state[0]:
            return None, None
        return self.layer.conv_states[0], self.layer.recurrent_states[0]

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """As in `LayerCache`; RuntimeError where the cache is to be cropped later."""
        if self.layer.record_past:
            raise RuntimeError(
                "this cache records the past in order to be cropped, and a recurrent state cannot "
                "go back to an earlier token: assisted generation and cropping are for attention. "
                "Use a cache without activate_past_recording()"
            )
        if inputs is None:  # a layer without convolution: the cache counts by its state
            inputs = states.new_zeros(len(states), states.shape[2], 0)
        self.layer.update_conv_state(inputs, conv_kernel_size=inputs.shape[-1])
        self.layer.update_recurrent_state(states)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As in `LayerCache`."""
        return self.layer.update(keys, values)


def counted(cache: Cache, layer_types: Sequence[str]) -> Cache:
    """Return a cache that knows how many tokens it holds, for layers of these types.

    Recurrent layers do not know, and `generate` asks. In a model without attention the first one
    has keys too, that nobody attends to. Raises ValueError for a cache that was made for other
    layers.
    """
    recurrent = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers]
    if recurrent != [word == "linear_attention" for word in layer_types]:
        raise ValueError(
            f"this cache is for other layers than the model's, got {cache}: make it by "
            "DynamicCache(config=model.config), or StaticCache(config=model.config, ...)"
        )
    if not any(hasattr(layer, "get_seq_length") for layer in cache.layers):
        # Without channels keys take no memory, and may be of more tokens than any row will have.
        counting: Any = (
            LinearAttentionAndStaticFullAttentionLayer(max_cache_len=1 << 24)
            if isinstance(cache, StaticCache)
            else LinearAttentionAndFullAttentionLayer()
        )
        counting.record_past = getattr(cache.layers[0], "record_past", False)
        cache.layers[0] = counting
    return cache


def count(cache: Cache, x: Tensor) -> None:
    """Tell the keys of `counted`, if there are such, of x (B, T, d)."""
    counter: Any = cache.layers[0]
    if isinstance(counter, COUNTING):
        keys = x[:, None]
        # A dynamic layer takes keys without channels for none at all.
        width = 0 if isinstance(counter, StaticLayer) else 1
        counter.update(keys[..., :width], keys[..., :0])
