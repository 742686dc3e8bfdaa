"""Cost of each engine and its agreement with the loop, on a model's own inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pararnn.engines.table import choose, pairs_for
from pararnn.lm import LanguageModel, bits_per_byte, set_solver
from pararnn.program.program import program_of
from pararnn.tune.timing import median_seconds

Pair = tuple[str, str]

LOOP: Pair = ("sequential", "torch")
"""The pair that the others are held against."""


@dataclass(frozen=True)
class Timing:
    """The median seconds of a model's pass over windows (B, T + 1) by one (solver, backend) pair.

    forward: without gradients. forward_backward: loss and the gradients of all parameters.
    sweeps: the most Newton updates that a layer made; 0 for the sequential solver. auto: whether
    "auto" takes this pair at this shape.
    """

    solver: str
    backend: str
    batch: int
    length: int
    forward: float
    forward_backward: float
    sweeps: int
    auto: bool


@dataclass(frozen=True)
class Agreement:
    """Largest differences between a pair and the loop on one batch.

    logits: max |difference|. gradients: max over parameters of max |difference| / max |gradient|.
    """

    logits: float
    gradients: float


@contextmanager
def solver_set_to(model: LanguageModel, solver: str, backend: str = "auto") -> Iterator[None]:
    """Run a block with every layer on a pair, then put the model's own back."""
    set_solver(model, solver, backend)
    try:
        yield
    finally:
        set_solver(model, model.config.solver, model.config.backend)


def pairs_of(model: LanguageModel) -> list[Pair]:
    """Return the pairs that run the model's cell on its device, the loop last."""
    weight = model.lm_head.weight
    program = program_of(model.recurrent_layers()[0].cell)
    pairs = pairs_for(program, weight.dtype, weight.device)
    return sorted(pairs, key=lambda pair: pair == LOOP)


def time_pair(model: LanguageModel, windows: Tensor, pair: Pair, repeats: int) -> Timing:
    """Time a pair on windows (B, T + 1) on the model's device: the median of `repeats`."""

    @torch.no_grad()
    def forward() -> None:
        model(windows[:, :-1])

    with solver_set_to(model, *pair):
        seconds = median_seconds(forward, windows.device, repeats)
        both = median_seconds(lambda: _gradients(model, windows), windows.device, repeats)
    infos = [layer.last_solve for layer in model.recurrent_layers()]
    sweeps = max(int(info.sweeps.max()) for info in infos if info is not None)
    batch, length = len(windows), windows.shape[1] - 1
    auto = pair == auto_pair(model, batch, length)
    return Timing(*pair, batch, length, seconds, both, sweeps, auto)


def auto_pair(model: LanguageModel, batch: int, length: int) -> Pair:
    """Return the pair that "auto" takes for the model's layers at (B, T) on its device."""
    layer, weight = model.recurrent_layers()[0], model.lm_head.weight
    size = (batch, length, layer.hidden_size)
    program = program_of(layer.cell)
    return choose(program, size, weight.dtype, weight.device, "auto", "auto").pair


def compare_to_loop(model: LanguageModel, windows: Tensor, pair: Pair) -> Agreement:
    """Measure a pair's distance to the loop on windows (B, T + 1) on the model's device."""
    results = []
    for each in (pair, LOOP):
        with solver_set_to(model, *each):
            results.append(_gradients(model, windows))
    (logits, grads), (loop_logits, loop_grads) = results
    differences = [
        float((grad - loop).abs().max() / loop.abs().max().clamp(min=torch.finfo(loop.dtype).tiny))
        for grad, loop in zip(grads, loop_grads, strict=True)
    ]
    return Agreement(float((logits - loop_logits).abs().max()), max(differences))


def _gradients(model: LanguageModel, windows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits, and the gradients of all parameters."""
    logits = model(windows[:, :-1])
    loss = bits_per_byte(logits, windows[:, 1:])
    return logits.detach(), torch.autograd.grad(loss, list(model.parameters()))
