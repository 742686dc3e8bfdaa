"""What is looked at every so often: whether recurrent layers obey the numerics contract."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pararnn.layers import RecurrentLayer
from pararnn.verify import defect

NAMES = ("defect", "sweeps", "mended")
"""Of what `checked` finds: a number each for every recurrent layer."""


@torch.no_grad()
def checked(model: nn.Module, called: nn.Module, inputs: dict[str, Tensor]) -> dict[str, list[Any]]:
    """The defect of every recurrent layer over its limit, and its solver's counts; see `defect`.

    Layers are checked within a forward pass of `called` (what wraps `model`), where parameters are
    whole and autocast is on, and eagerly: compiled blocks record nothing. Random numbers and the
    layers' own records stay as they were.
    """
    layers = [part for part in model.modules() if isinstance(part, RecurrentLayer)]
    kept = [layer.counts for layer in layers]
    found: list[tuple[float, int, int]] = []

    def look(layer: Any, args: Any, options: Any, _: Any) -> None:
        found.append(defect(layer, args, options))

    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in layers]
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(cuda), torch.compiler.set_stance("force_eager"):
            called(**inputs, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, counts in zip(layers, kept, strict=True):
            layer.__dict__["counts"] = counts
    return dict(zip(NAMES, map(list, zip(*found, strict=True)), strict=True)) if found else {}
