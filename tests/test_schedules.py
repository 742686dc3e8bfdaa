"""Engines of generated kernels pick a schedule out of a table, by the program alone."""

import pytest
import torch
from emulated import gpu
from norm_cells import NormLSTM
from table import needs_compiler

import pararnn
from pararnn.engines import table
from pararnn.engines.fused import cpu, cuda
from pararnn.engines.fused.elementwise_cpu import ElementwiseCpu
from pararnn.engines.fused.engine import FusedEngine
from pararnn.program.program import program_of


class Branch(pararnn.Cell):
    """A cell whose step may read values."""

    states, gates = ("h",), ("x",)
    structure = "sequential"

    def step(self, state, gate, param):
        return torch.tanh(gate.x + state.h)


CELLS = {
    "elementwise": pararnn.GRUCell(8),
    "products inside heads": pararnn.zoo.HeadLSTMCell(8, num_heads=2),
    "more than products": NormLSTM(8),
    "matrices, coupled": pararnn.zoo.GatedDeltaCell(8, num_heads=2, K=4),
    "matrices, independent": pararnn.zoo.MLSTMCell(8, num_heads=2, K=4),
    "products of all channels": pararnn.DenseGRUCell(8),
    "no kernels": Branch(8),
}
TABLES = {"cpu": cpu.SCHEDULES, "gpu": cuda.schedules_of(gpu())}


@pytest.mark.parametrize("target", TABLES)
@pytest.mark.parametrize("name", CELLS)
def test_one_schedule_takes_a_program_that_has_kernels(name, target):
    program = program_of(CELLS[name])
    for solver, schedules in TABLES[target].items():
        takers = [schedule for schedule in schedules if schedule.takes(program)]
        engine = FusedEngine(solver, schedules)
        assert len(takers) <= 1
        assert [engine.find(program)] == (takers or [None])
        if engine.why_not(program) is None:
            assert takers


def test_the_reason_names_the_solver_or_the_step():
    sequential, newton = (FusedEngine(*entry) for entry in cpu.SCHEDULES.items())
    for name, reason in {
        "products inside heads": "'newton' has no kernels for steps that mix channels",
        "more than products": "'newton' has no kernels for steps whose entries couple",
        "no kernels": "Branch is sequential-only: it declares",
    }.items():
        assert reason in newton.why_not(program_of(CELLS[name])), name
    assert sequential.why_not(program_of(CELLS["more than products"])) is None
    assert sequential.why_not(program_of(CELLS["no kernels"]))


@needs_compiler
def test_a_schedule_is_added_by_a_line(monkeypatch):
    """It runs what it takes, before those that follow; they run all others."""
    calls = []

    class Counted(ElementwiseCpu):
        def takes(self, program):
            return super().takes(program) and program.num_states == 2

        def forward(self, program, args):
            calls.append(program.cell_name)
            return super().forward(program, args)

    schedules = (Counted("sequential"), *cpu.SCHEDULES["sequential"])
    engine = FusedEngine("sequential", schedules)
    monkeypatch.setitem(table.TABLE, ("sequential", "fused", "cpu"), engine)
    for cell in (pararnn.GRUCell(8), pararnn.LSTMCell(8)):
        gates = torch.randn(2, 9, len(cell.gates), 8)
        ours, truth = (
            pararnn.solve(cell, gates, solver="sequential", backend=backend)[0]
            for backend in ("fused", "torch")
        )
        torch.testing.assert_close(ours, truth)
    assert calls == ["LSTMCell"]
