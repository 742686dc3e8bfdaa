"""The tables that drive the property tests.

Cell x (solver, backend) x dtype x length x variant in full, and of what else there is rows that
cover it: see `Row`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import mixing_cells
import pytest
import torch
from torch import Tensor

import pararnn
from pararnn import Cell
from pararnn.check.contract import SolveChecks, check_solve, check_solves
from pararnn.codegen.compiler import compiler_command

HANGS_AFTER = 15 * 60
"""Seconds after which a process hangs, however busy the machine: no bound on how long it takes."""


def there(missing: Exception | None) -> bool:
    """True if nothing is missing without which tests are skipped.

    RuntimeError where PARARNN_REQUIRE_KERNELS says that none may be.
    """
    if missing is not None and os.environ.get("PARARNN_REQUIRE_KERNELS", "0") != "0":
        raise RuntimeError(
            f"PARARNN_REQUIRE_KERNELS is set, and kernels cannot be built here: {missing}"
        )
    return missing is None


def has_compiler() -> bool:
    """Return True if this machine can build kernels."""
    try:
        compiler_command()
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
MIXING = {cell.__name__: cell for cell in (*mixing_cells.CELLS, mixing_cells.Dense)}
"""Cells with products inside heads, by name: of the tests, the library has its own."""
COUPLED = ["dense-gru", *MIXING]
FAST_PAIRS = [pair for pair in PAIRS if pair == FUSED]
"""Pairs that solve the tests' mixing cells in every test; others do as for `dense-gru`."""
LONGEST_COUPLED = 256
"""Steps of the longest row for cells whose channels mix: their oracle goes step by step."""
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, 2, 3, 17, 100, 256]
VARIANTS = ["plain", "initial", "resets", "packed", "reverse"]
BATCH, CHANNELS = 2, 4


class Case(NamedTuple):
    """Inputs of one solve; `options` also holds those of the check."""

    cell: Cell
    gates: Tensor
    initial: tuple[Tensor, ...] | None
    options: dict[str, Any]


def with_checks(
    case: Case, pairs: list[tuple[str, str]], segments: int, burn_in: int = 3
) -> list[SolveChecks]:
    """Solves by all pairs, held against the contract; (newton, fused) cuts time as said."""
    with pararnn.using(segments=segments, burn_in=burn_in):
        return check_solves(case.cell, case.gates, case.initial, pairs=pairs, **case.options)


def passed(result: SolveChecks) -> SolveChecks:
    """Return a result whose claims all hold; AssertionError for another."""
    assert result.passed, (result.pair, [check for check in result.checks if not check.passed])
    return result


def check_contract(*args: Any, **options: Any) -> SolveChecks:
    """Hold the solve of a cell on gates against the contract."""
    return passed(check_solve(*args, **options))


def check_case(case: Case, **options: Any) -> SolveChecks:
    """Hold the solve of a case, with these options too, against the contract."""
    return check_contract(case.cell, case.gates, case.initial, **{**case.options, **options})


def broken(results: list[SolveChecks]) -> list[tuple[tuple[str, str], Any]]:
    """Claims that do not hold, and what Newton on the whole sequence left to the loop."""
    wrong: list[tuple[tuple[str, str], Any]] = []
    for result in results:
        wrong += [(result.pair, check) for check in result.checks if not check.passed]
        if result.mended and result.pair != NEWTON_FUSED:
            wrong.append((result.pair, f"{result.mended} columns mended"))
    return wrong


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


@cache
def in_units(cell_class: type[Cell]) -> type[Cell]:
    """The cell with each state, and its gates, in a unit of its own: fields, the gates' is last."""

    class InUnits(cell_class):  # type: ignore[misc, valid-type]
        fields = (*cell_class.fields, *(f"unit_{s}" for s in cell_class.states), "unit_gates")

        def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, ...]:
            # By place, not by name, so that what it reads can be written out and its trace kept.
            count, many = len(self.gates), len(self.states)
            plain = (s / u for s, u in zip(state, gate[-1 - many : -1], strict=True))
            inputs = type(gate)(*(x / gate[-1] for x in gate[:count]), *gate[count:])
            new = super().step(type(state)(*plain), inputs, param)
            new = (new,) if isinstance(new, Tensor) else new
            return tuple(s * u for s, u in zip(new, gate[-1 - many : -1], strict=True))

    return InUnits


CELLS = {
    name: pararnn.CELLS[name]
    for name in ("gru", "lstm", "elman", "lem", "slstm", "lrc", "dense-gru")
}
"""Cells of the zoo that meet all conditions: one to three states, a field, a dense step.

test_zoo.py has all of them.
"""
BY_HEADS = [
    name
    for name, cell in pararnn.CELLS.items()
    if any(param.kind.by_heads for param in cell.params.values())
]
"""Cells of the zoo that mix channels inside heads: see test_head_cells.py."""
ELEMENTWISE = [name for name in CELLS if name not in COUPLED]


def cell_of(name: str) -> type[Cell]:
    """Return a cell of the library, or one of the tests that mixes channels."""
    return MIXING.get(name) or pararnn.CELLS[name]


def pairs_of(name: str, pairs: list[tuple[str, str]] = PAIRS) -> list[tuple[str, str]]:
    """The pairs that take a cell."""
    return [pair for pair in pairs if name not in COUPLED or pair not in (SCAN, NEWTON_FUSED)]


ROWS = [
    pytest.param(name, pair, id="-".join((name, *pair)))
    for name in (*CELLS, *MIXING)
    for pair in (pairs_of(name) if name in CELLS else FAST_PAIRS)
]


class Row(NamedTuple):
    """Conditions of one solve; what a row does not name is as usual.

    `unit`: of the gates and of the first state; `others`: of the other states.
    `shift`: how much more the first gate keeps. `weights`: factor of the recurrent parameters.
    `once`: each cell meets the row in one dtype, the first cell in this one and the others in the
    next, in turn; None: in all.
    """

    length: int
    batch: int = BATCH
    channels: int = CHANNELS
    heads: int = 1
    bias: bool = False
    variant: str = "initial"
    initial: bool = True
    loss: float = 1.0
    unit: float = 1.0
    others: float = 1.0
    shift: float = 0.0
    weights: float = 1.0
    segments: int = 5
    once: torch.dtype | None = None


SLOW, TINY, HUGE = {"shift": 4.0}, {"unit": 1e-12, "others": 1e-12}, {"unit": 1e12, "others": 1e-12}
COVERING = [
    Row(24, channels=33, bias=True, loss=1e-9, variant="reverse", **SLOW),
    Row(24, channels=66, heads=3, loss=1e9, variant="packed", initial=False),
    Row(13, channels=65, heads=5, bias=True, loss=1e-6, segments=2),
    Row(150, channels=33, loss=1e6, variant="packed", segments=7, **SLOW),
    Row(40, channels=5, loss=1e-9, variant="resets", initial=False, once=torch.float32, **TINY),
    Row(40, heads=2, bias=True, loss=1e9, once=torch.float32, **SLOW, **HUGE),
    Row(1024, channels=33, loss=1e-9, initial=False, segments=16, once=torch.float64, **SLOW),
]
F64, F32, BF16, F16 = DTYPES
MIXING_COVERING = [
    Row(0, batch=3, channels=32, heads=2, variant="resets", once=F64),
    Row(1, batch=5, channels=48, heads=3, bias=True, once=F16),
    Row(1, channels=32, heads=2, variant="packed", once=F32),
    Row(2, batch=17, channels=20, heads=2, loss=1e-9, once=BF16),
    Row(37, batch=3, channels=16, variant="plain", once=F32),
    Row(37, channels=64, heads=4, variant="resets", bias=True, loss=1e9, once=F16),
    Row(37, channels=66, heads=2, variant="packed", loss=1e-6, once=BF16),
    Row(37, batch=5, channels=24, heads=3, variant="reverse", bias=True, once=F64),
    Row(70, batch=1, channels=96, heads=6, initial=False, once=BF16, **SLOW),
    Row(64, channels=33, heads=11, variant="packed", weights=2.0, once=F32),
    Row(24, batch=2, channels=32, heads=2, variant="resets", weights=3.0, once=F64),
    Row(40, batch=3, channels=10, heads=2, loss=1e-9, variant="resets", once=F16, **TINY),
    Row(40, channels=8, heads=2, bias=True, loss=1e9, variant="reverse", once=F32, **SLOW, **HUGE),
    Row(9, batch=3, channels=256, heads=2, variant="resets", once=F64),
    Row(5, batch=19, channels=512, heads=2, once=F32),
    Row(4, batch=2, channels=512, once=BF16),
]
"""Rows that mixing cells meet, each in one dtype: heads of 2 to 512 channels."""
FORGETS = {"lstm": -1.0, "HeadLSTM": -1.0}  # where it is the larger first gate that forgets less


def covering() -> list[Any]:
    """(row, cell, dtype) of every solve of the rows, for parametrize."""
    return _solves(COVERING, CELLS)


def mixing_covering() -> list[Any]:
    """(row, cell, dtype) of every solve of the rows of mixing cells, for parametrize."""
    return _solves(MIXING_COVERING, MIXING)


def _solves(rows: Sequence[Row], names: Iterable[str]) -> list[Any]:
    solves = []
    for row in rows:
        for n, name in enumerate(names):
            turn = DTYPES.index(row.once) + n if row.once else 0
            for dtype in [DTYPES[turn % len(DTYPES)]] if row.once else DTYPES:
                label = f"{row_name(row)}-{name}-{dtype_name(dtype)}"
                solves.append(pytest.param(row, name, dtype, id=label))
    return solves


def row_name(row: Row) -> str:
    """Return what is unusual in a row."""
    usual = Row(0)._replace(once=row.once)._asdict()
    return ",".join(f"{k}={v}" for k, v in row._asdict().items() if v != usual[k])


def case_of(row: Row, name: str, dtype: torch.dtype, device: str = "cpu") -> Case:
    """A row's inputs for a cell; numbers of float16 have less room for scales."""
    loss, unit, others = row.loss, row.unit, row.others
    if dtype == torch.float16:
        loss, unit, others = (min(max(scale, 1e-3), 1e3) for scale in (loss, unit, others))
    usual = cell_of(name)
    cell_class = usual if unit == 1.0 else in_units(usual)
    sizes = {"channels": row.channels, "num_heads": row.heads, "device": device}
    sizes["batch"] = row.batch
    length = min(row.length, LONGEST_COUPLED) if name in COUPLED else row.length
    case = make_case(cell_class, dtype, length, row.variant, **sizes)
    case.gates[:, :, 0] -= FORGETS.get(name, 1.0) * row.shift
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.mul_(row.weights)
    gates, initial, options = case.gates * unit, case.initial, {**case.options, "loss_scale": loss}
    if row.heads > 1:
        gates = by_head(gates, row.heads)
    if unit != 1.0:
        units = [unit, *[others] * (len(usual.states) - 1)]
        names = cell_class.fields[len(usual.fields) :]
        options["fields"] = {**options["fields"], **dict(zip(names, [*units, unit], strict=True))}
        initial = tuple(h * u for h, u in zip(initial, units, strict=True))
    if row.bias:
        noise = torch.randn(gates.shape[2], row.channels, device=device)
        options["bias"] = noise.to(dtype) * unit
    return Case(case.cell, gates, initial if row.initial else None, options)


def by_head(gates: Tensor, heads: int) -> Tensor:
    """Gates (B, T, G, H, D/H) as a headwise projection leaves them: its heads outermost."""
    split = gates.unflatten(3, (heads, -1))
    return split.permute(3, 0, 1, 2, 4).contiguous().permute(1, 2, 3, 0, 4)


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


class Latch(pararnn.Cell):
    """A channel that never forgets its sign, and a gate that is added as it is."""

    states, gates = ("h",), ("x", "b")

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return torch.tanh(3.0 * state.h + gate.x) + gate.b


class MatrixLatch(pararnn.Cell):
    """`Latch`, whose entries are those of a matrix."""

    states: Any = {"S": ("K", "V")}
    gates: Any = {"x": ("K", "V"), "b": ""}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return torch.tanh(3.0 * state.S + gate.x) + gate.b[..., None, None]

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return state.S.mean(-2)


class Spike(Latch):
    """A latch that is far from zero, near which it has huge states: a guess meets them."""

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return super().step(state, gate, param) + 1e8 * torch.relu(0.1 - state.h.abs())


LATCHES = {"Latch": Latch, "MatrixLatch": MatrixLatch, "Spike": Spike}
PEAKS = {
    "last": (slice(None), slice(-1, None)),
    "late, of one row": (slice(1), slice(-20, -19)),
    "before a reset": (slice(None), slice(70, 71)),
}
"""Rows and steps whose gates are a million where states are 1."""


def peak_case(name: str, peak: str, dtype: torch.dtype, steps: int, device: str = "cpu") -> Case:
    """Gates of which few steps are large; every other one is small."""
    torch.manual_seed(0)
    matrix = name == "MatrixLatch"
    cell = LATCHES[name](
        8, device=device, dtype=dtype, **({"num_heads": 2, "K": 3} if matrix else {})
    )
    size = (2, cell.head_sizes.width) if matrix else (2, 8)
    gates = 0.3 * torch.randn(BATCH, steps, *size)
    added = gates[..., -1] if matrix else gates[:, :, 1]
    added.zero_()
    added[PEAKS[peak]] = 1e4 if dtype == torch.float16 else 1e6
    options: dict[str, Any] = {}
    initial = None
    if name == "Spike":
        initial = (-torch.ones(BATCH, 8, device=device, dtype=dtype),)
    elif peak == "before a reset":
        options["reset"] = torch.zeros(BATCH, steps, dtype=torch.bool, device=device)
        options["reset"][:, 80] = True
    return Case(cell, gates.to(device, dtype), initial, options)
