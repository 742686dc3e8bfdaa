"""Drafts change no token, where logits of all passes have the same bits."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import DTYPES, model_of
from lm_kinds import VOCABULARY, plain, tokens
from recordings import recordings_of_run as recordings_of_run
from torch import Tensor

from pararnn.lm import LanguageModel, LMConfig, Lookup, Prefixes, drafts, draws, sample
from pararnn.lm.drafts import CREDIT, HINT, INCOME, Drafter, paying
from pararnn.lm.replay import WORTH, Recording

CELLS = ("gru", "lstm", "head-lstm", "gated-delta")
CASES = [(kind, dtype) for kind in CELLS for dtype in DTYPES]
ONE_DTYPE = [
    pytest.param(*case, marks=[] if n % 4 in (0, 3) else pytest.mark.thorough)
    for n, case in enumerate(CASES)
]
"""All cases, of which quick runs have one of each kind."""
LENGTH = 24


def drawn(
    model: LanguageModel, prompt: Tensor, temperature: float, drafter: Drafter | None, seed: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, log-probabilities, and what the generator draws after them."""
    generator = torch.Generator().manual_seed(seed)
    options = {"draft": drafter, "return_log_probs": True}
    texts, chances = sample(model, prompt, LENGTH, temperature, generator, **options)
    return texts, chances, torch.rand(3, generator=generator)


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@st.composite
def prompts(draw: st.DrawFn) -> Tensor:
    """Draw rows of a text that repeats itself, with some tokens changed."""
    period = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6))
    text = torch.tensor([period * draw(st.integers(1, 6))]).repeat(draw(st.integers(1, 3)), 1)
    for place in draw(st.lists(st.integers(0, text.numel() - 1), max_size=3)):
        text.view(-1)[place] = draw(st.integers(0, VOCABULARY - 1))
    return text


REQUESTS = st.tuples(
    prompts(),
    st.sampled_from([0, 0.05, 1.0, 30.0]),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([0.0, 1.0, 3.0]),
)
"""Prompts, a temperature, how many tokens are drafted, the fewest tokens of an n-gram, a price."""


def check_request(kind: str, dtype: torch.dtype, request: tuple) -> None:
    prompt, temperature, drafts, least, price = request
    model, lookup = model_of(kind, dtype), Lookup(drafts, least=least)
    lookup.price = price
    assert same(drawn(model, prompt, temperature, lookup), drawn(model, prompt, temperature, None))


@pytest.mark.parametrize(("kind", "dtype"), ONE_DTYPE, ids=str)
@settings(max_examples=4)
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
UNEVEN = torch.cat([REPEATING, tokens(2, 16)])
"""One row repeats itself, two do not."""


@pytest.mark.parametrize(
    ("kind", "temperature", "rows"),
    [("gru", 0, 1), ("gru", 0.3, 3), ("gated-delta", 0.3, 1), ("gated-delta", 0, 3)],
)
def test_recorded_passes_draw_the_same(
    kind: str, temperature: float, rows: int, recordings_of_run: list[Recording]
) -> None:
    model, lookup = model_of(kind, torch.float32), Lookup(3, least=1)
    by_passes = drawn(model, UNEVEN[:rows], temperature, lookup)
    shapes = {tuple(recording.tokens.shape) for recording in recordings_of_run}
    assert (rows, 4) in shapes
    assert shapes <= {(rows,), (rows, 4)}
    assert LENGTH >= WORTH
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pararnn.lm.replay._records", lambda device: False)
        assert same(by_passes, drawn(model, UNEVEN[:rows], temperature, None))


def test_how_a_pass_runs_is_chosen_before_it_is_recorded(
    recordings_of_run: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By fused kernels where there are some for its size; 8-bit weights are looked at for it."""
    model, sizes, passes = model_of("gru", torch.float32), [], []

    def fused(*args):
        passes.append(args[1].shape)
        return drafts.called_pass(*args)

    plain_text = drawn(model, UNEVEN, 0.3, None)
    monkeypatch.setattr(drafts, "takes", lambda _, *size: sizes.append(size) or True)
    monkeypatch.setattr(drafts, "fused_pass", fused)
    assert same(drawn(model, UNEVEN, 0.3, Lookup(3, least=1)), plain_text)
    assert sizes == [(3, 4)]
    assert len(passes) > 2


class Oracle(Drafter):
    """A drafter that knows the texts; `right` tokens of a row's draft are right, `size` long.

    right: a number for each row, or a function of the row and of the number of its tokens so far.
    guesses: of all calls so far, the numbers of the rows' tokens.
    """

    def __init__(
        self, texts: Tensor, right: list[int] | Callable[[int, int], int], size: int
    ) -> None:
        self.texts, self.drafts, self.size = texts.tolist(), size, size
        self.right = right if callable(right) else lambda row, start: right[row]
        self.guesses: list[list[int]] = []

    def begin(self, model, prompts, length):
        done = [0] * len(prompts)

        def guess(written):
            assert written.hidden is not None or not self.is_costly
            drafts = []
            for row, new in enumerate(written.tokens):
                start = done[row] = done[row] + len(new)
                assert self.texts[row][start - len(new) : start] == list(new)
                true = self.texts[row][start : start + self.size]
                cut = self.right(row, start)
                drafts.append([*true[:cut], *(token ^ 1 for token in true[cut:])])
            self.guesses.append([*done])
            return drafts

        return guess


@pytest.mark.parametrize(
    ("temperature", "kept"), [(0, 1), (1.0, 3 * VOCABULARY), (1.0, draws.KEPT_NUMBERS)]
)
def test_rows_go_on_at_their_own_pace(
    temperature: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows far apart draw again what the generator gave to a step before."""
    monkeypatch.setattr(draws, "KEPT_NUMBERS", kept)
    model = model_of("gru", torch.float32)
    texts = drawn(model, UNEVEN, temperature, None)
    drafter = Oracle(texts[0], [5, 0, 2], 5)
    assert same(drawn(model, UNEVEN, temperature, drafter), texts)
    assert drafter.counts.tokens == 3 * (LENGTH - 1)
    assert drafter.counts.passes == -(-(LENGTH - 1) // 6) + LENGTH - 1 + -(-(LENGTH - 1) // 3)
    assert drafter.counts.accepted == drafter.counts.tokens - drafter.counts.passes


LONG = 160
"""Tokens of texts whose drafts are wrong for long."""


@functools.cache
def long_texts() -> tuple[LanguageModel, Tensor]:
    """Return a small model, in float64 so that rounding decides nothing, and what it writes after
    `UNEVEN`."""
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(16, 1, VOCABULARY, num_heads=2), dtype=torch.float64).eval()
    return model, sample(model, UNEVEN, LONG, 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the calls of models that are to come: whether each is a pass, or else a step."""
    result = []
    originals = drafts.called_pass, drafts.next_logits
    for original, is_pass in zip(originals, (True, False), strict=True):

        def spy(*args, call=original, is_pass=is_pass):
            result.append(is_pass)
            return call(*args)

        monkeypatch.setattr(drafts, original.__name__, spy)
    return result


def with_oracle(
    right: Callable[[int, int], int], rows: int = 1, is_costly: bool = False, price: float = 1.0
) -> Oracle:
    """Return the oracle that has drafted the long texts, which are the same with it."""
    model, texts = long_texts()
    oracle = Oracle(texts[:rows], right, 7)
    oracle.is_costly, oracle.price = is_costly, price
    drawn = sample(model, UNEVEN[:rows], LONG, 0, draft=oracle)
    assert torch.equal(drawn, texts[:rows])
    return oracle


@pytest.mark.parametrize(
    ("rows", "price", "passes"), [(1, 1.0, 8), (3, 1.0, 8), (3, 2.0, 4), (1, 3.0, 2), (1, 9.0, 0)]
)
def test_wrong_drafts_cost_a_bounded_number_of_passes(
    rows: int, price: float, passes: int, calls: list[bool]
) -> None:
    """However long the texts are, the time of `CREDIT` steps at most."""
    oracle = with_oracle(lambda row, start: 0, rows, price=price)
    assert calls == [True] * passes + [False] * (LONG - 1 - passes)
    assert passes * price <= CREDIT
    assert oracle.counts.drafted == passes * 7 * rows
    assert len(oracle.guesses) == LONG - 2  # all of them are looked at, which costs next to nothing


@pytest.mark.parametrize("is_costly", [False, True])
@pytest.mark.parametrize(("rows", "price"), [(1, 1.0), (1, 2.5), (3, 0.7), (3, 100.0)])
@pytest.mark.one_in(3)
def test_steps_begin_before_tokens_are_read(
    rows: int, price: float, is_costly: bool, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as come before a pass can be paid; so passes are those of reading every token."""
    reads, upload = [], drafts.upload
    monkeypatch.setattr(drafts, "upload", lambda *args: reads.append(args) or upload(*args))

    def run() -> tuple[list[bool], object, int]:
        calls.clear()
        reads.clear()
        right = lambda row, start: 7 * (start % (29 + 13 * row) > 20)  # noqa: E731
        counts = with_oracle(right, rows, is_costly, price).counts
        return [*calls], counts, len(reads)

    *ahead, few = run()
    monkeypatch.setattr(drafts, "AHEAD", 1)
    *alone, many = run()
    assert ahead == alone
    assert few < 0.9 * many
    if price == 100.0:
        assert few == 1  # no text can ever pay: all steps begin from tokens that are not read yet


def test_texts_without_guesses_are_read_seldom(
    calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And draft again soon after guesses come."""
    reads, upload = [], drafts.upload
    monkeypatch.setattr(drafts, "upload", lambda *args: reads.append(args) or upload(*args))
    model, texts = long_texts()
    oracle = Oracle(texts[:1], lambda row, start: 7, 7)
    begin = oracle.begin

    def late(*args):
        guess = begin(*args)
        return lambda written: [g if oracle.guesses[-1][0] > 80 else [] for g in guess(written)]

    oracle.begin, oracle.price = late, 1.0
    assert torch.equal(sample(model, UNEVEN[:1], LONG, 0, draft=oracle), texts[:1])
    first = calls.index(True)
    assert 80 <= first <= 80 + drafts.AHEAD
    assert calls[first:] == [True] * math.ceil((LONG - 1 - first) / 8)
    assert len(reads) < 20 + 2 * sum(calls)


def test_passes_without_a_price_are_over_all_drafts(calls: list[bool]) -> None:
    with_oracle(lambda row, start: 0, 3, price=0.0)
    assert calls == [True] * (LONG - 2) + [False]  # the last token needs no draft
    for price in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="at least 0 and finite, got"):
            with_oracle(lambda row, start: 0, price=price)


@pytest.mark.parametrize("rows", [1, 3])
def test_texts_that_repeat_themselves_late_are_drafted_again(rows: int, calls: list[bool]) -> None:
    """Guesses that come true without a pass pay for the first one."""
    late = 80
    with_oracle(lambda row, start: 7 * (start >= late), rows)
    steps = late - 1 + round(1 / HINT)
    assert calls[8:steps] == [False] * (steps - 8)
    assert calls[steps:] == [True] * math.ceil((LONG - 1 - steps) / 8)


def test_drafts_that_become_wrong_late_cost_as_few_passes(calls: list[bool]) -> None:
    """What a text has earned before is no credit for as many wrong passes."""
    late = 80
    with_oracle(lambda row, start: 7 * (start < late))
    assert calls[:10] == [True] * 10
    assert sum(calls[10:]) <= 2 * CREDIT
    assert sum(calls) + len(calls) < LONG


def test_a_right_row_next_to_a_wrong_one(calls: list[bool]) -> None:
    """Its drafts save no time, as the batch ends with the other row, and so cost little of it."""
    with_oracle(lambda row, start: 7 * (row == 0), 2)
    assert sum(calls) + len(calls) <= LONG - 1 + 2 * CREDIT
    # All rows draft, then the right one alone, until the batch cannot pay.
    assert calls == [True] * 16 + [False] * (LONG - 1 - 16)


def test_rows_that_are_right_in_turns_gain(calls: list[bool]) -> None:
    """A row that is ahead lets the others come after it by their drafts."""
    with_oracle(lambda row, start: 7 * (start // 8 % 3 != row), 3)
    assert sum(calls) + len(calls) < 0.9 * LONG
    calls.clear()
    with_oracle(lambda row, start: 7 * (start // 8 % 3 == row), 3)  # too seldom for a pass's price
    assert sum(calls) + len(calls) < LONG + 3 * CREDIT


def test_a_slow_row_that_becomes_right_brings_passes_back(calls: list[bool]) -> None:
    with_oracle(lambda row, start: 7 * (row == 0 or start >= 80), 2)
    assert not any(calls[16:79])
    assert sum(calls[79:]) >= (LONG - 80 - 16) // 8


def test_costly_guesses_are_made_where_a_pass_can_be_paid(calls: list[bool]) -> None:
    """After a while they are tried again: one pass makes the hidden states, and one verifies."""
    oracle = with_oracle(lambda row, start: 0, is_costly=True)
    tries = int((LONG - 8) * INCOME / 2)
    assert sum(calls) == 8 + 2 * tries
    assert len(oracle.guesses) == 8 + tries
    calls.clear()
    with_oracle(lambda row, start: 7 * (start >= 80), is_costly=True)
    first = 8 + round(2 / INCOME)
    assert calls[8:] == [False] * (first - 8) + [True] * (1 + math.ceil((LONG - 2 - first) / 8))


def test_a_pass_is_for_texts_that_can_pay_equal_shares() -> None:
    cases = [
        ({0: 8.0}, 1, {0}),
        ({0: 8.0}, 16, set()),  # it would have to earn twice what it has
        ({0: 8.0, 5: 8.0}, 16, {0, 5}),
        ({0: 8.0, 5: 7.9}, 16, set()),  # without one the other cannot pay either
        ({0: 4.0, 1: 1.0, 2: 4.0}, 4, {0, 2}),
        ({}, 4, set()),
    ]
    for credits, price, rows in cases:
        assert paying(credits, price) == rows, credits


def test_drafts_are_drawn_as_the_text_will_be() -> None:
    """`Written.draw` with the logits of the text gives its tokens."""
    model, seen = model_of("gru", torch.float32), []
    texts = drawn(model, UNEVEN, 1.0, None)[0]
    with torch.no_grad():
        logits = model(torch.cat([UNEVEN, texts], 1))[:, UNEVEN.shape[1] :]

    class Ahead(Oracle):
        def begin(self, model, prompts, length):
            inner, done = super().begin(model, prompts, length), [0] * len(prompts)

            def guess(written):
                for row, new in enumerate(written.tokens):
                    done[row] += len(new)
                for ahead in (2, 0):
                    places = [min(LENGTH - 1, length + ahead) for length in done]
                    rows = torch.stack([logits[row, at - 1] for row, at in enumerate(places)])
                    guesses = written.draw(rows, ahead)
                    seen.extend(
                        guesses[row] == texts[row, at]
                        for row, at in enumerate(places)
                        if done[row] + ahead < LENGTH
                    )
                return inner(written)

            return guess

    assert torch.equal(drawn(model, UNEVEN, 1.0, Ahead(texts, [3, 0, 1], 4))[0], texts)
    assert len(seen) > 60
    assert all(seen)


def test_passes_without_progress_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_right_beginning", lambda tokens, draft: 0)
    with pytest.raises(AssertionError, match="must write a token to every row"):
        sample(plain("gru"), REPEATING, LENGTH, 0, draft=Lookup())


def test_drafts_of_other_sizes_are_refused() -> None:
    model = plain("gru")
    drafter = Oracle(sample(model, REPEATING, LENGTH, 0), [0], 4)
    drafter.drafts = 3
    with pytest.raises(ValueError, match=r"at most 3 tokens .* each of 1 rows, got 1 of up to 4"):
        sample(model, REPEATING, LENGTH, 0, draft=drafter)


def test_texts_that_repeat_take_fewer_passes() -> None:
    """A token follows from the last one alone, so that the text comes back to what it was."""
    model, lookup = copy.deepcopy(model_of("gru", torch.float32)), Lookup(7)
    for block in model.backbone.blocks:
        block.mixer.out_proj.weight.data.zero_()
    texts = sample(model, REPEATING, 100, 0, draft=lookup)
    assert torch.equal(texts, sample(model, REPEATING, 100, 0))
    counts = lookup.counts
    assert counts.tokens == 99
    assert counts.passes + counts.accepted == counts.tokens
    assert counts.accepted <= counts.drafted
    assert lookup.tokens_per_pass > 2
    sample(model, REPEATING, 1, 0, draft=lookup)
    sample(model, REPEATING, 0, 0, draft=lookup)
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
    assert torch.equal(sample(model, REPEATING, **options, state=state, draft=Lookup()), whole)
    after = [tensor for layer in state.layers for tensor in layer.read()]
    assert same(before, after)
    for _ in range(2):
        twice = torch.cat([REPEATING, REPEATING], 1)
        got = sample(model, twice, **options, prefixes=prefixes, draft=Lookup())
        assert torch.equal(got, whole)
    assert prefixes.counts.hits == 1


def test_the_default_generator_is_left_as_without_drafts() -> None:
    model, ends = model_of("gru", torch.float32), []
    for lookup in (None, Lookup(5, least=1)):
        torch.manual_seed(4)
        ends.append((sample(model, REPEATING, LENGTH, draft=lookup), torch.rand(3)))
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
            sample(model, REPEATING, LENGTH, temperature, draft=Lookup())


def test_what_cannot_go_back_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 1 of the model .* remembers the keys"):
        sample(plain("hybrid"), tokens(1, 5), 5, draft=Lookup())
    model = plain("gru")
    model.backbone.layers[1].compile()
    with pytest.raises(ValueError, match="block 1 of the model is compiled"):
        sample(model, tokens(1, 5), 5, draft=Lookup())
    model = LanguageModel(LMConfig(16, 1, 48, mixers=("user_mixers:Decay",), num_heads=2))
    with pytest.raises(ValueError, match=r"layer 0 of the model \(Decay\).*leave draft out"):
        sample(model, tokens(1, 5), 5, draft=Lookup())
