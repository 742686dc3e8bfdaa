"""One record a call, of which the op is made; one choice, which comes with the solution."""

import copy
import pickle
import sys
from dataclasses import fields

import pytest
import torch
from table import FUSED, PAIRS, make_case

import pararnn
from pararnn.engines import table
from pararnn.engines.base import KIND_OF, LEAVES, Arguments
from pararnn.program import program_of
from pararnn.solve import prepare, run


def _record(**options):
    case = make_case(pararnn.LSTMCell, torch.float32, 20, "initial")
    return prepare(case.cell, case.gates, case.initial, **options)


def test_the_op_has_the_records_fields():
    names = [field.name for field in fields(Arguments)]
    assert list(KIND_OF) == names
    for op in (torch.ops.pararnn.forward, torch.ops.pararnn.backward):
        assert [argument.name for argument in op.default._schema.arguments][-len(names) :] == names
    defaults = {
        a.name: a.default_value for a in torch.ops.pararnn.forward.default._schema.arguments
    }
    plain = _record()
    assert all(getattr(plain, name) == defaults[name] for name in ("burn_in", "on_failure"))


@pytest.mark.parametrize("bias", [None, torch.zeros(3, 4)])
def test_records_come_apart_and_together(bias):
    args = _record(bias=bias, reset=torch.zeros(2, 20, dtype=torch.bool), on_failure="raise")
    tensors, rest = args.flatten()
    again = Arguments.unflatten(tensors, rest)
    for name in KIND_OF:
        assert getattr(again, name) is getattr(args, name) or name in (
            "params",
            "initial",
            "fields",
        )
    assert again.params[1] is args.params[1]
    assert again.initial[1] is args.initial[1]
    leaves = args.leaves()
    assert len(leaves) == 1 + (bias is not None) + len(args.params) + len(args.initial)
    beside = args.beside(leaves)
    apart = [tensor if tensor is not args.reset else None for tensor in tensors]
    assert all(a is b for a, b in zip(beside, apart, strict=True))
    assert set(LEAVES) < set(KIND_OF)
    assert Arguments.of_values(args.values()[:-1]) == Arguments.of_values(args.values())


@pytest.mark.parametrize("pair", [("auto", "auto"), *PAIRS], ids="-".join)
def test_the_choice_comes_with_the_solution(pair):
    case = make_case(pararnn.GRUCell, torch.float32, 20)
    program = program_of(case.cell)
    choice = run(program, prepare(case.cell, case.gates), *pair).choice
    assert choice == table.choose(program, (2, 20, 4), torch.float32, case.gates.device, *pair)
    assert pair in (choice.pair, ("auto", "auto"))
    assert (choice.split() is None) == (choice.pair != ("newton", "fused"))
    with pararnn.using(segments=3, burn_in=2):
        asked = run(program, prepare(case.cell, case.gates), *pair).choice.asked
    assert asked == (3, 2)


def test_layers_choose_once(monkeypatch):
    chosen = []

    def choose(*args):
        chosen.append(args)
        return table.choose(*args)

    monkeypatch.setattr(sys.modules["pararnn.solve"], "choose", choose)
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 3, 4)
    assert layer.choice is None
    with pararnn.adapt(layer):
        layer(torch.randn(2, 20, 3))
    assert len(chosen) == 1
    kept = layer.choice
    assert kept.pair in PAIRS
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.choice == kept
    chosen.clear()
    assert pararnn.verify(layer, torch.randn(2, 20, 3))
    assert len(chosen) == 2  # the module's own call, and the one that is checked


@pytest.mark.skipif(("newton", "scan") not in PAIRS, reason="no C++ compiler")
def test_a_backend_alone_finds_its_solver():
    case = make_case(pararnn.GRUCell, torch.float32, 20)
    chosen = run(program_of(case.cell), prepare(case.cell, case.gates), "auto", "scan").choice
    assert chosen.pair == ("newton", "scan")
    layer = pararnn.ParaRNN(pararnn.DenseGRUCell, 3, 4, backend="scan")
    can = r"Pairs that can: \(sequential, torch\), \(newton, torch\)$"
    with pytest.raises(pararnn.EngineError, match=rf"\(auto, scan\) cannot run .*{can}"):
        layer(torch.randn(2, 20, 3))


def test_errors_name_what_can_be_built(monkeypatch):
    def no_compiler(key, solver, backend, *rest):
        return None if backend == "torch" else "no compiler"

    monkeypatch.setattr(table, "_why_not_built", no_compiler)
    case = make_case(pararnn.GRUCell, torch.float32, 20)
    with pytest.raises(pararnn.EngineError, match=r"no compiler\. Pairs that can") as error:
        pararnn.solve(case.cell, case.gates, solver=FUSED[0], backend=FUSED[1])
    assert "fused)" not in str(error.value).partition("that can:")[2]
