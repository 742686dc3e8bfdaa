"""One sequence over two and four ranks is one process's, within the contract."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lm_kinds import hugging, plain, tokens
from processes import on_processes

import pararnn
from pararnn.engines import shooting
from pararnn.engines.arguments import Options
from pararnn.engines.forward_time import to_system
from pararnn.engines.table import find as find_engine
from pararnn.messages import group
from pararnn.messages.group import OnRanks, remember, span_of
from pararnn.program.entries import Entries
from pararnn.program.program import program_of
from pararnn.ranks import solve as context_solve
from pararnn.ranks.engine import OverRanks
from pararnn.ranks.parallel import check_module
from pararnn.ranks.pipeline import is_pipelined
from pararnn.ranks.span import RankSpan
from pararnn.ranks.subcall import RankBorder, Subcall
from pararnn.solve import prepare
from pararnn.solvers.boundaries import final_states
from pararnn.solvers.sequential import unroll_states

pytest.importorskip("transformers")

import context_runs
from context_runs import F64

CASES = [context_runs.case_id(*case) for case in context_runs.CASES]


@pytest.fixture(scope="module")
def failures(request, tmp_path_factory):
    """Run the cases of this run's tests, all in one launch: what each breaks."""
    folder = tmp_path_factory.mktemp("ranks")
    own = [item for item in request.session.items if item.module is request.module]
    names = {item.callspec.params.get("case") for item in own if hasattr(item, "callspec")}
    cases = [case for case in context_runs.CASES if context_runs.case_id(*case) in names]
    on_processes(partial(context_runs.check_all, folder, cases=cases), 4)
    return context_runs.failures_of(folder, 4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(4)
def test_ranks_are_one_process(failures, case):
    assert failures[case] == []


SIZE = (2, 3, 4)  # states, rows, channels


def push(map_, state):
    return (map_ * state.unsqueeze(0)).sum(1)


def linear_chain(ranks, seed=0):
    """Maps, shifts and true starts of spans whose ends are affine in their starts."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(ranks, SIZE[0], *SIZE, generator=generator, dtype=torch.float64)
    shifts = torch.randn(ranks, *SIZE, generator=generator, dtype=torch.float64)
    starts = [torch.randn(*SIZE, generator=generator, dtype=torch.float64)]
    for map_, shift in zip(maps[:-1], shifts, strict=False):
        starts.append(push(map_, starts[-1]) + shift)
    return maps, shifts, torch.stack(starts)


def ends_of(maps, shifts, starts):
    return torch.stack(
        [push(map_, h) + shift for map_, h, shift in zip(maps, starts, shifts, strict=True)]
    )


def by_segment(x):
    """States (B, ranks, D) of all ranks' (N, B, D)."""
    return tuple(x.movedim(0, 2))


def next_starts(starts, ends, maps, runs_back=False):
    """The starts of all ranks after an update."""
    segments = shooting.Segments()
    segments.runs_back, pairs = runs_back, context_solve._pairs(SIZE[0])
    segments.entries = Entries((("channel",),) * SIZE[0], pairs)
    jacobian = dict(zip(pairs, by_segment(maps.flatten(1, 2)), strict=True))
    begins = by_segment(starts)
    borders = segments.borders(begins, by_segment(ends), ())
    new = shooting.update(segments, begins, borders, borders.gaps(), jacobian)
    return torch.stack(new).movedim(2, 0)


def test_an_update_is_exact_for_affine_spans():
    maps, shifts, true = linear_chain(5)
    starts = true + 1e-3 * torch.randn_like(true)
    starts[0] = true[0]
    torch.testing.assert_close(next_starts(starts, ends_of(maps, shifts, starts), maps), true)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 0.0, -3.0, 1e300])
def test_each_update_makes_one_more_rank_exact(bad):
    """Whatever the maps say: with bits, so that a solve from there has the loop's bits."""
    maps, shifts, true = linear_chain(4)
    wrong, starts = torch.full_like(maps, bad), torch.full_like(true, 1e9)
    starts[0] = true[0]
    for exact in range(1, 4):
        starts = next_starts(starts, ends_of(maps, shifts, starts), wrong)
        assert torch.equal(starts[: exact + 1], true[: exact + 1])


def test_an_update_of_gradients_is_exact():
    """They run from the last rank to the first, by transposed maps."""
    maps, shifts, _ = linear_chain(5)
    arriving = [shifts[4]]  # gradients of the states at the ends of spans, the last one's first
    pulled = lambda rank, grad: (maps[rank] * grad.unsqueeze(1)).sum(0) + shifts[rank]  # noqa: E731
    for rank in (4, 3, 2, 1):
        arriving.append(pulled(rank, arriving[-1]))
    true = torch.stack(arriving[::-1])
    starts = true + 1e-3 * torch.randn_like(true)
    starts[-1] = true[-1]
    ends = torch.stack([pulled(rank, starts[rank]) for rank in range(5)])
    torch.testing.assert_close(next_starts(starts, ends, maps, runs_back=True), true)


def test_states_fit_relative_to_their_size():
    nan, inf, one = float("nan"), float("inf"), 1.0
    starts = torch.tensor([0.0, one, one, 1e-9, nan, nan, inf, one, one], dtype=torch.float64)
    ends = torch.tensor([0.0, one + 1e-9, one + 1e-3, 0.0, nan, one, inf, inf, 2.0])
    sizes = torch.tensor([0.0, one, one, 1e-2, 0.0, one, inf, inf, inf])
    ulps = 1e-6 / torch.finfo(torch.float64).eps
    flags = shooting.fit(starts, ends.double(), sizes.double(), ulps)
    assert flags.tolist() == [True, True, False, True, True, False, True, False, False]


class Gain(pararnn.Cell):
    """A step as steep as its gate says, which may jump where its state is 1."""

    states, gates, config = ("h",), ("x", "gain"), {"jump": 0.0}

    def step(self, state, gate, param):
        jump = (state.h > 1).to(state.h.dtype) if self.jump else 0.0
        return gate.x + gate.gain * state.h + jump


@pytest.mark.parametrize(
    ("gain", "jump", "gap", "agrees"),
    [
        (1.0, 0, 3, True),
        (1.0, 0, 7, False),
        (9.0, 0, 1, False),
        (1.0, 1, 1, False),
        (9.0, 1, 0, True),
    ],
)
def test_ranks_agree_if_their_first_steps_do(gain, jump, gap, agrees):
    """A start that is near the end before it may still lead elsewhere, where a step is steep."""
    cell = Gain(1, jump=jump)
    gates = torch.tensor([-gain, gain]).view(1, 1, 2, 1).repeat(1, 3, 1, 1)
    args, program = prepare(cell, gates), program_of(cell)
    args = args.complete(program)
    ends = torch.ones(1, 2, 1)
    starts = ends + gap * torch.finfo(torch.float32).eps
    engine = find_engine("sequential", "torch", gates.device)
    ranks = SimpleNamespace(gather=lambda value, reverse: torch.stack([value, value]))
    spans = context_solve.StateSpans(
        RankSpan(program, engine, args, args, ranks, RankBorder(None, 1, 2))
    )
    borders = spans.borders((starts,), (ends,), (torch.ones(1, 1, 1),))
    assert (shooting.open_gaps(spans, borders, {}) is None) == agrees


@pytest.mark.parametrize(("steps", "ranks"), [(8, 4), (9, 4), (11, 4), (4, 4), (1, 1)])
def test_spans_are_all_of_time_in_turn(steps, ranks):
    parts = [range(steps)[span_of(steps, rank, ranks)] for rank in range(ranks)]
    assert [t for part in parts for t in part] == list(range(steps))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_ranks_than_steps_raise():
    with pytest.raises(ValueError, match="over 4 ranks needs a step for each of them, got 3"):
        span_of(3, 0, 4)


class Branching(pararnn.Cell):
    """Neither kernels nor Newton's method can take its step."""

    states, gates, structure = ("h",), ("x",), "sequential"

    def step(self, state, gate, param):
        return -gate.x if state.h.sum() > 0 else gate.x + 0.5 * state.h


REFUSED = {
    "a user's mixer": (
        lambda: plain("gru", mixers=("rnn", "user_mixers:Decay")),
        r"backbone\.layers\.1\.mixer cannot .* Decay reads.*define why_no_context",
    ),
    "a cell of autograd alone": (
        lambda: pararnn.ParaRNN(Branching, 4, 4),
        r"layers\.0 cannot .* Branching runs by autograd alone.*take another cell",
    ),
    "torch's": (
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GRU(4, 4)),
        r"^1 cannot run on several ranks: torch\.nn\.GRU reads other steps",
    ),
    "a convolution": (lambda: torch.nn.Conv1d(4, 4, 3), "^the module cannot .*Conv1d"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_cannot_are_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        check_module(make())


def with_context(module):
    for submodule in module.modules():
        if isinstance(submodule, OnRanks):
            submodule.group = "none"
    return module


X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))


def calls():
    gru = with_context(pararnn.ParaGRU(4, 4))
    model, theirs = with_context(plain("gru")), with_context(hugging("gru"))
    sequence = torch.nn.utils.rnn.pack_padded_sequence(X, torch.tensor([6, 3]), True)
    reset = torch.zeros(2, 6, dtype=torch.bool)
    ids = tokens(2, 2)
    return {
        "PackedSequence holds its steps": lambda: gru(sequence),
        "cannot decode step by step": lambda: gru.step(X[:, 0]),
        "reset_states number sequences again": lambda: gru(
            X, reset=reset, reset_states=torch.zeros(1, 0, 4)
        ),
        "a cache continues whole rows": lambda: model(ids, model.new_cache()),
        "give no cache, and use_cache=False": lambda: theirs(ids, use_cache=True),
        "each rank needs a step of the sequence": lambda: model(ids[:, :0]),
        "knows no ranks 'none': call": lambda: gru(X),
    }


@pytest.mark.parametrize("message", calls())
def test_calls_that_ranks_cannot_share_raise(message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        calls()[message]()


def test_a_mesh_of_two_dimensions_raises():
    mesh = SimpleNamespace(ndim=2)
    with pytest.raises(ValueError, match=r"one dimension.* got 2: .*mesh\['context'\]"):
        pararnn.context_parallel(pararnn.ParaGRU(4, 4), mesh)


def test_a_single_rank_is_a_module_on_one_process():
    layer = pararnn.ParaGRU(4, 4)
    mesh = SimpleNamespace(ndim=1, size=lambda: 1)
    assert pararnn.context_parallel(with_context(layer), mesh) is layer
    assert layer(X)[0].shape == X.shape


def packed_args(reverse, seed=0):
    """A call on one rank of three: sequences that begin before it, within it, and padding."""
    torch.manual_seed(seed)
    cell = pararnn.LSTMCell(3, dtype=torch.float64)
    gates = torch.randn(2, 23, 3, 3, dtype=torch.float64) * 0.5
    reset = torch.zeros(2, 23, dtype=torch.bool)
    args = prepare(cell, gates, reset=reset, reverse=reverse)
    rows = torch.tensor([[0] * 23, [0] * 11 + [1] * 12]) + torch.tensor([[2], [0]])
    args = replace(args, seq=rows.int(), sequences=3).complete(program_of(cell))
    return program_of(cell), args


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunk", [5, 100])
def test_a_map_is_the_derivative_of_a_spans_end(monkeypatch, reverse, chunk):
    monkeypatch.setattr(context_solve, "CHUNK", chunk)
    program, args = packed_args(reverse)
    engine = find_engine("newton", "torch", args.gates.device)
    continues = torch.ones(3, 2, dtype=torch.bool)
    border, carry = (
        RankBorder(continues, 1, 3),
        (torch.randn(2, 3).double(), torch.randn(2, 3).double()),
    )

    def ends(*carry):
        subcall = Subcall.of(args, 0, 23, carry, continues[1])
        system = to_system(program, subcall.args)
        final = final_states(subcall.args.initial, system.boundaries, unroll_states(system))
        return subcall.ends(final)

    subcall = Subcall.of(args, 0, 23, carry, continues[1])
    states = engine.forward(program, subcall.args).states
    span = RankSpan(program, engine, args, args, None, border)
    maps = context_solve._map(span, carry, states)
    derivative = torch.autograd.functional.jacobian(ends, carry)
    for n, of_end in enumerate(derivative):
        for m, entry in enumerate(of_end):
            diagonal = torch.einsum("bdbd->bd", entry)
            torch.testing.assert_close(maps[n, m], diagonal, rtol=1e-9, atol=1e-12)
    assert maps[:, :, 0].abs().min() > 0  # the first row is one sequence
    assert not maps[:, :, 1].any()  # of the second row another one is at the end


def turn(cell, **options):
    program = program_of(pararnn.RecurrentLayer(cell, 6, 6, num_heads=2).cell)
    return is_pipelined(program, Options(context="ranks", **options))


def test_ranks_solve_in_turn_where_they_need_not_meet():
    assert not turn(pararnn.GRUCell)
    assert turn(pararnn.GRUCell, no_final=True)
    assert turn(pararnn.zoo.HeadLSTMCell)
    model = with_context(plain("gru"))
    assert all(layer._options(layer.cell, False).no_final for layer in model.recurrent_layers())


def test_repetitions_get_messages_again_and_send_none(monkeypatch):
    sent, arrivals = [], []

    def receive(value, group, group_src):
        arrivals.append(value.fill_(len(arrivals) + 1.0))

    monkeypatch.setattr(group.dist, "recv", receive)
    monkeypatch.setattr(
        group.dist, "isend", lambda value, **to: sent.append(value) or SimpleNamespace(wait=list)
    )
    ranks = group.Ranks(1, 3, SimpleNamespace(group_name="three"))

    def step(x):
        value = ranks.receive(x, False) + ranks.receive(x, False)
        ranks.send(value, False)
        return value

    first, second = remember(step), remember(step)
    x = torch.zeros(2)
    results = [first(x), second(x), second(x), first(x), first(x)]
    assert [float(value[0]) for value in results] == [3.0, 7.0, 7.0, 3.0, 3.0]
    assert len(sent) == 2
    assert len(arrivals) == 4


def test_a_span_is_checked_with_its_final_states(alone):
    model, ids = with_context(plain("gru", F64)), tokens(2, 32)
    report = pararnn.verify(model, ids)
    names = {check.name for _, _, part in report.layers for check in part.checks}
    assert report.passed
    assert any("final" in name for name in names)


def test_two_ranks_need_no_map():
    program, args = packed_args(False)
    span = RankSpan(program, None, args, args, None, RankBorder(None, 1, 2))
    assert context_solve._maps(span, (), ()) == {}


@pytest.fixture
def alone():
    """Ranks of one process, which run the code of several."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group._RANKS["none"] = group.Ranks(0, 1, dist.group.WORLD)
    yield
    del group._RANKS["none"]
    dist.destroy_process_group()


def test_gates_that_are_computed_again_repeat_no_solve(alone, monkeypatch):
    """Not by a loop in PyTorch either, which autograd differentiates in one process."""
    calls, forward = [], OverRanks.forward
    monkeypatch.setattr(OverRanks, "forward", lambda *args: calls.append(1) or forward(*args))
    pair = {"solver": "sequential", "backend": "torch"}
    layer = with_context(pararnn.RecurrentLayer(pararnn.GRUCell, 4, 4, recompute_gates=True))
    layer(X, **pair)[0].sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("block", [0, 1], ids=["recurrent", "attention"])
@pytest.mark.thorough
def test_blocks_are_compiled_with_their_messages(alone, block):
    model, ids = with_context(hugging("hybrid", F64).train()), tokens(2, 32)
    rows = {"labels": ids, "position_ids": context_runs.POSITIONS}
    results = []
    for compiles in (False, True):
        if compiles:
            part = model.model.backbone.blocks[block]
            part.forward = torch.compile(part.forward, backend="aot_eager", fullgraph=True)
        model.zero_grad()
        loss = model(ids, **rows).loss
        loss.backward()
        results.append([loss.detach(), *[p.grad for p in model.parameters()]])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)
