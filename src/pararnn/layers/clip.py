"""Keeping recurrent parameters small (paper, Appendix C)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pararnn.layers.recurrent import RecurrentLayer
from pararnn.parameters import CLIPS


def clip_after_step(
    optimizer: Optimizer, module: nn.Module, *, by: str = "elementwise", to: float | None = None
) -> RemovableHandle:
    """After each `optimizer.step()`, clip the recurrent parameters of every layer in `module`.

    by: "elementwise" clamps to [-bound, bound], "norm" scales a parameter whose vector norm is
    larger down to the bound. to: the bound; None is each layer's `recurrent_clip` (paper, Appendix
    C: 0.5), of which None leaves the layer alone. Sharded parameters (FSDP2) are clipped as whole
    ones are. Returns the hook's handle, whose `remove()` ends the clipping. Raises ValueError for
    another `by`; and, now or after a step, for a negative bound and for a recurrent parameter that
    a parametrisation computes.
    """
    if by not in CLIPS:
        raise ValueError(f"by must be one of {', '.join(CLIPS)}, got {by!r}")

    def layers() -> list[RecurrentLayer]:
        return [part for part in module.modules() if isinstance(part, RecurrentLayer)]

    def clip(*_: Any) -> None:
        for layer in layers():
            layer.clip_recurrent(by, to)

    for layer in layers():
        if layer.clip_bound(to) is not None:
            layer.recurrent_parameters()
    return optimizer.register_step_post_hook(clip)
