"""Memory of earlier tokens, one cache a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pararnn.base.private import foreach_copy

LEAST_FREE = 256
"""Least number of free positions in a buffer of keys."""
TENSORS = ("inputs", "states", "keys", "values")
"""What a `PlainCache` holds."""


class Places(Protocol):
    """Where the keys of a cache's rows are, in pages: `table`, int32 (B, n), each row's pages in
    order, and the `length` of the longest row."""

    length: int

    @property
    def table(self) -> Tensor:
        """Each row's pages."""

    def positions(self, past: int, steps: int) -> Tensor:
        """Return the positions of more tokens, int (B, steps), for which there are pages then."""


class LayerCache:
    """A layer's cache as mixers read it; Hugging Face's caches are wrapped into one.

    It holds the inputs of a convolution (B, d, K - 1) and hidden states (B, N, D). Subclasses add
    keys and values of attention.
    """

    grows: bool = False
    """True if the keys have another length after every `extend`."""
    no_keys: ClassVar[str] = "this cache holds no keys"
    """Message of `extend` where there are none."""
    marks: Sequence[int] | None = None
    """Numbers of a pass's steps after which `keep_marked` gets the memory too; None for no call."""
    places: Places | None = None
    """Where keys are in pages: then `attend` is called and not `extend`."""

    def __init__(self, inputs: Tensor | None = None, states: Tensor | None = None) -> None:
        self.inputs, self.states = inputs, states

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        """Return inputs of the convolution (B, d, K - 1) and hidden states (B, N, D), or None."""
        return self.inputs, self.states

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """Replace the tensors that `read` returns."""
        self.inputs, self.states = inputs, states

    def fork(self, count: int) -> LayerCache:
        """Return a copy for `count` rows, see `LMCache.fork`."""
        return LayerCache(*(_copies(memory, count) for memory in self.read()))

    def keep_marked(self, inputs: Tensor | None, states: Tensor) -> None:
        """Take the memory after the steps of `marks`: inputs (B, n, d, K - 1), states (B, n, ...).

        Raises RuntimeError in caches without marks.
        """
        raise RuntimeError("this cache has no marks")

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values (B, H, T, D/H), and return all; RuntimeError in caches without."""
        raise RuntimeError(self.no_keys)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, by_rows: bool = True
    ) -> Tensor:
        """Add keys and values (B, H, T, D/H) at positions, int (B or 1, T), and attend from q.

        by_rows: whether with the bits of `batch_invariant`, or faster for a few tokens. Returns (B,
        T, H, D/H); RuntimeError in caches without pages.
        """
        raise RuntimeError("this cache has no pages of keys")


class Buffer:
    """A preallocated buffer of tokens (dim 2), so that most additions copy nothing.

    tokens: the view of the filled positions. Only this very object may be extended: after a crop,
    or in a copy of a cache, another tensor takes its place.
    """

    def __init__(self, tokens: Tensor, more: int) -> None:
        length = tokens.shape[2]
        size = length + more + max(LEAST_FREE, length // 8)
        self.memory = tokens.new_empty((*tokens.shape[:2], size, *tokens.shape[3:]))
        self.tokens = self.memory[:, :, :length].copy_(tokens)

    def fits(self, tokens: Tensor, more: int) -> bool:
        """Return whether `more` tokens may be added to these here."""
        writable = torch.is_inference_mode_enabled() or not self.memory.is_inference()
        end = self.tokens.shape[2] + more
        return tokens is self.tokens and writable and end <= self.memory.shape[2]

    def add(self, more: Tensor) -> Tensor:
        """Write tokens after the others, and return all."""
        start = self.tokens.shape[2]
        end = start + more.shape[2]
        self.memory[:, :, start:end] = more
        self.tokens = self.memory[:, :, :end]
        return self.tokens


class PlainCache(LayerCache):
    """A layer's cache with keys and values.

    They are in preallocated buffers, except in compiled calls or where gradients are computed.
    """

    grows = True

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.buffers: dict[str, Buffer] = {}

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = self._join("keys", self.keys, keys)
        self.values = self._join("values", self.values, values)
        return self.keys, self.values

    def fork(self, count: int) -> PlainCache:
        other = PlainCache()
        other.inputs, other.states = (_copies(memory, count) for memory in self.read())
        other.keys, other.values = (_copies(x, count) for x in (self.keys, self.values))
        return other

    def _join(self, name: str, first: Tensor | None, more: Tensor) -> Tensor:
        """Return the tokens of a name, old and new."""
        if first is None:
            return more
        sizes = [(*tensor.shape[:2], *tensor.shape[3:], tensor.dtype) for tensor in (first, more)]
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or sizes[0] != sizes[1]:
            return torch.cat([first, more], 2)
        buffer = self.buffers.get(name)
        if buffer is None or not buffer.fits(first, more.shape[2]):
            buffer = self.buffers[name] = Buffer(first, more.shape[2])
        return buffer.add(more)


def _copies(memory: Tensor | None, count: int) -> Tensor | None:
    """Return a copy of the memory of `count` rows; of one row, for each of them."""
    if memory is None:
        return None
    if len(memory) not in (1, count):
        raise ValueError(
            f"a cache of {len(memory)} rows continues in as many, and one of a single row in any "
            f"number, got {count}"
        )
    return memory.repeat(count // len(memory), *[1] * (memory.ndim - 1))


class SteadyCache(LayerCache):
    """A layer's fixed-size cache: `keep` writes into its tensors, so that a recorded step reads
    what the one before wrote."""

    no_keys = (
        "a SteadyCache has a fixed size, and keys of attention grow: a mixer that calls extend is "
        "not steady (Mixer.steady)"
    )

    def __init__(self, inputs: Tensor | None = None, states: Tensor | None = None) -> None:
        super().__init__(
            *(tensor if tensor is None else tensor.clone() for tensor in (inputs, states))
        )

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """Write into the tensors that `read` returns."""
        self.inputs, self.states = _write(self.inputs, inputs), _write(self.states, states)


def _write(memory: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Return the new values in the memory, if there is one."""
    if memory is None or new is None:
        return None if new is None else new.clone()
    return memory if new is memory else memory.copy_(new)  # some mixers change theirs in place


class MarkedCache(LayerCache):
    """A layer's cache in a pass whose memory after some steps is needed, see `LayerCache.marks`.

    marked: what `keep_marked` got; None before.
    """

    no_keys = (
        "a MarkedCache holds states of recurrent layers: the memory of a mixer that calls extend "
        "is all its keys"
    )

    def __init__(self, memory: LayerCache, marks: Sequence[int]) -> None:
        super().__init__(*memory.read())
        self.marks = marks
        self.marked: tuple[Tensor | None, Tensor] | None = None

    def keep_marked(self, inputs: Tensor | None, states: Tensor) -> None:
        """Store for who made the cache."""
        self.marked = inputs, states


class CarriedCache(LayerCache):
    """A layer's cache for training in steps that continue each other.

    `keep` stores for the next step, in `after`. `read` still returns the old tensors, so that a
    block may run again in the backward pass. Stored tensors are detached copies.
    """

    no_keys = (
        "a CarriedCache holds states of recurrent layers, and keys of attention would grow without "
        "end: carry states in models whose mixers are all 'rnn'"
    )

    def __init__(self, inputs: Tensor | None = None, states: Tensor | None = None) -> None:
        super().__init__(inputs, states)
        self.after: tuple[Tensor | None, Tensor | None] = (None, None)

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """Store for the next step."""
        self.after = None if inputs is None else inputs.detach().clone(), states.detach().clone()


class LMCache:
    """Memory of a language model: `length` tokens of each row, a cache a layer.

    A model that is called with it continues there, and updates it for the next call. masked:
    whether attention has keys of padding, which need a mask. places: where attention's keys are, if
    they are in pages (`pararnn.lm.pages`).
    """

    def __init__(self, layers: int) -> None:
        self.layers: list[LayerCache] = [PlainCache() for _ in range(layers)]
        self.length = 0
        self.masked = False
        self.places: Places | None = None

    def fork(self, count: int) -> LMCache:
        """Return a copy that `count` rows continue from: of one row, all of them from that one.

        What is called with the copy leaves this cache as it is. Raises ValueError for a cache of
        another number of rows.
        """
        other = LMCache(0)
        other.layers = [layer.fork(count) for layer in self.layers]
        other.length, other.masked = self.length, self.masked
        return other


def join_rows(caches: Sequence[LMCache]) -> LMCache:
    """Return caches of texts of one length, without padding or pages, as the rows of one."""
    other = LMCache(len(caches[0].layers))
    other.length = caches[0].length
    for index, layer in enumerate(other.layers):
        for name in TENSORS:
            rows = [getattr(cache.layers[index], name, None) for cache in caches]
            held = [row for row in rows if row is not None]
            setattr(layer, name, torch.cat(held) if held else None)
    return other


def memory_pairs(
    layers: Sequence[LayerCache], memories: Sequence[tuple[Tensor | None, Tensor | None]]
) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that layers remember in, each with that of the memories in its place."""
    return [
        (held, new)
        for layer, memory in zip(layers, memories, strict=True)
        for held, new in zip(layer.read(), memory, strict=True)
        if held is not None and new is not None
    ]


def copy_memory(sources: Sequence[LayerCache], targets: Sequence[LayerCache]) -> None:
    """Copy what layers remember into others' tensors."""
    every = memory_pairs(targets, [source.read() for source in sources])
    copy_pairs([(to, values) for to, values in every if values is not to])


def copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, by a few kernels for each dtype: of
    several dtypes at once it would be one for each pair."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for to, values in pairs:
        groups.setdefault((to.dtype, values.dtype), []).append((to, values))
    for group in groups.values():
        foreach_copy([to for to, _ in group], [values for _, values in group])
