"""`adapt`: fall back to the loop where Newton is slow on this data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pararnn.base.device import type_of
from pararnn.base.private import are_functorch_transforms_active
from pararnn.cells.base import unwrap
from pararnn.engines.request import split_of_context
from pararnn.engines.split import NO_REQUEST
from pararnn.engines.table import Choice
from pararnn.layers import RecurrentLayer

SWEEP_COST = 3.0
"""Time of a sweep's step over the loop's, if many channels are rerun: measured on trained layers
(benchmarks/segments.py)."""

_LOG = logging.getLogger("pararnn")

Rows = tuple[int, int]
"""(B, T)."""


def adapt(module: nn.Module, patience: int = 20) -> Adaptation:
    """Have the layers in `module` fall back to the loop where Newton is slow on their data.

    A solve by (newton, fused) with W segments and k sweeps takes about 3 k / W of the loop's time,
    so it is slow at 3 k >= W. After `patience` slow solves in a row of a layer and a direction at
    one (B, T), `auto` runs (sequential, fused) there, and the logger "pararnn" reports it. The
    counts of a solve are read in a later forward pass, when the GPU has finished it: nothing waits.

    The result then depends on data and timing, within the numerics contract; without `adapt` it
    never does. Requests of a call, `using` or the layer, splits included, take precedence. Compiled
    code, captured CUDA graphs and transforms of torch.func do not change: no counts are read there.

    Raises ValueError where `module` holds no layer of this library, or `patience` is below 1.
    """
    if patience < 1:
        raise ValueError(f"patience must be 1 or more solves, got {patience}")
    layers = [(n, p) for n, p in module.named_modules() if isinstance(p, RecurrentLayer)]
    if not layers:
        raise ValueError(f"{type(module).__name__} holds no pararnn layer: nothing to adapt")
    return Adaptation(layers, patience)


class Adaptation:
    """Hooks of `adapt` on layers; as a context, it removes them at the end."""

    def __init__(self, layers: list[tuple[str, RecurrentLayer]], patience: int) -> None:
        self._watches = {name: _Watch(name, patience) for name, _ in layers}
        self._handles = [h for name, layer in layers for h in self._watches[name].on(layer)]

    @property
    def switched(self) -> dict[str, list[Rows]]:
        """Sizes (B, T) at which a layer and direction runs sequentially, by its name."""
        slow_sizes = {name: watch.slow_sizes for name, watch in self._watches.items()}
        return {name: sizes for name, sizes in slow_sizes.items() if sizes}

    def reset(self) -> None:
        """Drop all counts: every layer runs by the rule and is observed again."""
        for watch in self._watches.values():
            watch.reset()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Adaptation:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class _Watch:
    """Hooks on one layer in one direction; copies and pickles of it drop the pending solve."""

    def __init__(self, name: str, patience: int) -> None:
        self.name, self.patience = name, patience
        self.reset()

    def reset(self) -> None:
        self.slow: dict[Rows, int] = {}  # consecutive slow solves
        self.segments: dict[Choice, int] = {}
        self.pending: tuple[Rows, int, Callable[[], Tensor | None]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": None}

    def on(self, layer: RecurrentLayer) -> list[Any]:
        handle = layer.register_forward_pre_hook(self.switch, with_kwargs=True)
        return [handle, layer.register_forward_hook(self.observe, with_kwargs=True)]

    @property
    def slow_sizes(self) -> list[Rows]:
        return [rows for rows, count in self.slow.items() if count >= self.patience]

    def switch(self, layer: RecurrentLayer, inputs: Any, options: dict[str, Any]) -> Any:
        """Request the loop where (B, T) has been slow for `patience` solves."""
        if not self.slow or not _is_open(layer, options):
            return None
        if self.slow.get(_rows(inputs, options), 0) < self.patience:
            return None
        return inputs, options | {"solver": "sequential", "backend": "fused"}

    def observe(self, layer: RecurrentLayer, inputs: Any, options: Any, output: Any) -> None:
        """Judge the pending solve if its counts are here, then start to copy those of this one."""
        info = layer.counts
        if not _is_open(layer, options) or info is None or layer.choice is None:
            return
        device = type_of(info.device)
        if device.capturing():
            return
        if self.pending is not None:
            rows, segments, receive = self.pending
            counts = receive()
            if counts is None:
                return
            self.pending = None
            self.judge(layer, rows, int(counts[:, 0].max()), segments)
        segments = self.segments_of(layer.choice)
        if segments > 1:
            self.pending = _rows(inputs, options), segments, device.send(info.detach())

    def segments_of(self, choice: Choice) -> int:
        """Return the segments of a choice, cached: a plan queries the device."""
        if choice not in self.segments:
            split = choice.split()
            self.segments[choice] = 1 if split is None else split.segments
        return self.segments[choice]

    def judge(self, layer: RecurrentLayer, rows: Rows, sweeps: int, segments: int) -> None:
        """Count a solve of (newton, fused)."""
        self.slow[rows] = self.slow.get(rows, 0) + 1 if SWEEP_COST * sweeps >= segments else 0
        if self.slow[rows] == self.patience:
            _LOG.warning(
                "%s (%s) runs at (B, T) = %s by the loop from now on: %d solves in a row took so "
                "many sweeps that the loop is faster, at last %d for %d segments",
                self.name or "the layer",
                type(unwrap(layer.cell)).__name__,
                rows,
                self.patience,
                sweeps,
                segments,
            )


def _is_open(layer: RecurrentLayer, options: Mapping[str, Any]) -> bool:
    """Return True if `auto` may choose (newton, fused) or the loop, in eager code."""
    if torch.compiler.is_compiling() or are_functorch_transforms_active():
        return False
    pair = layer.requested_pair(*(options.get(name) for name in ("solver", "backend", "mode")))
    return pair in (("auto", "auto"), ("auto", "fused")) and split_of_context() == NO_REQUEST


def _rows(inputs: Any, options: Mapping[str, Any]) -> Rows:
    x = inputs[0] if inputs else options["x"]
    return tuple(x.shape[:2])
