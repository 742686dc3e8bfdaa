"""Clip recurrent parameters after optimiser steps (paper, Appendix C)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pararnn.base.parameters import CLIPS
from pararnn.layers.recurrent import Clipping

_HOOKS = "_optimizer_step_post_hooks"
"""Attribute of a PyTorch optimiser that holds the hooks of its steps."""


def clip_after_step(
    optimizer: Optimizer, module: nn.Module, *, by: str = "elementwise", to: float | None = None
) -> RemovableHandle:
    """Clip the recurrent parameters of every layer in `module` after each `optimizer.step()`.

    optimizer: PyTorch's, or one that wraps it in its attribute `optimizer`, as accelerate's do; a
    copy or a pickle of it clips the copies of the layers. by: "elementwise" clamps to
    [-bound, bound], "norm" scales a parameter whose vector norm is larger down to the bound, a
    matrix of heads head by head. With "norm" no product with a matrix makes a vector longer than
    bound times its length; clamped entries bound no such factor. to: the bound; None is each
    layer's `recurrent_clip` (paper, Appendix C: 0.5), where None means no
    clipping. Sharded parameters (FSDP2) are clipped as whole ones are. Returns the hook's
    handle, whose `remove()` ends the clipping. Raises TypeError for what is no optimiser,
    ValueError for another `by`; and, now or after a step, for a negative bound and for a recurrent
    parameter that a parametrisation computes.
    """
    if by not in CLIPS:
        raise ValueError(f"by must be one of {', '.join(CLIPS)}, got {by!r}")
    clip, inner = _Clip(module, by, to), _with_hooks(optimizer)
    for layer in clip.layers():
        if layer.clip_bound(to) is not None:
            layer.recurrent_parameters()
    vars(inner).setdefault("__getstate__", _State(inner))
    return inner.register_step_post_hook(clip)


@dataclass(eq=False)
class _Clip:
    """Hook after a step, which is copied and pickled with the module."""

    module: nn.Module
    by: str
    to: float | None

    def layers(self) -> list[Clipping]:
        """Return the layers that are in the module now."""
        return [layer for layer in self.module.modules() if isinstance(layer, Clipping)]

    def __call__(self, *_: Any) -> None:
        for layer in self.layers():
            layer.clip_recurrent(self.by, self.to)


@dataclass(eq=False)
class _State:
    """An optimiser's `__getstate__` that keeps our hooks; PyTorch's drops all hooks."""

    optimizer: Optimizer

    def __call__(self) -> dict[str, Any]:
        clips = [hook for hook in vars(self.optimizer)[_HOOKS].values() if isinstance(hook, _Clip)]
        state = type(self.optimizer).__getstate__(self.optimizer)
        # Each hook is its own key: ids of hooks differ between processes.
        return {**state, _HOOKS: OrderedDict(zip(clips, clips, strict=True)), "__getstate__": self}


def _with_hooks(optimizer: Any) -> Optimizer:
    """Return the innermost optimiser, whose step runs hooks; TypeError if there is none.

    A wrapper may subclass Optimizer without running its __init__.
    """
    inner = optimizer
    while isinstance(inner, Optimizer) and _HOOKS not in vars(inner):
        inner = getattr(inner, "optimizer", None)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            "clip_after_step needs a torch.optim.Optimizer, or a subclass that wraps one in its "
            f"attribute `optimizer`; got {type(optimizer).__name__}. After the steps of others "
            "call clip_recurrent() of each layer"
        )
    return inner
