"""`adapt`: layers that leave (newton, fused) where the data make it the slower choice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pararnn.cells.base import unwrapped
from pararnn.device import type_of
from pararnn.engines.request import split_of_context
from pararnn.engines.split import NO_REQUEST
from pararnn.layers import RecurrentLayer

SWEEP_COST = 3.0
"""What a step of a sweep takes, over one of the loop, where many channels run again: measured on
trained layers (benchmarks/segments.py)."""

_LOG = logging.getLogger("pararnn")

Rows = tuple[int, int]
"""(B, T)."""


def adapt(module: nn.Module, patience: int = 20) -> Adaptation:
    """Let the layers in `module` leave (newton, fused) where their data make it the slower choice.

    Where `auto` has taken (newton, fused), with W segments of time, and k sweeps were needed, that
    is about 3 k / W of the time of the loop: so at 3 k >= W a solve is slow. After `patience`
    slow ones in a row of a layer and a direction at one (B, T), `auto` takes (sequential, fused)
    there from then on, and the logger "pararnn" says so. The counts of a solve are looked at in a
    later forward pass, when the GPU has long finished it: nothing waits.

    The result then depends on data and timing, within the numerics contract; without `adapt` it
    never does. It leaves alone what a call, `using` or the layer asks for, a split included, and
    compiled code, captured CUDA graphs and transforms of torch.func, where nothing is looked at.

    Raises ValueError where `module` holds no layer of this library, or `patience` is below 1.
    """
    if patience < 1:
        raise ValueError(f"patience must be 1 or more solves, got {patience}")
    parts = [(n, p) for n, p in module.named_modules() if isinstance(p, RecurrentLayer)]
    if not parts:
        raise ValueError(f"{type(module).__name__} holds no pararnn layer: nothing to adapt")
    return Adaptation(parts, patience)


class Adaptation:
    """What `adapt` has put on layers; a context, at whose end it is removed."""

    def __init__(self, parts: list[tuple[str, RecurrentLayer]], patience: int) -> None:
        self._watches = {name: _Watch(name, patience) for name, _ in parts}
        self._handles = [handle for name, part in parts for handle in self._watches[name].on(part)]

    @property
    def switched(self) -> dict[str, list[Rows]]:
        """Each (B, T) at which a layer and direction runs sequentially, by its name."""
        found = {name: watch.switched for name, watch in self._watches.items()}
        return {name: sizes for name, sizes in found.items() if sizes}

    def reset(self) -> None:
        """Forget what has been seen: every layer runs as `auto` says, and is watched anew."""
        for watch in self._watches.values():
            watch.reset()

    def remove(self) -> None:
        """Take it off the layers."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Adaptation:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class _Watch:
    """The hooks on one layer in one direction: copied and pickled with it, less what is pending."""

    def __init__(self, name: str, patience: int) -> None:
        self.name, self.patience = name, patience
        self.reset()

    def reset(self) -> None:
        self.slow: dict[Rows, int] = {}  # solves in a row
        self.pending: tuple[Rows, int, Callable[[], Tensor | None]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": None}

    def on(self, layer: RecurrentLayer) -> list[Any]:
        before = layer.register_forward_pre_hook(self.before, with_kwargs=True)
        return [before, layer.register_forward_hook(self.after, with_kwargs=True)]

    @property
    def switched(self) -> list[Rows]:
        return [rows for rows, count in self.slow.items() if count >= self.patience]

    def before(self, layer: RecurrentLayer, inputs: Any, options: dict[str, Any]) -> Any:
        """Where (B, T) has been slow for long, the loop."""
        if not self.slow or not _is_open(layer, options):
            return None
        if self.slow.get(_rows(inputs, options), 0) < self.patience:
            return None
        return inputs, options | {"solver": "sequential", "backend": "fused"}

    def after(self, layer: RecurrentLayer, inputs: Any, options: Any, output: Any) -> None:
        """Judge the solve whose counts have arrived, and send for those of this one."""
        info = layer.counts
        if not _is_open(layer, options) or info is None or layer.choice is None:
            return
        device = type_of(info.device)
        if device.capturing():
            return
        if self.pending is not None:
            rows, segments, arrived = self.pending
            counts = arrived()
            if counts is None:
                return
            self.pending = None
            self.judge(layer, rows, int(counts[:, 0].max()), segments)
        split = layer.choice.split()
        if split is not None and split.segments > 1:
            self.pending = _rows(inputs, options), split.segments, device.send(info.detach())

    def judge(self, layer: RecurrentLayer, rows: Rows, sweeps: int, segments: int) -> None:
        """Count a solve of (newton, fused)."""
        self.slow[rows] = self.slow.get(rows, 0) + 1 if SWEEP_COST * sweeps >= segments else 0
        if self.slow[rows] == self.patience:
            _LOG.warning(
                "%s (%s) runs at (B, T) = %s by the loop from now on: %d solves in a row took so "
                "many sweeps that the loop is faster, at last %d for %d segments",
                self.name or "the layer",
                type(unwrapped(layer.cell)).__name__,
                rows,
                self.patience,
                sweeps,
                segments,
            )


def _is_open(layer: RecurrentLayer, options: Mapping[str, Any]) -> bool:
    """Whether it is `auto` that chooses between (newton, fused) and the loop, in eager code."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    asked = layer.requested_pair(*(options.get(part) for part in ("solver", "backend", "mode")))
    return asked in (("auto", "auto"), ("auto", "fused")) and split_of_context() == NO_REQUEST


def _rows(inputs: Any, options: Mapping[str, Any]) -> Rows:
    x = inputs[0] if inputs else options["x"]
    return tuple(x.shape[:2])
