"""Decoding steps as CUDA graphs, which save the host's launch time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as module_calls

from pararnn.base.device import Gpu, type_of
from pararnn.base.private import autocast_enabled
from pararnn.lm.cache import LMCache, SteadyCache
from pararnn.lm.fused_step import fused_logits, takes
from pararnn.lm.model import LanguageModel
from pararnn.lm.quantise import is_readable
from pararnn.op import can_bypass_dispatcher

WORTH = 8
"""Least number of tokens for which a step is recorded, which takes about as long as a call."""


class Recording(NamedTuple):
    """A step on the GPU: the token that it reads, the replay, and the logits that it writes."""

    token: Tensor
    run: Callable[[], object]
    logits: Tensor


class Steps:
    """Steps of one token a row from a cache on: called once, then recorded and replayed.

    A call with tokens int64 (B,) returns the logits (B, vocab_size) of the next ones, which the
    next call may overwrite. They are bit-identical to those of separate calls, except of models
    that have a fused step (`pararnn.lm.fused_step`), which rounds less often.
    """

    def __init__(self, model: LanguageModel, cache: LMCache) -> None:
        cache.layers = [SteadyCache(*layer.read()) for layer in cache.layers]
        self.model, self.cache = model, cache
        self.is_warm = False
        self.recording: Recording | None = None

    def __call__(self, token: Tensor) -> Tensor:
        if not self.is_warm:  # compiles and loads what may not be compiled while recording
            self.is_warm = True
            return step_of(self.model, len(token))(self.model, token, self.cache)
        if self.recording is None:
            self.recording = record(self.model, self.cache, token)
        self.recording.token.copy_(token)
        self.recording.run()
        return self.recording.logits


def next_logits(model: LanguageModel, tokens: Tensor, cache: LMCache) -> Tensor:
    """Compute logits (B, vocab_size) of the token after tokens (B, T)."""
    return model.lm_head(model.hidden(tokens, cache)[:, -1])


def step_of(model: LanguageModel, rows: int) -> Callable[[LanguageModel, Tensor, LMCache], Tensor]:
    """Return the function of a step of tokens (B,): fused where there are kernels for it."""
    return fused_logits if takes(model, rows) else _call


def _call(model: LanguageModel, token: Tensor, cache: LMCache) -> Tensor:
    return next_logits(model, token.unsqueeze(1), cache)


def record(model: LanguageModel, cache: LMCache, token: Tensor) -> Recording:
    """Record a step, without running it, for tokens of this shape."""
    token, gpu = token.clone(), type_of(token.device)
    assert isinstance(gpu, Gpu)
    step = step_of(model, len(token))
    with gpu.capture(token.device) as replay:
        logits = step(model, token, cache)
    return Recording(token, replay, logits)


def replayable(model: LanguageModel, length: int) -> bool:
    """Return whether `Steps` may draw `length` tokens: on a GPU, where it is faster and safe."""
    return length >= WORTH and _records(model.lm_head.weight.device) and can_record(model)


def _records(device: torch.device) -> bool:
    """Return whether a graph can be recorded on a device now."""
    record = type_of(device)
    return record.accelerator and not record.capturing()


def can_record(model: LanguageModel) -> bool:
    """Return whether a replayed step has all effects of a called one.

    Every mixer must be steady (`Mixer.steady`). There may be no hook, mode, autocast, compiled
    block or profiler, and all parameters must be plain tensors, or what `quantise_weights` makes
    of them, on the head's device.
    """
    device = model.lm_head.weight.device
    return (
        can_bypass_dispatcher()
        and not autocast_enabled()
        and not module_calls._has_any_global_hook()
        and all(block.mixer.steady for block in model.backbone.blocks)
        and all(is_readable(p) and p.device == device for p in model.parameters())
        and not any(map(_has_hooks, model.modules()))
    )


def _has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module's call runs anything but its class's forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    replaces = "forward" in vars(module)  # as accelerate does
    return any(hooks) or replaces or module._compiled_call_impl is not None
