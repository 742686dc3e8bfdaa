"""Drafts from the text change no token, where logits of all passes have the same bits."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import DTYPES, model_of
from lm_kinds import VOCABULARY, plain, tokens
from recordings import recordings_of_run as recordings_of_run
from torch import Tensor

from pararnn.lm import LanguageModel, LMConfig, Lookup, Prefixes, sample
from pararnn.lm.lookup import Text
from pararnn.lm.replay import WORTH, Recording

CELLS = ("gru", "lstm", "head-lstm", "gated-delta")
CASES = [(kind, dtype) for kind in CELLS for dtype in DTYPES]
LENGTH = 24


def drawn(
    model: LanguageModel, prompt: Tensor, temperature: float, lookup: Lookup | None, seed: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, log-probabilities, and what the generator draws after them."""
    generator = torch.Generator().manual_seed(seed)
    options = {"lookup": lookup, "return_log_probs": True}
    texts, chances = sample(model, prompt, LENGTH, temperature, generator, **options)
    return texts, chances, torch.rand(3, generator=generator)


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@st.composite
def prompts(draw: st.DrawFn) -> Tensor:
    """Draw a text that repeats itself, with some tokens changed."""
    period = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6))
    text = torch.tensor(period * draw(st.integers(1, 6)))
    for place in draw(st.lists(st.integers(0, len(text) - 1), max_size=2)):
        text[place] = draw(st.integers(0, VOCABULARY - 1))
    return text.unsqueeze(0)


REQUESTS = st.tuples(
    prompts(), st.sampled_from([0, 0.05, 1.0, 30.0]), st.integers(1, 8), st.integers(1, 3)
)
"""A prompt, a temperature, how many tokens are drafted, and the fewest tokens of an n-gram."""


def check_request(kind: str, dtype: torch.dtype, request: tuple[Tensor, float, int, int]) -> None:
    prompt, temperature, drafts, least = request
    model, lookup = model_of(kind, dtype), Lookup(drafts, least=least)
    assert same(drawn(model, prompt, temperature, lookup), drawn(model, prompt, temperature, None))


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
@settings(max_examples=8)
@given(asked=REQUESTS)
def test_tokens_are_those_of_plain_sampling(kind: str, dtype: torch.dtype, asked) -> None:
    check_request(kind, dtype, asked)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
@settings(max_examples=500)
@given(asked=REQUESTS)
def test_hundreds_of_texts(kind: str, dtype: torch.dtype, asked) -> None:
    check_request(kind, dtype, asked)


REPEATING = torch.tensor([[5, 6, 7, 8] * 4])


@pytest.mark.parametrize("temperature", [0, 0.3])
@pytest.mark.parametrize("kind", ["gru", "gated-delta"])
def test_recorded_passes_draw_the_same(
    kind: str, temperature: float, recordings_of_run: list[Recording]
) -> None:
    model, lookup = model_of(kind, torch.float32), Lookup(3, least=1)
    by_passes = drawn(model, REPEATING, temperature, lookup)
    shapes = sorted(tuple(recording.tokens.shape) for recording in recordings_of_run)
    assert shapes == [(1,), (1, 4)]
    assert LENGTH >= WORTH
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pararnn.lm.replay._records", lambda device: False)
        assert same(by_passes, drawn(model, REPEATING, temperature, None))


def test_texts_that_repeat_take_fewer_passes() -> None:
    """A token follows from the last one alone, so that the text comes back to what it was."""
    model, lookup = copy.deepcopy(model_of("gru", torch.float32)), Lookup(7)
    for block in model.backbone.blocks:
        block.mixer.out_proj.weight.data.zero_()
    texts = sample(model, REPEATING, 100, 0, lookup=lookup)
    assert torch.equal(texts, sample(model, REPEATING, 100, 0))
    counts = lookup.counts
    assert counts.tokens == 99
    assert counts.passes + counts.accepted == counts.tokens
    assert counts.accepted <= counts.drafted
    assert lookup.tokens_per_pass > 2
    sample(model, REPEATING, 1, 0, lookup=lookup)
    sample(model, REPEATING, 0, 0, lookup=lookup)
    assert lookup.counts == counts
    assert math.isnan(Lookup().tokens_per_pass)


def test_states_and_prefixes_are_continued() -> None:
    model = model_of("lstm", torch.float32)
    options = {"length": LENGTH, "temperature": 0}
    whole = sample(model, torch.cat([REPEATING, REPEATING], 1), **options)
    state, prefixes = model.new_cache(), Prefixes(model, budget=1 << 16)
    with torch.no_grad():
        model(REPEATING, state)
    before = [tensor.clone() for layer in state.layers for tensor in layer.read()]
    assert torch.equal(sample(model, REPEATING, **options, state=state, lookup=Lookup()), whole)
    after = [tensor for layer in state.layers for tensor in layer.read()]
    assert same(before, after)
    for _ in range(2):
        twice = torch.cat([REPEATING, REPEATING], 1)
        got = sample(model, twice, **options, prefixes=prefixes, lookup=Lookup())
        assert torch.equal(got, whole)
    assert prefixes.counts.hits == 1


def test_the_default_generator_is_left_as_without_drafts() -> None:
    model, ends = model_of("gru", torch.float32), []
    for lookup in (None, Lookup(5, least=1)):
        torch.manual_seed(4)
        ends.append((sample(model, REPEATING, LENGTH, lookup=lookup), torch.rand(3)))
    assert same(*ends)


@pytest.mark.parametrize("kind", ["gru", "lstm", "user's", "matrix", "no convolution", "tied"])
def test_models_whose_bits_depend_on_the_batch(kind: str) -> None:
    """Logits of several tokens differ from those of one by rounding, and these by more."""
    model, prompt = plain(kind), torch.cat([tokens(1, 9)] * 3, 1)
    for temperature in (0, 1.0):
        first = drawn(model, prompt, temperature, Lookup(4, least=1))
        second = drawn(model, prompt, temperature, None)
        assert torch.equal(first[0], second[0])
        torch.testing.assert_close(first[1], second[1], rtol=0, atol=1e-4)


def test_logits_that_are_not_finite_raise() -> None:
    model = LanguageModel(LMConfig(16, 1, VOCABULARY, num_heads=2))
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    for temperature in (0, 1.0):
        with pytest.raises(FloatingPointError, match="token 0 of row 0 are not finite"):
            sample(model, REPEATING, LENGTH, temperature, lookup=Lookup())


def test_what_cannot_go_back_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one row, .* got 2 rows: sample them one by one"):
        sample(plain("gru"), tokens(2, 5), 5, lookup=Lookup())
    with pytest.raises(ValueError, match=r"layer 1 of the model .* remembers the keys"):
        sample(plain("hybrid"), tokens(1, 5), 5, lookup=Lookup())
    model = plain("gru")
    model.backbone.layers[1].compile()
    with pytest.raises(ValueError, match="block 1 of the model is compiled"):
        sample(model, tokens(1, 5), 5, lookup=Lookup())
    model = LanguageModel(LMConfig(16, 1, 48, mixers=("user_mixers:Decay",), num_heads=2))
    with pytest.raises(ValueError, match=r"layer 0 of the model \(Decay\).*leave lookup out"):
        sample(model, tokens(1, 5), 5, lookup=Lookup())
    for wrong in ({"drafts": 0}, {"least": 0}, {"longest": 1, "least": 2}):
        with pytest.raises(ValueError, match="must be positive"):
            Lookup(**wrong)


def test_drafts_follow_the_longest_match_and_the_last_one() -> None:
    lookup = Lookup(3, longest=3, least=1)
    cases = {
        (1, 2, 3, 9, 2, 3, 8, 1, 2, 3): [9, 2, 3],  # not 8, which followed two of them
        (2, 3, 9, 1, 2, 3, 8, 4, 2, 3): [8, 4, 2],  # the last place of two
        (4, 1, 2, 3): [],
        (4, 7, 7): [7, 7, 7],  # it runs into itself
        (5, 6, 5, 6): [5, 6, 5],
        (3,): [],
    }
    for text, draft in cases.items():
        assert Text(lookup, text).draft() == draft, text
        grown = Text(lookup, ())
        for token in text:
            grown.extend([token])
        assert grown.draft() == draft
    assert Text(Lookup(3), (5, 6, 7, 6, 9, 6)).draft() == []  # one token is too few
