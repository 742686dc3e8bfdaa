"""A solver is chosen by the call, else by the context, else by the layer; `explain` says which."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from fake_newton import patch_engine
from user_cells import Cumulative

import pararnn
from pararnn.codegen import cpp
from pararnn.engines import newton_torch
from pararnn.engines import request as requests
from pararnn.engines.request import Request, resolve
from pararnn.engines.table import ANY_DEVICE, TABLE
from pararnn.layers import recurrent
from pararnn.solve import plan_solve


def _ran(layer, **call):
    """The pair that a call runs."""
    pairs = []

    def record(program, args, *pair):
        pairs.append(pair)
        return plan_solve(program, args, *pair)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "plan_solve", record)
        layer(torch.randn(2, 20, 4), **call)
    return pairs[0]


def test_precedence():
    layer = pararnn.ParaGRU(4, 6, solver="newton")
    assert _ran(layer) == ("newton", "auto")
    assert _ran(layer, solver="sequential", backend="torch") == ("sequential", "torch")
    with pararnn.using("sequential"):
        assert _ran(layer) == ("sequential", "auto")
        assert _ran(layer, solver="newton") == ("newton", "auto")
        with pararnn.using(backend="torch"):
            assert _ran(layer) == ("sequential", "torch")
        assert _ran(layer, mode="PARALLEL") == ("newton", "torch")
        assert _ran(layer, solver="auto") == ("auto", "auto")
    assert _ran(layer) == ("newton", "auto")


def test_a_context_ends_with_an_error_too():
    def fail():
        with pararnn.using("newton"):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert requests._OUTSIDE.innermost == requests.Context()


def _in_a_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_a_context_holds_in_its_own_thread():
    def pair_of_context():
        return resolve(Request(), Request())

    other = pararnn.using("sequential")
    with ThreadPoolExecutor(1) as pool:
        with pararnn.using("newton", "torch"):
            assert pool.submit(pair_of_context).result() == ("auto", "auto")
            pool.submit(other.__enter__).result()
            assert pair_of_context() == ("newton", "torch")
        assert pair_of_context() == ("auto", "auto")  # the first to enter is the first to leave
        assert pool.submit(pair_of_context).result() == ("sequential", "auto")
        pool.submit(other.__exit__, None, None, None).result()
        assert pool.submit(pair_of_context).result() == ("auto", "auto")
    assert requests._OUTSIDE.innermost == requests.Context()


@pytest.mark.thorough
def test_a_context_holds_in_its_own_task(operators):
    """In threads that a task goes on in, too; and compiled code looks at the task's own."""
    program = torch.compile(pararnn.ParaGRU(4, 6), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 4)

    async def task(solver, steps, ran):
        with pararnn.using(solver, "torch"):
            program(x)
            for _ in range(steps):
                await asyncio.sleep(0)
                ran.add(resolve(Request(), Request()))
                ran.add(await asyncio.to_thread(resolve, Request(), Request()))
                operators.clear()
                program(x)
                assert operators == ([] if solver == "sequential" else [(solver, "torch")])
        return ran

    async def both():
        return await asyncio.gather(task("sequential", 2, set()), task("newton", 4, set()))

    assert asyncio.run(both()) == [{("sequential", "torch")}, {("newton", "torch")}]
    assert resolve(Request(), Request()) == ("auto", "auto")


def test_a_backward_pass_in_another_thread_stays_with_its_forward_pass():
    ran = []
    backward = newton_torch.ENGINE.backward

    def record(*args):
        ran.append("newton")
        return backward(*args)

    gates = torch.randn(2, 20, 3, 4, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        recording = patch_engine(newton_torch.ENGINE, backward=record)
        patch.setitem(TABLE, ("newton", "torch", ANY_DEVICE), recording)
        with pararnn.using("newton", "torch"):
            states, _ = pararnn.solve(pararnn.GRUCell(4), gates)
        with pararnn.using("sequential", "torch"):
            _in_a_thread(states.sum().backward)
    assert ran == ["newton"]


def test_solve_follows_the_context():
    cell, gates = pararnn.GRUCell(4), torch.randn(2, 80, 3, 4)
    pairs = []
    real = pararnn.engines.table.choose

    def record(program, size, dtype, device, *pair_and_heads):
        pairs.append(pair_and_heads[:2])
        return real(program, size, dtype, device, *pair_and_heads)

    with pytest.MonkeyPatch.context() as patch, pararnn.using("newton", "torch"):
        patch.setattr(sys.modules["pararnn.solve"], "choose", record)
        pararnn.solve(cell, gates)
        pararnn.solve(cell, gates, solver="sequential")
    assert pairs == [("newton", "torch"), ("sequential", "torch")]


def test_decoding_is_sequential_in_every_context():
    layer = pararnn.ParaGRU(4, 6, mode="PARALLEL")
    with pararnn.using("newton", "torch"):
        y, _ = layer.step(torch.randn(2, 4))
    assert y.shape == (2, 6)
    assert not layer.last_solve.sweeps.any()


@pytest.mark.thorough
def test_compiled_code_follows_the_context(operators):
    layer = pararnn.ParaGRU(4, 6)
    program = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 4)  # the plain loop is compiled step by step
    counts = []
    for solver in ("sequential", "newton", "sequential"):
        with pararnn.using(solver, "torch"):
            program(x)
            operators.clear()
            program(x)
        counts.append(len(operators))
    assert counts[0] == counts[2] == 0 < counts[1]


@pytest.mark.thorough
def test_compiled_code_follows_the_context_of_the_thread_that_calls(operators):
    layer = pararnn.ParaGRU(4, 6)
    program = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 20, 4)

    def by_newton(solver=None):
        with pararnn.using(solver, "torch") if solver else nullcontext():
            program(x)
            operators.clear()
            program(x)
        return ("newton", "torch") in operators

    assert by_newton("newton")
    assert not _in_a_thread(lambda: by_newton("sequential"))
    assert by_newton("newton")
    with pararnn.using("newton", "torch"):
        assert not _in_a_thread(by_newton)  # where auto takes the loop at T = 20
        assert by_newton()


@pytest.mark.parametrize("mode", pararnn.MODES)
def test_modes(mode):
    solver, backend = pararnn.MODES[mode]
    layer = pararnn.ParaGRU(4, 6, mode=mode)
    assert (layer.solver, layer.backend) == (solver, backend)
    with pararnn.using(mode=mode):
        assert resolve(Request(), Request("sequential", "torch")) == (solver, backend)


def test_wrong_requests():
    with pytest.raises(pararnn.EngineError, match="unknown mode 'FAST'; known: SEQUENTIAL"):
        pararnn.ParaGRU(4, 6, mode="FAST")
    layer = pararnn.ParaGRU(4, 6)
    with pytest.raises(pararnn.EngineError, match="unknown solver 'magic'"):
        layer(torch.zeros(1, 3, 4), solver="magic")
    with (
        pytest.raises(pararnn.EngineError, match="pass no other"),
        pararnn.using("newton", mode="PARALLEL"),
    ):
        pass


def test_explain_builds_what_runs_alone(monkeypatch, no_caches):
    built = []

    def build(program, dtype, solver, f=cpp._build):
        built.append(solver)
        return f(program, dtype, solver)

    monkeypatch.setattr(cpp, "_build", build)
    report = pararnn.explain(pararnn.ParaGRU(4, 6), (1, 8, 4), solver="sequential")
    assert (report.backend, report.others["newton", "fused"]) == ("fused", None)
    assert built == ["sequential"]


def test_explain():
    layer = pararnn.ParaGRU(4, 6, num_layers=2)
    x = torch.randn(1, 300, 4)
    for request in ({}, {"solver": "newton"}, {"backend": "torch"}, {"mode": "SEQUENTIAL"}):
        report = pararnn.explain(layer, x.shape, **request)
        assert report.size == (1, 300, 6)
        assert (report.solver, report.backend) not in report.others
        assert set(report.others) | {(report.solver, report.backend)} == set(
            pararnn.engines.table.PAIRS
        )
        layer(x, **request)
        assert bool(layer.last_solve.sweeps.any()) == (report.solver == "newton")
        assert str(report).splitlines()[1].endswith(report.why)
    short = pararnn.explain(pararnn.GRUCell(6), (8, 10), backend="torch")
    assert (short.solver, short.why) == ("sequential", "Newton pays from T = 64 on")
    time_first = pararnn.ParaGRU(4, 6, batch_first=False)
    assert pararnn.explain(time_first, (300, 2, 4)).size == (2, 300, 6)
    dense = pararnn.explain(Cumulative(32), (1, 300, 1, 32))
    assert "N D" in dense.why
    assert any("mixes channels" in (reason or "") for reason in dense.others.values())
    with pytest.raises(ValueError, match="shape must hold batch and time"):
        pararnn.explain(layer, (3,))


def test_explain_says_what_others_cost():
    report = pararnn.explain(pararnn.ParaGRU(4, 6), (2, 3000, 4), mode="SEQUENTIAL")
    assert set(report.costs) == {pair for pair, reason in report.others.items() if reason is None}
    assert report.costs["newton", "torch"] == "Jacobians of 36,000 numbers in memory"
    assert report.costs["sequential", "fused"].startswith("kernels, compiled in some seconds")
    assert "(newton, torch) could run: Jacobians of 36,000" in str(report)
    dense = pararnn.explain(Cumulative(32), (2, 3000, 3, 32), solver="newton")
    assert dense.costs == {("sequential", "torch"): "a loop in Python over 3,000 steps"}


@pytest.mark.parametrize(
    ("shape", "dtype", "cell"),
    [
        ((2, 300, 4), None, "Affine1"),
        ((2, 300, 3, 4), torch.float64, "Affine3"),
        ((2, 300, 4), torch.complex64, "AffineComplex"),
    ],
)
def test_explain_of_a_scan(shape, dtype, cell):
    report = pararnn.explain(pararnn.scan, shape, dtype=dtype, backend="torch")
    assert (report.cell, report.size) == (cell, (2, 300, 4))
    assert report.dtype == {torch.float64: torch.float64}.get(dtype, torch.float32)
    with pararnn.using(solver="newton"):
        assert pararnn.explain(pararnn.scan, shape).solver == "newton"
    with pytest.raises(ValueError, match=r"b must be \(B, T, D\)"):
        pararnn.explain(pararnn.scan, (2, 300))
