"""What a model remembers of the tokens before: one entry a layer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LayerCache(Protocol):
    """What mixers need of a layer's cache: Hugging Face's caches are wrapped into this too."""

    @property
    def grows(self) -> bool:
        """Whether its keys have another length after every `extend`."""
        ...

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        """Inputs of the convolution (B, d, K - 1) and hidden states (B, N, D); None before any."""
        ...

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """Replace what `read` gives."""
        ...

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values (B, H, T, D/H); return all of them."""
        ...


LEAST_ROOM = 256
"""Tokens that a cache of keys has free places for, at least."""


class Room:
    """A tensor with free places behind its tokens (dim 2), so that most that follow copy none.

    joined: the tensor. What is not this very object, as after a crop or in a copy of a cache that
    went on elsewhere, has no room here.
    """

    def __init__(self, joined: Tensor, more: int) -> None:
        length = joined.shape[2]
        count = length + more + max(LEAST_ROOM, length // 8)
        self.places = joined.new_empty((*joined.shape[:2], count, *joined.shape[3:]))
        self.joined = self.places[:, :, :length].copy_(joined)

    def has(self, before: Tensor, more: int) -> bool:
        """Whether so many tokens may follow these here."""
        writable = torch.is_inference_mode_enabled() or not self.places.is_inference()
        return before is self.joined and writable and self.end(more) <= self.places.shape[2]

    def end(self, more: int) -> int:
        """How many tokens there are with so many more."""
        return self.joined.shape[2] + more

    def add(self, more: Tensor) -> Tensor:
        """All tokens, these behind the others."""
        start, end = self.joined.shape[2], self.end(more.shape[2])
        self.places[:, :, start:end] = more
        self.joined = self.places[:, :, :end]
        return self.joined


class PlainCache:
    """A layer's cache as tensors: of a convolution, hidden states, keys and values.

    Keys and values have room for more where nobody asks for gradients; a compiler plans its own.
    """

    grows = True

    def __init__(self) -> None:
        self.inputs: Tensor | None = None
        self.states: Tensor | None = None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.rooms: dict[str, Room] = {}

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        """As in `LayerCache`."""
        return self.inputs, self.states

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """As in `LayerCache`."""
        self.inputs, self.states = inputs, states

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As in `LayerCache`."""
        self.keys = self._behind("keys", self.keys, keys)
        self.values = self._behind("values", self.values, values)
        return self.keys, self.values

    def _behind(self, name: str, before: Tensor | None, more: Tensor) -> Tensor:
        """All of a name's tokens."""
        if before is None:
            return more
        sizes = [(*part.shape[:2], *part.shape[3:], part.dtype) for part in (before, more)]
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or sizes[0] != sizes[1]:
            return torch.cat([before, more], 2)
        room = self.rooms.get(name)
        if room is None or not room.has(before, more.shape[2]):
            room = self.rooms[name] = Room(before, more.shape[2])
        return room.add(more)


class SteadyCache(PlainCache):
    """A layer's cache whose tensors stay where they are: what is kept is written into them, so that
    a recorded step reads what the one before left. It holds no keys."""

    grows = False

    def __init__(self, inputs: Tensor | None = None, states: Tensor | None = None) -> None:
        super().__init__()
        self.inputs = None if inputs is None else inputs.clone()
        self.states = None if states is None else states.clone()

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """As in `LayerCache`."""
        self.inputs, self.states = _written(self.inputs, inputs), _written(self.states, states)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """RuntimeError: each step would have more keys than the one that was recorded."""
        raise RuntimeError(
            "a SteadyCache holds what keeps its size, and keys of attention grow: a mixer that "
            "calls extend is not steady (Mixer.steady)"
        )


def _written(held: Tensor | None, new: Tensor | None) -> Tensor | None:
    """The new numbers, in the memory of those that are held, if any are."""
    if held is None or new is None:
        return None if new is None else new.clone()
    return held if new is held else held.copy_(new)  # some mixers change theirs in place


class CarriedCache:
    """A layer's cache for training in steps that go on from each other.

    What is read stays and what is kept stands beside it, so that a block may run again in the
    backward pass; what is kept is detached, and holds no memory of its step.
    """

    grows = False

    def __init__(self, inputs: Tensor | None = None, states: Tensor | None = None) -> None:
        self.before = inputs, states
        self.after: tuple[Tensor | None, Tensor | None] = (None, None)

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        """As in `LayerCache`."""
        return self.before

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """As in `LayerCache`, for the next step."""
        self.after = None if inputs is None else inputs.detach().clone(), states.detach().clone()

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """RuntimeError: attention's keys would be without end."""
        raise RuntimeError(
            "a CarriedCache holds states of recurrent layers, and keys of attention would grow "
            "without end: carry states in models whose mixers are all 'rnn'"
        )


class LMCache:
    """What a language model remembers: `length` tokens of each row, one entry a layer.

    A model that is called with it goes on from there, and leaves in it what the next call needs.
    masked: whether attention has keys of padding, which a mask says.
    """

    def __init__(self, layers: int) -> None:
        self.layers = [PlainCache() for _ in range(layers)]
        self.length = 0
        self.masked = False
