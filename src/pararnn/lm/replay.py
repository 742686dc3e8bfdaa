"""Decoding steps as CUDA graphs, which save the host's launch time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.modules import module as module_calls

from pararnn.base.device import Gpu, type_of
from pararnn.base.private import autocast_enabled
from pararnn.lm.cache import LayerCache, LMCache, Places, PlainCache, SteadyCache
from pararnn.lm.fused_step import fused_logits, takes
from pararnn.lm.model import LanguageModel
from pararnn.lm.pages import LinePlaces, PagedCache
from pararnn.lm.quantise import is_readable
from pararnn.lm.rows_op import takes_pages
from pararnn.op import can_bypass_dispatcher

WORTH = 8
"""Least number of tokens for which a step is recorded, which takes about as long as a call."""


Results = TypeVar("Results")


class Recording(NamedTuple):
    """A function on the GPU: the tokens that it reads, the replay, and the results it writes."""

    tokens: Tensor
    run: Callable[[], object]
    results: Any


class Replayed(Generic[Results]):
    """A function of tokens and a steady cache: called once, then recorded and replayed.

    Calls have tokens of one shape. The next one may overwrite the results. memory: as in `record`.
    """

    def __init__(
        self,
        function: Callable[[Tensor, LMCache], Results],
        cache: LMCache,
        memory: object | None = None,
    ) -> None:
        self.function, self.cache, self.memory = function, cache, memory
        self.is_warm = False
        self.recording: Recording | None = None

    def __call__(self, tokens: Tensor) -> Results:
        if not self.is_warm:  # compiles and loads what may not be compiled while recording
            self.is_warm = True
            return self.function(tokens, self.cache)
        if self.recording is None:
            self.recording = record(self.function, tokens, self.cache, self.memory)
        self.recording.tokens.copy_(tokens)
        self.recording.run()
        results: Results = self.recording.results
        return results


class Steps(Replayed[Tensor]):
    """Steps of one token a row from a cache on, recorded and replayed.

    A call with tokens int64 (B,) returns the logits (B, vocab_size) of the next ones. They are
    bit-identical to those of separate calls, except of models that have a fused step for so many
    rows (`pararnn.lm.fused_step`), which rounds less often, and of attention, whose kernel for keys
    in pages is another one (not with `batch_invariant`).

    more: calls to come, for which keys of attention get room.
    """

    def __init__(self, model: LanguageModel, cache: LMCache, more: int = 0) -> None:
        make_steady(cache, more)
        # Chosen by the first call: to look at 8-bit weights is not permitted while recording.
        step = functools.cache(partial(step_of, model))
        super().__init__(lambda token, cache: step(len(token))(model, token, cache), cache)


def make_steady(cache: LMCache, more: int = 0) -> None:
    """Copy what a cache's layers remember into tensors in which it stays.

    more: tokens of each row for which there is room in the pages that keys of attention get.
    """
    plain = (layer.keys for layer in cache.layers if isinstance(layer, PlainCache))
    kind = next(((len(keys), keys.device) for keys in plain if keys is not None), None)
    if kind is not None:
        rows, device = kind
        cache.places = LinePlaces(rows, cache.length, more, device)
    for index, layer in enumerate(cache.layers):  # one layer at a time has its keys twice
        cache.layers[index] = _steady(layer, cache.places)


def takes_pages_of(cache: LMCache) -> bool:
    """Return whether there are kernels for the cache's keys, if any, in pages."""
    plain = (layer.keys for layer in cache.layers if isinstance(layer, PlainCache))
    return all(keys is None or takes_pages(keys) for keys in plain)


def _steady(layer: LayerCache, places: Places | None) -> LayerCache:
    """Return a layer's cache with what it remembers in tensors in which it stays."""
    if layer.places is not None:
        return layer
    if isinstance(layer, PlainCache) and layer.keys is not None and layer.values is not None:
        assert isinstance(places, LinePlaces)
        return PagedCache((places.paged(layer.keys), places.paged(layer.values)), places)
    return SteadyCache(*layer.read())


def next_logits(model: LanguageModel, tokens: Tensor, cache: LMCache) -> Tensor:
    """Compute logits (B, vocab_size) of the token after tokens (B, T)."""
    return model.lm_head(model.hidden(tokens, cache)[:, -1])


def step_of(model: LanguageModel, rows: int) -> Callable[[LanguageModel, Tensor, LMCache], Tensor]:
    """Return the function of a step of tokens (B,): fused where there are kernels for it."""
    return fused_logits if takes(model, rows) else _call


def _call(model: LanguageModel, token: Tensor, cache: LMCache) -> Tensor:
    return next_logits(model, token.unsqueeze(1), cache)


def record(
    function: Callable[[Tensor, LMCache], Any],
    tokens: Tensor,
    cache: LMCache,
    memory: object | None = None,
) -> Recording:
    """Record a function of tokens of this shape and of a cache, without running it.

    memory: of `Gpu.graph_memory`, shared by recordings whose replays wait for one another.
    """
    tokens, gpu = tokens.clone(), type_of(tokens.device)
    assert isinstance(gpu, Gpu)
    with gpu.capture(tokens.device, memory) as replay:
        results = function(tokens, cache)
    return Recording(tokens, replay, results)


def replayable(model: LanguageModel, length: int, paged: bool = False) -> bool:
    """Return whether recordings may draw or read `length` tokens: on a GPU, if faster and safe.

    paged: whether keys of attention are in pages.
    """
    return length >= WORTH and _records(model.lm_head.weight.device) and can_record(model, paged)


def _records(device: torch.device) -> bool:
    """Return whether a graph can be recorded on a device now."""
    record = type_of(device)
    return record.accelerator and not record.capturing()


def can_record(model: LanguageModel, paged: bool = False) -> bool:
    """Return whether a replayed step has all effects of a called one.

    Every mixer must be steady (`Mixer.steady`), or have its keys in pages (`Mixer.paged`). There
    may be no hook, mode, autocast, compiled block or profiler, and all parameters must be plain
    tensors, or what `quantise_weights` makes of them, on the head's device.
    """
    device = model.lm_head.weight.device
    return (
        can_bypass_dispatcher()
        and not autocast_enabled()
        and not module_calls._has_any_global_hook()
        and all(b.mixer.steady or (paged and b.mixer.paged) for b in model.backbone.blocks)
        and all(is_readable(p) and p.device == device for p in model.parameters())
        and not any(map(has_hooks, model.modules()))
    )


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module's call runs anything but its class's forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    replaces = "forward" in vars(module)  # as accelerate does
    return any(hooks) or replaces or module._compiled_call_impl is not None
