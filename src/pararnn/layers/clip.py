"""Keeping recurrent parameters small (paper, Appendix C)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pararnn.layers.recurrent import RecurrentLayer


def clip_after_step(optimizer: Optimizer, module: nn.Module) -> RemovableHandle:
    """After each `optimizer.step()`, clamp the recurrent parameters of every layer in `module`.

    Each layer's `recurrent_clip` is the bound (paper, Appendix C: 0.5); None leaves it alone.
    Sharded parameters (FSDP2) are clamped shard by shard. Returns the hook's handle, whose
    `remove()` ends the clipping. Raises ValueError, now or after a step, for a recurrent parameter
    that a parametrisation computes.
    """

    def layers() -> list[RecurrentLayer]:
        return [part for part in module.modules() if isinstance(part, RecurrentLayer)]

    def clip(*_: Any) -> None:
        for layer in layers():
            layer.clip_recurrent()

    for layer in layers():
        if layer.recurrent_clip is not None:
            layer.recurrent_parameters()
    return optimizer.register_step_post_hook(clip)
