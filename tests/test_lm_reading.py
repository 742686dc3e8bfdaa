"""Texts read by recorded pieces: the bits of the same pieces by calls, and bounded recordings."""

from __future__ import annotations

import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies
from lm_kinds import KINDS, VOCABULARY, plain
from recordings import recordings_of_run as recordings_of_run
from torch import Tensor
from user_mixers import Decay

from pararnn.lm import LanguageModel, LMConfig, Prefixes
from pararnn.lm.cache import LMCache
from pararnn.lm.pages import NoRoom
from pararnn.lm.prefixes import release
from pararnn.lm.reading import Reader, marks_of, pieces_of
from pararnn.lm.replay import Recording
from pararnn.lm.states import pack, read_with_marks

MORE = {
    "head-lstm": {"cell": "head-lstm"},
    "gated-delta": {"mixers": ("matrix", "matrix"), "cell": "gated-delta", "cell_config": {"K": 4}},
}
MOST, GRAIN = 16, 4
CUTS = (0, 32, 40, 43, 44, 45, 70)
"""A whole piece twice, smaller ones, tokens up to a mark, and after one."""


def _model(kind: str, dtype: torch.dtype = torch.float32, **more) -> LanguageModel:
    return plain("gru" if kind in MORE else kind, dtype, **MORE.get(kind, {}), **more)


def _text(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


@given(strategies.integers(0, 2000), strategies.integers(1, 700), strategies.integers(0, 9))
def test_pieces_are_aligned_powers_of_two(start: int, count: int, most: int) -> None:
    """One piece of each size for first tokens and for later ones, with a mark or without below the
    grain."""
    most, end, at = 1 << most, start + count, start
    for piece in pieces_of(start, end, most, 16):
        assert piece.size & (piece.size - 1) == 0
        assert piece.size <= most
        assert at % piece.size == 0
        assert piece.is_first == (at == 0)
        marks = [at + mark for mark in piece.marks]
        assert marks == [n for n in range(at + 1, at + piece.size + 1) if n % 16 == 0]
        if piece.size >= 16:
            assert piece.marks == tuple(range(16, piece.size + 1, 16))
        at += piece.size
    assert at == end


def _by_calls(model: LanguageModel, text: list[int], cuts: tuple[int, ...], most: int, grain: int):
    """Return hidden states, packed states and the last state by a call of the model a piece."""
    cache, hidden, states = LMCache(0), [], []
    cache.layers = model.new_cache().layers
    for first, end in pairwise(cuts):
        for piece in pieces_of(first, end, most, grain):
            row = torch.tensor([text[cache.length : cache.length + piece.size]])
            if not grain:
                hidden.append(model.hidden(row, cache))
                continue
            new, layers = read_with_marks(model, row, cache, piece.marks)
            hidden.append(new)
            last = new[0, [mark - 1 for mark in piece.marks]]
            states.append(pack([*layers, (last, None)]))
    return (
        torch.cat(hidden, 1),
        states and torch.cat(states),
        pack([x.read() for x in cache.layers]),
    )


def _read(reader: Reader, text: list[int], cuts: tuple[int, ...]):
    cache = reader.model.new_cache()
    results = [reader.read(text[first:end], cache) for first, end in pairwise(cuts)]
    hidden, states = zip(*results, strict=True)
    assert cache.length == cuts[-1]
    return torch.cat(hidden, 1), torch.cat(states), pack([x.read() for x in cache.layers])


STEADY = [kind for kind in (*KINDS, *MORE) if "attention" not in _model(kind).config.mixers]


@pytest.mark.parametrize("kind", STEADY)
@pytest.mark.parametrize("grain", [0, GRAIN])
@pytest.mark.one_in(3)
@torch.no_grad()
def test_recorded_pieces_have_the_bits_of_calls(
    kind: str, grain: int, recordings_of_run: list[Recording]
) -> None:
    """From no memory too, whatever was read before, and at any later use of a recording."""
    model = _model(kind, torch.bfloat16 if kind in ("gru", "matrix") else torch.float32)
    reader, others = Reader(model, grain, MOST), _text(70, seed=5)
    for text in (_text(70), others, _text(70)):
        expected = _by_calls(model, text, CUTS, MOST, grain)
        for one, other in zip(_read(reader, text, CUTS), expected, strict=True):
            assert torch.equal(one, other) if grain or len(other) else not len(one)
    assert len(recordings_of_run) == len(reader.recordings) <= 2 * 5 + 2


@torch.no_grad()
def test_texts_that_are_read_by_turns_keep_their_memory(recordings_of_run: list[Recording]) -> None:
    model = _model("lstm")
    reader = Reader(model, GRAIN, MOST)
    texts = [_text(70, seed) for seed in range(3)]
    caches = [model.new_cache() for _ in texts]
    results: list[list[Tensor]] = [[] for _ in texts]
    for first, end in pairwise(CUTS):
        for text, cache, hidden in zip(texts, caches, results, strict=True):
            hidden.append(reader.read(text[first:end], cache)[0])
    for text, cache, hidden in zip(texts, caches, results, strict=True):
        expected, _, last = _by_calls(model, text, CUTS, MOST, GRAIN)
        assert torch.equal(torch.cat(hidden, 1), expected)
        assert torch.equal(pack([layer.read() for layer in cache.layers]), last)


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
@pytest.mark.parametrize("grain", [0, GRAIN])
@torch.no_grad()
def test_all_pieces_of_prompts_are_recorded_ahead(
    kind: str, grain: int, recordings_of_run: list[Recording]
) -> None:
    """Of chunks of 20 tokens, from kept states too, and their results share memory."""
    model = _model(kind)
    pool = Prefixes(model, 1 << 18, GRAIN).pool
    reader = Reader(model, grain, 20, pool)
    reader.prepare()
    assert len(recordings_of_run) == 2 * 5
    for length in range(1, 70, 3):
        cache, text = pool.new_cache(), _text(length)
        for cut in [*range(20, length, 20), length]:
            reader.read(text[cache.length : cut], cache)
        release(cache)
    assert len(recordings_of_run) == len(reader.recordings) == 2 * 5
    addresses = {recording.results[0].data_ptr() for recording in recordings_of_run}
    assert len(addresses) == 1
    reference = weakref.ref(reader)
    del reader  # frees its memory at once
    assert reference() is None


class Begun(Decay):
    """A memory that does not begin with zeros."""

    def forward(self, x, rows, cache=None):
        if cache is not None and cache.read()[1] is None:
            cache.keep(None, x.new_ones(len(x), 1, x.shape[2]))
        return super().forward(x, rows, cache)


@torch.no_grad()
def test_a_text_begins_with_no_memory(recordings_of_run: list[Recording], monkeypatch) -> None:
    """Not with zeros; by a mixer that gives no memory at marks, which is read in smaller calls."""
    monkeypatch.setattr(Begun, "steady", True, raising=False)
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(16, 2, VOCABULARY, mixers=(f"{__name__}:Begun", "rnn"))).eval()
    reader = Reader(model, GRAIN, MOST)
    for text in (_text(70), _text(70, seed=2)):
        for one, other in zip(
            _read(reader, text, CUTS), _by_calls(model, text, CUTS, MOST, GRAIN), strict=True
        ):
            assert torch.equal(one, other)
    assert recordings_of_run


@pytest.mark.parametrize("kind", ["attention", "hybrid", "mlstm"])
@torch.no_grad()
def test_recorded_pieces_write_keys_into_pages(
    kind: str, recordings_of_run: list[Recording]
) -> None:
    """Texts that share beginnings, that wait in the middle, and that give their pages back."""
    model = _model(kind)
    every = [Prefixes(model, 1 << 18, GRAIN) for _ in range(2)]
    reader = Reader(model, GRAIN, MOST, every[0].pool)
    shared = _text(70)
    texts = [[*shared[:cut], *_text(70 - cut, seed=cut)] for cut in (0, 33, 70, 50, 70)]
    for text in texts:
        results = []
        for prefixes in every:
            names = prefixes.names(text)
            cache, hidden = prefixes.find(names)
            by_pieces, outputs = prefixes is every[0], [] if hidden is None else [hidden]
            while cache.length < len(text):
                if by_pieces:
                    end = cache.length - cache.length % 32 + 32
                    new = prefixes.read(text[cache.length : end], names, cache, reader)
                else:
                    piece = pieces_of(cache.length, len(text), MOST, GRAIN)[0]
                    end = cache.length + piece.size
                    new = prefixes.read(text[cache.length : end], names, cache)
                outputs.append(new[0])
            results.append((torch.cat(outputs), prefixes.counts))
            release(cache)
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1] == results[1][1]
    assert every[0].pool.in_use == 0
    assert recordings_of_run


@torch.no_grad()
def test_a_text_without_room_for_its_keys_stays_as_it_is(
    recordings_of_run: list[Recording],
) -> None:
    model = _model("hybrid")
    unit = Prefixes(model, 1 << 18, GRAIN).pool.unit_bytes
    pool = Prefixes(model, 9 * unit, GRAIN).pool
    reader, text = Reader(model, 0, MOST, pool), _text(70)
    cache = pool.new_cache()
    first, _ = reader.read(text[:20], cache)
    before = [[x if x is None else x.clone() for x in layer.read()] for layer in cache.layers]
    used = pool.in_use
    with pytest.raises(NoRoom):
        reader.read(text[20:], cache)
    assert (cache.length, pool.in_use) == (20, used)
    for layer, old in zip(cache.layers, before, strict=True):
        for one, other in zip(layer.read(), old, strict=True):
            assert one is other is None or torch.equal(one, other)
    more, _ = reader.read(text[20:30], cache)
    release(cache)
    cache = pool.new_cache()
    whole = [reader.read(text[first:end], cache)[0] for first, end in ((0, 20), (20, 30))]
    assert torch.equal(torch.cat([first, more], 1), torch.cat(whole, 1))


@pytest.mark.parametrize(
    ("kind", "grain", "most"),
    [("gru", 0, 7), ("gru", 12, 64), ("hybrid", 0, 64), ("gru", 4, 0)],
    ids=["few tokens", "a grain that is no power of two", "keys without pages", "no pieces"],
)
def test_other_reads_are_calls(
    kind: str, grain: int, most: int, recordings_of_run: list[Recording]
) -> None:
    assert Reader(_model(kind), grain, most).most == 0


def test_nothing_is_recorded_on_a_cpu() -> None:
    assert Reader(_model("gru"), GRAIN, 64).most == 0


def test_marks_are_counted_from_the_first_token() -> None:
    assert marks_of(0, 9, 4) == (4, 8)
    assert marks_of(3, 9, 4) == (1, 5)
    assert marks_of(4, 7, 4) == ()
    assert marks_of(0, 9, 0) == ()
