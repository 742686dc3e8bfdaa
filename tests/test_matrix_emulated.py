"""CUDA kernels of matrix cells, compiled for a CPU."""

import emulated
import pytest
import test_matrix
import torch
from emulated import gpu, install, recorded
from matrix_cells import LOOPS, make_call
from table import DTYPES, needs_compiler
from test_matrix import _compare, _layer
from test_matrix_kernels import Mixed, Rows
from test_steps import NORMS, check_forms, check_norms

import pararnn
from pararnn.base.errors import EngineError
from pararnn.codegen import headers, matrix_cuda
from pararnn.codegen.matrix_cuda import emitted_for, matrix_variants, memory_of
from pararnn.program.matrix import CHECKPOINT
from pararnn.program.program import program_of
from pararnn.zoo import MATRIX_CELLS

FUSED = {"solver": "sequential", "backend": "fused"}
TORCH = {"solver": "sequential", "backend": "torch"}
NAMES = [*LOOPS]


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Run CUDA kernels on a CPU."""
    install(gpu(), monkeypatch)


def _program(name="m2rnn", keys=16, values=16, heads=2):
    return program_of(MATRIX_CELLS[name](heads * values, num_heads=heads, K=keys))


def _variants(program, dtype, weight_dtype=None):
    return matrix_variants(program, dtype, weight_dtype or dtype, (9, 0))


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(11)
def test_kernels_are_the_loop(name):
    """Over a chunk of steps and a part of one, from the last step on, with resets."""
    dtype = DTYPES[NAMES.index(name) % len(DTYPES)]
    call = make_call(name, 1, 40, dtype=dtype)
    _compare(name, call, dtype, torch.rand(1, 40) < 0.05, reverse=True, **FUSED)
    _compare(name, make_call(name, 1, 0, dtype=dtype), dtype, **FUSED)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "keys", "values"),
    [
        (torch.bfloat16, torch.bfloat16, 32, 16),  # matrices as fragments in registers
        (torch.bfloat16, torch.float32, 32, 48),  # in two parts, and in shared memory
        (torch.float32, torch.float32, 32, 32),  # by operands in shared memory
    ],
)
@pytest.mark.one_in(5)
def test_products(dtype, weight_dtype, keys, values):
    """In warps that exchange sums; a matrix of another dtype than the gates' counts in full."""
    call = make_call("m2rnn", 2, 5, keys=keys, values=values, dtype=dtype)
    call.cell.to(weight_dtype)
    program = program_of(call.cell)
    for own in _variants(program, dtype, weight_dtype):
        shares = emitted_for(program, own).layout
        assert shares.tiles == (dtype == torch.bfloat16)
        assert shares.warps > 1
    _compare("m2rnn", call, dtype, **FUSED)


@needs_compiler
@pytest.mark.parametrize("kind", range(3))
@pytest.mark.thorough
def test_forms_of_steps(kind):
    check_forms(kind, group=kind)


@needs_compiler
def test_norms_of_keys_and_states():
    check_norms(NORMS)


@needs_compiler
def test_an_infinite_entry_stays_alone():
    """Its parts in bfloat16 are infinity and a number, not what infinity less infinity is."""
    call = make_call("m2rnn", 2, 5, keys=32, values=16, dtype=torch.bfloat16)
    with torch.no_grad():
        call.initial[0][0, 0, 0, 0] = torch.inf
    finals = [
        pararnn.solve(call.cell, call.gates, call.initial, **own)[1] for own in (FUSED, TORCH)
    ]
    assert finals[0].isinf().sum() == 1
    assert torch.equal(*[final.isfinite() for final in finals])


@needs_compiler
@pytest.mark.parametrize(
    ("cls", "values", "lengths", "dtype"),
    [
        (Mixed, 5, {"K": 4}, torch.float64),
        (Mixed, 16, {"K": 16}, torch.bfloat16),
        (Rows, 5, {"K": 9, "U": 4}, torch.float64),
    ],
)
@pytest.mark.one_in(4)
def test_steps_of_many_operations(cls, values, lengths, dtype):
    test_matrix.check_kernels(cls, values, lengths, dtype, rows=2)


@needs_compiler
@pytest.mark.parametrize("window", [8, 0])
@pytest.mark.one_in(3)
def test_inputs_come_by_windows_of_any_size(window, monkeypatch):
    """Those of fewer steps than a chunk, and none."""
    monkeypatch.setattr(matrix_cuda, "WINDOWS", (window,) if window else ())
    variant = _variants(_program(keys=4, values=3), torch.float32)[1]
    call = make_call("m2rnn", 1, 70, dtype=torch.float32)
    assert memory_of(program_of(call.cell), variant).window == window
    _compare("m2rnn", call, torch.float32, torch.rand(1, 70) < 0.1, **FUSED)


@needs_compiler
def test_layers_run_kernels_on_packed_rows():
    test_matrix.check_packed_rows(_layer("m2rnn"), [0, 3, 3, 40, 45])


@needs_compiler
@pytest.mark.parametrize("name", ["m2rnn", "gated-delta"])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.thorough
def test_training_launches_the_variants_that_are_compiled_ahead(name, weight_dtype, monkeypatch):
    device, variants = recorded(gpu())
    install(device, monkeypatch)
    call = make_call(name, 1, 3, keys=16, values=16, dtype=torch.bfloat16)
    call.cell.to(weight_dtype)
    pararnn.solve(call.cell, call.gates, **FUSED)[0].sum().backward()
    program = program_of(call.cell)
    assert variants == _variants(program, torch.bfloat16, weight_dtype)


@needs_compiler
def test_some_gradients_are_wanted():
    test_matrix.check_some_gradients("m2rnn")


def test_states_that_do_not_fit_are_refused():
    for keys, values, message in ((512, 512, "registers"), (128, 256, "shared memory")):
        program = _program("m2rnn", keys, values, heads=1)
        variant = _variants(program, torch.float64)[1]
        with pytest.raises(EngineError, match=message):
            memory_of(program, variant)


MUTANTS = {
    "no reset": ("(place.is_reset(l)) fill_all(state", "(false) fill_all(state"),
    "an adjoint through a reset": ("(place.is_reset(l)) fill_all(adj", "(false) fill_all(adj"),
    "a state before the wrong step": ("part % checkpoint == 0", "part == 0"),
    "a final gradient too few": ("(events && place.sequence(l + 1) != sequence) load", "(0) load"),
    "lanes that are not summed": ("< A::lane_step * A::lanes", "< A::lane_step * A::lanes / 2"),
    "warps that are not summed": ("part < A::warps", "part < A::warps - 1"),
    "entries that do not exist": ("return A::exists(n) ? x : otherwise;", "return x;"),
    "a matrix's column": ("matrix[j * row + L::index(i)]", "matrix[L::index(i) * row + j]"),
    "one window for two": ("(held == l / span ? 0 : window)", "0"),
    "a piece too few": ("piece < pieces; ++piece", "piece < pieces - 1; ++piece"),
    "halves that lanes mix up": ("upper ? x[i + half] : x[i];", "x[i];"),
    "a step's gates for another's": ("(int)far) & (copy", "2 + (int)far) & (copy"),
    "a row too few in a sum": ("other < others", "other < others - 1"),
}


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.thorough
def test_a_wrong_kernel_is_seen(name, tmp_path):
    """The agreement that the tests above rest on fails for a kernel that is wrong."""
    # Axes that fill no lanes, and more than one warp.
    cell, keys, values = ("hopfield", 5, 3) if "exist" in name else ("m2rnn", 40, 20)
    if "not summed" in name:
        cell = "hopfield"
    if "halves" in name:
        cell = "gated-delta"
    call = make_call(cell, 2, 40, keys=keys, values=values, dtype=torch.float32)
    wrong = emulated.wrong_headers(tmp_path, "cuda/matrix", *MUTANTS[name])
    with emulated.compiled_from(wrong), pytest.raises(AssertionError):
        _compare(cell, call, torch.float32, torch.rand(2, 40) < 0.1, **FUSED)


def test_a_chunk_is_the_contracts():
    text = (headers.KERNELS / "cuda" / "matrix" / "inputs.h").read_text()
    assert f"constexpr int checkpoint = {CHECKPOINT};" in text
    pairs = [(CHECKPOINT, window) for window in matrix_cuda.WINDOWS]
    assert all(max(pair) % min(pair) == 0 for pair in pairs)
