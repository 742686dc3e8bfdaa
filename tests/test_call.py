"""One record a call, of which the op is made; one choice, which comes with the solution."""

import copy
import pickle
import sys
from dataclasses import fields

import pytest
import torch
from table import FUSED, OPS, PAIRS, make_case
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pararnn
from pararnn.engines import table, tuned
from pararnn.engines.arguments import (
    LEAVES,
    Arguments,
    Options,
    wanted_gradients,
    wants,
    with_arguments,
)
from pararnn.engines.split import NO_REQUEST
from pararnn.engines.tuned import Measured
from pararnn.program.program import program_of
from pararnn.solve import prepare, run


def _record(**options):
    case = make_case(pararnn.LSTMCell, torch.float32, 20, "initial")
    return prepare(case.cell, case.gates, case.initial, **options)


def test_the_op_has_the_records_fields():
    names = [field.name for field in fields(Arguments)][:-1] + list(Options._fields)
    for op in (torch.ops.pararnn.forward, torch.ops.pararnn.backward):
        assert [argument.name for argument in op.default._schema.arguments][-len(names) :] == names
    defaults = {
        a.name: a.default_value for a in torch.ops.pararnn.forward.default._schema.arguments
    }
    plain = _record()
    assert all(getattr(plain.options, name) == defaults[name] for name in ("burn_in", "on_failure"))


@pytest.mark.parametrize("bias", [None, torch.zeros(3, 4)])
def test_records_flatten_and_unflatten(bias):
    args = _record(bias=bias, reset=torch.zeros(2, 20, dtype=torch.bool), on_failure="raise")
    tensors, values = args.flatten()
    again = Arguments.unflatten(tensors, values)
    assert all(a is b for a, b in zip(again.flatten()[0], tensors, strict=True))
    assert (again.options, again.sequences) == (args.options, args.sequences)
    assert again.params[1] is args.params[1]
    assert again.initial[1] is args.initial[1]
    assert len(args.leaves()) == 1 + (bias is not None) + len(args.params) + len(args.initial)
    # Not by ==: from Python 3.13 on, a dataclass has no regard for fields that are one tensor.
    for values in (args.values()[:-1], args.values()):
        other = Arguments.of_values(values)
        assert all(a is b for a, b in zip(other.flatten()[0], tensors, strict=True))
        assert (other.options, other.sequences) == (args.options, args.sequences)
    assert Arguments.of_values(args.values()[:6]).reset is None


@pytest.mark.parametrize("bias", [None, torch.zeros(3, 4)])
def test_wanted_gradients_are_found_by_tensor(bias):
    args = _record(bias=bias, reset=torch.zeros(2, 20, dtype=torch.bool))
    tensors, values = args.flatten()
    for names in (LEAVES, ["params"], ["gates", "initial"]):
        leaves = args.leaves(names)
        flags = [any(tensor is leaf for leaf in leaves) for tensor in tensors]
        wanted = wanted_gradients(flags, values)
        assert wanted.names == [n for n in LEAVES if n in names and args.leaves([n])]
        gradients = [None if index is None else leaves[index] for index in wanted.indices]
        pairs = zip(gradients, tensors, flags, strict=True)
        assert all(g is (tensor if need else None) for g, tensor, need in pairs)
    first = [tensor is not None and tensor is args.params[0] for tensor in tensors]
    wanted = wanted_gradients(first, values)
    assert wanted.names == ["params.0"]
    assert [index for index in wanted.indices if index is not None] == [0]
    assert args.places(["gates", "params.1", "initial"]) == [
        ("gates", 0), ("params", 1), ("initial", 0), ("initial", 1)
    ]  # fmt: skip
    names = with_arguments(["gates", "params.0", "params.2"])
    assert [wants(names, "params", i) for i in range(3)] == [True, False, True]
    assert "params" in names
    assert wants(names, "gates", 0)
    assert not wants(names, "bias", 0)


@pytest.mark.parametrize("pair", [("auto", "auto"), *PAIRS], ids="-".join)
def test_the_choice_comes_with_the_solution(pair):
    case = make_case(pararnn.GRUCell, torch.float32, 20)
    program = program_of(case.cell)
    choice = run(program, prepare(case.cell, case.gates), *pair).choice
    assert choice == table.choose(program, (2, 20, 4), torch.float32, case.gates.device, *pair)
    assert pair in (choice.pair, ("auto", "auto"))
    assert (choice.split() is None) == (choice.pair != ("newton", "fused"))
    with pararnn.using(segments=3, burn_in=2):
        split = run(program, prepare(case.cell, case.gates), *pair).choice.split_request
    assert split == (3, 2)


def test_layers_choose_once_for_a_form(monkeypatch):
    chosen = []

    def choose(*args):
        chosen.append(args)
        return table.choose(*args)

    monkeypatch.setattr(sys.modules["pararnn.solve"], "choose", choose)
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 3, 4)
    assert layer.choice is None
    with pararnn.adapt(layer):
        for _ in range(2):
            layer(torch.randn(2, 20, 3))
    assert len(chosen) == 1
    layer(torch.randn(2, 21, 3))
    assert len(chosen) == 2
    assert layer.choice.pair in PAIRS
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.choice == layer.choice


@pytest.mark.skipif(("newton", "scan") not in PAIRS, reason="no C++ compiler")
def test_a_backend_alone_finds_its_solver():
    case = make_case(pararnn.GRUCell, torch.float32, 20)
    chosen = run(program_of(case.cell), prepare(case.cell, case.gates), "auto", "scan").choice
    assert chosen.pair == ("newton", "scan")
    layer = pararnn.ParaRNN(pararnn.DenseGRUCell, 3, 4, backend="scan")
    can = r"Pairs that can: \(sequential, torch\), \(newton, torch\), \(sequential, fused\)$"
    with pytest.raises(pararnn.EngineError, match=rf"\(auto, scan\) cannot run .*{can}"):
        layer(torch.randn(2, 20, 3))


def _no_compiler(key, solver, backend, *others):
    return None if backend == "torch" else "no compiler"


def test_errors_name_what_can_be_built(monkeypatch):
    monkeypatch.setattr(table, "_why_not_built", _no_compiler)
    case = make_case(pararnn.GRUCell, torch.float32, 20)
    with pytest.raises(pararnn.EngineError, match=r"no compiler\. Pairs that can") as error:
        pararnn.solve(case.cell, case.gates, solver=FUSED[0], backend=FUSED[1])
    assert "fused)" not in str(error.value).partition("that can:")[2]


def test_what_is_remembered_of_a_form_depends_on_the_context_and_on_the_machine(monkeypatch):
    case = make_case(pararnn.GRUCell, torch.float32, 4096)
    program = program_of(case.cell)

    def choice(*pair):
        return run(program, prepare(case.cell, case.gates), *pair).choice

    first = choice("auto", "auto")
    assert choice("auto", "auto") is first
    assert choice("newton", "auto").pair == choice("newton", "auto").pair != first.pair
    with pararnn.using(segments=3):
        assert choice("auto", "auto").split_request.segments == 3
    assert choice("auto", "auto") is first
    if FUSED in PAIRS:
        tuned.remember(first.workload, [Measured("newton", "torch", NO_REQUEST, 1.0)])
        assert choice("auto", "auto").pair == ("newton", "torch")
        tuned.forget(first.workload)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
        assert first.pair == ("sequential", "fused")
        assert choice("auto", "auto").pair == ("newton", "fused")


SLIPS = {
    "a state of another size": lambda cell: torch.zeros(2, 5),
    "an integer": lambda cell: torch.zeros(2, 4, dtype=torch.long),
    "elsewhere": lambda cell: torch.zeros(2, 4, device="meta"),
    "no tensor": lambda cell: [[0.0] * 4],
}


@pytest.mark.parametrize("initial", SLIPS.values(), ids=SLIPS)
def test_slips_are_seen_after_calls_that_fit(initial):
    cell, gates = pararnn.GRUCell(4), torch.randn(2, 20, 3, 4)
    for _ in range(2):
        pararnn.solve(cell, gates, torch.zeros(2, 4))
        with pytest.raises((TypeError, ValueError), match="initial state"):
            pararnn.solve(cell, gates, initial(cell))
    cell.to("meta")
    with pytest.raises(ValueError, match="the cell is on meta"):
        pararnn.solve(cell, gates, torch.zeros(2, 4))


HOW = ("solver", "backend")


class _Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "backward"), [(_Ops, [False]), (_Functions, [])])
@pytest.mark.parametrize("pair", OPS, ids="-".join)
def test_modes_see_the_ops(mode, backward, pair):
    """A mode of functions sees the call of backward, and nothing that happens in there."""
    case = make_case(pararnn.GRUCell, torch.float32, 20)
    gates = case.gates.requires_grad_()
    with mode() as watch:
        states, _ = pararnn.solve(case.cell, gates, solver=pair[0], backend=pair[1])
        states.sum().backward()
        with torch.no_grad():
            pararnn.solve(case.cell, gates, solver=pair[0], backend=pair[1])
    ran = [name for name in watch.calls if "pararnn" in name]
    assert ["forward" in name for name in ran] == [True, *backward, True]


@pytest.mark.parametrize("pair", OPS, ids="-".join)
def test_profilers_see_both_ops(pair):
    case = make_case(pararnn.GRUCell, torch.float32, 20)
    gates = case.gates.requires_grad_()
    with torch.profiler.profile() as profile:
        states, _ = pararnn.solve(case.cell, gates, solver=pair[0], backend=pair[1])
        states.sum().backward()
    assert {"pararnn::forward", "pararnn::backward"} <= {event.key for event in profile.events()}


class _Tagged(torch.Tensor):
    """A subclass that says what it was used for."""

    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(str(func))
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("pair", OPS, ids="-".join)
def test_subclasses_see_the_op(pair):
    case = make_case(pararnn.GRUCell, torch.float32, 20)
    _Tagged.calls.clear()
    options = {"solver": pair[0], "backend": pair[1]}
    states, _ = pararnn.solve(case.cell, case.gates.as_subclass(_Tagged), **options)
    assert any("pararnn.forward" in name for name in _Tagged.calls)
    plain, _ = pararnn.solve(case.cell, case.gates, **options)
    assert torch.equal(states.as_subclass(torch.Tensor), plain)


@pytest.mark.parametrize("pair", OPS, ids="-".join)
def test_tangents_are_not_lost_without_gradients(pair):
    case = make_case(pararnn.GRUCell, torch.float32, 20)
    with forward_ad.dual_level(), torch.no_grad():
        gates = forward_ad.make_dual(case.gates, torch.ones_like(case.gates))
        states, _ = pararnn.solve(case.cell, gates, solver=pair[0], backend=pair[1])
        assert forward_ad.unpack_dual(states).tangent.abs().max() > 0


@pytest.mark.parametrize("pair", OPS, ids="-".join)
def test_negations_that_are_put_off_are_made(pair):
    """As in the imaginary part of a conjugate: a view whose numbers are still to be negated."""
    case, options = make_case(pararnn.GRUCell, torch.float32, 20), dict(zip(HOW, pair, strict=True))
    put_off = torch._neg_view(-case.gates)
    assert put_off.is_neg()
    grads = []
    for gates in (case.gates, put_off):
        leaf = gates.detach().requires_grad_()
        states, _ = pararnn.solve(case.cell, leaf, **options)
        plain, _ = pararnn.solve(case.cell, gates, **options)
        ones = torch.ones_like(states)
        late = torch._neg_view(-ones)
        assert late.is_neg()
        grads.append((states, plain, *torch.autograd.grad(states, leaf, late)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    states, _ = pararnn.solve(case.cell, leaf, **options)
    (reference,) = torch.autograd.grad(states, leaf, ones)
    assert torch.equal(grads[1][2], reference)
