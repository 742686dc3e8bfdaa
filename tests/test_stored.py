"""Traced steps on disk: they serve the same step alone, whatever is there, and execute nothing."""

import functools
import hashlib
import json
import math
import os
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import pararnn
from pararnn import cache
from pararnn.program import content, derive, program, stored
from pararnn.program.content import UnknownContent, content_of
from pararnn.program.reads import reads_of
from pararnn.program.structure import STRUCTURES

SCRIPT = """
import sys, torch, pararnn
from pararnn.program import trace
if sys.argv[1:] == ["warm"]:
    trace.trace_pointwise = trace.trace_rows = None  # tracing would fail
    from pararnn.program import derive
    derive.trace_pointwise = derive.trace_rows = None
LEAK = {leak}
class Own(pararnn.Cell):
    states, gates, params = ("h",), ("x",), {{"a": pararnn.Param("D", std=None)}}
    config = {{"dt": 0.5}}
    def step(self, state, gate, param):
        return LEAK * torch.tanh(self.dt * gate.x + param.a * state.h)
torch.manual_seed(0)
cell = Own(5)
states, _ = pararnn.solve(cell, torch.randn(2, 9, 1, 5), backend="torch")
print(pararnn.program_of(cell).key, states.double().sum().item())
"""


def _run(folder, tmp_path, leak, *arguments):
    script = tmp_path / "own.py"
    script.write_text(SCRIPT.format(leak=leak))
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PARARNN_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )


def test_a_new_process_traces_nothing_unless_the_step_has_changed(tmp_path):
    folder = tmp_path / "cache"
    cold, warm = (_run(folder, tmp_path, 0.9, how) for how in ("cold", "warm"))
    assert cold.stdout == warm.stdout != "", cold.stderr + warm.stderr
    assert "'NoneType' object is not callable" in _run(folder, tmp_path, 0.8, "warm").stderr
    assert _run(folder, tmp_path, 0.8).stdout != cold.stdout
    assert len(list(folder.glob("Own-step-*"))) == 2


def _content(cls, **config):
    return content_of(cls, {**cls.config, **config}, reads_of(cls, STRUCTURES, cls.structure or ""))


def _made(source, **names):
    """The class `Own` of a module's source."""
    module = types.ModuleType("own_cells")
    vars(module).update({"torch": torch, "F": F, "math": math, "pararnn": pararnn, **names})
    exec(source, vars(module))
    return module.Own


SOURCE = """
LEAK = 0.9
TABLE = {"leak": 0.9}
def helper(h, by=0.9):
    return h * by
def maker(by):
    return lambda h: h * by
closed = maker(0.9)
class Base(pararnn.Cell):
    rate = 0.9
    def leaked(self, h):
        return self.rate * h
class Own(Base):
    states = ("h",)
    gates = ("x",)
    params = {"a": pararnn.Param("D")}
    config = {"dt": 0.5}
    def step(self, state, gate, param):
        h = helper(closed(self.leaked(LEAK * TABLE["leak"] * state.h)))
        return torch.tanh(h * math.sqrt(2) + F.softsign(gate.x) * self.dt * param.a)
def unread():
    return 0.9
"""
CONSTANT = """
class Own(pararnn.Cell):
    states = ("h",)
    gates = ("x",)
    structure = "dense"
    def step(self, state, gate, param):
        return torch.tanh(gate.x + torch.tensor(0.5) * state.h.mean(-1, keepdim=True))
"""
CHANGES = {
    "a global": ("LEAK = 0.9", "LEAK = 0.8"),
    "a type": ("LEAK = 0.9", "LEAK = True"),
    "an entry": ('{"leak": 0.9}', '{"leak": 0.8}'),
    "a default": ("by=0.9", "by=0.8"),
    "a closure": ("maker(0.9)", "maker(0.8)"),
    "a class attribute": ("rate = 0.9", "rate = 0.8"),
    "the code of a helper": ("return h * by\ndef maker", "return by * h + h\ndef maker"),
    "the code of a method": ("self.rate * h", "self.rate + h"),
    "a constant": ("math.sqrt(2)", "math.sqrt(3)"),
    "a function": ("torch.tanh", "torch.sin"),
    "a parameter's shape": ('Param("D")', 'Param("H")'),
    "a config default": ("0.5}", "0.25}"),
    "the order of arguments": ("h, by=0.9", "by=0.9, h=1.0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_step_reads_is_in_the_key(change):
    before, after = CHANGES[change]
    assert SOURCE.count(before) == 1
    assert _content(_made(SOURCE)) != _content(_made(SOURCE.replace(before, after)))


def test_what_a_step_does_not_read_is_not():
    assert _content(_made(SOURCE)) == _content(_made(SOURCE))
    edited = "# a comment\n" + SOURCE.replace("def unread():\n    return 0.9", "OTHER = 3")
    assert _content(_made(SOURCE)) == _content(_made(edited))


def test_config_the_default_dtype_and_versions_are_in_the_key(monkeypatch):
    cls = _made(SOURCE)
    texts = [_content(cls), _content(cls, dt=1), _content(cls, dt=1.0), _content(cls, dt=True)]
    texts += [_content(cls, dt=[1.0]), _content(cls, dt=(1.0,))]
    torch.set_default_dtype(torch.float64)
    try:
        texts.append(_content(cls))
    finally:
        torch.set_default_dtype(torch.float32)
    for where, name in ((torch, "__version__"), (torch.version, "git_version")):
        monkeypatch.setattr(where, name, "another")
        texts.append(_content(cls))
    monkeypatch.setattr(content, "_own_source", lambda: "another")
    texts.append(_content(cls))
    assert len(set(texts)) == len(texts)


def test_two_objects_that_are_one_elsewhere_are_told_apart():
    source = """
def one(h):
    return h * 0.5
{two}
def kept(h, f=one, g=two):
    return f(h) + g(h)
class Own(pararnn.Cell):
    states, gates = ("h",), ("x",)
    def step(self, state, gate, param):
        return kept(state.h) + gate.x
"""
    same = _made(source.replace("{two}", "two = one"))
    other = _made(source.replace("{two}", "def two(h):\n    return h * 0.25"))
    assert _content(same) != _content(other)


@pytest.mark.parametrize(
    "value", ["torch.ones_like(gate.x).to(gate.x.dtype)", "(gate.x > 0).float()"]
)
def test_types_of_torch_may_be_named(value):
    assert _content(_made(STEP.format(before="", value=value)))


def test_functions_of_one_code_are_told_apart_by_what_they_close_over():
    source = """
def pair(by):
    return (lambda h: h * by), (lambda h: h + by)
one, same = pair(0.5)
two, other = pair(0.25)
def kept(h, f=one, g=two, k={}):
    return f(h) + g(h) + k(h)
class Own(pararnn.Cell):
    states, gates = ("h",), ("x",)
    def step(self, state, gate, param):
        return kept(state.h) + gate.x
"""
    assert _content(_made(source.format("same"))) != _content(_made(source.format("other")))


STEP = """
{before}
class Own(pararnn.Cell):
    states, gates = ("h",), ("x",)
    rate = 0.9
    def step(self, state, gate, param):
        return {value} * state.h + gate.x
"""
UNKNOWN = {
    "the built-in getattr": ("", "getattr(self, 'ra' + 'te')"),
    "the class Helper": ("class Helper:\n    rate = 0.9", "Helper.rate"),
    "the module decimal": ("import decimal", "decimal.MAX_PREC * 1e-20"),
    "the function is_available": ("", "(0.9 + torch.cuda.is_available())"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_has_no_content_to_go_by_is_traced_in_every_process(what):
    before, value = UNKNOWN[what]
    cls = _made(STEP.format(before=before, value=value))
    with pytest.raises(UnknownContent, match=what):
        _content(cls)


def test_an_import_inside_a_step_and_odd_classes_are_traced_in_every_process(monkeypatch):
    inside = STEP.format(before="", value="1.0").replace("return", "import math; return")
    with pytest.raises(UnknownContent, match="an import of math inside the step"):
        _content(_made(inside))
    odd = STEP.format(before="", value="1.0").replace(
        "    rate", "    def __getattr__(self, name): return 1.0\n    rate"
    )
    with pytest.raises(UnknownContent, match=r"Own has .'__getattr__'."):
        _content(_made(odd))
    tanh = STEP.format(before="", value="torch.tanh(gate.x).sin()")
    assert "torch.tanh" in _content(_made(tanh))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tanh", lambda x: x)
        with pytest.raises(UnknownContent, match=r"the function .*lambda"):
            _content(_made(tanh))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "sin", lambda x: x)
        with pytest.raises(UnknownContent, match=r"Tensor\.sin, which is not torch's own"):
            _content(_made(tanh))


def test_this_packages_code_is_in_the_key_while_it_is_what_runs(monkeypatch, tmp_path):
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(content, "PACKAGE", tmp_path)
    content._own_source.cache_clear()
    try:
        with pytest.raises(UnknownContent, match=r"a\.py has changed since this process began"):
            content._own_source()
        os.utime(tmp_path / "a.py", (1, 1))
        first = content._own_source()
        (tmp_path / "a.py").write_text("2")
        os.utime(tmp_path / "a.py", (1, 1))
        content._own_source.cache_clear()
        assert content._own_source() != first
    finally:
        content._own_source.cache_clear()


def _graphs_of(traced):
    return [g for graphs in traced.graphs.values() for g in vars(graphs).values() if g is not None]


@pytest.mark.parametrize("name", pararnn.CELLS)
def test_what_is_read_back_is_what_was_traced(name):
    cls = pararnn.CELLS[name]
    step = program.Step(cls, dict(cls.config))
    traced = program.apart(program._traced, step)
    again = stored.from_text(stored.to_text(traced))
    assert again[:3] == traced[:3]
    tensors = derive.example(step, (6,), 8, torch.float64)
    for first, second in zip(_graphs_of(traced), _graphs_of(again), strict=True):
        assert first.text == second.text
        assert first.mixing_op == second.mixing_op
        old, new = ([n.meta for n in g.module.graph.nodes] for g in (first, second))
        assert old == new
    one, two = (t.graphs[torch.float64].step(*tensors) for t in (traced, again))
    assert all(map(torch.equal, one, two))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PARARNN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _kept(calls=None, text="what it reads"):
    """Keep a traced step; returns how often it was traced."""
    cls = pararnn.ElmanCell

    def make():
        calls.append(1)
        return program.apart(program._traced, program.Step(cls, dict(cls.config)))

    calls = [] if calls is None else calls
    assert stored.kept("Elman", lambda: text, make).structure == "diagonal"
    return len(calls)


def _rewritten(change):
    """An entry with other graphs and a checksum that agrees, as somebody could write it."""

    def damage(entry):
        file = entry / stored.KIND.library
        structure, why, warning, graphs = json.loads(file.read_text())
        change(graphs["float32"]["step"])
        file.write_text(json.dumps([structure, why, warning, graphs]))
        manifest = json.loads((entry / cache.MANIFEST).read_text())
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        (entry / cache.MANIFEST).write_text(json.dumps({**manifest, "checksum": digest}))

    return damage


def _call(graph, target):
    next(node for node in graph["nodes"] if node[0] == "call_function")[1] = target


def _argument_name(graph):
    next(n for n in graph["nodes"] if n[0] == "call_function")[2][2] = ["dict", ["a=print(1)", 1]]


DAMAGE = {
    "truncated": lambda e: (e / "step.json").write_bytes((e / "step.json").read_bytes()[:99]),
    "no file": lambda e: (e / "step.json").unlink(),
    "another function": _rewritten(lambda graph: _call(graph, "aten.sin.default")),
    "no function of ATen's": _rewritten(lambda graph: _call(graph, "os.system")),
    "an operator": _rewritten(lambda graph: _call(graph, "operator.call")),
    "part of ATen": _rewritten(lambda graph: _call(graph, "aten.__class__.__init__")),
    "code for a name": _rewritten(_argument_name),
    "another op": _rewritten(lambda graph: graph["nodes"][0].__setitem__(0, "call_module")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_foreign_entries_are_traced_anew(folder, damage):
    assert [_kept(), _kept()] == [1, 0]
    (entry,) = folder.iterdir()
    DAMAGE[damage](entry)
    assert [_kept(), _kept()] == [1, 0]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PARARNN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "_UNUSABLE", set())
    with pytest.warns(pararnn.BackendWarning, match="traced steps .*cannot be cached in .*cache"):
        assert _kept(text="unwritable") == 1
    assert _kept(text="unwritable too") == 1


def test_a_step_that_changes_what_it_reads_is_not_kept(folder):
    texts = iter(["before", "after"])
    calls = []

    def make():
        calls.append(1)
        return stored.Traced(None, "why", None, {})

    assert stored.kept("Own", functools.partial(next, texts), make).why_sequential == "why"
    assert len(calls) == 1
    assert not list(folder.iterdir())


def test_errors_of_a_step_are_raised_and_not_kept(folder):
    def make():
        raise pararnn.CellError("not a step")

    for _ in range(2):
        with pytest.raises(pararnn.CellError, match="not a step"):
            stored.kept("Own", lambda: "text", make)
    assert not list(folder.iterdir())


def test_a_constant_is_read_back_to_where_it_was_traced():
    gates, made = torch.randn(2, 3, 1, 4), _made(CONSTANT)
    with torch.device("meta"):
        program.make_program(made, {})
    pairs = [("newton", "torch"), ("sequential", "torch")]
    states = [
        pararnn.solve(made(4), gates, solver=solver, backend=backend)[0]
        for solver, backend in pairs
    ]
    assert torch.allclose(*states)
