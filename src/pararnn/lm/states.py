"""States of texts as objects: packed, forked, read at several places of a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.layers.marks import pieces
from pararnn.lm.cache import LayerCache, LMCache, MarkedCache
from pararnn.lm.mixers import MixerError
from pararnn.lm.model import LanguageModel

Memory = tuple[Tensor | None, Tensor | None]
"""What a layer remembers, as `LayerCache.read` returns it."""
ALIGNMENT = 16
"""Bytes at whose multiples kernels read a tensor as fast as one of its own."""


def on_each(function: Callable[[Tensor], Tensor], memory: Memory) -> Memory:
    """Return what a layer remembers with a function's results in place of its tensors."""
    inputs, states = memory
    return (
        None if inputs is None else function(inputs),
        None if states is None else function(states),
    )


class Layout(NamedTuple):
    """Sizes and dtypes of what the layers remember of one text, in order; None where nothing is."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]

    @classmethod
    def of(cls, layers: Sequence[Memory]) -> Layout:
        """Return the layout of memories (B, ...)."""
        every = [tensor for layer in layers for tensor in layer]
        return cls(tuple([None if x is None else (tuple(x.shape[1:]), x.dtype) for x in every]))

    def sizes(self) -> list[int]:
        """Return the bytes of each tensor that one text has."""
        held = [entry for entry in self.tensors if entry is not None]
        return [math.prod(shape) * dtype.itemsize for shape, dtype in held]

    def nbytes(self) -> int:
        """Return the bytes of one text."""
        return sum(self.sizes())


def pack(layers: Sequence[Memory]) -> Tensor:
    """Return memories (B, ...) of a model's layers as bytes, uint8 (B, nbytes)."""
    held = [tensor for layer in layers for tensor in layer if tensor is not None]
    return torch.cat([x.flatten(1).contiguous().view(torch.uint8) for x in held], 1)


def unpack(data: Tensor, layout: Layout) -> list[Memory]:
    """Return the memories from what `pack` returned: of one text views of it, as far as they are
    aligned, else copies."""
    pieces_of_row = iter(data.split(layout.sizes(), 1))
    tensors: list[Tensor | None] = []
    for entry in layout.tensors:
        if entry is None:
            tensors.append(None)
            continue
        shape, dtype = entry
        piece = next(pieces_of_row).reshape(-1)
        if piece.storage_offset() % ALIGNMENT:
            piece = piece.clone()
        tensors.append(piece.view(dtype).view(len(data), *shape))
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def cache_of(layers: Sequence[LayerCache], length: int) -> LMCache:
    """Return a cache of these layers, which hold `length` tokens, and no keys in pages."""
    cache = LMCache(0)
    cache.layers, cache.length = list(layers), length
    return cache


def why_keys(model: LanguageModel, pages: bool = False) -> str | None:
    """Return why a text's memory is no state of a fixed size, or with `pages` none of states and
    pages of keys, or None if it is."""
    cure = ": states are of models whose layers are all recurrent"
    if pages:
        cure = ", and does not take them in pages: call cache.attend where cache.places is not None"
        cure += ", and say paged = True"
    for layer, block in enumerate(model.backbone.blocks):
        if block.mixer.layer_type == "full_attention" and not (pages and block.mixer.paged):
            name = type(block.mixer).__name__
            return f"layer {layer} of the model ({name}) remembers the keys of all tokens{cure}"
    return None


@torch.no_grad()
def read_with_marks(
    model: LanguageModel, tokens: Tensor, cache: LMCache, marks: Sequence[int]
) -> tuple[Tensor, list[Memory]]:
    """Read tokens (1, T) after those of a cache; return what is remembered on the way, too.

    marks: increasing numbers of these tokens, from 1 to T. Returns the head's inputs (1, T, d), and
    what each layer remembers after n marks, (n, ...) each, but for keys in pages, which stay there.
    It is one pass where all other mixers give their memory at marks (`Mixer.marks`) and no block is
    compiled, else one for each mark.

    Raises MixerError for a mixer that says so and does not.
    """
    # Compiled code would be made again for other marks.
    if all(
        (block.mixer.marks or layer.places is not None) and block._compiled_call_impl is None
        for block, layer in zip(model.backbone.blocks, cache.layers, strict=True)
    ):
        whole, marked = read_once(model, tokens, cache, marks)
        return whole, [on_each(lambda x: x[0], memory) for memory in marked]
    hidden, rows = [], []
    for first, end in pieces(marks, tokens.shape[1]):
        hidden.append(model.hidden(tokens[:, first:end], cache))
        # A copy, as mixers may change theirs in place.
        rows.append(pack([layer.read() for layer in cache.layers]))
    layout = Layout.of([layer.read() for layer in cache.layers])
    data = torch.cat(rows[: len(marks)]) if marks else rows[0][:0]
    return torch.cat(hidden, 1), unpack(data, layout)


def read_once(
    model: LanguageModel, tokens: Tensor, cache: LMCache, marks: Sequence[int]
) -> tuple[Tensor, list[Memory]]:
    """Read tokens (B, T) by one pass of a model whose mixers all give their memory at marks.

    Arguments and errors as in `read_with_marks`. Returns the head's inputs (B, T, d), and what each
    layer remembers after n marks, (B, n, ...) each; nothing of one whose memory is in pages.
    """
    layers = [x if x.places is not None else MarkedCache(x, marks) for x in cache.layers]
    cache.layers = list(layers)
    hidden = model.hidden(tokens, cache)
    cache.layers = [x if x.places is not None else LayerCache(*x.read()) for x in layers]
    memories: list[Memory] = []
    for layer, block in zip(layers, model.backbone.blocks, strict=True):
        if not isinstance(layer, MarkedCache):
            memories.append((None, None))
            continue
        if layer.marked is None:
            raise MixerError(
                f"{type(block.mixer).__name__} says `marks`, and has not called keep_marked: call "
                "it where cache.marks is not None, or set marks = False"
            )
        memories.append(layer.marked)
    return hidden, memories
