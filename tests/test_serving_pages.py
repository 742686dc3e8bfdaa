"""Models with attention in the running batch: keys in pages, shared, given back, never too many."""

import random

import pytest
import torch
from hypothesis import given, settings, strategies
from invariance import model_of
from lm_kinds import add_noise, plain
from recordings import recordings_of_run as recordings_of_run

from pararnn.lab.serving.batch import Batch, ServingError
from pararnn.lab.serving.engine import Continuation, Delta, Engine, Prompt, TextTooLong
from pararnn.lm import LanguageModel, LMConfig, Prefixes, sample
from pararnn.lm.reading import Reader

ROWS = 4
DELTA = ("matrix", "matrix", "matrix", "attention")
KINDS = {
    "gru": {"mixers": ("rnn", "attention")},
    "gated delta": {"mixers": DELTA, "cell": "gated-delta", "cell_config": {"K": 4}},
    "attention": {"mixers": ("attention", "attention")},
}


def _model(kind: str = "gru", invariant: bool = False) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 2, "num_attention_heads": 2, "vocab_size": 64}
    sizes |= {"num_hidden_layers": len(KINDS[kind]["mixers"]), "intermediate_size": 40}
    config = LMConfig(**sizes, **KINDS[kind], batch_invariant=invariant)
    return add_noise(LanguageModel(config))


def _engine(model: LanguageModel, pages: int, chunk: int = 16, grain: int = 16, **more) -> Engine:
    """An engine whose memory has so many pages for texts, and one for rows without."""
    prefixes = Prefixes(model, (pages + 1) * Prefixes(model, 1 << 24, grain).pool.unit_bytes, grain)
    return Engine(Batch(model, ROWS, prefixes.pool), chunk, prefixes=prefixes, **more)


class Asked:
    """A text that an engine writes."""

    def __init__(self, engine: Engine, prompt: list[int] | Prompt, **options) -> None:
        self.deltas: list[Delta] = []
        self.engine, self.options = engine, options
        self.prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        words = lambda tokens: "".join(chr(0x100 + token) for token in tokens)  # noqa: E731
        self.text = Continuation(self.prompt, words, self.deltas.append, **options)
        engine.submit([self.text])

    @property
    def tokens(self) -> list[int]:
        return [ord(letter) - 0x100 for delta in self.deltas for letter in delta.text]

    @property
    def log_probs(self) -> list[float]:
        return [score.logprob for delta in self.deltas for score in delta.scores]


def _finish(engine: Engine) -> None:
    while engine.step():
        pool = engine.batch.pool
        assert 0 <= pool.in_use <= pool.capacity
    _check_is_idle(engine)


def _check_is_idle(engine: Engine) -> None:
    """No text holds a page; with no kept state either, all units are free."""
    pool = engine.batch.pool
    assert (engine.active, len(engine.waiting), len(engine.reading), pool.in_use) == (0, 0, 0, 0)
    while engine.prefixes.evict():
        pass
    assert sorted(pool.free) == list(range(1, pool.count))


def _prompt(number: int, length: int) -> list[int]:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(number)).tolist()


def _sampled(model: LanguageModel, prompt: list[int], length: int) -> tuple[list[int], list[float]]:
    tokens, log_probs = sample(model, torch.tensor([prompt]), length, 0, return_log_probs=True)
    return tokens[0].tolist(), log_probs[0].tolist()


@torch.no_grad()
def _check(text: Asked, model: LanguageModel, exact: bool = False) -> None:
    """Check that a text's tokens are the likeliest by one pass over all of it, as in `sample`."""
    prompt, tokens = text.prompt.tokens, text.tokens
    row, start = torch.tensor([[*prompt, *tokens]]), len(prompt)
    assert model(row)[0, start - 1 : -1].argmax(-1).tolist() == tokens
    assert len(tokens) == text.text.max_tokens or text.text.is_cancelled
    if exact:
        assert text.log_probs == model.log_probs(row)[0, start:].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(3)
def test_texts_are_those_of_sample(kind):
    """With little memory: some wait, some give their pages back and are written again."""
    model = _model(kind)
    engine = _engine(model, 8)
    requests = [(_prompt(i, 5 + 9 * i), 20 + 5 * i % 20) for i in range(6)]
    asked = [Asked(engine, p, max_tokens=n, temperature=0.0) for p, n in requests]
    _finish(engine)
    for text, (prompt, length) in zip(asked, requests, strict=True):
        assert text.tokens == _sampled(model, prompt, length)[0]
    assert engine.preempted > 0


@pytest.mark.parametrize("kind", ["gru", "gated delta"])
@pytest.mark.one_in(2)
def test_log_probabilities_are_those_of_sample_to_the_bit(kind):
    model = _model(kind, invariant=True)
    engine = _engine(model, 60)
    assert engine.is_exact()
    shared = _prompt(0, 50)
    requests = [([*shared[: 50 - i], i], 10 + 9 * i % 20) for i in range(4)]
    asked = []
    for prompt, length in requests:
        asked.append(Asked(engine, prompt, max_tokens=length, temperature=0.0, top=0))
        engine.step()
    _finish(engine)
    assert [text.prompt.cached for text in asked][1:4] == [48, 48, 32]
    for text, (prompt, length) in zip(asked, requests, strict=True):
        tokens, log_probs = _sampled(model, prompt, length)
        assert text.tokens == tokens
        assert text.log_probs == log_probs


def _any_schedule(
    model: LanguageModel, numbers: random.Random, pages: int, exact: bool, turns: int = 14
) -> Engine:
    """Arrivals, shared beginnings, turns that go on or branch off, samples, and cancels."""
    engine = _engine(
        model, pages, chunk=numbers.choice([8, 16, 100]), grain=numbers.choice([4, 16])
    )
    engine.keeps_answers = numbers.random() < 0.7
    dialogues, asked = [_prompt(0, 40)], []
    for _ in range(turns):
        before = numbers.choice(dialogues)
        start = before[: numbers.randrange(1, 1 + len(before))]
        prompt, length = [*start, *_prompt(numbers.randrange(9), 5)], numbers.randrange(1, 40)
        if len(prompt) + length > engine.longest:
            with pytest.raises(TextTooLong, match=f"holds a text of {engine.longest} tokens, got"):
                Asked(engine, prompt, max_tokens=length)
            continue
        shared = Prompt(prompt)
        for _ in range(numbers.choice([1, 1, 3])):
            asked.append(Asked(engine, shared, max_tokens=length, temperature=0.0, top=0))
        for _ in range(numbers.randrange(8)):
            engine.step()
        if numbers.random() < 0.3:
            engine.cancel([numbers.choice(asked).text])
        dialogues += [[*text.prompt.tokens, *text.tokens] for text in asked[-3:]]
    _finish(engine)
    for text in asked:
        if text.tokens:
            _check(text, model, exact)
    return engine


def test_a_schedule_in_little_memory():
    engine = _any_schedule(_model("gru", invariant=True), random.Random(1), 12, exact=True, turns=9)
    assert engine.preempted > 0
    assert engine.prefixes.counts.tokens_saved > 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(strategies.randoms(use_true_random=False), strategies.integers(6, 60), strategies.booleans())
def test_any_schedules(kind, numbers, pages, invariant):
    _any_schedule(_model(kind, invariant), numbers, pages, invariant)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.one_in(2)
def test_texts_that_were_preempted_have_the_same_bits(invariant):
    """Also those that are drawn by chance, and without `batch_invariant`."""
    model = _model("gru", invariant)

    def write(pages: int, count: int) -> tuple[list[tuple[list[int], list[float]]], int]:
        results, preempted = [], 0
        for first in range(0, 4, count):
            engine = _engine(model, pages, keeps_prompts=False)
            asked = [
                Asked(engine, Prompt(_prompt(i, 9 + 4 * i), top=0), max_tokens=30, seed=i, top=0)
                for i in range(first, first + count)
            ]
            _finish(engine)
            for text in asked:
                of_prompt = [score.logprob for score in text.prompt.scores]
                assert len(of_prompt) == len(text.prompt.tokens) - 1  # also of those read twice
                results.append((text.tokens, [*of_prompt, *text.log_probs]))
            preempted += engine.preempted
        return results, preempted

    alone, none = write(100, 1)
    together, some = write(8, 4)
    assert (none, some > 0) == (0, True)
    assert together == alone
    assert len({tuple(tokens) for tokens, _ in alone}) == 4


def test_the_youngest_text_gives_its_pages_back():
    engine = _engine(_model(), 7, keeps_prompts=False, grain=8)
    asked = [Asked(engine, _prompt(i, 7), max_tokens=30, seed=i) for i in range(3)]
    places = []
    while engine.step():
        places.append([None if text is None else text.number for text in engine.rows])
    assert engine.preempted >= 2
    ends = [max(step for step, rows in enumerate(places) if i in rows) for i in range(3)]
    assert ends == sorted(ends)  # the oldest ends first
    assert [len(text.tokens) for text in asked] == [30] * 3
    lost = next(
        step for step, rows in enumerate(places) if 1 in rows and 2 not in rows and step > 2
    )
    assert 0 in places[lost]
    _check_is_idle(engine)


def test_what_a_text_has_read_itself_is_not_cached():
    engine = _engine(_model(), 9, grain=8, keeps_answers=False)
    asked = [Asked(engine, _prompt(i, 9), max_tokens=30, seed=i) for i in range(3)]
    _finish(engine)
    assert (engine.preempted, engine.prefixes.hits > 0) == (3, True)  # when it is read again
    assert [text.prompt.cached for text in asked] == [0, 0, 0]


def test_texts_wait_for_room_and_impossible_ones_are_refused():
    engine = _engine(_model(), 5, keeps_prompts=False)
    assert engine.longest == 64
    with pytest.raises(TextTooLong, match="a text of 64 tokens, got a prompt of 40 and max_tokens"):
        Asked(engine, _prompt(0, 40), max_tokens=25)
    first = Asked(engine, _prompt(0, 40), max_tokens=24, seed=0)
    second = Asked(engine, _prompt(1, 33), max_tokens=2, seed=0)
    for _ in range(3):
        engine.step()
    assert (engine.active, len(engine.waiting)) == (1, 1)  # three rows are free, two pages are
    _finish(engine)
    assert [len(text.tokens) for text in (first, second)] == [24, 2]
    assert engine.preempted == 0


def test_a_prompt_that_others_wait_for_is_read_again_where_it_is_in_the_way():
    engine = _engine(_model(), 5, keeps_prompts=False)
    shared = Prompt(_prompt(0, 40))
    asked = [
        Asked(engine, prompt, max_tokens=2, temperature=0.0)
        for prompt in (shared, _prompt(1, 60), shared)
    ]
    _finish(engine)
    assert [len(text.tokens) for text in asked] == [2, 2, 2]
    assert asked[0].tokens == asked[2].tokens


def test_samples_and_beginnings_share_pages():
    engine = _engine(_model(), 100)
    prompt = Prompt(_prompt(0, 70))
    for seed in range(4):
        Asked(engine, prompt, max_tokens=30, seed=seed)
    for _ in range(5):  # chunks of the prompt
        engine.step()
    assert engine.active == 4
    assert engine.batch.pool.in_use == 4 + 4  # a copy of the last page for each
    other = Asked(engine, [*prompt.tokens[:50], 1], max_tokens=5)
    _finish(engine)
    assert other.prompt.cached == 48


def test_cancelled_texts_give_their_pages_back():
    engine = _engine(_model(), 40)
    running = Asked(engine, _prompt(0, 60), max_tokens=100)
    while not engine.active:
        engine.step()
    reading = Asked(engine, _prompt(1, 100), max_tokens=10)
    engine.step()
    assert engine.batch.pool.in_use == 4 + 1
    assert 0 < reading.prompt.position < 100
    engine.cancel([running.text, reading.text])
    engine.step()
    _check_is_idle(engine)


def test_a_failing_model_gives_all_pages_back(monkeypatch):
    engine = _engine(_model(), 40)
    for i in range(6):
        Asked(engine, _prompt(i, 20), max_tokens=50)
    for _ in range(8):
        engine.step()

    def fail(tokens):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.batch, "step", fail)
    engine._try()
    _check_is_idle(engine)


def test_memory_does_not_grow():
    """Conversations go on for long; the memory is full of states, which leave for pages."""
    model = _model()
    engine = _engine(model, 30)
    memory, table = engine.batch.pool.memory, engine.batch.places.table
    turn = _prompt(0, 20)
    for i in range(10):
        asked = Asked(engine, turn, max_tokens=18, temperature=0.0)
        while engine.step():
            pass
        _check(asked, model)
        turn = [*turn, *asked.tokens, *_prompt(i, 20)]
        turn = turn if len(turn) < 250 else turn[:40]
        pool = engine.batch.pool
        pool.memory[pool.free] = 255  # NaN where nothing is kept
        assert pool.in_use == 0
        assert (pool.memory is memory, engine.batch.places.table is table) == (True, True)
        assert len(pool.free) + engine.prefixes.nbytes // pool.unit_bytes == 30
    assert engine.prefixes.counts.evicted > 0
    assert engine.prefixes.counts.hits > 6


@pytest.mark.parametrize("kind", ["gru", "gated delta"])
@pytest.mark.one_in(2)
def test_recorded_steps_write_the_same_texts(kind, recordings_of_run):
    """One recording for texts that grow over pages, join and leave."""
    model = _model(kind)
    engine = _engine(model, 40)
    assert engine.batch.is_repeatable()
    assert len(recordings_of_run) == 1
    prompts = [_prompt(i, 10 + 7 * i) for i in range(6)]
    asked = [Asked(engine, prompt, max_tokens=20, temperature=0.0) for prompt in prompts]
    _finish(engine)
    shapes = [tuple(recording.tokens.shape) for recording in recordings_of_run]
    assert shapes.count((ROWS,)) == 1
    assert {(1, 16), (1, 4), (1, 1)} < {*shapes}  # pieces of prompts
    for text in asked:
        _check(text, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_of_a_row_have_the_same_bits_in_any_company(dtype):
    model = model_of("hybrid", dtype)
    pool = Prefixes(model, 1 << 20, 4).pool
    text = _prompt(0, 40)
    text = [token % 48 for token in text]
    reference = model(torch.tensor([text]))[0]
    batch, reader = Batch(model, ROWS, pool), Reader(model)
    company = []
    for row, length in ((0, 3), (2, 30)):
        company.append(batch.new_cache())
        reader.read([7] * length, company[-1])
        batch.join(row, company[-1])
    memory = batch.new_cache()
    assert torch.equal(batch.head(reader.read(text[:7], memory)[0][:, -1])[0], reference[6])
    batch.join(1, memory)
    for position in range(7, 40):
        if position == 20:
            batch.leave(2)
            for pages in (company[1].places, memory.places):
                pages.release()
            pool.memory[pool.free] = 255  # NaN, in all dtypes
        logits = batch.step([5, text[position], 6, 0])
        assert torch.equal(logits[1], reference[position])


def test_what_has_no_pages_is_refused():
    with pytest.raises(
        ServingError, match=r"layer 1 of the model .Attention. has keys, whose pages"
    ):
        Batch(plain("hybrid"), 2)
    with pytest.raises(ServingError, match=r"layer 1 of the model .Decay. has a memory that grows"):
        Batch(plain("gru", mixers=("rnn", "user_mixers:Decay")), 2)
