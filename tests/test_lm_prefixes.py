"""States of prompts' beginnings: hits at the grain, the same results, bytes within the budget."""

import pytest
import torch
from hypothesis import given, settings, strategies
from lm_kinds import VOCABULARY, plain, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from pararnn.lm import LanguageModel, LMConfig, Prefixes, sample
from pararnn.lm.prefixes import release
from pararnn.lm.states import pack

GRAIN = 4


def _read(prefixes, text, chunk=1000):
    """Read a text as a server does; return the tokens that were read again and the last logits."""
    names = prefixes.names(text)
    cache, hidden = prefixes.find(names)
    start = cache.length
    while cache.length < len(text):
        end = cache.length - cache.length % chunk + chunk
        hidden = prefixes.read(text[cache.length : end], names, cache)[:, -1]
    release(cache)
    return len(text) - start, prefixes.model.lm_head(hidden)


def _text(length, seed=0):
    return tokens(1, length, seed=seed)[0].tolist()


@pytest.mark.parametrize("kind", ["lstm", "matrix", "hybrid"])
@torch.no_grad()
def test_at_most_a_grain_less_one_is_read_again(kind):
    model, text = plain(kind), _text(70)
    prefixes = Prefixes(model)
    assert _read(prefixes, text)[0] == 70
    for length in range(1, 71):
        again, logits = _read(prefixes, text[:length])
        assert again == length % 16
        reference = model(torch.tensor([text[:length]]))[:, -1]
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4)
    other = [*text[:37], *_text(20, seed=5)]  # a branch
    assert _read(prefixes, other)[0] == 57 - 32
    assert _read(prefixes, [*other, 1, 2])[0] == 59 - 48
    assert _read(prefixes, [*text, 1, 2])[0] == 72 - 64
    assert prefixes.counts.lookups == 1 + 70 + 3
    assert prefixes.counts.hits == (70 - 15) + 3


@torch.no_grad()
def test_pieces_of_the_grain_have_the_bits_of_a_whole_reading():
    """Prompts cut at multiples of the grain compute the same calls from any kept state."""
    model = plain("lstm")
    text = _text(90)
    _, whole = _read(Prefixes(model), text, chunk=16)
    for cut in (16, 50, 80, 90):
        prefixes = Prefixes(model)
        _read(prefixes, [*text[:cut], 1, 2, 3], chunk=16)
        again, logits = _read(prefixes, text, chunk=16)
        assert again == 90 - cut // 16 * 16
        assert torch.equal(logits, whole)


STEPS = strategies.lists(
    strategies.tuples(strategies.integers(0, 5), strategies.integers(0, 14), strategies.booleans()),
    min_size=1,
    max_size=14,
)


@settings(max_examples=15, deadline=None)
@given(strategies.integers(1, 9), STEPS)
@torch.no_grad()
def test_any_order_of_texts_hits_what_a_dictionary_holds(states, steps):
    """Texts branch from earlier ones; a dictionary of their beginnings says what must be there."""
    model = plain("gru")
    size = Prefixes(model, 1 << 20).state_bytes
    prefixes, recent = Prefixes(model, size * states, GRAIN), []
    texts = [[1, 2, 3]]
    for parent, length, is_new in steps:
        text = [*texts[parent % len(texts)][: 2 * length], *([length % VOCABULARY] * length)] or [7]
        if is_new:
            texts.append(text)
        found = [n for n in range(GRAIN, len(text) + 1, GRAIN) if tuple(text[:n]) in recent]
        best = max(found, default=0)
        if best:  # the most recently used
            recent.remove(tuple(text[:best]))
            recent.append(tuple(text[:best]))
        again, logits = _read(prefixes, text)
        assert again == len(text) - best
        for n in range(best // GRAIN * GRAIN + GRAIN, len(text) + 1, GRAIN):
            beginning = tuple(text[:n])
            if beginning in recent:
                recent.remove(beginning)
            recent.append(beginning)
            del recent[:-states]
        reference = model(torch.tensor([text]))[:, -1]
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4)
        counts = prefixes.counts
        assert counts.states == len(recent)
        assert counts.bytes == len(recent) * size <= size * states
        assert prefixes.pool.memory.untyped_storage().nbytes() == size * states


@torch.no_grad()
def test_kept_states_share_no_memory_with_what_is_read():
    model, text = plain("lstm"), _text(40)
    prefixes = Prefixes(model, 1 << 20, GRAIN)
    _read(prefixes, text)
    cache, _ = prefixes.find(prefixes.names(text))
    before = prefixes.pool.memory.clone()
    for layer in cache.layers:
        for tensor in layer.read():
            tensor.fill_(torch.nan)
    assert torch.equal(prefixes.pool.memory, before)


class Operations(TorchDispatchMode):
    """Names of the operations that run kernels."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.names.append(function.name())
        return result


@torch.no_grad()
def test_a_state_of_many_layers_is_found_by_one_copy():
    config = LMConfig(16, 12, VOCABULARY, num_heads=2)
    model, text = LanguageModel(config, dtype=torch.bfloat16).eval(), _text(40)
    prefixes = Prefixes(model, grain=GRAIN)
    _read(prefixes, text)
    names = prefixes.names([*text, 1])
    with Operations() as operations:
        cache, _ = prefixes.find(names)
    assert cache.length == 40
    assert operations.names == ["aten::clone"]


@torch.no_grad()
def test_a_state_has_the_bytes_of_its_tensors():
    for kind in ("gru", "matrix"):
        model, cache = plain(kind, torch.bfloat16), plain(kind, torch.bfloat16).new_cache()
        hidden = model.hidden(tokens(1, 3), cache)[:, -1]
        held = [x for layer in cache.layers for x in layer.read() if x is not None]
        assert Prefixes(model).state_bytes == sum(x.nbytes for x in (*held, hidden))


@torch.no_grad()
def test_a_long_text_leaves_its_last_states():
    model, text = plain("gru"), _text(41)
    size = Prefixes(model).state_bytes
    prefixes = Prefixes(model, 3 * size + size - 1, GRAIN)
    _read(prefixes, text)
    assert prefixes.counts[3:] == (3, 3 * size, 0)
    assert [_read(prefixes, text[:n])[0] for n in (40, 36, 32)] == [0, 0, 0]
    assert _read(prefixes, text[:28])[0] == 28


@torch.no_grad()
def test_a_state_without_the_heads_input_serves_longer_texts_only():
    """As of rows that are decoded, whose step gives logits alone."""
    model, text = plain("gru"), _text(12)
    prefixes = Prefixes(model, grain=GRAIN)
    cache = model.new_cache()
    model.hidden(torch.tensor([text]), cache)
    layers = [layer.read() for layer in cache.layers]
    prefixes.keep(prefixes.names(text)[-1:], pack(layers), is_open=True)
    assert _read(prefixes, [*text, 1])[0] == 1
    assert _read(prefixes, text)[0] == 12
    assert _read(prefixes, text)[0] == 0  # by now it is known
    reference = model(torch.tensor([text]))[:, -1]
    torch.testing.assert_close(_read(prefixes, text)[1], reference, rtol=0, atol=1e-4)
    prefixes.keep(prefixes.names(text)[-1:], pack(layers), is_open=True)
    assert _read(prefixes, text)[0] == 0  # and stays so


@pytest.mark.parametrize("kind", ["gru", "lstm", "matrix", "hybrid", "attention"])
@pytest.mark.one_in(2)
def test_sample_continues_from_prefixes(kind):
    model, shared = plain(kind), tokens(1, 40)
    prompts = torch.cat([shared.expand(3, 40), tokens(3, 7, seed=4)], 1)
    prefixes = Prefixes(model)
    first = sample(model, prompts, 15, 0, prefixes=prefixes)
    assert torch.equal(first, sample(model, prompts, 15, 0))
    assert prefixes.counts[:3] == (3, 2, 2 * 32)
    warm = [
        sample(model, prompts, 15, 1.0, torch.Generator().manual_seed(0), prefixes=p)
        for p in (prefixes, None)
    ]
    assert torch.equal(*warm)
    assert prefixes.counts.hits == 5
    with pytest.raises(ValueError, match="states of another model"):
        sample(plain(kind), prompts, 2, prefixes=prefixes)
    with pytest.raises(ValueError, match="prefixes are of whole texts"):
        sample(model, prompts, 2, prefixes=prefixes, state=model.new_cache())


def test_impossible_arguments_raise():
    with pytest.raises(ValueError, match="grain must be positive, got 0"):
        Prefixes(plain("gru"), grain=0)
    with pytest.raises(ValueError, match=r"budget is 10+ bytes on cpu, whose memory is .*: give"):
        Prefixes(plain("gru"), 10**18)
    with pytest.raises(ValueError, match="a state of this model: 576 bytes, and the budget is 9"):
        Prefixes(plain("gru"), 9)
    with pytest.raises(
        ValueError, match="three pages of this model: 6144 bytes, and the budget is 9"
    ):
        Prefixes(plain("hybrid"), 9)
    with pytest.raises(ValueError, match="remembers the keys of all tokens, and does not take"):
        Prefixes(plain("gru", mixers=("rnn", "user_mixers:Hoard")))
