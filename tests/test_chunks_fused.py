"""Kernels over chunks, compiled for a CPU: against the loop, and the numerics contract."""

import itertools

import emulated
import pytest
import torch
from chunk_cases import (
    CELLS,
    CHUNKS,
    HARD,
    LOOP,
    RATES,
    VARIANTS,
    Decays,
    Grows,
    VectorDecays,
    assert_alike,
    assert_close,
    counts_of_loops,
    gate_at,
    in_variant,
    late_and_large,
    make_call,
    make_hard,
    obeys,
    queried,
    solved,
    views_of,
)
from matrix_cells import Call
from table import needs_compiler

import pararnn
from pararnn.base.numerics import FORWARD_TOLERANCE
from pararnn.codegen.chunks import PRODUCERS, ChunkVariant, why_no_chunks
from pararnn.engines.fused import chunks
from pararnn.engines.fused.elementwise_cuda import ElementwiseCuda
from pararnn.engines.rule import Rank
from pararnn.engines.tuned import Workload
from pararnn.program.program import program_of
from pararnn.solve import one_gate, prepare, run
from pararnn.zoo import MATRIX_CELLS, GatedDeltaCell

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SIZES = ((16, 16), (20, 12), (32, 16))


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Run CUDA kernels on a CPU."""
    emulated.install(emulated.gpu(), monkeypatch)


@pytest.fixture
def heads_by_loop(monkeypatch):
    """How many heads each launch of the loop has run again."""
    return counts_of_loops(monkeypatch)


@needs_compiler
@pytest.mark.parametrize("name", list(CELLS))
@pytest.mark.one_in(7)
def test_cells_meet_the_contract(name, heads_by_loop):
    """Each in one dtype; sizes that are no multiples of 16. No head runs by the loop."""
    number = list(CELLS).index(name)
    keys, values = SIZES[number % 3]
    call = make_call(CELLS[name], dtype=DTYPES[number // 3 % 3], keys=keys, values=values)
    assert not obeys(call)
    assert heads_by_loop == [0, 0, 0]


@needs_compiler
@pytest.mark.parametrize("variant", VARIANTS[1:])
@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "titans", "WithParams", "mlstm", "Apart"])
@pytest.mark.one_in(11)
def test_variants_meet_the_contract(name, variant, heads_by_loop):
    dtype = torch.bfloat16 if name == "gated-delta" else torch.float32
    call, options = in_variant(make_call(CELLS[name], steps=50, dtype=dtype), variant)
    assert not obeys(call, **options)
    assert heads_by_loop == [0, 0, 0]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "mlstm"])
@pytest.mark.one_in(5)
def test_dtypes_meet_the_contract(name, dtype):
    assert not obeys(make_call(CELLS[name], dtype=dtype), initial=False)


@needs_compiler
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.one_in(23)
def test_random_cells_are_the_loop(seed, heads_by_loop):
    """Those that kernels take; of the others the reason is known before anything is compiled."""
    call = make_call(queried(seed))
    program = program_of(call.cell)
    if why_no_chunks(program) is None:
        call, options = in_variant(call, VARIANTS[seed % len(VARIANTS)])
        assert_close(call, **options)
        assert not any(heads_by_loop)
    else:
        with pytest.raises(pararnn.EngineError, match=call.cell.__class__.__name__):
            pararnn.solve(call.cell, call.gates, **CHUNKS)


@needs_compiler
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32])
@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "mlstm"])
@pytest.mark.one_in(5)
def test_any_length(name, length, heads_by_loop):
    assert_close(make_call(CELLS[name], steps=length))
    assert not any(heads_by_loop)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "WithParams"])
@pytest.mark.one_in(5)
def test_few_heads_have_several_blocks(name, dtype, monkeypatch, heads_by_loop):
    """Blocks divide the values of a head where multiprocessors are idle, to the same bits."""
    call = make_call(CELLS[name], 1, 50, 1, 16, 64, dtype)
    results = []
    for cores in (1, 2, 8):
        emulated.install(emulated.gpu(cores=cores), monkeypatch)
        pararnn.clear_caches()
        results.append(solved(call, CHUNKS))
    assert not obeys(call)
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert torch.equal(x, y)
    assert not any(heads_by_loop)


@needs_compiler
@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "titans", "mlstm"])
@pytest.mark.one_in(5)
def test_rings_go_round_with_several_blocks_of_keys_and_values(name, heads_by_loop):
    """More chunks than any ring has stages; the last value has a block of its own."""
    most = 16 * max(stages for table in PRODUCERS for _, stages, *_ in table)
    assert_close(make_call(CELLS[name], 1, 2 * most + 3, 1, 40, 33))
    assert not any(heads_by_loop)


@needs_compiler
def test_no_rows_and_no_sequences():
    assert_close(make_call(GatedDeltaCell, rows=0))
    call = make_call(GatedDeltaCell, rows=1)
    output, final = pararnn.solve(call.cell, call.gates, cu_seqlens=[0, 0, 0], **CHUNKS)
    assert output.eq(0).all()
    assert final.eq(0).all()
    assert torch.autograd.grad(output.sum(), call.gates)[0].eq(0).all()


@needs_compiler
@pytest.mark.parametrize("name", ["gated-delta", "titans", "ScalarDecay", "mlstm", "Apart"])
@pytest.mark.parametrize("arriving", ["output", "final"])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.one_in(7)
def test_some_gradients_are_absent(name, arriving, initial, heads_by_loop):
    call = make_call(CELLS[name])
    call = call if initial else Call(call.cell, call.gates, ())
    assert_close(call, arriving=arriving)
    assert not any(heads_by_loop)


@needs_compiler
@pytest.mark.parametrize("name", ["gated-delta", "ScalarDecay", "mlstm"])
@pytest.mark.one_in(2)
def test_a_bias_and_results_that_are_not_read(name, heads_by_loop):
    call = make_call(CELLS[name])
    bias = (0.5 * torch.randn(1, call.gates.shape[2] * call.gates.shape[3])).requires_grad_()
    assert_close(call, bias=bias)
    assert_close(call, arriving="output", bias=bias, output_only=True)
    assert not any(heads_by_loop)


@needs_compiler
def test_gates_at_odd_addresses():
    """Heads and rows that begin at odd numbers, of 16 bits; the gradient has strides of its own."""
    call = make_call(GatedDeltaCell, dtype=torch.bfloat16)
    rows, steps, heads, width = call.gates.shape
    by_time = torch.zeros(steps, rows, heads, width + 3, dtype=torch.bfloat16)
    odd = by_time.transpose(0, 1)[..., 1 : width + 1]
    odd.copy_(call.gates.detach())
    results = []
    for gates in (call.gates, odd.requires_grad_()):
        results.append(solved(Call(call.cell, gates, call.initial), CHUNKS))
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


def test_pairs_are_read_at_even_addresses_only(monkeypatch):
    """A number before vectors moves them to odd ones, which a GPU refuses to read two at once."""
    seen = []
    monkeypatch.setattr(
        chunks, "ChunkVariant", lambda *values: seen.append(values) or ChunkVariant(*values)
    )
    for name, even in (("gated-delta", True), ("ValuesByKeys", False)):
        call = make_call(CELLS[name], steps=1, dtype=torch.bfloat16)
        with torch.no_grad():
            pararnn.solve(call.cell, call.gates, **CHUNKS)
        assert seen[-1][ChunkVariant._fields.index("pairs")] == even


def test_what_kernels_do_not_take_is_refused():
    call = make_call(GatedDeltaCell, dtype=torch.float64)
    with pytest.raises(pararnn.EngineError, match="compute in float32, and gates are float64"):
        pararnn.solve(call.cell, call.gates, **CHUNKS)
    call = make_call(MATRIX_CELLS["m2rnn"])
    with pytest.raises(pararnn.EngineError, match=r"aten\.mm of H and a square parameter"):
        pararnn.solve(call.cell, call.gates, **CHUNKS)
    call = make_call(GatedDeltaCell, keys=144)
    with pytest.raises(pararnn.EngineError, match="K = 144; kernels over chunks take 128"):
        pararnn.solve(call.cell, call.gates, **CHUNKS)
    with pytest.raises(pararnn.EngineError, match="without matrix states"):
        pararnn.solve(pararnn.GRUCell(8), torch.randn(1, 4, 3, 8), **CHUNKS)
    cell = pararnn.ParaGRU(8, 8)
    with pytest.raises(pararnn.EngineError, match="without matrix states"):
        cell(torch.randn(1, 4, 8), **CHUNKS)


@needs_compiler
@pytest.mark.parametrize("decay", list(HARD))
@pytest.mark.parametrize("cls", [Decays, VectorDecays])
@pytest.mark.parametrize(("rate", "alike"), RATES, ids=str)
@pytest.mark.one_in(7)
def test_hard_decays_and_keys(decay, cls, rate, alike):
    """In one dtype each, another one for the next rate."""
    dtype = DTYPES[(list(HARD).index(decay) + RATES.index((rate, alike))) % 3]
    call = make_hard(make_call(cls, rows=1, steps=70, dtype=dtype), decay, rate, alike)
    assert not obeys(call)


@needs_compiler
@pytest.mark.parametrize("scale", [1e-9, 2.0**-100, 2.0**60])
@pytest.mark.parametrize("name", ["gated-delta", "rwkv7"])
@pytest.mark.one_in(5)
def test_units_of_the_loss(name, scale):
    call = make_call(CELLS[name])
    assert not obeys(call, loss_scale=scale)


@needs_compiler
@pytest.mark.parametrize("name", ["gated-delta", "rwkv7"])
def test_late_large_values_excuse_nothing(name):
    call = late_and_large(make_call(CELLS[name], steps=64))
    assert not obeys(call)


def _finite_and_not(call, **options):
    ours, loop = (solved(call, pair, **options) for pair in (CHUNKS, LOOP))
    assert_alike(ours, loop, 2 * FORWARD_TOLERANCE[call.gates.dtype])
    return ours


COMPILED = {"gated-delta": torch.bfloat16, "rwkv7": torch.float16}
"""Dtypes in which other quick tests run a cell too; else float32."""


def _places_of_values():
    """Return (name, value, gate, dtype), each gate of a cell in a dtype: states before chunks are
    kept for those of 16 bits."""
    names, table = (
        ("gated-delta", "rwkv7", "titans", "ScalarDecay", "Selects", "mlstm", "Apart"),
        [],
    )
    for gate, value, name in itertools.product(range(5), (torch.nan, torch.inf, -torch.inf), names):
        dtype = DTYPES[(gate + len(name)) % 3]
        if CELLS[name].params:  # sums of which one head's is left, which may cancel
            dtype = torch.float32
        marks = () if dtype == COMPILED.get(name, torch.float32) else pytest.mark.thorough
        case = f"{name}-{value}-{gate}"
        table.append(pytest.param(name, value, gate, dtype, marks=marks, id=case))
    return table


@needs_compiler
@pytest.mark.parametrize(("name", "value", "gate", "dtype"), _places_of_values())
@pytest.mark.one_in(8)
def test_values_are_non_finite_where_the_loop_has_them(name, value, gate, dtype):
    """One number of a step and head: earlier steps, other rows and heads keep their results."""
    call = make_call(CELLS[name], rows=2, steps=40, dtype=dtype)
    with torch.no_grad():
        call.gates[1, 20, 0, gate_at(call.cell, gate)] = value
        if (
            name == "Selects" and gate < 4
        ):  # what is turned off counts as zero, not 0 times infinity
            views_of(call.cell, call.gates)["b"][1, 20, 0] = 1.0
    _finite_and_not(call)


@needs_compiler
@pytest.mark.parametrize("name", ["gated-delta", "WithParams", "mlstm", "Apart"])
@pytest.mark.parametrize("variant", ["resets", "packed"])
@pytest.mark.one_in(3)
def test_a_nan_stays_in_its_sequence(name, variant):
    call, options = in_variant(make_call(CELLS[name], rows=2, steps=50), variant)
    with torch.no_grad():
        call.gates[0, 20, 1, 3] = torch.nan
    ours = _finite_and_not(call, **options)
    assert ours[0].isnan().any()
    assert not ours[0][:, :20].isnan().any()


@needs_compiler
@pytest.mark.parametrize("name", ["Decays", "VectorDecays"])
def test_what_overflows_runs_by_the_loop(name):
    call = make_call(CELLS[name], rows=2, steps=40)
    with torch.no_grad():
        gates = views_of(call.cell, call.gates)
        for at in ("k", "v"):
            gates[at][0, 21, 1] = 1e30
    ours = _finite_and_not(call)
    assert not ours[0].isfinite().all()
    assert ours[0][1].isfinite().all()


@needs_compiler
@pytest.mark.parametrize("name", ["gated-delta", "titans"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.one_in(3)
def test_gradients_and_states_that_are_not_finite(name, value):
    call = make_call(CELLS[name], rows=2, steps=40)
    grads = []
    for pair in (CHUNKS, LOOP):
        output, _ = pararnn.solve(call.cell, call.gates, call.initial, **pair)
        arriving = torch.ones_like(output)
        arriving[1, 20, 0, 0] = value
        grads.append(torch.autograd.grad(output, [call.gates, *call.initial], arriving))
    assert_alike(*grads, 2e-5)
    with torch.no_grad():
        call.initial[0][0, 1, 2, 3] = value
    _finite_and_not(call)


@needs_compiler
@pytest.mark.parametrize("name", ["gated-delta", "WithParams"])
def test_a_reset_forgets_what_is_not_finite(name, heads_by_loop):
    """Zero times NaN is NaN in a product of a chunk, but no step reads that state."""
    call = make_call(CELLS[name], rows=2, steps=20)
    with torch.no_grad():
        call.initial[0][1, 1] = torch.nan
    reset = torch.zeros(2, 20, dtype=torch.bool)
    reset[1, 0] = True
    ours = _finite_and_not(call, reset=reset)
    assert all(x.isfinite().all() for x in ours)
    assert heads_by_loop[0] == 1


@needs_compiler
def test_parameters_count_heads_once_that_a_later_matrix_runs_again():
    """The first matrix has summed gradients of a head before the second finds infinity there."""
    call, grads = make_call(CELLS["Apart"]), []
    for pair in (CHUNKS, LOOP):
        output, final = pararnn.solve(call.cell, call.gates, call.initial, **pair)
        arriving = [torch.ones_like(x) for x in (output, *final)]
        arriving[1 + [*call.cell.states].index("R")][1, 0, 2, 3] = torch.inf
        grads.append(torch.autograd.grad([output, *final], call.leaves(), arriving))
    assert_alike(*grads, 2e-5)
    assert grads[1][-1].isfinite().all()


@needs_compiler
def test_heads_that_ran_again_are_those_of_their_rows():
    """Parameters sum what the loop has of one row, and what chunks have of others."""
    layer = pararnn.ParaRNN(CELLS["WithParams"], 8, 32, num_heads=2, K=16)
    x, h_0 = torch.randn(4, 40, 8), torch.randn(1, 4, 2, 16, 16)
    h_0[0, 2, 1] = torch.nan
    reset = torch.zeros(4, 40, dtype=torch.bool)
    reset[2, 0] = True
    results = []
    for pair in (CHUNKS, LOOP):
        output, h_n = layer(x, h_0, lengths=[17, 0, 40, 3], reset=reset, **pair)
        grads = torch.autograd.grad(output.square().sum() + h_n.sum(), [*layer.parameters()])
        results.append([output.detach(), h_n.detach(), *grads])
    assert all(x.isfinite().all() for x in results[1])
    assert_alike(*results, 2e-5)


SLOW = {
    "gated-delta": {"a": 5.0},
    "rwkv7": {"w": -5.0},
    "titans": {"a": -5.0, "e": 5.0},
    "kda": {"a": 5.0},
}


@needs_compiler
@pytest.mark.parametrize("name", list(SLOW))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.one_in(5)
def test_what_is_kept_over_many_chunks(name, dtype):
    """Decays near 1, whose products over a chunk have gradients."""
    call = make_call(CELLS[name], steps=70, dtype=dtype)
    with torch.no_grad():
        for gate, shift in SLOW[name].items():
            views_of(call.cell, call.gates)[gate].add_(shift)
    assert not obeys(call)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_products_of_decays_may_overflow_where_the_loop_does_not(dtype):
    """States are zero until the last steps, so decays before them change nothing."""
    call = make_call(Grows, steps=48, dtype=dtype)
    with torch.no_grad():
        call.initial[0].zero_()
        views = views_of(call.cell, call.gates)
        views["k"][:, :44] = 0
        views["d"][:, :44] = 1e5
        views["d"][:, 44:] = 0.5
    leaves = [call.gates, *call.cell.parameters()]
    results = []
    for pair in (CHUNKS, LOOP):
        output, final = pararnn.solve(call.cell, call.gates, call.initial, **pair)
        grads = torch.autograd.grad(output[:, 44:].sum() + final.sum(), leaves)
        results.append([output.detach(), final.detach(), *grads])
    assert results[1][0].isfinite().all()
    assert_alike(*results, 2 * FORWARD_TOLERANCE[dtype])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", ["gated-delta", "ScalarDecay", "mlstm", "Apart"])
@pytest.mark.one_in(5)
def test_states_before_chunks_are_kept_or_computed_again(name, dtype):
    """Also for a second backward pass, and for blocks that are computed again."""
    call = make_call(CELLS[name], steps=40, dtype=dtype)
    results = []
    for sums in (None, True, False):
        args = prepare(call.cell, one_gate(call.cell, call.gates), call.initial, save_values=sums)
        (output, *_), final, _, _ = run(program_of(call.cell), args, *CHUNKS.values())
        loss = output.square().sum() + sum(h.sum() for h in final)
        first = torch.autograd.grad(loss, call.leaves(), retain_graph=True)
        second = torch.autograd.grad(loss, call.leaves())
        assert all(map(torch.equal, first, second))
        results.append([output, *first])
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])

    def again(gates):
        return pararnn.solve(call.cell, gates, call.initial, **CHUNKS)[0]

    output = torch.utils.checkpoint.checkpoint(again, call.gates, use_reentrant=False)
    whole = again(call.gates)
    grads = [torch.autograd.grad(y.square().sum(), call.gates)[0] for y in (output, whole)]
    assert torch.equal(*grads)


@needs_compiler
@pytest.mark.parametrize("cell", ["gated-delta", "rwkv7", "mlstm"])
@pytest.mark.one_in(2)
def test_verify_checks_a_layer(cell):
    layer = pararnn.ParaRNN(MATRIX_CELLS[cell], 8, 32, num_heads=2, K=16, **CHUNKS)
    report = pararnn.verify(layer, torch.randn(3, 40, 8), lengths=[40, 0, 33])
    assert report.passed, report
    assert layer.layers[0].choice.pair == ("chunks", "fused")


def test_explain_says_the_class_of_a_cell():
    cell = GatedDeltaCell(32, num_heads=2, K=16)
    text = str(pararnn.explain(cell, (2, 50, 2, cell.head_sizes.width), **CHUNKS))
    assert "(chunks, fused) runs: it was requested" in text
    assert "affine in its states, S: R = 1, r = 1, n = 1, reads along K" in text
    cell = MATRIX_CELLS["m2rnn"](32, num_heads=2, K=16)
    text = str(pararnn.explain(cell, (2, 50, 2, cell.head_sizes.width)))
    assert "(chunks, fused) its step is not affine in its states: aten.mm of H" in text


@needs_compiler
@pytest.mark.parametrize("arriving", ["all", pytest.param("final", marks=pytest.mark.thorough)])
def test_states_before_others_are_cut_into_segments_of_time(arriving, monkeypatch):
    """As `auto` cuts long rows of few channels."""
    monkeypatch.setattr(ElementwiseCuda, "segments", lambda *_: 8)
    call, options = in_variant(make_call(CELLS["mlstm"], 1, 300, 1), "resets")
    assert_close(call, arriving=arriving, **options)


@needs_compiler
@pytest.mark.parametrize("name", ["gated-delta", pytest.param("mlstm", marks=pytest.mark.thorough)])
def test_compilers_take_a_layer_as_one_graph(name):
    layer = pararnn.ParaRNN(MATRIX_CELLS[name], 12, 32, num_heads=2, K=16, **CHUNKS)
    compiled, x = torch.compile(layer, fullgraph=True, backend="eager"), torch.randn(2, 20, 12)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])


def test_a_state_that_nothing_is_written_into_is_refused():
    class Forgets(GatedDeltaCell):
        gates = {"q": "K", "a": ""}

        def step(self, state, gate, param):
            return torch.sigmoid(gate.a)[..., None, None] * state.S

    cell = Forgets(32, num_heads=2, K=16)
    with pytest.raises(pararnn.EngineError, match="writes nothing into its states"):
        pararnn.solve(cell, torch.randn(1, 3, 2, 17), solver="chunks", backend="fused")


AUTO = {
    "fast": ("gated-delta", 64, 64, 256, torch.bfloat16, (9, 0)),
    "float16": ("gated-delta", 64, 64, 256, torch.float16, (9, 0)),
    "newer": ("rwkv7", 64, 64, 256, torch.bfloat16, (10, 0)),
}
NOT_AUTO = {
    "float32": ("gated-delta", 64, 64, 256, torch.float32, (9, 0)),
    "short": ("gated-delta", 64, 64, 255, torch.bfloat16, (9, 0)),
    "few keys": ("gated-delta", 48, 64, 256, torch.bfloat16, (9, 0)),
    "few values": ("gated-delta", 64, 48, 256, torch.bfloat16, (9, 0)),
    "older": ("gated-delta", 64, 64, 256, torch.bfloat16, (8, 9)),
    "entries": ("mlstm", 64, 64, 256, torch.bfloat16, (9, 0)),
    "readout": ("mamba2", 64, 64, 256, torch.bfloat16, (9, 0)),
    "coupled": ("hopfield", 64, 64, 256, torch.bfloat16, (9, 0)),
}


@pytest.mark.parametrize("case", [*AUTO, *NOT_AUTO])
def test_auto_takes_chunks_where_they_were_measured_to_be_faster(case, monkeypatch):
    name, keys, values, steps, dtype, capability = (AUTO | NOT_AUTO)[case]
    monkeypatch.setattr(chunks, "has_gpu", lambda: True)
    monkeypatch.setattr(chunks, "CUDA", emulated.gpu(capability))
    program = program_of(MATRIX_CELLS[name](2 * values, num_heads=2, K=keys))
    size = (16, steps, program.step.head.width)
    workload = Workload(program.key, size, dtype, torch.device("cuda"))
    rank, _ = chunks.ENGINE.rank(program, workload)
    assert (rank is Rank.CHUNKS) is (case in AUTO)
