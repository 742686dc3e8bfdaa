"""Recordings without a GPU: a function reads and writes the tensors with which it was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pararnn.lm import replay
from pararnn.lm.cache import LMCache
from pararnn.lm.pages import LinePlaces
from pararnn.lm.replay import Recording


def tensors_of(results: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples and lists."""
    if torch.is_tensor(results):
        yield results
    elif results is not None:
        for result in results:
            yield from tensors_of(result)


def record(
    function: Callable[[Tensor, LMCache], Any],
    tokens: Tensor,
    cache: LMCache,
    memory: object | None = None,
) -> Recording:
    """Return a recording whose replays call the function, into the tensors of the first results."""
    places = [cache.places.next] if isinstance(cache.places, LinePlaces) else []
    layers = [layer.read() for layer in cache.layers]
    states = [*layers, places]
    memory, tokens = [tensor.clone() for tensor in tensors_of(states)], tokens.clone()
    results = function(tokens, cache)
    for tensor, old in zip(tensors_of(states), memory, strict=True):
        tensor.copy_(old)  # recording runs nothing

    def run() -> None:
        new = function(tokens, cache)
        for tensor, value in zip(tensors_of(results), tensors_of(new), strict=True):
            tensor.copy_(value)
        for layer, old in zip(cache.layers, layers, strict=True):
            assert all(a is b for a, b in zip(layer.read(), old, strict=True))

    return Recording(tokens, run, results)


@pytest.fixture
def recordings_of_run(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Record as on a GPU, and return the list of recordings."""
    recordings = []

    def append(*args: Any) -> Recording:
        recordings.append(record(*args))
        return recordings[-1]

    monkeypatch.setattr(replay, "record", append)
    monkeypatch.setattr(replay, "_records", lambda device: True)
    return recordings
