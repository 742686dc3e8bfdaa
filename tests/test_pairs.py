"""The pairs that errors, `explain` and `autotune` name can run: each has been tried."""

import re

import pytest
import torch
from table import CELLS, DTYPES, dtype_name

import pararnn
from pararnn import Param
from pararnn.codegen import cuda
from pararnn.codegen import elementwise_cuda as elementwise
from pararnn.engines.table import PAIRS, pairs_for
from pararnn.program.program import program_of

pytestmark = pytest.mark.two_dtypes


def make_class(step, count=1, **attributes):
    states = tuple(f"s{i}" for i in range(count))
    body = {"states": states, "gates": ("x",), "params": {"a": Param(std=0.1)}, "step": step}
    return type("Made", (pararnn.Cell,), {**body, **attributes})


def chain(self, state, gate, param):
    first = torch.tanh(gate.x + param.a * state[-1])
    return (first, *(0.5 * state[i + 1] + 0.1 * state[i] for i in range(len(state) - 1)))


def one(function, **attributes):
    return make_class(lambda self, s, g, p: function(s[0], g.x, p.a), **attributes)


UNUSUAL = {
    "five states": make_class(chain, 5),
    "nine states": make_class(chain, 9, structure="block_diagonal"),
    "unspelled": one(lambda h, x, a: torch.erfinv(0.5 * torch.tanh(a * h + x))),
    "a constant condition": one(lambda h, x, a: torch.xlogy(torch.tanh(a * h), 1 + x * x)),
    "nothing of the state": one(lambda h, x, a: x),
    "nothing of the input": one(lambda h, x, a: torch.zeros_like(h)),
    "branching": one(lambda h, x, a: a * h + x if h.sum() > 0 else x, structure="sequential"),
    "mixing": one(lambda h, x, a: torch.tanh(a * h.roll(1, -1) + x), structure="dense"),
}


def runs(cell, pair, device="cpu"):
    """Both passes, with resets."""
    dtype = next(cell.parameters()).dtype
    gates = torch.randn(2, 20, len(cell.gates), 6, dtype=dtype, device=device, requires_grad=True)
    fields = {name: torch.rand(2, 20, dtype=dtype, device=device) for name in cell.fields}
    reset = torch.zeros(2, 20, dtype=torch.bool, device=device)
    options = {"solver": pair[0], "backend": pair[1]}
    states, final = pararnn.solve(cell, gates, fields=fields, reset=reset, **options)
    parts = [states, final] if len(cell.states) == 1 else [*states, *final]
    total = sum(part.float().sum() for part in parts)
    if total.requires_grad:
        total.backward()
    assert total.isfinite()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.one_in(5)
def test_pairs_that_can_run_a_cell_do(name, dtype):
    cell = pararnn.CELLS[name](6, dtype=dtype)
    for pair in pairs_for(program_of(cell), dtype, torch.device("cpu")):
        runs(cell, pair)


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.one_in(7)
def test_pairs_that_can_run_an_unusual_cell_do_and_others_say_which_can(name):
    cell = UNUSUAL[name](6)
    able = pairs_for(program_of(cell), torch.float32, torch.device("cpu"))
    for pair in PAIRS:
        if pair in able:
            runs(cell, pair)
            continue
        with pytest.raises(pararnn.EngineError) as caught:
            runs(cell, pair)
        names = re.findall(r"\((\w+), (\w+)\)", str(caught.value).partition("Pairs that can")[2])
        assert names == able


def test_every_pair_runs_where_there_are_no_numbers():
    cell = pararnn.GRUCell(6, device="meta")
    assert pairs_for(program_of(cell), torch.float32, torch.device("meta")) == [*PAIRS]


@pytest.mark.parametrize("solver", elementwise.SOLVERS)
@pytest.mark.parametrize("count", [30, 45, 50, 90])
def test_cuda_kernels_that_can_be_built_fit_whatever_gradients_arrive(count, solver, monkeypatch):
    """With many gates the ring of some variants fits, and that of others does not."""
    cell = make_class(chain, 8, gates=("x", *(f"g{i}" for i in range(count - 1))))(6)
    program, dtype = program_of(cell), torch.float32
    monkeypatch.setattr(cuda, "kernels_of", lambda *_: {})
    if count >= 50:
        with pytest.raises(pararnn.EngineError, match="Use fewer gates or states"):
            cuda.check_buildable(program, dtype, (9, 0), solver)
        return
    cuda.check_buildable(program, dtype, (9, 0), solver)
    for variant in elementwise.usual_variants(program, dtype, 1024, 1024, solver=solver):
        all_arrive = (variant.direction == "backward",) * 8
        elementwise.ring_of(program, variant._replace(arriving=all_arrive))
