"""Kernels over chunks on a GPU: the numerics contract, graphs, streams and compilers."""

import pytest
import torch
from call_results import as_tuple
from captures import capture, check_replays
from chunk_cases import (
    CELLS,
    CHUNKS,
    HARD,
    LOOP,
    RATES,
    VARIANTS,
    ZOO,
    Decays,
    VectorDecays,
    assert_alike,
    assert_close,
    error,
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

import pararnn
from pararnn.engines.fused.chunks import ENGINE
from pararnn.lm import set_solver
from pararnn.program.program import program_of
from pararnn.zoo import MATRIX_CELLS, GatedDeltaCell

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((64, 64), (128, 128), (32, 48), (20, 12))
NAMES = (*ZOO, "Apart")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_cells_meet_the_contract(name, size, dtype, device):
    keys, values = size
    call = make_call(CELLS[name], 2, 150, 3, keys, values, dtype, device)
    reason = _why_not(call)
    if reason is not None:
        pytest.skip(reason)
    assert not obeys(call)


def size_of(name):
    """Keys and values that the loop's registers hold too."""
    return (48, 48) if name == "Apart" else (64, 64)


def _why_not(call):
    """The reason why kernels do not fit this GPU, or None."""
    try:
        ENGINE.build(program_of(call.cell), call.gates.dtype)
    except pararnn.EngineError as error:
        assert "shared memory" in str(error) or "registers" in str(error)  # noqa: PT017
        return str(error)
    return None


@pytest.mark.parametrize("name", [name for name in CELLS if name not in NAMES])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_other_cells_meet_the_contract(name, dtype, device):
    assert not obeys(make_call(CELLS[name], 3, 70, 2, 32, 32, dtype, device))


@pytest.mark.parametrize("variant", VARIANTS[1:])
@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "titans", "WithParams", "mlstm", "Apart"])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_variants_meet_the_contract(name, variant, dtype, device):
    call, options = in_variant(
        make_call(CELLS[name], 3, 200, 2, *size_of(name), dtype, device), variant
    )
    assert not obeys(call, **options)
    assert not obeys(call, initial=False, **options)


@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "mlstm"])
@pytest.mark.parametrize(("rows", "steps", "heads"), [(4, 1024, 12), (1, 4096, 2)])
@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_long_rows_meet_the_contract(name, rows, steps, heads, size, device):
    call = make_call(CELLS[name], rows, steps, heads, *size, torch.bfloat16, device)
    assert not obeys(call)


@pytest.mark.parametrize("seed", range(40))
def test_random_cells_are_the_loop(seed, device):
    call = make_call(queried(seed), 2, 70, 2, 32, 16, torch.float32, device)
    if ENGINE.why_not(program_of(call.cell)) is None:
        call, options = in_variant(call, VARIANTS[seed % len(VARIANTS)])
        assert_close(call, **options)


@pytest.mark.parametrize("name", ["gated-delta", "ScalarDecay", "mlstm", "Apart"])
@pytest.mark.parametrize("arriving", ["output", "final"])
@pytest.mark.parametrize("initial", [False, True])
def test_some_gradients_are_absent(name, arriving, initial, device):
    call = make_call(CELLS[name], 2, 100, 2, *size_of(name), device=device)
    call = call if initial else Call(call.cell, call.gates, ())
    assert_close(call, arriving=arriving)


@pytest.mark.parametrize("length", [0, 1, 16, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_length(length, dtype, device):
    assert_close(make_call(GatedDeltaCell, 2, length, 2, 64, 64, dtype, device))


@pytest.mark.parametrize("name", ["gated-delta", "ValuesByKeys"])
def test_gates_at_odd_addresses(name, device):
    call = make_call(CELLS[name], 2, 50, 2, *size_of(name), torch.bfloat16, device)
    rows, steps, heads, width = call.gates.shape
    wide = torch.zeros(steps, rows, heads, width + 3, dtype=torch.bfloat16, device=device)
    odd = wide.transpose(0, 1)[..., 1 : width + 1]
    odd.copy_(call.gates.detach())
    results = [
        solved(Call(call.cell, gates, call.initial), CHUNKS)
        for gates in (call.gates, odd.requires_grad_())
    ]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "name", ["gated-delta", "rwkv7", "titans", "ScalarDecay", "mlstm", "Apart"]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("gate", range(5))
def test_values_are_non_finite_where_the_loop_has_them(name, value, gate, device):
    call = make_call(CELLS[name], 2, 100, 2, *size_of(name), device=device)
    with torch.no_grad():
        call.gates[1, 50, 0, gate_at(call.cell, gate)] = value
    ours, loop = (solved(call, pair) for pair in (CHUNKS, LOOP))
    assert_alike(ours, loop, 1e-4)


def test_what_overflows_runs_by_the_loop(device):
    call = make_call(CELLS["Decays"], 2, 100, 2, 64, 64, device=device)
    with torch.no_grad():
        for name in ("k", "v"):
            views_of(call.cell, call.gates)[name][0, 50, 1] = 1e30
    ours, loop = (solved(call, pair) for pair in (CHUNKS, LOOP))
    assert_alike(ours, loop, 1e-4)
    assert not ours[0].isfinite().all()


@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "ScalarDecay", "mlstm", "Apart"])
@pytest.mark.parametrize("variant", ["plain", "packed"])
def test_graphs_replay_and_bits_repeat(name, variant, device):
    """Also where a head is not finite: the host does not look at flags."""
    call = make_call(CELLS[name], 4, 1024, 12, *size_of(name), torch.bfloat16, device)
    call, options = in_variant(call, variant)

    def run():
        output, final = pararnn.solve(call.cell, call.gates, call.initial, **CHUNKS, **options)
        loss = output.float().square().sum() + sum(h.sum() for h in as_tuple(final))
        return [output, *torch.autograd.grad(loss, call.leaves())]

    graph, replay = capture(run)
    for changes in (None, torch.nan):
        if changes is not None:
            with torch.no_grad():
                call.gates[0, 100, 1, 3] = changes
        reference = run()
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            for a, b in zip(replay, reference, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_graphs_of_a_layer_take_new_inputs(device):
    layer = _layer(device)

    def run(x):
        output, h_n = layer(x)
        loss = output.float().square().sum() + h_n.sum()
        return [output, *torch.autograd.grad(loss, [x, *layer.parameters()])]

    check_replays(run, torch.randn(4, 256, 64, device=device, dtype=torch.bfloat16))


def _layer(device, name="gated-delta", dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    cell = MATRIX_CELLS[name]
    sizes = {"num_heads": 2, "K": 64, "device": device, "dtype": dtype}
    return pararnn.ParaRNN(cell, 64, 128, **sizes, **CHUNKS, **options)


@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "mlstm"])
def test_compiled_layers_are_eager_ones(name, device):
    """In one graph, forward and backward, for two lengths."""
    layer = _layer(device, name, torch.float32)
    compiled = torch.compile(layer, fullgraph=True)
    for steps in (64, 100):
        results = []
        for module in (layer, compiled):
            x = torch.randn(3, steps, 64, generator=torch.Generator().manual_seed(1)).to(device)
            x.requires_grad_()
            output, h_n = module(x)
            loss = output.square().sum() + sum(h.sum() for h in as_tuple(h_n))
            grads = torch.autograd.grad(loss, [x, *layer.parameters()])
            results.append([output, *as_tuple(h_n), *grads])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def test_two_streams_at_once(device):
    calls = [
        make_call(GatedDeltaCell, 4, 1024, 6, 64, 64, torch.bfloat16, device) for _ in range(2)
    ]
    references = [solved(call, CHUNKS) for call in calls]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in calls], []
    for _ in range(3):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                results.append(solved(call, CHUNKS))
    torch.cuda.synchronize()
    for number, result in enumerate(results):
        assert all(map(torch.equal, result, references[number % 2]))


def test_layers_explain_what_runs(device):
    layer = _layer(device)
    layer(torch.randn(2, 50, 64, device=device, dtype=torch.bfloat16))
    assert layer.layers[0].choice.pair == ("chunks", "fused")
    assert "S: R = 1, r = 1, n = 1, reads along K" in str(pararnn.explain(layer, (2, 50, 64)))


@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "mlstm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_checks_a_layer(name, dtype, device):
    if name == "mlstm" and dtype != torch.float32:
        pytest.skip("gradients of i and f cancel: see `obeys`")
    layer = _layer(device, name, dtype)
    x = torch.randn(3, 100, 64, device=device, dtype=dtype)
    failed = {}
    for solver in ("chunks", "sequential"):
        set_solver(layer, solver, "fused")
        ((_, _, result),) = pararnn.verify(layer, x, lengths=[100, 0, 33]).layers
        failed[solver] = {c.name: c.error for c in result.checks if not c.passed}
    # Gradients of gates in float16 are rounded by more than the contract has for RWKV-7.
    for check, error_of_chunks in failed["chunks"].items():
        assert error_of_chunks <= 1.1 * failed["sequential"].get(check, 0.0), check


AUTO = ("gated-delta", "kda", "rwkv7", "titans", "comba", "gated-delta-product")
"""Cells that `auto` runs by chunks."""


def _pair_of_auto(call):
    gates = call.gates
    why = pararnn.explain(call.cell, gates.shape, dtype=gates.dtype, device=gates.device)
    return why.solver, why.backend


@pytest.mark.parametrize("decay", list(HARD))
@pytest.mark.parametrize("cls", [Decays, VectorDecays])
@pytest.mark.parametrize(("rate", "alike"), RATES, ids=str)
def test_hard_decays_and_keys_where_auto_takes_chunks(decay, cls, rate, alike, device):
    dtype = DTYPES[(list(HARD).index(decay) + RATES.index((rate, alike))) % 2]
    call = make_hard(make_call(cls, 2, 300, 2, 64, 64, dtype, device), decay, rate, alike)
    assert _pair_of_auto(call) == ("chunks", "fused")
    assert not obeys(call)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", AUTO)
def test_late_large_values_where_auto_takes_chunks(name, dtype, device):
    call = late_and_large(make_call(CELLS[name], 2, 512, 2, 64, 64, dtype, device))
    assert _pair_of_auto(call) == ("chunks", "fused")
    assert not obeys(call)


@pytest.mark.parametrize("name", AUTO)
def test_very_long_rows_are_the_generated_loop(name, device):
    call = make_call(CELLS[name], 1, 65_536, 1, 64, 64, torch.bfloat16, device)
    ours, loop = (solved(call, pair) for pair in (CHUNKS, {**LOOP, "backend": "fused"}))
    for a, b in zip(ours, loop, strict=True):
        assert error(a, b.double()) <= 1e-2
