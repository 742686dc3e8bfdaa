"""Subjects of the paper's figures: reductions, and cells applied to a sequence."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from cpu import output_of, pair, python_loop
from fixed_newton import UPDATES, fixed_newton
from kernels import LINEAR_SCANS
from mamba_peer import SimplifiedMamba, reduction
from torch import Tensor, nn

import pararnn
from pararnn.layers import RecurrentLayer
from pararnn.program.program import program_of
from pararnn.program.structure import BlockDiagonal, Diagonal
from pararnn.solvers.affine_scan import affine_scan

NO_LIMIT = 2**30
COMPILED_LOOP = 64
"""Steps to which a loop is compiled as a whole: it is unrolled, and compiling 512 steps takes
minutes."""
TORCH_LAYERS = {"gru": nn.GRU, "lstm": nn.LSTM}
LOOP = "loop, compiled step"
WHOLE = "loop, compiled as a whole"
EAGER = "loop, eager"
FIXED = f"newton, {UPDATES} updates"
MAMBA = "Mamba's selective scan"
SIMPLIFIED = "simplified Mamba, compiled"
SCAN_KERNEL = "scan kernel"
TORCH_SCAN = "PyTorch, compiled"


class Way(NamedTuple):
    """Something to time. `make` gives the call, anew for each length.

    graph: whether it never waits for the host; longest: the length to which it is tried; peer:
    whether it may be missing or fail; weights: what a backward pass has gradients of; result: a
    reduction's; reference: what a solve's result is compared with.
    """

    name: str
    make: Callable[[], Callable[..., Any]] = lambda: lambda: None
    graph: bool = False
    longest: int = NO_LIMIT
    peer: bool = False
    weights: tuple[Tensor, ...] = ()
    result: Tensor | None = None
    reference: Callable[[Tensor], Tensor] | None = None


def reduction_ways(what: str, length: int, channels: int, device: torch.device) -> Iterator[Way]:
    """Yield the linear recurrence of one row, h = a h + b: a diagonal or 2 x 2 blocks."""
    states = 1 if what == "diagonal" else 2
    block = () if states == 1 else (states, states)
    a = torch.rand(1, length, *block, channels, device=device).mul_(0.9 / states).clamp_(min=1e-3)
    b = torch.randn(1, length, *block[:1], channels, device=device)
    kernel = partial(pararnn.scan, a, b, backend="fused")
    result = kernel()
    yield Way(SCAN_KERNEL, lambda: kernel, graph=True, result=result)
    yield Way(TORCH_SCAN, partial(_compiled_scan, a, b), graph=True, result=result)
    if states > 1:
        return
    decay, values = (t.mT.contiguous() for t in (a, b))  # time last, as peers have it
    last = result.mT.contiguous()
    yield Way(MAMBA, partial(reduction, decay, values), graph=True, peer=True, result=last)
    for name, module in LINEAR_SCANS.items():
        yield Way(name, partial(_peer_scan, module, decay, values), True, peer=True, result=last)


def _compiled_scan(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """Return the library's scan in PyTorch, compiled."""
    states = 1 if b.ndim == 3 else b.shape[2]
    structure = Diagonal(1) if states == 1 else BlockDiagonal(states)
    jacobian, rhs = (a.unsqueeze(2), b.unsqueeze(2)) if states == 1 else (a, b)
    scan = torch.compile(partial(affine_scan, structure), fullgraph=True, dynamic=False)
    return lambda: scan(jacobian[:, 1:], rhs).view(b.shape)


def _peer_scan(module: str, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    return partial(importlib.import_module(module).scan, a, b)


Solve = Callable[[Tensor], Tensor]


class Kind(NamedTuple):
    """Way to apply a cell: from the cell, a solve of gates with biases; see `Way`."""

    solve: Callable[[pararnn.Cell], Solve]
    graph: bool = False
    longest: int = NO_LIMIT


def compiled_loop(cell: pararnn.Cell) -> Solve:
    """Return the paper's baseline: one step compiled on tensors (B, D), called in a Python loop."""
    program = program_of(cell)

    def step(
        states: tuple[Tensor, ...], inputs: tuple[Tensor, ...], params: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        return program.step(states, inputs, params)

    compiled_step = torch.compile(step, fullgraph=True)

    def run(gates: Tensor) -> Tensor:
        params = cell.lifted_params(gates.dtype)
        zeros = gates.new_zeros(program.num_states, len(gates), cell.hidden_size)
        states, out = zeros.unbind(0), []
        # Steps in one piece each: their strides, which code is compiled for, do not hold T then.
        for inputs in gates.permute(1, 2, 0, 3).contiguous().unbind(0):
            states = compiled_step(states, inputs.unbind(0), params)
            out.append(states[0])
        return torch.stack(out, 1)

    return run


def _whole_loop(cell: pararnn.Cell) -> Solve:
    return torch.compile(python_loop(cell), fullgraph=True, dynamic=False)


KINDS = {
    "sequential, fused": Kind(partial(pair, solver="sequential", backend="fused"), graph=True),
    "newton, fused": Kind(partial(pair, solver="newton", backend="fused"), graph=True),
    "newton, scan": Kind(partial(pair, solver="newton", backend="scan")),
    "newton, torch": Kind(partial(pair, solver="newton", backend="torch")),
    f"{FIXED}, scan": Kind(partial(fixed_newton, backend="scan"), graph=True),
    f"{FIXED}, torch, compiled": Kind(partial(fixed_newton, backend="torch"), graph=True),
    EAGER: Kind(python_loop),
    LOOP: Kind(compiled_loop, graph=True),
    WHOLE: Kind(_whole_loop, graph=True, longest=COMPILED_LOOP),
}
"""By name: the ways of applying a cell; kernels first, since what follows may take long."""


def solve_ways(name: str, channels: int, device: torch.device) -> list[Way]:
    """Return the ways to apply a cell to x (B, T, D), with projection; "mamba": the simplified.

    Weights are the same for all ways but torch.nn's, whose recurrence is dense.
    """
    if name == "mamba":
        return [_simplified_mamba(channels, device)]
    layer = RecurrentLayer(pararnn.CELLS[name], channels, channels, device=device)
    weights = tuple(layer.parameters())

    def with_projection(solve: Solve) -> Solve:
        return lambda x: solve(layer.proj(x) + layer.bias)

    right = with_projection(pair(layer.cell, "sequential", "auto"))
    ways = [
        Way(
            way,
            lambda kind=kind: with_projection(kind.solve(layer.cell)),  # type: ignore[misc]
            kind.graph,
            kind.longest,
            weights=weights,
            reference=right,
        )
        for way, kind in KINDS.items()
    ]
    return [*ways, _torch_layer(name, channels, device)]


def _torch_layer(name: str, channels: int, device: torch.device) -> Way:
    """torch.nn's dense layer of the same sizes: cuDNN on a GPU, which refuses long sequences."""
    layer = TORCH_LAYERS[name](channels, channels, batch_first=True, device=device)
    weights = tuple(layer.parameters())
    name = f"torch.nn.{name.upper()}"
    return Way(name, lambda: output_of(layer), peer=True, weights=weights)


def _simplified_mamba(channels: int, device: torch.device) -> Way:
    model = SimplifiedMamba(channels, device=device)
    weights = tuple(model.parameters())
    return Way(
        SIMPLIFIED,
        lambda: torch.compile(model, dynamic=False),
        graph=True,
        peer=True,
        weights=weights,
    )
