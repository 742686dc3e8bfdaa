"""Memories of models as objects: packed, read at marks of one pass, and forked."""

import pytest
import torch
from lm_kinds import KINDS, plain, tokens
from user_mixers import Decay

from pararnn.lm import LanguageModel, LMConfig, sample
from pararnn.lm.mixers import MixerError, RNNMixer
from pararnn.lm.states import ALIGNMENT, Layout, pack, read_with_marks, unpack, why_keys

RECURRENT = [kind for kind in KINDS if "attention" not in plain(kind).config.mixers]
MARKS = (3, 16, 17, 30)


def _layers(cache):
    return [layer.read() for layer in cache.layers]


def _same(one, other):
    for pair in zip(one, other, strict=True):
        for a, b in zip(*pair, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_pass_with_marks_gives_what_shorter_passes_leave(kind, dtype):
    model, text = plain(kind, dtype), tokens(1, 30)
    before, after = text[:, :5], text[:, 5:]  # a pass after earlier tokens
    marks = (1, 11, 12, 25)
    cache = model.new_cache()
    model.hidden(before, cache)
    hidden, memories = read_with_marks(model, after, cache, marks)
    reference = model.new_cache()
    model.hidden(before, reference)
    close = {"rtol": 0, "atol": 3e-2 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(hidden, model.hidden(after, reference), **close)
    assert cache.length == reference.length == 30
    for index, mark in enumerate(marks):
        shorter = model.new_cache()
        model.hidden(text[:, : 5 + mark], shorter)
        for memory, other in zip(memories, _layers(shorter), strict=True):
            for one, two in zip(memory, other, strict=True):
                assert (one is None) == (two is None)
                if one is not None:
                    assert one.dtype == two.dtype
                    torch.testing.assert_close(one[index : index + 1], two, **close)
    _, none = read_with_marks(model, tokens(1, 4), cache, ())
    assert {len(x) for memory in none for x in memory if x is not None} == {0}


@pytest.mark.parametrize("change", ["a mixer without marks", "compiled"])
@torch.no_grad()
def test_other_models_are_read_in_pieces(change, monkeypatch):
    mixers = ("user_mixers:Decay", "rnn") if change != "compiled" else ("rnn", "rnn")
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(16, 2, 48, mixers=mixers)).eval()
    lengths, call = [], type(model).hidden

    def hidden(self, row, cache):
        lengths.append(row.shape[1])
        return call(self, row, cache)

    text = tokens(1, 33)
    reference = [model.new_cache() for _ in MARKS]
    wholes = [model.hidden(text[:, :mark], c) for mark, c in zip(MARKS, reference, strict=True)]
    if change == "compiled":
        monkeypatch.setattr(
            model.backbone.layers[1], "_compiled_call_impl", model.backbone.layers[1].forward
        )
    monkeypatch.setattr(type(model), "hidden", hidden)
    cache = model.new_cache()
    out, memories = read_with_marks(model, text, cache, MARKS)
    assert lengths == [3, 13, 1, 13, 3]
    assert cache.length == out.shape[1] == 33
    for index, (whole, other) in enumerate(zip(wholes, reference, strict=True)):
        torch.testing.assert_close(out[:, : MARKS[index]], whole, rtol=0, atol=1e-5)
        states = [None if x is None else x[index : index + 1] for m in memories for x in m]
        for one, two in zip(states, [x for m in _layers(other) for x in m], strict=True):
            assert one is None or torch.allclose(one, two, atol=1e-5)


def test_a_mixer_that_breaks_its_word_is_told(monkeypatch):
    model = LanguageModel(LMConfig(16, 1, 48, mixers=("user_mixers:Decay",)))
    monkeypatch.setattr(Decay, "marks", True)
    with pytest.raises(MixerError, match="Decay says `marks`, and has not called keep_marked"):
        read_with_marks(model, tokens(1, 4), model.new_cache(), (2,))


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_packed_memories_are_the_same(kind, dtype):
    """Of one text they are views, which kernels read as they read tensors of their own."""
    model, cache = plain(kind, dtype), plain(kind, dtype).new_cache()
    model.hidden(tokens(3, 9), cache)
    layers = _layers(cache)
    data, layout = pack(layers), Layout.of(layers)
    held = [x for layer in layers for x in layer if x is not None]
    assert data.shape == (3, layout.nbytes()) == (3, sum(x.nbytes for x in held) // 3)
    for first in (0, 1, 2):
        some = data[first:].clone() if first else data
        again = unpack(some, layout)
        _same(again, [[None if x is None else x[first:] for x in layer] for layer in layers])
        for x in (x for m in again for x in m if x is not None):
            is_view = x.untyped_storage().data_ptr() == some.untyped_storage().data_ptr()
            assert is_view <= (first == 2)
            assert x.data_ptr() % ALIGNMENT == 0
            assert x.stride() == torch.empty(x.shape).stride()


def test_memories_that_are_not_aligned_are_copies():
    layers = [
        (torch.randn(1, 2, dtype=torch.bfloat16), torch.randn(1, 2, 4)),
        (None, torch.randn(1, 5)),
        (torch.randn(1, 1), None),
    ]
    data, layout = pack(layers), Layout.of(layers)
    again = unpack(data, layout)
    _same(again, layers)
    held = [x for layer in again for x in layer if x is not None]
    assert all(x.data_ptr() % ALIGNMENT == 0 for x in held)
    addresses = [x.untyped_storage().data_ptr() == data.data_ptr() for x in held]
    assert addresses == [True, False, False, False]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_forks_continue_alike_and_leave_the_first_as_it_is(kind):
    model, start, more = plain(kind), tokens(1, 9), tokens(3, 5, seed=4)
    cache = model.new_cache()
    model(start, cache)
    together = model(more, cache.fork(3))
    for row in range(3):
        whole = model(torch.cat([start, more[row : row + 1]], 1))[:, 9:]
        torch.testing.assert_close(together[row : row + 1], whole, rtol=0, atol=1e-4)
    first = sample(model, more, 12, 0, state=cache)
    assert torch.equal(sample(model, more, 12, 0, state=cache), first)
    assert cache.length == 9
    assert torch.equal(first, sample(model, torch.cat([start.expand(3, 9), more], 1), 12, 0))
    with pytest.raises(ValueError, match="a cache of 3 rows continues in as many"):
        cache.fork(3).fork(2)


class Doubled(RNNMixer):
    """A recurrent block with a forward of its own, which knows no marks."""

    def forward(self, x, rows, cache=None):
        inputs, states = (None, None) if cache is None else cache.read()
        h, final = self.rnn(self.in_proj(x), None if states is None else states[:, 0])
        if cache is not None:
            cache.keep(inputs, final.unsqueeze(1))
        return 2 * self.out_proj(h)


@torch.no_grad()
def test_blocks_with_another_forward_are_read_in_pieces():
    model = LanguageModel(LMConfig(16, 1, 48, mixers=(f"{__name__}:Doubled",))).eval()
    cache, reference = model.new_cache(), model.new_cache()
    hidden, (memory,) = read_with_marks(model, tokens(1, 9), cache, (4,))
    assert hidden.shape == (1, 9, 16)
    model.hidden(tokens(1, 9)[:, :4], reference)
    torch.testing.assert_close(memory[1], reference.layers[0].states)


def test_keys_are_no_state():
    assert why_keys(plain("gru")) is None
    assert "layer 1 of the model (Attention) remembers" in str(why_keys(plain("hybrid")))
