"""Packed, padded, chunked and reversed sequences equal each sequence run alone, in every engine."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table import CELLS, PAIRS
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
)

import pararnn
from pararnn.layers.resets import split_sequences
from pararnn.sequences import Sequences, of_cu_seqlens

LENGTHS = (3, 7, 1, 5)
SIZES = {"input_size": 4, "hidden_size": 6, "num_layers": 2, "num_heads": 2}


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request):
    return dict(zip(("solver", "backend"), request.param, strict=True))


def _layer(device, bidirectional=True, cell=pararnn.LSTMCell, **options):
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "device": device, **options}
    return pararnn.ParaRNN(cell, bidirectional=bidirectional, **SIZES, **options)


def _inputs(device, lengths=LENGTHS, **factory):
    return [torch.randn(n, 4, dtype=torch.float64, device=device) for n in lengths]


def _states(layer, count):
    parameter = next(layer.parameters())
    size = (2 * (1 + layer.bidirectional), count, 6)
    return tuple(parameter.new_empty(size).normal_() for _ in layer.cell.states)


def _run_alone(layer, inputs, h_0):
    """The oracle: each sequence by itself through the loop in PyTorch."""
    plain = {"solver": "sequential", "backend": "torch"}
    runs = [layer(x, tuple(h[:, i] for h in h_0), **plain) for i, x in enumerate(inputs)]
    finals = zip(*(final for _, final in runs), strict=True)
    return [output for output, _ in runs], tuple(torch.stack(f, 1) for f in finals)


def _check(layer, inputs, h_0, outputs, finals):
    """Outputs, final states and all gradients are the oracle's."""
    leaves = [*inputs, *h_0, *layer.parameters()]
    reference, ends = _run_alone(layer, inputs, h_0)
    results = []
    for given_outputs, given_finals in ((outputs, finals), (reference, ends)):
        loss = sum(o.sin().sum() for o in given_outputs) + sum(
            f.square().sum() for f in given_finals
        )
        grads = torch.autograd.grad(loss, leaves, retain_graph=True)
        results.append([*given_outputs, *given_finals, *grads])
    for mine, theirs in zip(*results, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-11)


def _leaves(*tensors):
    return [t.requires_grad_() for t in tensors]


def test_bidirectional(device, pair):
    layer = _layer(device)
    x = torch.randn(3, 40, 4, dtype=torch.float64, device=device)
    output, (h_n, c_n) = layer(x, **pair)
    assert output.shape == (3, 40, 12)
    assert h_n.shape == c_n.shape == (4, 3, 6)
    by_hand, finals = x, []
    for index in range(2):
        both = []
        for part, flip in ((layer.layers[index], False), (layer.reverse_layers[index], True)):
            inputs_in_order = by_hand.flip(1) if flip else by_hand
            gates = part.proj(inputs_in_order).flatten(3) + part.bias
            (h, _), final = pararnn.solve(part.cell, gates, solver="sequential", backend="torch")
            both.append(h.flip(1) if flip else h)
            finals.append(final)
        # Each head of the next layer sees both directions of its own channels.
        heads = torch.cat([h.unflatten(-1, (2, 3)) for h in both], -1).flatten(-2)
        by_hand = heads if index == 0 else torch.cat(both, -1)
    assert torch.allclose(output, by_hand, atol=1e-12)
    assert torch.allclose(h_n, torch.stack([h for h, _ in finals]), atol=1e-12)
    assert torch.allclose(c_n, torch.stack([c for _, c in finals]), atol=1e-12)


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.one_in(3)
def test_packed_sequence(device, pair, enforce_sorted, bidirectional):
    layer = _layer(device, bidirectional)
    lengths = sorted(LENGTHS, reverse=True) if enforce_sorted else LENGTHS
    inputs = _leaves(*_inputs(device, lengths))
    h_0 = _leaves(*_states(layer, len(lengths)))
    sequence = pack_sequence(inputs, enforce_sorted=enforce_sorted)
    output, finals = layer(sequence, h_0, **pair)
    assert isinstance(output, PackedSequence)
    assert torch.equal(output.batch_sizes, sequence.batch_sizes)
    _check(layer, inputs, h_0, unpack_sequence(output), finals)
    full_rows, sizes = pad_packed_sequence(output, batch_first=True)
    assert sizes.tolist() == list(lengths)
    assert full_rows.shape == (4, 7, 12 if bidirectional else 6)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
@pytest.mark.thorough
def test_packed_sequences_of_any_lengths(lengths):
    layer = _layer("cpu")
    inputs = _leaves(*_inputs("cpu", lengths))
    h_0 = _leaves(*_states(layer, len(lengths)))
    output, finals = layer(pack_sequence(inputs, enforce_sorted=False), h_0)
    _check(layer, inputs, h_0, unpack_sequence(output), finals)


def test_packing_leaves_little_padding():
    layer = pararnn.ParaGRU(4, 6)
    rows = []
    layer.layers[0].register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    layer(pack_sequence([torch.randn(n, 4) for n in [100, *[10] * 30]]))
    assert rows == [4]


class _PackedInside(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = pararnn.ParaGRU(4, 6)

    def forward(self, x, lengths):
        return self.rnn(pack_padded_sequence(x, lengths, batch_first=True))[0].data


def test_exported_programs_take_no_packed_sequence():
    inputs = torch.randn(2, 5, 4), torch.tensor([5, 3])
    with pytest.raises(ValueError, match="padded rows and lengths"):
        torch.export.export(_PackedInside(), inputs, strict=False)


@pytest.mark.parametrize("starts", [(0, 3, 3, 5, 9), (0, 0, 12), (0,)], ids=str)
def test_packed_rows_are_the_same_without_searchsorted_as_in_onnx(monkeypatch, starts):
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    want = of_cu_seqlens(cu_seqlens, 1, 12, cu_seqlens.device)
    monkeypatch.setattr("pararnn.sequences.exporting_to_onnx", lambda: True)
    got = of_cu_seqlens(cu_seqlens, 1, 12, cu_seqlens.device)
    assert torch.equal(got.seq, want.seq)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("lengths", [(3, 7, 1, 5), (3, 0, 7, 2)], ids=str)
@pytest.mark.one_in(3)
def test_lengths(device, pair, padding, lengths):
    layer = _layer(device)
    inputs = _leaves(*_inputs(device, lengths))
    h_0 = _leaves(*_states(layer, 4))
    x = pad_sequence(inputs, batch_first=True, padding_value=float("nan"), padding_side=padding)
    where = {"lengths": torch.tensor(lengths, device=device), "padding": padding}
    output, finals = layer(x.detach().nan_to_num(7.0), h_0, **where, **pair)
    real = [
        o[:n] if padding == "right" else o[7 - n :] for o, n in zip(output, lengths, strict=True)
    ]
    assert output.count_nonzero() == sum(r.count_nonzero() for r in real)
    output, finals = layer(x, h_0, **where, **pair)
    real = [
        o[:n] if padding == "right" else o[7 - n :] for o, n in zip(output, lengths, strict=True)
    ]
    if 0 not in lengths:
        _check(layer, inputs, h_0, real, finals)
    else:
        assert all(torch.equal(f[:, 1], h[:, 1]) for f, h in zip(finals, h_0, strict=True))
    by_list, _ = layer(x, h_0, lengths=list(lengths), padding=padding, **pair)
    assert torch.equal(by_list, output)


@pytest.mark.parametrize("with_batch", [True, False])
def test_cu_seqlens(device, pair, with_batch):
    layer = _layer(device)
    inputs = _leaves(*_inputs(device))
    h_0 = _leaves(*_states(layer, 4))
    x = torch.cat(inputs)
    cuts = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    output, finals = layer(x.unsqueeze(0) if with_batch else x, h_0, cu_seqlens=cuts, **pair)
    rows = output[0] if with_batch else output
    _check(layer, inputs, h_0, rows.split(LENGTHS), finals)


def test_unbatched(device, pair):
    for batch_first in (True, False):
        layer = _layer(device, batch_first=batch_first)
        (x,) = _inputs(device, (9,))
        h_0 = tuple(h[:, 0] for h in _states(layer, 1))
        output, finals = layer(x, h_0, **pair)
        row = 0 if batch_first else 1
        with_batch, ends = layer(x.unsqueeze(row), tuple(h.unsqueeze(1) for h in h_0), **pair)
        assert output.shape == (9, 12)
        assert torch.equal(output, with_batch.squeeze(row))
        assert all(torch.equal(f, e.squeeze(1)) for f, e in zip(finals, ends, strict=True))
    one_way = _layer(device, bidirectional=False)
    state, outputs = None, []
    for step in x:
        y, state = one_way.step(step, state)
        outputs.append(y)
    reference, last = one_way(x)
    assert torch.allclose(torch.stack(outputs), reference, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(state, last, strict=True))


@pytest.mark.parametrize("name", list(CELLS))
def test_chunks_equal_one_run(device, name):
    layer = _layer(device, bidirectional=False, cell=pararnn.CELLS[name])
    x = torch.randn(2, 30, 4, dtype=torch.float64, device=device, requires_grad=True)
    fields = {field: torch.rand(2, 30, dtype=x.dtype, device=device) for field in layer.cell.fields}
    whole, _ = layer(x, fields=fields)
    state, outputs = None, []
    for part in torch.arange(30, device=device).split(11):
        output, state = layer(x[:, part], state, fields={k: v[:, part] for k, v in fields.items()})
        outputs.append(output)
    chunks = torch.cat(outputs, 1)
    assert torch.allclose(chunks, whole, atol=1e-12)
    leaves = [x, *layer.parameters()]
    grads = [torch.autograd.grad(o.sin().sum(), leaves) for o in (chunks, whole)]
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(*grads, strict=True))


def test_detached_states_truncate_the_gradient(device, pair):
    layer = _layer(device, bidirectional=False)
    x = torch.randn(2, 30, 4, dtype=torch.float64, device=device, requires_grad=True)
    _, state = layer(x[:, :20], **pair)
    output, _ = layer(x[:, 20:], tuple(s.detach() for s in state), **pair)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert not grad[:, :20].any()
    assert grad[:, 20:].all()


def test_all_states(device, pair):
    layer = _layer(device)
    x = torch.randn(2, 12, 4, dtype=torch.float64, device=device)
    output, (h_n, c_n), states = layer(x, all_states=True, **pair)
    assert len(states) == 4
    assert all(s.shape == (2, 12, 6) for both in states for s in both)
    assert torch.equal(torch.cat([states[2][0], states[3][0]], -1), output)
    assert torch.equal(states[2][1][:, -1], c_n[2])
    assert torch.equal(states[3][0][:, 0], h_n[3])
    plain = copy.deepcopy(layer)
    _, _, reference = plain(x, all_states=True, solver="sequential", backend="torch")
    losses = [sum((h * c).sum() for h, c in series) for series in (states, reference)]
    grads = [torch.autograd.grad(losses[0], list(layer.parameters()))]
    grads.append(torch.autograd.grad(losses[1], list(plain.parameters())))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*grads, strict=True))
    sequence = pack_sequence(list(x))
    _, _, series = layer(sequence, all_states=True, **pair)
    assert torch.equal(unpack_sequence(series[1][1])[0], states[1][1][0])


@pytest.mark.one_in(3)
def test_fields_and_resets(device, pair):
    layer = _layer(device, cell=pararnn.LRCCell)
    inputs = _inputs(device)
    gaps = [torch.rand(len(x), dtype=x.dtype, device=device) for x in inputs]
    ends = [torch.rand(len(x), device=device) < 0.3 for x in inputs]
    pack_options = {"enforce_sorted": False}
    output, _ = layer(
        pack_sequence(inputs, **pack_options),
        fields={"dt": pack_sequence(gaps, **pack_options)},
        reset=pack_sequence(ends, **pack_options),
        **pair,
    )
    time_first = copy.deepcopy(layer)
    time_first.batch_first = False
    for x, gap, end, got in zip(inputs, gaps, ends, unpack_sequence(output), strict=True):
        plain = {"solver": "sequential", "backend": "torch"}
        reference, _ = layer(x, fields={"dt": gap}, reset=end, **plain)
        assert torch.allclose(got, reference, atol=1e-12)
        rows = {"fields": {"dt": gap.unsqueeze(1)}, "reset": end.unsqueeze(1)}
        other, _ = time_first(x.unsqueeze(1), **rows, **pair)
        assert torch.allclose(other.squeeze(1), reference, atol=1e-12)
    number, _ = layer(inputs[1], fields={"dt": 0.5}, **pair)
    full, _ = layer(inputs[1], fields={"dt": torch.full_like(gaps[1], 0.5)}, **pair)
    assert torch.equal(number, full)


PADDED = torch.zeros(4, 7, 4)
PACKED = pack_padded_sequence(PADDED, torch.tensor([7, 3, 2, 1]), batch_first=True)
WRONG = [
    ({"x": PACKED, "lengths": [1]}, "a PackedSequence says its lengths itself"),
    (
        {"x": PADDED, "lengths": [1, 2]},
        r"lengths must be int32 or int64 \(4,\), got torch.int64 \(2,\)",
    ),
    ({"x": PADDED, "lengths": [8, 1, 1, 1]}, r"lengths must be 0 to 7, got \[8, 1, 1, 1\]"),
    ({"x": PADDED, "lengths": [7] * 4, "padding": "top"}, r"one of \('right', 'left'\), got 'top'"),
    ({"x": PADDED[0], "lengths": [7]}, "lengths need a batch"),
    ({"x": PADDED, "lengths": [7] * 4, "cu_seqlens": torch.tensor([0, 7])}, "give one"),
    ({"x": PADDED, "cu_seqlens": torch.tensor([0, 7])}, "into one row: got B = 4"),
    ({"x": PADDED[0], "cu_seqlens": torch.tensor([0, 8])}, r"end at 7 or before, got \[0, 8\]"),
    ({"x": PACKED, "reset": torch.zeros(4, 7, dtype=torch.bool)}, "are PackedSequences too"),
    (
        {"x": PACKED, "reset": pack_sequence([torch.zeros(3, dtype=torch.bool)])},
        "packed like the input: batch_sizes differ",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_sequences(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        pararnn.ParaGRU(4, 6)(**arguments)


def test_bidirectional_layers_do_not_decode():
    with pytest.raises(ValueError, match="cannot decode step by step"):
        pararnn.ParaGRU(4, 6, bidirectional=True).step(torch.zeros(2, 4))


def test_users_sequences(pair):
    """Numbers as cumsum gives them are int64."""
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 4, 6, **pair)
    x, starts = torch.randn(2, 6, 4), torch.tensor([[1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 1, 0]])
    seq = (starts.flatten().cumsum(0) - 1).view(2, 6)
    seq[0, :2] = -1
    initial = torch.randn(4, 6)
    output, final = layer(x, initial, sequences=Sequences(seq, 4))
    for row, begin, end, number in ((0, 2, 6, 1), (1, 0, 4, 2), (1, 4, 6, 3)):
        single = layer(x[row : row + 1, begin:end], initial[number : number + 1])
        assert torch.allclose(output[row, begin:end], single[0][0], atol=1e-6)
        assert torch.allclose(final[number], single[1][0], atol=1e-6)
    assert not output[0, :2].any()
    assert torch.equal(final[0], initial[0])


OWN = torch.tensor([[0, 0, 1, 1, -1, -1], [2, 2, 2, 3, 3, 3]])
WRONG_SEQUENCES = {
    "too small a total": (OWN, 3, r"below the total of 3, got \[-1, 3\]"),
    "below -1": (OWN - 1, 4, "must be -1"),
    "negative": (OWN, -1, "integer of 0 or more, got -1"),
    "a total that is no integer": (OWN, 4.0, "integer of 0 or more, got 4.0"),
    "int16": (OWN.short(), 4, "int32 or int64 tensor, got torch.int16"),
    "float": (OWN.float(), 4, "int32 or int64 tensor, got torch.float32"),
    "a list": (OWN.tolist(), 4, "int32 or int64 tensor, got list"),
    "fewer steps": (OWN[:, :3], 4, r"must be \(2, 6\), got \(2, 3\)"),
    "elsewhere": (OWN.to("meta"), 4, "is on meta, the steps on cpu"),
    "two runs": (OWN.where(OWN >= 0, 0), 4, r"one run of steps of one row; .* \[2, 1, 1, 1\]"),
    "two rows": (OWN.where(OWN < 2, 0), 4, r"one run of steps of one row"),
    "beyond int32": (OWN + 2**32, 2**40, "must be -1"),
}


@pytest.mark.parametrize("case", list(WRONG_SEQUENCES))
def test_wrong_users_sequences(case):
    seq, total, message = WRONG_SEQUENCES[case]
    if case == "beyond int32":
        total = 2**31  # where numbers would wrap around
    with pytest.raises(ValueError, match=message):
        pararnn.RecurrentLayer(pararnn.GRUCell, 4, 6)(
            torch.randn(2, 6, 4), sequences=Sequences(seq, total)
        )


def test_more_resets_than_states_stay_within_memory(monkeypatch):
    """Compiled code does not count them."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    reset = torch.ones(2, 5, dtype=torch.bool)
    for reverse in (False, True):
        for count in (0, 1, 3):
            rows = Sequences(None, 2, reset)
            seq, total, *_ = split_sequences(rows, count, reverse)
            assert seq.max() < total == 2 + count
