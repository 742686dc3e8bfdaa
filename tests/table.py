"""The table that drives the property tests: cell x (solver, backend) x dtype x length x variant."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pararnn
from pararnn import Cell
from pararnn.codegen.compiler import find_compiler

HANGS_AFTER = 15 * 60
"""Seconds after which a process hangs, however busy the machine: no bound on how long it takes."""


def there(missing: Exception | None) -> bool:
    """Whether nothing is missing that tests are skipped without.

    RuntimeError where PARARNN_REQUIRE_KERNELS says that none may be.
    """
    if missing is not None and os.environ.get("PARARNN_REQUIRE_KERNELS", "0") != "0":
        raise RuntimeError(
            f"PARARNN_REQUIRE_KERNELS is set, and kernels cannot be built here: {missing}"
        )
    return missing is None


def has_compiler() -> bool:
    """Whether this machine can build kernels."""
    try:
        find_compiler()
    except pararnn.EngineError as error:
        return there(error)
    return there(None)


PLAIN, FUSED = ("sequential", "torch"), ("sequential", "fused")
SCAN, NEWTON_FUSED = ("newton", "scan"), ("newton", "fused")
KERNEL_PAIRS = [FUSED, SCAN, NEWTON_FUSED]
ALL_PAIRS = [PLAIN, ("newton", "torch"), *KERNEL_PAIRS]
PAIRS = [pair for pair in ALL_PAIRS if pair not in KERNEL_PAIRS or has_compiler()]  # on a CPU
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
OPS = [pair for pair in PAIRS if pair != PLAIN]  # those behind the operator
COUPLED = ["dense-gru"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, 2, 3, 17, 100, 1000]
VARIANTS = ["plain", "initial", "resets", "packed", "reverse"]
BATCH, CHANNELS = 2, 4


class Case(NamedTuple):
    """Inputs of one solve."""

    cell: Cell
    gates: Tensor
    initial: tuple[Tensor, ...] | None
    options: dict[str, Any]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_case(
    cell_class: type[Cell],
    dtype: torch.dtype,
    length: int,
    variant: str = "plain",
    *,
    batch: int = BATCH,
    channels: int = CHANNELS,
    seed: int = 0,
    device: str = "cpu",
    **config: Any,
) -> Case:
    """Random inputs for a cell; `variant` adds initial states, resets, packing or direction."""
    torch.manual_seed(seed)
    if variant == "packed":
        batch = 1
    cell = cell_class(channels, device=device, dtype=dtype, **config)
    gates = torch.randn(batch, length, len(cell.gates), channels).to(device, dtype)
    options: dict[str, Any] = {}
    if cell.fields:
        options["fields"] = {
            name: torch.rand(batch, length).to(device, dtype) for name in cell.fields
        }
    sequences = batch
    if variant == "packed":
        cuts = sorted(torch.randint(0, length + 1, (3,)).tolist())
        options["cu_seqlens"] = torch.tensor([0, *cuts], device=device)
        sequences = 3
    initial = None
    if variant != "plain":
        initial = tuple(torch.randn(sequences, channels).to(device, dtype) for _ in cell.states)
    if variant in ("resets", "packed", "reverse"):
        options["reset"] = torch.rand(batch, length).to(device) < 0.1
    if variant == "reverse":
        options["reverse"] = True
    return Case(cell, gates, initial, options)


def with_latches(case: Case, share: float, begin: int = 0) -> Case:
    """Some channels never forget: their first gate, of updates, is shut from step `begin` on."""
    gates = case.gates.clone()
    generator = torch.Generator().manual_seed(1)
    shut = torch.rand(gates.shape[-1], generator=generator) < share
    gates[:, begin:, 0, shut.to(gates.device)] -= 30.0
    return case._replace(gates=gates)


CELLS = list(pararnn.CELLS.items())


def pairs_of(name: str, pairs: list[tuple[str, str]] = PAIRS) -> list[tuple[str, str]]:
    """The pairs that take a cell."""
    return [pair for pair in pairs if name not in COUPLED or pair not in KERNEL_PAIRS]


ROWS = [
    pytest.param(name, pair, id="-".join((name, *pair)))
    for name in pararnn.CELLS
    for pair in pairs_of(name)
]


class Sum(pararnn.Cell):
    """Every contribution to the gradient of `a` is 1: a plain float32 sum would stop at 2^24."""

    states = ("h",)
    gates = ("x",)
    params = {"a": pararnn.Param(std=0.0)}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return gate.x + param.a + 0.0 * state.h


def gate_layouts(by_head: Tensor) -> dict[str, Tensor]:
    """The same gates (B, T, G, H, D/H), as a headwise projection leaves them, in other layouts."""
    return {
        "as the projection leaves it": by_head,
        "contiguous": by_head.contiguous(),
        "flat": by_head.flatten(3),
        "time first": by_head.transpose(0, 1).contiguous().transpose(0, 1),
        "channels not adjacent": by_head.transpose(3, 4).contiguous().transpose(3, 4),
        "expanded": by_head[:1].expand(2, -1, -1, -1, -1),
    }
