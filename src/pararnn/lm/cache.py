"""What a model remembers of the tokens before: one entry a layer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LayerCache(Protocol):
    """What mixers need of a layer's cache: Hugging Face's caches are wrapped into this too."""

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        """Inputs of the convolution (B, d, K - 1) and hidden states (B, N, D); None before any."""
        ...

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """Replace what `read` gives."""
        ...

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values (B, H, T, D/H); return all of them."""
        ...


class PlainCache:
    """A layer's cache as tensors: of a convolution, hidden states, keys and values."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None
        self.states: Tensor | None = None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        """As in `LayerCache`."""
        return self.inputs, self.states

    def keep(self, inputs: Tensor | None, states: Tensor) -> None:
        """As in `LayerCache`."""
        self.inputs, self.states = inputs, states

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As in `LayerCache`."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], 2)
            values = torch.cat([self.values, values], 2)
        self.keys, self.values = keys, values
        return keys, values


class CarriedCache:
    """A layer's cache for training in steps that go on from each other.

    What is read stays and what is kept stands beside it, so that a block may run again in the
    backward pass; what is kept is detached, and holds no memory of its step.
    """

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
