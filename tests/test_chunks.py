"""The scan over chunks: the recurrence itself, and cells by (chunks, torch) against the loop."""

import math
import re

import pytest
import torch
from affine_cells import AFFINE, REFUSED, ZOO, random_cell
from matrix_cells import Call

import pararnn
import pararnn.zoo as zoo
from pararnn.base.numerics import FORWARD_TOLERANCE
from pararnn.check.matrix import check_matrix
from pararnn.engines import chunks_torch
from pararnn.solve import one_gate, prepare
from pararnn.solvers import affine_cells
from pararnn.solvers.chunks import Terms, inverse, scan_chunks

CHUNKS, LOOP = ("chunks", "torch"), ("sequential", "torch")
CELLS = AFFINE | {name: zoo.MATRIX_CELLS[name] for name in ZOO}
VARIANTS = ["plain", "resets", "reverse", "packed", "packed in reverse"]
EMPTY_AND_SHORT = [0, 20, 20, 21, 39]


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


def error(actual, reference):
    """The largest error over the largest entry."""
    if not reference.numel():
        return 0.0
    return float((actual - reference).abs().max() / reference.abs().max().clamp(min=1e-300))


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
@pytest.mark.one_in(5)
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


def make_call(cell_class, rows=3, steps=41, heads=2, keys=4, values=3, dtype=torch.float64, seed=0):
    """A cell, and random gates and states."""
    torch.manual_seed(seed)
    cell = cell_class(heads * values, num_heads=heads, K=keys, dtype=dtype)
    sizes = cell.head_sizes
    gates = torch.randn(rows, steps, heads, sizes.width, dtype=torch.float64)
    initial = [0.5 * torch.randn(rows, *size, dtype=torch.float64) for size in sizes.state_sizes]
    leaves = [x.to(dtype).requires_grad_() for x in (gates, *initial)]
    return Call(cell, leaves[0], tuple(leaves[1:]))


def in_variant(call, variant):
    """A call and its options."""
    options = {"reverse": "reverse" in variant}
    rows, steps = call.gates.shape[:2]
    if variant != "plain":
        options["reset"] = torch.rand(rows, steps) < 0.1
    if "packed" not in variant:
        return call, options
    gates = call.gates.detach()[:1].clone()
    gates[:, EMPTY_AND_SHORT[-1] :] = torch.nan
    sizes = call.cell.head_sizes.state_sizes
    initial = [torch.randn(4, *size).to(gates.dtype).requires_grad_() for size in sizes]
    options |= {"cu_seqlens": EMPTY_AND_SHORT, "reset": options["reset"][:1]}
    return Call(call.cell, gates.requires_grad_(), tuple(initial)), options


def solved(call, pair, scale=1.0, **options):
    """Outputs, final states and all gradients."""
    output, final = pararnn.solve(
        call.cell, call.gates, call.initial, solver=pair[0], backend=pair[1], **options
    )
    results = [output, *(final if isinstance(final, tuple) else (final,))]
    generator = torch.Generator().manual_seed(0)
    arriving = [torch.randn(r.shape, generator=generator).to(r.dtype) * scale for r in results]
    grads = torch.autograd.grad(
        [r for r in results if r.requires_grad],
        call.leaves(),
        [a for a, r in zip(arriving, results, strict=True) if r.requires_grad],
        materialize_grads=True,
    )
    assert [r.dtype for r in (*grads,)] == [leaf.dtype for leaf in call.leaves()]
    return [r.detach() for r in results], list(grads)


def assert_close(call, limit=1e-12, **options):
    ours, loop = (solved(call, pair, **options) for pair in (CHUNKS, LOOP))
    for a, b in zip(ours[0] + ours[1], loop[0] + loop[1], strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert error(a.double(), b.double()) < limit


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps", [16, 64])
@pytest.mark.parametrize("name", list(CELLS))
@pytest.mark.one_in(7)
def test_cells_are_the_loop(name, steps, variant, monkeypatch):
    """In tiles of one position, so that states and gradients pass from tile to tile."""
    monkeypatch.setattr(chunks_torch, "STEPS", steps)
    monkeypatch.setitem(chunks_torch.TILE_NUMBERS, "cpu", 1)
    call, options = in_variant(make_call(CELLS[name]), variant)
    assert_close(call, **options)


@pytest.mark.parametrize("seed", range(300))
@pytest.mark.one_in(45)
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
    args = prepare(call.cell, one_gate(call.cell, call.gates), call.initial, **options)
    assert check_matrix(call.cell, args, CHUNKS, 0, 1e-9 if dtype == torch.float32 else 1.0).passed


@pytest.mark.parametrize("name", ["gated-delta", "rwkv7"])
@pytest.mark.one_in(2)
def test_long_rows_meet_the_contract(name):
    call = make_call(CELLS[name], rows=2, steps=4096, keys=8, values=8, dtype=torch.float32)
    args = prepare(call.cell, one_gate(call.cell, call.gates), call.initial)
    assert check_matrix(call.cell, args, CHUNKS, 0, 1.0).passed


def test_the_unit_of_a_loss_changes_no_digit():
    call = make_call(zoo.GatedDeltaCell, dtype=torch.float32)
    (_, one), (_, tiny) = (solved(call, CHUNKS, scale) for scale in (1.0, 2.0**-30))
    assert all(torch.equal(a, b * 2.0**30) for a, b in zip(one, tiny, strict=True))


@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "mlstm", "titans"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("gate", range(5))
def test_values_are_non_finite_where_the_loop_has_them(name, value, gate):
    """A gate of one step, in each of the cell's gates: earlier steps, other rows and other heads
    keep their outputs, and later steps their gradients."""
    call = make_call(CELLS[name])
    at = sum(map(math.prod, call.cell.head_sizes.gates[:gate]))
    with torch.no_grad():
        call.gates[1, 20, 0, at] = value
    ours, loop = (solved(call, pair) for pair in (CHUNKS, LOOP))
    for a, b in zip(ours[0] + ours[1], loop[0] + loop[1], strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.isinf(), b.isinf())
        assert error(a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)) < 1e-12


def test_a_gradient_that_is_not_finite_stays_in_its_row():
    call = make_call(zoo.GatedDeltaCell)
    grads = []
    for pair in (CHUNKS, LOOP):
        output, _ = pararnn.solve(call.cell, call.gates, solver=pair[0], backend=pair[1])
        arriving = torch.ones_like(output)
        arriving[1, 20, 0, 0] = torch.nan
        grads.append(torch.autograd.grad(output, call.gates, arriving)[0])
    assert torch.equal(grads[0].isnan(), grads[1].isnan())
    assert grads[0][1, :20].isnan().any()


class Grows(pararnn.Cell):
    """A decay that is its gate, however large."""

    states = {"S": ("K", "V")}
    gates = {"k": "K", "v": "V", "d": ""}

    def step(self, state, gate, param):
        new = gate.d[..., None, None] * state.S
        return new + gate.k[..., :, None] * gate.v[..., None, :]

    def readout(self, state, gate, param):
        return (gate.k[..., :, None] * state.S).sum(-2)


def test_products_of_decays_may_overflow_where_the_loop_does_not():
    """States are zero until the last steps, so decays before them change nothing."""
    call = make_call(Grows, steps=32, dtype=torch.float32)
    call = Call(call.cell, call.gates, tuple(torch.zeros_like(h) for h in call.initial))
    with torch.no_grad():
        call.gates[:, :28, :, :4] = 0
        call.gates[:, :28, :, -1] = 1e5
    results = [
        pararnn.solve(call.cell, call.gates, call.initial, solver=pair[0], backend=pair[1])
        for pair in (CHUNKS, LOOP)
    ]
    for a, b in zip(*results, strict=True):
        assert b.isfinite().all()
        assert error(a.detach(), b.detach()) < 1e-6


@pytest.mark.parametrize("name", ["gated-delta", "mlstm"])
def test_verify_checks_a_layer(name):
    layer = pararnn.ParaRNN(
        zoo.MATRIX_CELLS[name], 6, 6, num_heads=2, K=4, solver="chunks", backend="torch"
    )
    report = pararnn.verify(layer, torch.randn(3, 40, 6), lengths=[40, 0, 33])
    assert report.passed, report
    assert layer.layers[0].choice.pair == CHUNKS


@pytest.mark.parametrize("cell_class", list(REFUSED)[:2], ids=lambda cls: cls.__name__)
def test_what_is_not_affine_is_refused_by_name(cell_class):
    call = make_call(cell_class)
    with pytest.raises(pararnn.EngineError, match=re.escape(REFUSED[cell_class])):
        pararnn.solve(call.cell, call.gates, solver="chunks")
