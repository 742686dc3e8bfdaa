"""The scan over chunks: the recurrence itself, and cells by (chunks, torch) against the loop."""

import re
from functools import partial

import chunk_cases
import pytest
import torch
from affine_cells import AFFINE, REFUSED, ZOO, random_cell
from chunk_cases import LOOP, VARIANTS, Grows, assert_alike, error, gate_at, in_variant, solved
from matrix_cells import Call
from table import check_contract

import pararnn
import pararnn.zoo as zoo
from pararnn.base.numerics import FORWARD_TOLERANCE
from pararnn.engines import chunks_torch
from pararnn.solvers import affine_cells
from pararnn.solvers.chunks import Terms, inverse, scan_chunks

CHUNKS = {"solver": "chunks", "backend": "torch"}
CELLS = AFFINE | {name: zoo.MATRIX_CELLS[name] for name in ZOO}


def loop_over(terms, state, sizes):
    """Y, Z and the last states, step after step."""
    outputs, seen, begin = [], [], 0
    for count in sizes:
        of = [x[begin : begin + count] for x in terms]
        s, ys, zs = state[:count], [], []
        for decay, column, read, value, query, look in zip(*(x.unbind(1) for x in of), strict=True):
            u = torch.einsum("grik,gikv->grv", read, s)
            w = torch.cat([value[:, : read.shape[1]] + u, value[:, read.shape[1] :]], 1)
            kept = torch.einsum("gijk,gjkv->gikv", decay.expand(*decay.shape[:3], s.shape[2]), s)
            s = kept + torch.einsum("gcik,gcv->gikv", column, w)
            ys.append(torch.einsum("gpik,gikv->gpv", query, s))
            zs.append(torch.einsum("gikv,gev->geik", s, look))
        outputs.append(torch.stack(ys, 1))
        seen.append(torch.stack(zs, 1))
        state, begin = torch.cat([s, state[count:]]), begin + count
    return torch.cat(outputs), torch.cat(seen), state


def make_terms(steps, sizes, n=1, keys=4, values=3, columns=1, reads=1, queries=1, looks=0, per=1):
    """Random terms of chunks in float64, with decays that are zero or negative among them."""
    count = sum(sizes)

    def draw(*size):
        return torch.randn(count, steps, *size, dtype=torch.float64)

    decays = torch.rand(count, steps, n, n, per, dtype=torch.float64) / n
    decays = torch.where(torch.rand_like(decays) < 0.1, 0.0, decays)
    decays = torch.where(torch.rand_like(decays) < 0.1, -decays, decays)
    terms = Terms(
        decays,
        0.3 * draw(columns, n, keys),
        0.3 * draw(reads, n, keys),
        draw(columns, values),
        draw(queries, n, keys),
        draw(looks, values),
    )
    return terms, torch.randn(sizes[0], n, keys, values, dtype=torch.float64)


def with_gradients(run, terms, state, sizes, dtype):
    """Results and gradients in a dtype, of the same gradients that arrive."""
    leaves = [x.to(dtype).requires_grad_() for x in (*terms, state)]
    results = run(Terms(*leaves[:-1]), leaves[-1], sizes)
    generator = torch.Generator().manual_seed(0)
    arriving = [
        torch.randn(r.shape, generator=generator, dtype=torch.float64).to(dtype) for r in results
    ]
    grads = torch.autograd.grad(results, leaves, arriving, materialize_grads=True)
    return [x.detach().double() for x in (*results, *grads)]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"per": 4},
        {"values": 1, "reads": 0},
        {"values": 1, "reads": 0, "per": 4},
        {"n": 2, "columns": 2, "looks": 1},
        {"n": 2, "columns": 2, "looks": 1, "per": 4},
        {"n": 3, "columns": 2, "reads": 2, "queries": 2},
        {"n": 2, "columns": 3, "reads": 2, "queries": 0, "looks": 2, "per": 4},
        {"columns": 0, "reads": 0, "looks": 1, "per": 4},
        {"columns": 3, "reads": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(("steps", "sizes"), [(1, (2, 2)), (16, (3, 3, 1)), (64, (2, 1))])
@pytest.mark.one_in(3)
def test_the_scan_is_the_loop(shape, steps, sizes):
    """Results and all gradients, with decays that are zero or negative, and sequences that end."""
    call = (*make_terms(steps, sizes, **shape), sizes)
    ours, loop = (with_gradients(run, *call, torch.float64) for run in (scan_chunks, loop_over))
    assert max(map(error, ours, loop)) < 1e-13


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


HARD = {
    "soft": lambda d: d,
    "exp(-50)": lambda d: torch.where(torch.rand_like(d) < 0.1, torch.exp(torch.tensor(-50.0)), d),
    "all exp(-50)": lambda d: torch.full_like(d, -50.0).exp(),
    "zero": lambda d: torch.where(torch.rand_like(d) < 0.1, 0.0, d),
    "negative": lambda d: torch.where(torch.rand_like(d) < 0.5, -d, d),
    "1.02": lambda d: torch.full_like(d, 1.02),
}


@pytest.mark.parametrize("per", [1, 16])
@pytest.mark.parametrize("decay", list(HARD))
@pytest.mark.parametrize(
    ("rate", "alike"), [(0.5, False), (1.0, True), (1.9, True), (2.5, False)], ids=str
)
@pytest.mark.one_in(9)
def test_hard_rules_in_float32(decay, per, rate, alike):
    """The delta rule, by the contract's claim on errors: decays of any kind and sign, keys that are
    alike, and rates above 2 with which states grow."""
    steps, positions, count, keys, values = 32, 8, 2, 16, 8
    total = positions * count

    def series(*size):
        return torch.randn(total, steps, *size, dtype=torch.float64)

    k = unit(series(1, 1, keys) * 0.1 + 1.0) if alike else unit(series(1, 1, keys))
    decays = HARD[decay](torch.exp(-0.1 * torch.rand(total, steps, 1, 1, per).double()))
    read = -k * decays.double()
    terms = Terms(
        decays.double(), rate * k, read, series(1, values), series(1, 1, keys), series(0, values)
    )
    terms = Terms(*(x.float().double() for x in terms))
    state = torch.zeros(count, 1, keys, values, dtype=torch.float64)
    call = terms, state, (count,) * positions
    ours = with_gradients(scan_chunks, *call, torch.float32)
    loop = with_gradients(loop_over, *call, torch.float32)
    exact = with_gradients(loop_over, *call, torch.float64)
    for a, b, e in zip(ours, loop, exact, strict=True):
        assert error(a, e) <= FORWARD_TOLERANCE[torch.float32] + 4 * error(b, e)


@pytest.mark.parametrize("size", [1, 12, 16, 48, 64])
def test_inverse_of_keys_that_are_alike(size):
    """Powers of the matrix are 1e19 there."""
    strict = (-1.9 * torch.ones(3, size, size)).tril(-1)
    exact = torch.linalg.inv(torch.eye(size, dtype=torch.float64) - strict.double())
    assert error(inverse(strict).double(), exact) < 1e-5


make_call = partial(chunk_cases.make_call, rows=3, steps=41, keys=4, values=3, dtype=torch.float64)


def assert_close(call, limit=1e-12, **options):
    ours, loop = (solved(call, pair, **options) for pair in (CHUNKS, LOOP))
    for a, b in zip(ours, loop, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert error(a, b.double()) < limit


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps", [16, 64])
@pytest.mark.parametrize("name", list(CELLS))
@pytest.mark.one_in(23)
def test_cells_are_the_loop(name, steps, variant, monkeypatch):
    """In tiles of one position, so that states and gradients pass from tile to tile."""
    monkeypatch.setattr(chunks_torch, "STEPS", steps)
    monkeypatch.setitem(chunks_torch.TILE_NUMBERS, "cpu", 1)
    call, options = in_variant(make_call(CELLS[name]), variant)
    assert_close(call, **options)


@pytest.mark.parametrize("seed", range(300))
@pytest.mark.one_in(149)
def test_random_cells_are_the_loop(seed):
    call, options = in_variant(make_call(random_cell(seed)), VARIANTS[seed % len(VARIANTS)])
    assert_close(call, **options)


@pytest.mark.parametrize("length", [0, 1, 15, 32, 33])
def test_any_length(length):
    assert_close(make_call(zoo.GatedDeltaCell, steps=length))


def test_no_rows():
    assert_close(make_call(zoo.GatedDeltaCell, rows=0))


def test_no_loop_runs_without_need(monkeypatch):
    monkeypatch.setattr(affine_cells, "solve_by_steps", None)
    monkeypatch.setattr(chunks_torch, "solve_by_steps", None)
    call, options = in_variant(make_call(zoo.GatedDeltaCell), "packed")
    solved(call, CHUNKS, **options)


@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "mlstm", "titans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["packed", "reverse"])
@pytest.mark.one_in(5)
def test_cells_meet_the_contract(name, dtype, variant):
    call, options = in_variant(make_call(CELLS[name], steps=70, dtype=dtype), variant)
    scale = 1e-9 if dtype == torch.float32 else 1.0
    check_contract(call.cell, call.gates, call.initial, loss_scale=scale, **CHUNKS, **options)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("gated-delta", 1100),
        pytest.param("gated-delta", 4096, marks=pytest.mark.thorough),
        pytest.param("rwkv7", 4096, marks=pytest.mark.thorough),
    ],
)
def test_long_rows_meet_the_contract(name, steps):
    call = make_call(CELLS[name], rows=2, steps=steps, keys=8, values=8, dtype=torch.float32)
    check_contract(call.cell, call.gates, call.initial, **CHUNKS)


def test_the_unit_of_a_loss_changes_no_digit():
    call = make_call(zoo.GatedDeltaCell, dtype=torch.float32)
    one, tiny = (solved(call, CHUNKS, scale)[2:] for scale in (1.0, 2.0**-30))
    assert all(torch.equal(a, b * 2.0**30) for a, b in zip(one, tiny, strict=True))


@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "mlstm", "titans"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("gate", range(5))
@pytest.mark.one_in(7)
def test_values_are_non_finite_where_the_loop_has_them(name, value, gate):
    """A gate of one step, in each of the cell's gates: earlier steps, other rows and other heads
    keep their outputs, and later steps their gradients."""
    call = make_call(CELLS[name])
    with torch.no_grad():
        call.gates[1, 20, 0, gate_at(call.cell, gate)] = value
    assert_alike(*(solved(call, pair) for pair in (CHUNKS, LOOP)), 1e-12)


def test_padding_of_a_chunk_adds_no_nan():
    """Steps that fill up a chunk read the last state, and have gradients of 0."""
    call = make_call(zoo.CombaCell, steps=40)
    with torch.no_grad():
        call.gates[1, 39, 0, gate_at(call.cell, 2)] = torch.inf
    assert_alike(*(solved(call, pair) for pair in (CHUNKS, LOOP)), 1e-12)


def test_a_gradient_that_is_not_finite_stays_in_its_row():
    call = make_call(zoo.GatedDeltaCell)
    grads = []
    for pair in (CHUNKS, LOOP):
        output, _ = pararnn.solve(call.cell, call.gates, **pair)
        arriving = torch.ones_like(output)
        arriving[1, 20, 0, 0] = torch.nan
        grads.append(torch.autograd.grad(output, call.gates, arriving)[0])
    assert torch.equal(grads[0].isnan(), grads[1].isnan())
    assert grads[0][1, :20].isnan().any()


def test_products_of_decays_may_overflow_where_the_loop_does_not():
    """States are zero until the last steps, so decays before them change nothing."""
    call = make_call(Grows, steps=32, dtype=torch.float32)
    call = Call(call.cell, call.gates, tuple(torch.zeros_like(h) for h in call.initial))
    with torch.no_grad():
        call.gates[:, :28, :, :4] = 0
        call.gates[:, :28, :, -1] = 1e5
    results = [
        pararnn.solve(call.cell, call.gates, call.initial, **pair) for pair in (CHUNKS, LOOP)
    ]
    for a, b in zip(*results, strict=True):
        assert b.isfinite().all()
        assert error(a.detach(), b.detach().double()) < 1e-6


@pytest.mark.parametrize("name", ["gated-delta", "mlstm"])
def test_verify_checks_a_layer(name):
    layer = pararnn.ParaRNN(zoo.MATRIX_CELLS[name], 6, 6, num_heads=2, K=4, **CHUNKS)
    report = pararnn.verify(layer, torch.randn(3, 40, 6), lengths=[40, 0, 33])
    assert report.passed, report
    assert layer.layers[0].choice.pair == ("chunks", "torch")


@pytest.mark.parametrize("cell_class", list(REFUSED)[:2], ids=lambda cls: cls.__name__)
def test_what_is_not_affine_is_refused_by_name(cell_class):
    call = make_call(cell_class)
    with pytest.raises(pararnn.EngineError, match=re.escape(REFUSED[cell_class])):
        pararnn.solve(call.cell, call.gates, solver="chunks")
