"""Rows that restart from given states equal their pieces run alone, in every engine."""

import copy
from itertools import pairwise

import pytest
import torch
from table import PAIRS, PLAIN
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

import pararnn
from pararnn.base.numerics import compute_dtype

HOW = ("solver", "backend")
ROWS, STEPS, D = 3, 12, 6
AT = {(0, 4), (0, 5), (1, 0), (1, 11), (2, 7)}  # neighbours, the first and the last step


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request):
    return dict(zip(HOW, request.param, strict=True))


def _reset(device="cpu"):
    reset = torch.zeros(ROWS, STEPS, dtype=torch.bool, device=device)
    for place in AT:
        reset[place] = True
    return reset


def _draw(*size, device="cpu"):
    return torch.randn(size, dtype=torch.float64, device=device).requires_grad_()


def _layer(device, reverse=False):
    torch.manual_seed(0)
    factory = {"dtype": torch.float64, "device": device}
    return pararnn.RecurrentLayer(pararnn.LSTMCell, 4, D, num_heads=2, reverse=reverse, **factory)


def _by_hand(layer, x, initial, states, starts):
    """The loop over each piece alone: of sequences that lie one behind the other in x (1, T, C)."""
    places = sorted(row * STEPS + t for row, t in AT)
    output, finals = torch.zeros(1, x.shape[1], D, dtype=x.dtype, device=x.device), []
    for number, (begin, end) in enumerate(pairwise(starts)):
        last = tuple(h[number : number + 1] for h in initial)
        own = [t for t in places if begin <= t < end]
        edges = [begin, *(t + layer.reverse for t in own), end]
        order, start_states = list(pairwise(edges)), [places.index(t) for t in own]
        if layer.reverse:
            order, start_states = order[::-1], start_states[::-1]
        for (a, b), start in zip(order, [None, *start_states], strict=True):
            if start is not None:
                last = tuple(s[start : start + 1] for s in states)
            if a < b:
                got, last = layer(x[:, a:b], last, solver=PLAIN[0], backend=PLAIN[1])
                output = torch.cat([output[:, :a], got, output[:, b:]], 1)
        finals.append(last)
    return output, tuple(torch.cat(f) for f in zip(*finals, strict=True))


def _same(got, reference, leaves):
    results = []
    for output, finals in (got, reference):
        loss = output.sin().sum() + sum((i + 2) * f.cos().sum() for i, f in enumerate(finals))
        results.append((output, *finals, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)
    assert all(grad.abs().sum() > 0 for grad in results[1])


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("pack", [False, True], ids=["rows", "packed"])
@pytest.mark.one_in(3)
def test_restarts_are_pieces_run_alone(device, pair, reverse, pack):
    layer, x, reset = _layer(device, reverse), _draw(ROWS, STEPS, 4, device=device), _reset(device)
    flat = x.reshape(1, -1, 4)
    starts, options = list(range(0, ROWS * STEPS + 1, STEPS)), {}
    rows = x
    if pack:  # other sequences, one of them without steps, and padding with a reset in it
        starts = [0, 4, 4, 14, 30]
        options = {"cu_seqlens": torch.tensor(starts, device=device)}
        rows, reset = flat, reset.reshape(1, -1)
    initial = [_draw(len(starts) - 1, D, device=device) for _ in range(2)]
    states = [_draw(len(AT), D, device=device) for _ in range(2)]
    resets = {"reset": reset, "reset_states": tuple(states)}
    output, finals = layer(rows, tuple(initial), **resets, **options, **pair)
    got = output.reshape(1, -1, D), finals
    reference = _by_hand(layer, flat, initial, states, starts)
    _same(got, reference, [x, *initial, *states, *layer.parameters()])


@pytest.mark.parametrize("layout", ["time first", "packed sequence", "lengths", "unbatched"])
def test_states_come_in_the_order_of_the_resets(layout):
    torch.manual_seed(0)
    options = {"num_layers": 2, "bidirectional": True, "dtype": torch.float64}
    layer = pararnn.ParaLSTM(4, D, **options)
    x, reset, states = _draw(ROWS, STEPS, 4), _reset(), [_draw(4, ROWS, STEPS, D) for _ in range(2)]
    rows = tuple(h[:, reset] for h in states)
    reference, (h_n, c_n) = layer(x, reset=reset, reset_states=rows)
    if layout == "time first":
        other = copy.deepcopy(layer)
        other.batch_first = False
        late = tuple(h.transpose(1, 2)[:, reset.T] for h in states)
        assert not torch.equal(late[0], rows[0])
        output, final = other(x.transpose(0, 1), reset=reset.T, reset_states=late)
        output = output.transpose(0, 1)
    elif layout == "packed sequence":
        sequence = pack_sequence([*x])
        resets = pack_sequence([*reset])
        late = [pack_sequence([*h.movedim(0, 2)]).data[resets.data].movedim(1, 0) for h in states]
        assert not torch.equal(late[0], rows[0])
        output, final = layer(sequence, reset=resets, reset_states=tuple(late))
        output = output.data.unflatten(0, (STEPS, ROWS)).transpose(0, 1)
    elif layout == "lengths":
        output, final = layer(x, reset=reset, reset_states=rows, lengths=[STEPS] * ROWS)
    else:
        own = tuple(h[:, 0][:, reset[0]] for h in states)
        output, final = layer(x[0], reset=reset[0], reset_states=own)
        reference, h_n, c_n = reference[0], h_n[:, 0], c_n[:, 0]
    assert torch.allclose(output, reference, atol=1e-12)
    assert torch.allclose(torch.stack(final), torch.stack([h_n, c_n]), atol=1e-12)


@pytest.mark.parametrize("with_states", [False, True], ids=["zero", "given"])
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_steps_restart(name, with_states):
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(pararnn.CELLS[name], 4, D, num_layers=2, dtype=torch.float64)
    x, reset = _draw(ROWS, STEPS, 4), _reset()
    states = tuple(_draw(2, ROWS, STEPS, D) for _ in layer.cell.states)
    whole = tuple(h[:, reset] for h in states) if with_states else None
    output, _ = layer(x, reset=reset, reset_states=whole)
    state = None
    for t in range(STEPS):
        now = tuple(h[:, :, t][:, reset[:, t]] for h in states) if with_states else None
        y, state = layer.step(x[:, t], state, reset=reset[:, t], reset_states=now)
        assert torch.allclose(y, output[:, t], atol=1e-12)
    single = tuple(h[:, :1, 4].squeeze(1)[:, None] for h in states) if with_states else None
    y, _ = layer.step(x[0, 4], reset=torch.tensor(True), reset_states=single)
    assert torch.allclose(y, output[0, 4], atol=1e-12)


def _spread(x, weight, gates):
    """A projection without a matrix product, whose rounding hangs on how many rows there are."""
    weight = weight if weight.ndim > 2 else weight[None]
    by_gate = weight[..., 0].unflatten(1, (gates, -1)).transpose(0, 1)
    return (x.unflatten(-1, (len(weight), -1)).unsqueeze(-3) * by_gate.flatten(1, -2)).flatten(-2)


STACKS = {
    "gru": (pararnn.ParaGRU, {}),
    "lstm": (pararnn.ParaLSTM, {"keep_dtype": True}),
    "slstm": (pararnn.SLSTM, {"num_heads": 2, "keep_dtype": True}),
    "nn.LSTM": (pararnn.LSTM, {"batch_first": True}),
    "nn.GRU": (pararnn.GRU, {"batch_first": True, "num_heads": 2}),
    "nn.RNN": (pararnn.RNN, {"batch_first": True, "keep_dtype": False}),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("backend", sorted({b for s, b in PAIRS if s == "sequential"}))
@pytest.mark.one_in(5)
def test_acting_and_replay_agree_to_the_bit(name, dtype, backend, device, monkeypatch):
    """As the docs on reinforcement learning say; what is before the recurrence is PyTorch's."""
    monkeypatch.setattr("pararnn.layers.projection.project", _spread)
    monkeypatch.setattr("pararnn.layers.recurrent.project", _spread)
    torch.manual_seed(0)
    cls, options = STACKS[name]
    dtype = getattr(torch, dtype)
    where = {"dtype": dtype, "device": device, "backend": backend}
    layer = cls(D, D, 2, solver="sequential", **options, **where)
    x, begins = torch.randn(5, 60, D, dtype=dtype, device=device), torch.rand(5, 60) < 0.1

    def act(steps, state, begins):
        outputs = []
        for t in range(steps):
            y, state = layer.step(x[:, t], state, reset=begins[:, t])
            outputs.append(y)
        return torch.stack(outputs, 1), state

    replay, finals = layer(x, reset=begins.to(device))
    acted, state = act(60, None, begins.numpy())
    assert torch.equal(acted, replay)
    for mine, own in zip(tree_leaves(state), tree_leaves(finals), strict=True):
        assert mine.dtype == compute_dtype(dtype)
        assert torch.equal(mine.to(own.dtype), own)
    # States pass from the layer to steps, and back.
    start = finals
    replay, finals = layer(x, start)
    acted, state = act(30, start, torch.zeros_like(begins, device=device))
    rest, last = layer(x[:, 30:], state)
    assert torch.equal(torch.cat([acted, rest], 1), replay)
    for mine, own in zip(tree_leaves(last), tree_leaves(finals), strict=True):
        assert torch.equal(mine, own)


@pytest.mark.thorough
def test_restarts_compile_to_one_graph():
    torch.manual_seed(0)
    layer = pararnn.ParaGRU(4, D, dtype=torch.float64)
    program = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, steps, every in ((3, 9, 2), (5, 11, 3)):
        x = torch.randn(batch, steps, 4, dtype=torch.float64)
        reset = torch.arange(batch * steps).view(batch, steps) % every == 0
        states = torch.randn(1, int(reset.sum()), D, dtype=torch.float64)
        with torch.compiler.set_stance("default" if batch == 3 else "fail_on_recompile"):
            got, _ = program(x, reset=reset, reset_states=states)
        reference, _ = layer(x, reset=reset, reset_states=states)
        assert torch.allclose(got, reference, atol=1e-12)


def test_restarts_are_verified_too():
    layer = pararnn.ParaGRU(4, D)
    states = torch.randn(1, len(AT), D)
    assert pararnn.verify(layer, torch.randn(ROWS, STEPS, 4), reset=_reset(), reset_states=states)


def test_rows_without_steps():
    layer = pararnn.ParaGRU(4, D)
    h_0 = torch.randn(1, 2, D)
    reset, states = torch.zeros(2, 0, dtype=torch.bool), torch.zeros(1, 0, D)
    output, h_n = layer(torch.zeros(2, 0, 4), h_0, reset=reset, reset_states=states)
    assert output.shape == (2, 0, D)
    assert torch.equal(h_n, h_0)


X, RESET, STATES = torch.zeros(ROWS, STEPS, 4), _reset(), torch.zeros(1, len(AT), D)
WRONG = [
    ({"reset_states": STATES}, "give reset, too"),
    (
        {"reset": RESET, "reset_states": STATES[:, :4]},
        "reset must be true at 4 steps, as reset_states hold 4 states, one a step, got 5",
    ),
    (
        {"reset": RESET, "reset_states": STATES[..., :4]},
        r"reset_states must be .* \(1, K, 6\) each, .* got \[\(1, 5, 4\)\]",
    ),
    (
        {"reset": RESET.float(), "reset_states": STATES},
        r"reset must be bool \(3, 12\), got torch.f",
    ),
    ({"reset": RESET[:, 1:], "reset_states": STATES[:, 1:]}, r"reset must be bool \(3, 12\), got"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_restarts(arguments, message):
    with pytest.raises(ValueError, match=message):
        pararnn.ParaGRU(4, D)(X, **arguments)


def test_wrong_restarts_of_one_layer():
    layer = pararnn.RecurrentLayer(pararnn.LSTMCell, 4, D)
    with pytest.raises(ValueError, match=r"reset_states must be \(K, 6\) for each of \('h', 'c'\)"):
        layer(X, reset=RESET, reset_states=STATES[0])
    both = (STATES[0], STATES[0])
    with pytest.raises(ValueError, match=r"initial must be \(S, 6\) for each of .* got \[\(2, 6\)"):
        layer(X, (torch.zeros(2, D),) * 2, reset=RESET, reset_states=both)
