"""Drafts in the running batch change no text, and no state that is kept of one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies
from invariance import model_of
from lm_kinds import VOCABULARY, plain
from recordings import recordings_of_run as recordings_of_run

from pararnn.lab.serving.batch import Batch, ServingError
from pararnn.lab.serving.engine import Continuation, Delta, Engine, Prompt
from pararnn.lm import LanguageModel, Prefixes, lookup
from pararnn.lm.drafts import CREDIT, HINT
from pararnn.lm.lookup import Lookup, Text

ROWS, GRAIN, DRAFTS = 4, 4, 5
KINDS = ("gru", "gated-delta", "hybrid", "lstm", "head-lstm", "m2rnn")


class Asked:
    """A text that an engine writes."""

    def __init__(self, engine: Engine, prompt: Prompt, options: dict[str, Any]) -> None:
        self.deltas: list[Delta] = []
        self.text = Continuation(prompt, _words, self.deltas.append, **options)
        engine.submit([self.text])

    @property
    def result(self) -> tuple[str, list[Any], str | None]:
        """The text, its scores and its end."""
        scores = [score for delta in self.deltas for score in delta.scores]
        finish = self.deltas[-1].finish if self.deltas else None
        return "".join(delta.text for delta in self.deltas), scores, finish


def _words(tokens: list[int]) -> str:
    return "".join(chr(0x100 + token) for token in tokens)


def _engine(model: LanguageModel, drafts: int, pages: int = 200) -> Engine:
    unit = Prefixes(model, 1 << 24, GRAIN).pool.unit_bytes
    prefixes = Prefixes(model, (pages + 1) * unit, GRAIN)
    return Engine(Batch(model, ROWS, prefixes.pool, drafts), chunk=8, prefixes=prefixes)


def _finish(engine: Engine) -> None:
    while engine.step():
        pass
    assert (engine.active, engine.batch.marked) == (0, None)
    if engine.batch.pool is not None:
        assert engine.batch.pool.in_use == 0


def _states(engine: Engine) -> dict[bytes, list[int]]:
    """Return the bytes of kept states by name, without the head's inputs, which end them: of
    written texts these are not known."""
    prefixes = engine.prefixes
    size = prefixes.state_bytes - 4 * engine.batch.model.config.hidden_size
    return {
        name: prefixes.pool.memory[state.units].view(-1)[:size].tolist()
        for name, state in prefixes.kept.items()
    }


def _requests(draw: random.Random, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Draw prompts that repeat themselves, and options."""

    def one(number: int) -> tuple[list[int], dict[str, Any]]:
        period = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 6))]
        options: dict[str, Any] = {"max_tokens": draw.randrange(1, 30), "seed": number}
        options |= {"temperature": draw.choice([0.0, 0.0, 0.05, 1.0])}
        options |= {"top_p": draw.choice([1.0, 0.9]), "top_k": draw.choice([0, 8])}
        options |= {"top": draw.choice([None, 0, 2])}
        letters = [chr(0x100 + draw.randrange(VOCABULARY)) for _ in range(3)]
        options |= {"stop": draw.choice([[], [], letters])}
        options |= {"ends": draw.choice([[], [], [draw.randrange(VOCABULARY)]])}
        return (period * 12)[: draw.randrange(1, 40)], options

    return [one(number) for number in range(count)]


def _spoiled(draw: random.Random, tokens: list[int]) -> list[int]:
    """Return tokens of which about one of ten is another one."""
    return [token if draw.random() < 0.9 else draw.randrange(VOCABULARY) for token in tokens]


def _check_schedule(model: LanguageModel, draw: random.Random, pages: int, count: int) -> Engine:
    """Check texts that arrive and leave at random next to those of an engine without drafts."""
    requests, without = _requests(draw, count), _engine(model, 0)
    alone = [Asked(without, Prompt(prompt), options) for prompt, options in requests]
    _finish(without)
    engine, asked = _engine(model, DRAFTS, pages), []
    for (prompt, options), right in zip(requests, alone, strict=True):
        if engine.longest is not None and len(prompt) + options["max_tokens"] > engine.longest:
            continue
        # Most of what comes is predicted, so that drafts of all lengths come true.
        prediction = _spoiled(draw, right.text.written) if draw.random() < 0.7 else []
        one = Asked(engine, Prompt(prompt, prediction=prediction), options)
        asked.append((one, right))
        for _ in range(draw.randrange(6)):
            engine.step()
        if draw.random() < 0.2:
            engine.cancel([draw.choice(asked)[0].text])
    _finish(engine)
    for one, right in asked:
        if one.text.is_cancelled:
            assert right.result[0].startswith(one.result[0])
        else:
            assert one.result == right.result
    return engine


@pytest.mark.parametrize("kind", ["gru", "gated-delta"])
@pytest.mark.one_in(2)
def test_texts_are_those_without_drafts(kind: str) -> None:
    engine = _check_schedule(model_of(kind, torch.float32), random.Random(0), 40, 8)
    assert engine.batch.verifies_exactly
    assert engine.counts.accepted > 9


def test_texts_that_give_their_pages_back_are_those_without_drafts() -> None:
    engine = _check_schedule(model_of("hybrid", torch.float32), random.Random(4), 14, 9)
    assert engine.preempted > 1
    assert engine.counts.accepted > 9


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=25, deadline=None)
@given(draw=strategies.randoms(use_true_random=False), pages=strategies.integers(20, 200))
def test_any_schedules(kind: str, dtype: torch.dtype, draw: random.Random, pages: int) -> None:
    _check_schedule(model_of(kind, dtype), draw, pages, 12)


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
def test_states_are_kept_of_what_texts_have_and_of_all_of_it(kind: str) -> None:
    """The same names and the same bytes as without drafts, also where a text ends in a draft."""
    model, states, texts = model_of(kind, torch.float32), [], []
    for drafts in (0, DRAFTS):
        engine = _engine(model, drafts)
        for number, (prompt, options) in enumerate(_requests(random.Random(1), 6)):
            # Of the second engine the prediction is right to the end, and goes on after it.
            prediction = [*texts[number], *range(9)] if drafts else []
            asked = Asked(engine, Prompt(prompt, prediction=prediction), options)
            _finish(engine)
            if drafts == 0:
                texts.append(asked.text.written)
        states.append(_states(engine))
    assert engine.counts.accepted > 20
    assert states[0] == states[1]


def test_a_prediction_is_drafted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gru", torch.float32)
    prompt, options = [3, 1, 4, 1, 5], {"max_tokens": 24, "temperature": 0.0}
    without = _engine(model, 0)
    right = Asked(without, Prompt(prompt), options)
    _finish(without)
    engine = _engine(model, DRAFTS)
    asked = Asked(engine, Prompt(prompt, prediction=right.text.written), options)
    _finish(engine)
    assert asked.result == right.result
    # The prompt's pass writes the first token; 23 others take four passes of six.
    assert engine.counts.passes == 4
    assert asked.text.drafts.drafted == asked.text.drafts.accepted == 19


def test_wrong_drafts_cost_a_bounded_number_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each text as many as its credit pays for, however long it is."""
    model = model_of("gru", torch.float32)
    with torch.no_grad():  # the mean of the others' logits is not the largest one
        model.lm_head.weight[0] = model.lm_head.weight[1:].mean(0)
    monkeypatch.setattr(Text, "draft", lambda self: [0] * DRAFTS)
    for count in (1, 2, ROWS):
        engine = _engine(model, DRAFTS)
        verify, active = engine.batch.verify, []

        def spy(tokens, drafts, engine=engine, verify=verify, active=active):
            active.append(engine.active)
            return verify(tokens, drafts)

        monkeypatch.setattr(engine.batch, "verify", spy)
        options = {"max_tokens": 60, "temperature": 0}
        asked = [Asked(engine, Prompt([7 + i]), options) for i in range(count)]
        _finish(engine)
        assert CREDIT <= sum(active) <= count * CREDIT + engine.counts.accepted
        assert engine.counts.passes == len(active) < 30
        assert all(one.text.drafts.credit < 1 for one in asked)


def test_texts_that_repeat_themselves_late_are_drafted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guesses that come true without a pass pay for the first one."""
    model, late, steps = model_of("gru", torch.float32), 30, round(1 / HINT)
    prompt, options = [3, 1, 4, 1, 5], {"max_tokens": 60, "temperature": 0.0}
    without = _engine(model, 0)
    right = Asked(without, Prompt(prompt), options)
    _finish(without)

    def draft(text: Text) -> list[int]:
        written = len(text.tokens) - len(prompt)
        tokens = right.text.written[written : written + DRAFTS]
        return tokens if written >= late else [token ^ 1 for token in tokens]

    monkeypatch.setattr(Text, "draft", draft)
    engine = _engine(model, DRAFTS)
    asked = Asked(engine, Prompt(prompt), options)
    _finish(engine)
    assert asked.result == right.result
    passes = -(-(60 - late - steps) // (1 + DRAFTS))
    assert engine.counts.passes == CREDIT + passes
    assert engine.counts.accepted == 60 - late - steps - passes


def test_recorded_passes_write_the_same_texts(recordings_of_run: list[Any]) -> None:
    """Recordings of a step, of a pass, and of what rows keep of it, which share the rows' memory;
    and of a step without drafts."""
    model = model_of("hybrid", torch.float32)
    _check_schedule(model, random.Random(0), 40, 8)
    shapes = [tuple(recording.tokens.shape) for recording in recordings_of_run]
    of_rows = sorted(shape for shape in shapes if shape[0] == ROWS)
    assert of_rows == [(ROWS,), (ROWS,), (ROWS,), (ROWS, 1 + DRAFTS)]


@pytest.mark.parametrize("seed", [None, 3])
def test_texts_with_a_seed_are_steps_where_passes_have_other_bits(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Text, "draft", lambda self: [1] * DRAFTS)
    engine = _engine(model_of("gru", torch.float32), DRAFTS)
    engine.batch.verifies_exactly = False
    assert not engine.is_exact()
    Asked(engine, Prompt([5, 6]), {"max_tokens": 9, "seed": seed})
    _finish(engine)
    assert (engine.counts.passes > 0) == (seed is None)


def test_passes_of_other_bits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gru", torch.float32)
    call = LanguageModel.hidden

    def uneven(self, tokens, cache=None, **rows):
        return call(self, tokens, cache, **rows) + 1e-6 * (tokens.shape == (ROWS, 1 + DRAFTS))

    assert Batch(model, ROWS, drafts=DRAFTS).verifies_exactly
    monkeypatch.setattr(LanguageModel, "hidden", uneven)
    assert not Batch(model, ROWS, drafts=DRAFTS).verifies_exactly


def test_what_cannot_go_back_is_refused() -> None:
    model = plain("gru")
    model.backbone.layers[1].compile()
    with pytest.raises(ServingError, match="--drafts 3: block 1 of the model is compiled"):
        Batch(model, 2, drafts=3)


def test_a_failure_in_a_pass_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that have ended in it have one end; the next ones are written by steps as ever."""
    model = model_of("gru", torch.float32)
    engine, other = _engine(model, DRAFTS), _engine(model, 0)
    short = Asked(engine, Prompt([5, 6]), {"max_tokens": 2, "temperature": 0.0})
    long = Asked(engine, Prompt([7, 8]), {"max_tokens": 20, "temperature": 0.0})

    def fail(*arguments):
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draft", lambda self: [1] * DRAFTS)
        patch.setattr(engine, "_keep_answers", fail)
        engine._try()
    assert engine.batch.marked is not None
    assert [one.result[2] for one in (short, long)] == ["length", "error"]
    assert sum(delta.finish is not None for delta in short.deltas) == 1
    monkeypatch.setattr(Text, "draft", lambda self: [])
    options = {"max_tokens": 20, "temperature": 0.0}
    texts = [Asked(one, Prompt([9] * 9), options) for one in (engine, other)]
    for one in (engine, other):
        _finish(one)
    assert texts[0].result == texts[1].result
    states = _states(other)
    assert {name: state for name, state in _states(engine).items() if name in states} == states


def test_a_first_token_does_not_wait_for_an_index() -> None:
    engine, texts = _engine(model_of("gru", torch.float32), DRAFTS), []
    prompt, deltas = Prompt([5, 6] * 20), []

    def deliver(delta: Delta) -> None:
        deltas.append(delta)
        texts.append(prompt.text)

    engine.submit([Continuation(prompt, _words, deliver, max_tokens=9, temperature=0.0)])
    _finish(engine)
    assert texts[0] is None
    assert texts[1] is not None
    assert deltas[-1].finish == "length"


def test_a_long_prediction_is_looked_up_from_the_first_token_on(monkeypatch) -> None:
    monkeypatch.setattr(lookup, "PACE", 4)
    prompt = Prompt([1, 2, 3] * 9, prediction=[*range(10, 40)])
    drafts = prompt.drafts(Lookup(3))
    assert drafts.guess(3) == [10, 11, 12]
    drafts.extend(10)
    assert drafts.guess(3) == [11, 12, 13]
    assert prompt.text.missing == 27 - 2 * 4


def test_a_text_goes_on_from_another_one() -> None:
    first = Lookup(3, least=1).text([1, 2, 3])
    second, third = first.fork(), first.fork()
    second.extend([9, 1])
    third.extend([1, 2])
    assert second.draft() == [2, 3, 9]
    assert third.draft() == [3, 1, 2]
    assert first.tokens == [1, 2, 3]
