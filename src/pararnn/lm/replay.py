"""A decoding step recorded as a CUDA graph: a token then takes the GPU's time, not the host's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as module_calls

from pararnn.device import Gpu, type_of
from pararnn.engines.signature import PLAIN_TYPES
from pararnn.lm.cache import LMCache, SteadyCache
from pararnn.lm.model import LanguageModel
from pararnn.op import can_bypass_dispatcher

WORTH = 8
"""Tokens from which on a step is recorded, which takes about as long as one that is called."""


class Recording(NamedTuple):
    """A step on the GPU: the token that it reads, what runs it, and the logits that it writes."""

    token: Tensor
    run: Callable[[], object]
    logits: Tensor


class Steps:
    """Steps of one token a row after what `cache` holds: called once, then recorded and replayed.

    Called with tokens int64 (B,), returns the logits (B, vocab_size) of the next ones, which the
    next call may write over. The bits are those of calls.
    """

    def __init__(self, model: LanguageModel, cache: LMCache) -> None:
        cache.layers = [SteadyCache(*layer.read()) for layer in cache.layers]
        self.model, self.cache = model, cache
        self.called = False
        self.recording: Recording | None = None

    def __call__(self, token: Tensor) -> Tensor:
        if not self.called:  # compiles and loads what a recording may not
            self.called = True
            return next_logits(self.model, token.unsqueeze(1), self.cache)
        if self.recording is None:
            self.recording = record(self.model, self.cache, token)
        self.recording.token.copy_(token)
        self.recording.run()
        return self.recording.logits


def next_logits(model: LanguageModel, tokens: Tensor, cache: LMCache) -> Tensor:
    """Logits (B, vocab_size) of what follows tokens (B, T)."""
    return model.lm_head(model.hidden(tokens, cache)[:, -1])


def record(model: LanguageModel, cache: LMCache, token: Tensor) -> Recording:
    """Record a step, without running it, for tokens like this one."""
    token, gpu = token.clone(), type_of(token.device)
    assert isinstance(gpu, Gpu)
    with gpu.capture(token.device) as replay:
        logits = next_logits(model, token.unsqueeze(1), cache)
    return Recording(token, replay, logits)


def replayable(model: LanguageModel, length: int) -> bool:
    """Whether so many tokens are drawn by `Steps`: on a GPU, where it pays and nobody can tell."""
    return length >= WORTH and _records(model.lm_head.weight.device) and undisturbed(model)


def _records(device: torch.device) -> bool:
    """Whether a graph can be recorded on a device now."""
    record = type_of(device)
    return record.accelerator and not record.capturing()


def undisturbed(model: LanguageModel) -> bool:
    """Whether a step is the same whenever it runs: every mixer is steady (`Mixer.steady`), and
    nobody else takes part in a call, by a hook, a mode, autocast, a compiler or a profiler, or by
    parameters that are no plain tensors of the head's device."""
    device = model.lm_head.weight.device
    return (
        can_bypass_dispatcher()
        and not torch._C._is_any_autocast_enabled()
        and not module_calls._has_any_global_hook()
        and all(block.mixer.steady for block in model.backbone.blocks)
        and all(type(p) in PLAIN_TYPES and p.device == device for p in model.parameters())
        and not any(map(_hooked, model.modules()))
    )


def _hooked(module: torch.nn.Module) -> bool:
    """Whether a module's call runs more, or something else, than its class's forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    own = "forward" in vars(module)  # where accelerate puts its own
    return any(hooks) or own or module._compiled_call_impl is not None
