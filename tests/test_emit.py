"""Emitted source: goldens of every cell, and errors that say what to do."""

import ctypes
import os
from pathlib import Path

import pytest
import torch
from mixing_cells import Coupled, HeadLSTM, Mixture, ResetAfter
from table import ELEMENTWISE, needs_compiler
from user_cells import Cumulative

import pararnn
from pararnn.codegen import emit, headers, spelling
from pararnn.codegen.compiler import compile_library
from pararnn.codegen.spelling import SPELLINGS, literal
from pararnn.program.derive import expand_entry

GOLDENS = Path(__file__).parent / "goldens"
TORCH = "2.13"  # traced graphs may differ in the order of ops between versions
MIXING = {"dense-gru": pararnn.DenseGRUCell} | {
    f"mixing-{cell.__name__}": cell for cell in (HeadLSTM, ResetAfter, Coupled, Mixture)
}

MATRIX = ["m2rnn", "gated-delta"]


def _is_golden(name, text, suffix="cpp"):
    if not torch.__version__.startswith(TORCH):
        pytest.skip(f"goldens are of torch {TORCH}")
    golden = GOLDENS / f"{name}.{suffix}"
    if os.environ.get("PARARNN_WRITE_GOLDENS"):
        golden.write_text(text, encoding="utf-8")
    return text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_goldens(name):
    """PARARNN_WRITE_GOLDENS=1 rewrites goldens: read the difference."""
    text, cuda = (pararnn.emitted(pararnn.CELLS[name](4), target) for target in headers.LANGUAGES)
    assert text == cuda
    assert _is_golden(name, text)


@pytest.mark.parametrize("name", MIXING)
def test_goldens_of_cells_that_mix_channels(name):
    """The stages between products, and the tables of products."""
    assert _is_golden(name, pararnn.emitted(MIXING[name](4, num_heads=2), "cpp"))


@pytest.mark.parametrize("name", MATRIX)
def test_goldens_of_matrix_cells(name):
    """The loops over the axes of a head, and the tables of sizes."""
    cell = pararnn.zoo.MATRIX_CELLS[name](8, num_heads=2, K=6)
    assert _is_golden(f"matrix-{name}", pararnn.emitted(cell, "cpp"))


@pytest.mark.parametrize(
    ("name", "dtype"), [("m2rnn", torch.bfloat16), ("gated-delta", torch.float32)]
)
def test_goldens_of_matrix_cells_on_gpus(name, dtype):
    """The loops over a thread's share of a head, and what threads exchange; both passes."""
    cell = pararnn.zoo.MATRIX_CELLS[name](64, num_heads=2, K=64)
    assert _is_golden(f"matrix-{name}", pararnn.emitted(cell, "cuda", dtype), "cu")


def test_every_golden_has_a_cell():
    names = {path.name for path in GOLDENS.iterdir()}
    matrix = [f"matrix-{name}" for name in MATRIX]
    wanted = {f"{name}.cpp" for name in (*ELEMENTWISE, *MIXING, *matrix)}
    assert names == wanted | {f"{name}.cu" for name in matrix}


def test_sums_fuse_the_later_product():
    source = pararnn.emitted(pararnn.GRUCell(4))
    step = source[source.index("void step") : source.index("void jacobian")]
    assert "multiply_add(t9, t13, t15);" in step  # z * c, and not (1 - z) * h
    assert "= t9 * t13" not in step


def test_subexpressions_are_computed_once():
    for name in ELEMENTWISE:
        for function in pararnn.emitted(pararnn.CELLS[name](4)).split("PARARNN_FUNCTION void ")[1:]:
            lines = [line.partition(" = ") for line in function.splitlines() if "  const" in line]
            expressions = [expression for _, _, expression in lines]
            assert len(set(expressions)) == len(expressions), (name, expressions)


def test_a_product_added_to_itself_is_computed():
    class Twice(pararnn.Cell):
        states = ("h",)
        gates = ("x",)

        def step(self, state, gate, param):
            product = gate.x * state.h
            return product + product

    assert "t2 + t2" in pararnn.emitted(Twice(3))


def test_source_depends_on_config_and_dtype():
    plain, relu = pararnn.GRUCell(4), pararnn.GRUCell(4, state_nonlinearity="relu")
    assert "tanh" in pararnn.emitted(plain)
    assert "tanh" not in pararnn.emitted(relu)
    assert pararnn.emitted(plain, dtype=torch.bfloat16) == pararnn.emitted(plain)


# Runs the Jacobian on one vector of channels.
JACOBIAN = """
#define PARARNN_IO double
#define PARARNN_WIDE 1
#include "functions.h"
#define EXPORT __attribute__((visibility("default")))
namespace pararnn {{
{functions}
extern "C" EXPORT int channels() {{ return lanes; }}
extern "C" EXPORT void run(const double* in, double* out) {{
  real inputs[4][16], results[2][{entries}];
  const int counts[4] = {{num_states, num_gates, num_fields, num_params}};
  for (int kind = 0; kind < 4; ++kind)
    for (int i = 0; i < counts[kind]; ++i, in += lanes) inputs[kind][i] = load(in, lanes);
  jacobian(inputs[0], inputs[1], inputs[2], inputs[3], results[0], results[1]);
  for (int i = 0; i < num_states; ++i, out += lanes) store(out, results[0][i], lanes);
  for (int i = 0; i < num_states * num_states; ++i, out += lanes) store(out, results[1][i], lanes);
}}
}}
"""


@needs_compiler
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_emitted_jacobians_run(name, tmp_path):
    cell = pararnn.CELLS[name](4)
    program = pararnn.program_of(cell)
    functions = pararnn.emitted(cell, dtype=torch.float64)
    source, output = tmp_path / "jacobian.cpp", tmp_path / "jacobian.so"
    entries = program.num_states**2
    source.write_text(JACOBIAN.format(functions=functions, entries=entries), encoding="utf-8")
    compile_library(source, headers.folder("cpp"), output)
    library = ctypes.CDLL(str(output))
    rows = sum(map(len, (program.states, program.gates, program.fields, program.params)))
    torch.manual_seed(0)
    inputs = torch.randn(rows, library.channels(), dtype=torch.float64)
    got = inputs.new_empty(program.num_states + entries, library.channels())
    library.run(*(ctypes.c_void_p(t.data_ptr()) for t in (inputs, got)))
    for row, entry in zip(got, program.graphs[torch.float64].jacobian(*inputs), strict=True):
        full = expand_entry(entry, row, row.shape)
        assert torch.allclose(row, full, rtol=1e-13, atol=1e-14)


def test_literals():
    values = [1, 0.1, -2.5e-30, float("inf"), -float("inf"), float("nan")]
    numbers = ["1.0", "0.1", "-2.5e-30", "INFINITY", "-INFINITY", "NAN"]
    assert [literal(v) for v in values] == [f"constant({n})" for n in numbers]


class Rare(pararnn.Cell):
    """Cell with an op that has no spelling."""

    states = ("h",)
    gates = ("x",)

    def step(self, state, gate, param):
        return torch.i0(torch.tanh(gate.x + state.h))


@needs_compiler
def test_unknown_ops_are_named_with_the_cure():
    cell, gates = Rare(3), torch.randn(1, 4, 1, 3)
    message = r"Rare's step uses aten.i0.default.*register_spelling\('aten::i0'"
    with pytest.raises(pararnn.EngineError, match=message):
        pararnn.emitted(cell)
    with pytest.raises(pararnn.EngineError, match=r"\(auto, fused\) cannot run Rare.*i0"):
        pararnn.solve(cell, gates, backend="fused")
    with pytest.raises(pararnn.EngineError, match=r"aten\.i0"):
        pararnn.precompile(cell)
    with pytest.warns(pararnn.BackendWarning, match=r"by \(sequential, torch\): .*aten.i0"):
        states, _ = pararnn.solve(cell, gates)
    loop, _ = pararnn.solve(cell, gates, solver="sequential", backend="torch")
    assert torch.equal(states, loop)


@needs_compiler
def test_spellings_can_be_registered(monkeypatch):
    class Lucky(pararnn.Cell):
        states = ("h",)
        gates = ("x",)

        def step(self, state, gate, param):
            return torch.special.i1e(gate.x).detach() + 0.5 * torch.tanh(state.h)

    cell = Lucky(3)
    with pytest.raises(pararnn.EngineError, match="special_i1e"):
        pararnn.emitted(cell)
    gates = torch.randn(1, 1, 1, 3)
    with pytest.raises(pararnn.EngineError, match="special_i1e"):
        pararnn.solve(cell, gates, backend="fused")
    monkeypatch.setitem(SPELLINGS, "aten::special_i1e", None)  # removes it afterwards
    for c in (1.0, 2.0):  # neither the failure nor the first kernel is reused
        text = f"{{0}} / (constant({c}) + abs({{0}}))"
        pararnn.register_spelling("aten::special_i1e", text)
        states, _ = pararnn.solve(cell, gates, backend="fused")
        assert torch.allclose(states, gates[:, :, 0] / (c + gates[:, :, 0].abs()))


def test_wrong_requests():
    with pytest.raises(ValueError, match="schema name such as"):
        pararnn.register_spelling("erfinv", "{0}")
    with pytest.raises(pararnn.EngineError, match="unknown target 'metal'; known: cpp, cuda"):
        pararnn.emitted(pararnn.GRUCell(4), "metal")
    with pytest.raises(pararnn.EngineError, match="no code can be generated: Cumulative mixes"):
        pararnn.emitted(Cumulative(4))
    with pytest.raises(TypeError, match="dtype must have one of the dtypes"):
        pararnn.emitted(pararnn.GRUCell(4), dtype=torch.int8)


@pytest.mark.parametrize(
    ("of_state", "jumps"),
    {
        torch.relu: False,
        torch.abs: False,
        torch.tanh: False,
        torch.nn.functional.softplus: True,  # PyTorch writes it with a condition
        torch.floor: True,
        torch.sign: True,
        torch.nn.functional.hardshrink: True,
        lambda h: torch.div(h, 0.5, rounding_mode="trunc"): True,
        lambda h: (h > 0.5).to(h.dtype): True,
        lambda h: torch.where(h > 0, h, 0.1 * h): True,
    }.items(),
)
def test_steps_jump_if_a_small_change_of_state_may(of_state, jumps):
    class Reading(pararnn.Cell):
        states = ("h",)
        gates = ("x",)

        def step(self, state, gate, param):
            return 0.5 * of_state(state.h) + torch.floor(gate.x)  # jumps of inputs do not count

    assert emit.jumps(pararnn.program_of(Reading(4)), torch.float32) == jumps


def test_a_registered_op_says_whether_it_jumps(monkeypatch):
    monkeypatch.setattr(spelling, "SPELLINGS", dict(spelling.SPELLINGS))
    for jumps in (False, True):
        pararnn.register_spelling("aten::frac", "{0} - trunc({0})", jumps=jumps)
        assert spelling.may_jump("aten::frac", {}) == jumps
