"""`autotune` measures, `auto` follows in this process; a record spares others the measuring."""

import json
import math
import sys

import pytest
import torch
from table import FUSED, NEWTON_FUSED, PAIRS, PLAIN

import pararnn
from pararnn.engines import table, tuned
from pararnn.engines.split import NO_REQUEST, SplitRequest
from pararnn.engines.tuned import Measured, Workload

SHAPE = (2, 100, 4)
OTHER = NEWTON_FUSED if NEWTON_FUSED in PAIRS else ("newton", "torch")
"""Pair that runs in addition to the loop."""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path, no_caches):
    """Records of a test's own; kernels are loaded already, or are built once more."""
    monkeypatch.setattr(tuned, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def times(monkeypatch):
    """Times of candidates in s, by (solver, backend, segments, burn-in); 1 by default."""
    chosen, calls = {}, []
    module = sys.modules["pararnn.tune.autotune"]

    def call(cell, workload, engine, pin, backward):
        calls.append((engine.solver, engine.backend, *pin))
        return calls[-1]

    def seconds(call, device, budget):
        return chosen.get(call, chosen.get(call[:2], 1.0))

    monkeypatch.setattr(module, "_call", call)
    monkeypatch.setattr(module, "median_seconds", seconds)
    monkeypatch.setattr(module, "settled_seconds", seconds)
    chosen["seen"] = calls
    return chosen


def _ran(layer, shape=SHAPE, **options):
    explanation = pararnn.explain(layer, shape, **options)
    return explanation.solver, explanation.backend


def test_what_runs_is_measured():
    layer = pararnn.ParaGRU(4, 6)
    tuning = pararnn.autotune(layer, SHAPE)
    assert tuning.anew
    assert tuning.size == (2, 100, 6)
    pairs = {(row.solver, row.backend) for row in tuning.measured}
    assert OTHER in pairs
    assert (FUSED in pairs) == (FUSED in PAIRS)
    assert all(0 < row.ms < math.inf for row in tuning.measured)
    assert _ran(layer) == (tuning.solver, tuning.backend)
    assert "forward + backward, measured" in str(tuning)
    assert "ms, by the rule" in str(tuning)
    assert pararnn.explain(layer, SHAPE).why.startswith("autotune measured")
    layer(torch.randn(SHAPE))[0].sum().backward()


def test_both_passes_are_measured_in_inference_mode():
    with torch.inference_mode():
        assert pararnn.autotune(pararnn.ParaGRU(4, 6), SHAPE).backward


@pytest.mark.parametrize("name", ["lrc", "lstm", "dense-gru"])
@pytest.mark.thorough
def test_every_kind_of_cell_is_measured(name, times, monkeypatch):
    monkeypatch.undo()  # really
    monkeypatch.setattr(sys.modules["pararnn.tune.autotune"], "SECONDS", 0.0)
    cell = pararnn.CELLS[name](4, dtype=torch.float64)
    for backward in (True, False):
        tuning = pararnn.autotune(cell, (1, 20, 4), backward=backward, remeasure=True)
        assert len(tuning.measured) >= 2
    if name != "dense-gru":
        heads = pararnn.CELLS[name](4, num_heads=2)
        pararnn.autotune(heads, (1, 20, 4), dtype=torch.bfloat16, remeasure=True)


def test_auto_takes_the_fastest_for_this_workload_only(times):
    layer = pararnn.ParaGRU(4, 6)
    times[OTHER] = 0.5
    tuning = pararnn.autotune(layer, SHAPE)
    assert (tuning.solver, tuning.backend) == _ran(layer) == OTHER
    why = pararnn.explain(layer, SHAPE).why
    assert why == "autotune measured it fastest: 500 ms against 1000 ms by the rule"
    layer(torch.randn(SHAPE))
    assert layer.last_solve.sweeps.any()
    rule = _ran(layer, (2, 101, 4))
    assert rule != OTHER
    assert _ran(layer, (3, 100, 4)) == _ran(layer, dtype=torch.float64) == rule
    assert _ran(pararnn.ParaGRU(4, 7)) == _ran(pararnn.ParaLSTM(4, 6)) == rule
    assert _ran(pararnn.ParaGRU(4, 6, state_nonlinearity="relu")) == rule
    assert _ran(pararnn.ParaGRU(9, 6, num_layers=2), (2, 100, 9)) == OTHER


def test_records_are_of_a_number_of_heads(times):
    """A matrix of 8 channels is other work than four of 2."""
    layers = {heads: pararnn.GRU(4, 8, num_heads=heads, batch_first=True) for heads in (1, 4)}
    slow = ("newton", "torch")
    times[slow] = 0.5
    tuning = pararnn.autotune(layers[4], SHAPE)
    assert (tuning.solver, tuning.backend) == _ran(layers[4]) == slow
    assert _ran(layers[1]) != slow
    layers[4](torch.randn(SHAPE))
    assert layers[4].layers[0].choice.pair == slow
    assert pararnn.autotune(layers[1], SHAPE).path != tuning.path
    assert _ran(layers[1]) == _ran(layers[4]) == slow


def test_what_is_asked_for_comes_first(times):
    layer = pararnn.ParaGRU(4, 6)
    times[OTHER] = 0.5
    pararnn.autotune(layer, SHAPE)
    assert _ran(layer, solver="sequential") == (FUSED if FUSED in PAIRS else PLAIN)
    assert _ran(layer, mode="SEQUENTIAL") == ("sequential", "torch")
    with pararnn.using("sequential", "torch"):
        assert _ran(layer) == ("sequential", "torch")
    assert _ran(pararnn.ParaGRU(4, 6, mode="SEQUENTIAL")) == ("sequential", "torch")
    assert _ran(layer, solver="newton") == OTHER


def test_the_rules_choice_stays_on_a_tie(times):
    layer = pararnn.ParaGRU(4, 6)
    rule = _ran(layer)
    times[OTHER] = 0.97
    tuning = pararnn.autotune(layer, SHAPE)
    assert (tuning.solver, tuning.backend) == _ran(layer) == rule
    assert "nothing faster than the rule's choice" in pararnn.explain(layer, SHAPE).why


def test_splits_around_the_rules_are_tried(times, newton_fused):
    layer = pararnn.ParaGRU(4, 6)
    times["newton", "fused"] = 0.9
    times["newton", "fused", 16, 48] = 0.4
    shape = (2, 1024, 4)
    tuning = pararnn.autotune(layer, shape)
    requests = {row.split for row in tuning.measured if row.backend == "fused"} - {NO_REQUEST}
    assert requests == {SplitRequest(w, k) for w in (16, 32, 64) for k in (24, 48, 96)} - {
        SplitRequest(32, 48)
    }
    assert tuning.measured[0].split == SplitRequest(16, 48)
    assert "(newton, fused) segments 16, burn-in 48: 400 ms" in str(tuning)
    assert pararnn.explain(layer, shape).split.segments == 16
    with torch.no_grad():
        layer(torch.randn(shape))
        layer(torch.randn(shape), solver="newton", backend="fused")
        layer(torch.randn(2, 1000, 4), solver="newton", backend="fused")
        with pararnn.using(segments=3):
            layer(torch.randn(shape))
    splits = [split[1:] for split in newton_fused.requests]
    assert splits == [(16, 48), (16, 48), (None, None), (3, None)]


def test_slow_engines_of_the_same_solver_and_huge_jacobians_are_left_out(times, monkeypatch):
    calls = times["seen"]
    pararnn.autotune(pararnn.GRUCell(4), (1, 100, 4))
    assert (("sequential", "torch", None, None) in calls) == (FUSED not in PAIRS)
    monkeypatch.setattr(sys.modules["pararnn.tune.candidates"], "MOST_JACOBIANS", 1000)
    dense = pararnn.autotune(pararnn.DenseGRUCell(4), (1, 63, 4))
    assert [row.solver for row in dense.measured] == ["sequential"]


def test_another_process_reads_the_record(own_folder, times, monkeypatch):
    layer = pararnn.ParaGRU(4, 6)
    times[OTHER] = 0.5
    first = pararnn.autotune(layer, SHAPE)
    assert list((own_folder / "tuned").iterdir()) == [first.path]
    pararnn.clear_caches()  # as in another process
    assert _ran(layer) != OTHER  # nothing is read without a call
    times["seen"].clear()
    again = pararnn.autotune(layer, SHAPE)
    assert not again.anew
    assert not times["seen"]
    assert (again.measured, again.by_rule) == (first.measured, first.by_rule)
    assert f"as measured before, {first.path}" in str(again)
    assert _ran(layer) == OTHER
    times[OTHER] = 2.0
    assert pararnn.autotune(layer, SHAPE, remeasure=True).anew
    assert _ran(layer) != OTHER


def test_stale_records_are_not_used(times, monkeypatch):
    layer = pararnn.ParaGRU(4, 6)
    path = pararnn.autotune(layer, SHAPE).path
    assert pararnn.autotune(layer, SHAPE, backward=False).path != path
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert pararnn.autotune(layer, SHAPE).path != path
    monkeypatch.undo()
    module = sys.modules["pararnn.tune.autotune"]
    monkeypatch.setattr(module, "device_name", lambda device: "another")
    monkeypatch.setattr(tuned, "read", lambda path, about: [Measured("a", "b", NO_REQUEST, 1.0)])
    assert pararnn.autotune(layer, SHAPE).path != path


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[]", b'{"about": 3}', "foreign", "no measurement", "wrong split"],
)
def test_records_that_cannot_be_used(times, content):
    layer = pararnn.ParaGRU(4, 6)
    path = pararnn.autotune(layer, SHAPE).path
    whole = json.loads(path.read_text())
    changes = {
        "foreign": {"about": whole["about"] | {"device": "another"}},
        "no measurement": {"measured": []},
        "wrong split": {"measured": [["newton", "fused", [-1, 0], 1.0]]},
    }
    if content in changes:
        content = json.dumps(whole | changes[content]).encode()
    path.write_bytes(content)
    with pytest.warns(pararnn.BackendWarning, match="measures anew, as its record"):
        assert pararnn.autotune(layer, SHAPE).anew
    assert json.loads(path.read_text()) == whole


def test_a_folder_that_cannot_be_written(times, own_folder):
    (own_folder / "tuned").write_text("in the way")
    layer = pararnn.ParaGRU(4, 6)
    times[OTHER] = 0.5
    with pytest.warns(pararnn.BackendWarning, match="cannot be written"):
        pararnn.autotune(layer, SHAPE)
    assert _ran(layer) == OTHER


def test_a_pair_that_can_no_longer_be_built_is_passed_over(monkeypatch):
    cell = pararnn.GRUCell(6)
    key = pararnn.program_of(cell).key
    workload = Workload(key, (2, 100, 6), torch.float32, torch.device("cpu"))
    tuned.remember(workload, [Measured("newton", "scan", NO_REQUEST, 1.0)])
    monkeypatch.setattr(
        table,
        "_why_not_built",
        lambda key, solver, backend, *others: "no compiler" if backend != "torch" else None,
    )
    monkeypatch.setattr(table, "_warn_once", lambda message: None)
    assert _ran(cell, (2, 100, 6)) == ("newton", "torch")


@pytest.mark.thorough
def test_compiled_code_follows_the_records(operators):
    layer = pararnn.ParaGRU(4, 6)
    key = pararnn.program_of(layer.cell).key
    program = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    x = torch.randn(2, 90, 4)

    def by_newton(x):
        program(x)
        operators.clear()  # what tracing has asked for
        program(x)
        return ("newton", "torch") in operators

    with torch.no_grad():
        assert not by_newton(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert not by_newton(torch.randn(3, 70, 4))
        workload = Workload(key, (2, 90, 6), torch.float32, torch.device("cpu"))
        tuned.remember(workload, [Measured("newton", "torch", NO_REQUEST, 1.0)])
        assert by_newton(x)
        assert not by_newton(torch.randn(3, 70, 4))
        with torch.compiler.set_stance("fail_on_recompile"):
            assert not by_newton(torch.randn(4, 80, 4))
            assert by_newton(x)


def test_what_is_no_layer():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    x = torch.randn(2, 100, 3)
    for module, name in ((model, "Sequential"), (pararnn.ParaGRU, "ParaGRU")):
        for call in (
            lambda module=module: pararnn.explain(module, (2, 5, 3)),
            lambda module=module: pararnn.explain(module, x, predict=True),
            lambda module=module: pararnn.autotune(module, (2, 5, 3)),
        ):
            with pytest.raises(TypeError, match=f"take a layer .* or a cell, got {name}: of a"):
                call()


def test_wrong_shapes():
    with pytest.raises(ValueError, match="shape must hold batch and time"):
        pararnn.autotune(pararnn.GRUCell(4), (3,))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_exported_programs_of_any_size_take_the_measured_one(strict):
    layer, x = pararnn.ParaGRU(4, 6), torch.randn(3, 9, 4)
    pararnn.autotune(layer, (2, 9, 4))
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": sizes}, strict=strict).module()
    for rows in (x, x[:2], x[:2, :5]):
        torch.testing.assert_close(program(rows)[0], layer(rows)[0])
