"""transformers' caches as those that mixers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
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
    """Return the cache that was passed by its names; ValueError for two of them."""
    if None not in (cache, past_key_values) and cache is not past_key_values:
        raise ValueError("cache and past_key_values are two names of one argument: give one")
    return past_key_values if cache is None else cache


COUNTING = LinearAttentionAndFullAttentionLayer, LinearAttentionAndStaticFullAttentionLayer
"""Recurrent layers with keys too, which count tokens."""


MOST_REMOVED = 128
"""Largest number of tokens that a crop removes from a recurrent layer."""


class Past:
    """Of a recurrent layer that records the past: what it remembers after the tokens since a crop.

    transformers' layers keep the inputs of convolutions, and no earlier states.
    """

    record_past: bool
    recurrent_states: dict[int, Any]
    has_previous_state: dict[int, bool]
    past: tuple[Tensor, Tensor] | None = None
    """Inputs of a convolution (B, n, d, K - 1) and states (B, n, ...) after the last n tokens."""
    is_whole: bool = False
    """Whether these are all tokens that were read, so that a crop may go back to none."""

    @property
    def is_croppable(self) -> bool:
        """Whether it records the past."""
        return self.record_past

    def add_past(self, inputs: Tensor, states: Tensor) -> None:
        """Add what the layer remembers after some tokens."""
        if self.past is None:
            self.is_whole = not self.has_previous_state[0]
        else:
            inputs = torch.cat([self.past[0], inputs], 1)
            states = torch.cat([self.past[1], states], 1)
        self.is_whole &= states.shape[1] <= MOST_REMOVED
        self.past = inputs[:, -MOST_REMOVED - 1 :], states[:, -MOST_REMOVED - 1 :]

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by -tokens_to_remove tokens; RuntimeError for more than were recorded."""
        held = 0 if self.past is None else self.past[1].shape[1]
        if held and self.is_whole and tokens_to_remove == -held:
            self.reset()
            return
        if not self.record_past or tokens_to_remove > 0 or -tokens_to_remove >= max(held, 1):
            raise RuntimeError(
                f"crop({tokens_to_remove}) of a recurrent layer that has recorded {held} tokens: "
                "call activate_past_recording() on the cache before they are read, and crop by a "
                f"negative number that leaves one of them, or no token at all, at most "
                f"{MOST_REMOVED} at once"
            )
        if self.past is not None:
            last = held - 1 + tokens_to_remove
            inputs, states = (tensor[:, last : last + 1] for tensor in self.past)
            self.past, self.is_whole = (inputs, states), self.is_whole and last == 0
            _write(self, inputs[:, 0], states[:, 0])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take other rows, what they remembered before too."""
        if self.past is not None:
            inputs, states = (t.index_select(0, beam_idx.to(t.device)) for t in self.past)
            self.past = inputs, states
        super().reorder_cache(beam_idx)  # type: ignore[misc]

    # transformers' recurrent layers lack the next two, and those with keys move the keys alone.

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take some rows, by their numbers or a mask."""
        rows = self._rows()
        self.reorder_cache(rows[indices.to(rows.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take each row so many times."""
        self.reorder_cache(self._rows().repeat_interleave(repeats))

    def _rows(self) -> Tensor:
        """Return the numbers of the rows, none before any token."""
        states = self.recurrent_states[0]
        count, device = (0, None) if states is None else (len(states), states.device)
        return torch.arange(count, device=device)

    def reset(self) -> None:
        """Forget everything."""
        self.past = None
        super().reset()  # type: ignore[misc]


class RecurrentLayer(Past, LinearAttentionLayer):
    """A recurrent layer of a DynamicCache, which can be cropped."""


class CountingLayer(Past, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """A `RecurrentLayer` with keys too, which count tokens."""

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.is_initialized:  # not after a reset, which transformers before 5.21 cannot crop
            DynamicLayer.crop(self, tokens_to_remove)


CROPPABLE: dict[type, type[LinearAttentionLayer]] = {
    LinearAttentionLayer: RecurrentLayer,
    LinearAttentionAndFullAttentionLayer: CountingLayer,
}
"""Layers that can be cropped, in place of transformers'."""


def _write(layer: Any, inputs: Tensor, states: Tensor) -> None:
    """Replace a layer's states."""
    recording, layer.record_past = layer.record_past, False  # else inputs are added to the others
    layer.update_conv_state(inputs, conv_kernel_size=inputs.shape[-1])
    layer.update_recurrent_state(states)
    layer.record_past = recording


class LayerView(LayerCache):
    """One layer of a transformers cache as a `LayerCache`, for a pass of some steps."""

    def __init__(self, layer: Any, steps: int) -> None:
        self.layer = layer
        # A static layer returns all its positions, and attention gets a mask.
        self.grows = not isinstance(layer, StaticLayer)
        self.has_marked = False
        if isinstance(layer, Past) and layer.record_past:
            self.marks = range(max(1, steps - MOST_REMOVED), steps + 1)

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.layer.has_previous_state[0]:
            return None, None
        return self.layer.conv_states[0], self.layer.recurrent_states[0]

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """Replace the layer's states; RuntimeError where the past is to be recorded, and is not."""
        if self.layer.record_past and not self.has_marked:
            raise RuntimeError(
                "this cache records the past in order to be cropped, which needs a mixer that "
                "gives its memory after the steps of a pass (Mixer.marks), rows without padding, "
                "and a DynamicCache(config=model.config) that the model fills. Else use a cache "
                "without activate_past_recording()"
            )
        if inputs is None:  # a layer without convolution, whose state tells that there were tokens
            inputs = states.new_zeros(len(states), states.shape[2], 0)
        _write(self.layer, inputs, states)

    def keep_marked(self, inputs: Tensor | None, states: Tensor) -> None:
        """Record the states after the last steps."""
        if inputs is None:
            inputs = states.new_zeros(*states.shape[:2], states.shape[3], 0)
        self.layer.add_past(inputs, states)
        self.has_marked = True

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.update(keys, values)


def with_count(cache: Cache, layer_types: Sequence[str]) -> Cache:
    """Let a cache count its tokens, for layers of these types, and return it.

    Its empty recurrent layers become those that can be cropped.
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
            else CountingLayer()
        )
        counter.record_past = getattr(cache.layers[0], "record_past", False)
        cache.layers[0] = counter
    cache.layers = [_croppable(layer) for layer in cache.layers]
    return cache


def _croppable(layer: Any) -> Any:
    """Return a layer, if it is transformers' and empty one that can be cropped."""
    if type(layer) not in CROPPABLE or layer.has_previous_state[0]:
        return layer
    other = CROPPABLE[type(layer)]()
    other.record_past = layer.record_past
    return other


def count(cache: Cache, x: Tensor) -> None:
    """Count the tokens of x (B, T, d) in the keys of `with_count`, if there are any."""
    counter: Any = cache.layers[0]
    if isinstance(counter, COUNTING):
        keys = x[:, None]
        # A dynamic layer reads keys without channels as no keys at all.
        width = 0 if isinstance(counter, StaticLayer) else 1
        counter.update(keys[..., :width], keys[..., :0])
