"""The running batch: texts that join and leave it are those that run alone, bit for bit."""

import gc
import threading
import weakref
from collections import deque

import pytest
import torch
from hypothesis import given, settings, strategies
from lm_kinds import add_noise, plain
from recordings import recordings_of_run as recordings_of_run
from torch import Tensor

from pararnn.lab.serving.batch import PACKED, Batch
from pararnn.lab.serving.draw import Choice, draw, scores
from pararnn.lab.serving.engine import Continuation, Delta, Engine, Prompt, QueueFull
from pararnn.lm import LanguageModel, LMConfig, Prefixes, replay
from pararnn.lm.loss import Head
from pararnn.lm.reading import Reader
from pararnn.lm.states import pack
from pararnn.lm.text import LONGEST, REPLACEMENT, Decoder, Stops

ROWS = 4


def _model(cell: str = "gru", **more) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 64}
    return add_noise(LanguageModel(LMConfig(**sizes, cell=cell, **more)))


class Record:
    """A text's deltas and, where they are recorded, the bits of its logits."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def _words(tokens: list[int]) -> str:
    return "".join(chr(0x100 + token) for token in tokens)


def _submit(engine: Engine, prompt: Prompt | list[int], **options) -> tuple[Continuation, Record]:
    record = Record()
    prompt = Prompt(prompt) if isinstance(prompt, list) else prompt
    text = Continuation(prompt, _words, record.deltas.append, **options)
    engine.submit([text])
    return text, record


def _finish(engine: Engine) -> int:
    steps = 0
    while engine.step():
        steps += 1
    return steps


def _prompt(number: int, length: int) -> list[int]:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(number)).tolist()


REQUESTS = [
    {"prompt": _prompt(0, 5), "max_tokens": 12, "temperature": 0.0},
    {"prompt": _prompt(1, 23), "max_tokens": 7, "seed": 3},
    {"prompt": _prompt(2, 1), "max_tokens": 20, "temperature": 0.7, "top_p": 0.5, "seed": 4},
    {"prompt": _prompt(3, 17), "max_tokens": 9, "temperature": 2.0, "top_p": 0.9, "seed": "a"},
    {"prompt": _prompt(4, 8), "max_tokens": 1, "seed": 5},
    {"prompt": _prompt(5, 40), "max_tokens": 15, "seed": 6, "top_p": 0.99},
    {"prompt": _prompt(6, 3), "max_tokens": 30, "seed": 7},
]


@pytest.mark.parametrize("cell", ["gru", "lstm", "head-gru", "user_cells:Memory"])
@pytest.mark.one_in(3)
def test_texts_that_join_and_leave_are_those_alone(cell):
    model = _model(cell)

    def rows_of(engine: Engine, order: list[int]) -> dict[int, Record]:
        return {i: _submit(engine, **REQUESTS[i])[1] for i in order}

    alone = {}
    for i in range(len(REQUESTS)):
        engine = Engine(Batch(model, ROWS), chunk=6)
        alone |= rows_of(engine, [i])
        _finish(engine)
    assert len({record.text for record in alone.values()}) == len(REQUESTS)
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0]):
        engine = Engine(Batch(model, ROWS), chunk=6)
        together = rows_of(engine, order[:3])
        for _ in range(4):
            engine.step()
        together |= rows_of(engine, order[3:])  # while others are running
        _finish(engine)
        assert {i: record.text for i, record in together.items()} == {
            i: record.text for i, record in alone.items()
        }
        assert all(record.deltas[-1].finish == "length" for record in together.values())


def test_texts_are_submitted_while_the_engine_looks_at_those_that_wait():
    """By other threads, at any time: one within a loop over the queue failed all texts."""
    engine = Engine(Batch(_model(), ROWS), chunk=6)
    late: list[threading.Thread] = []

    class Queue(deque):
        def __iter__(self):
            for index, text in enumerate(super().__iter__()):
                yield text
                if not index and len(late) < 4:
                    late.append(threading.Thread(target=_submit, args=(engine, [1, 2]), kwargs=few))
                    late[-1].start()
                    late[-1].join(0.1)  # it waits until the loop is over

    few = {"max_tokens": 2}
    records = [_submit(engine, [n, n], **few)[1] for n in range(ROWS + 1)]
    engine.waiting = Queue(engine.waiting)
    _finish(engine)
    for thread in late:
        thread.join()
    _finish(engine)
    assert all(record.deltas[-1].finish == "length" for record in records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_row_have_the_same_bits_in_any_company(dtype):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 257}
    model = add_noise(LanguageModel(LMConfig(**sizes), dtype=dtype))
    generator = torch.Generator().manual_seed(0)

    def logits(company: bool, own: int) -> list[Tensor]:
        batch, reader = Batch(model, 8), Reader(model)
        memory = model.new_cache()
        first = batch.head(reader.read(range(20), memory)[0][:, -1]).clone()
        for row in range(8):
            other = model.new_cache()
            reader.read(torch.randint(257, (9,), generator=generator).tolist(), other)
            if company:
                batch.join(row, other)
        batch.join(own, memory)
        steps = [first[0]]
        for token in range(6):
            tokens = torch.randint(257, (8,), generator=generator).tolist()
            tokens = tokens if company else [0] * 8
            tokens[own] = token
            steps.append(batch.step(tokens)[own].clone())
        return steps

    alone = logits(False, 0)
    for row in (0, 3, 7):
        for one, other in zip(alone, logits(True, row), strict=True):
            assert torch.equal(one, other)
    assert Batch(model, 8).is_repeatable()


def test_recorded_steps_write_the_same_texts(recordings_of_run, monkeypatch):
    model = _model("lstm")

    def texts() -> list[str]:
        engine = Engine(Batch(model, ROWS), chunk=6)
        records = [_submit(engine, **request)[1] for request in REQUESTS]
        _finish(engine)
        return [record.text for record in records]

    by_replay = texts()
    assert len(recordings_of_run) == 1
    monkeypatch.setattr(replay, "_records", lambda device: False)
    assert texts() == by_replay
    assert len(recordings_of_run) == 1


def test_recorded_pieces_and_kept_states_write_the_same_texts(recordings_of_run, monkeypatch):
    """Of prompts that begin alike, next to each other, and of a turn after an answer."""
    model, shared = _model("lstm", batch_invariant=True), _prompt(0, 75)
    prompts = [[*shared[:cut], *_prompt(cut, 9)] for cut in (75, 40, 64, 75, 15, 3)]
    engine = _engine(model, chunk=32)
    assert engine.is_exact()
    pieces = {piece.size for piece in engine.reader.recordings}
    assert pieces == {1, 2, 4, 8, 16, 32}
    asked = [_submit(engine, prompt, max_tokens=20, seed=3)[1] for prompt in prompts]
    _finish(engine)
    assert len(engine.reader.recordings) <= 2 * 6
    assert engine.prefixes.counts.hits > 1
    answer = [ord(letter) - 0x100 for letter in asked[0].text]
    turn = [*prompts[0], *answer, *_prompt(5, 20)]
    text, cached = _ask(engine, turn, max_tokens=20, seed=3)
    assert cached == (84 + 19) // 16 * 16
    monkeypatch.setattr(replay, "_records", lambda device: False)
    by_calls = Engine(Batch(model, ROWS), 32)
    assert by_calls.reader.most == 0
    again = [_submit(by_calls, prompt, max_tokens=20, seed=3)[1] for prompt in [*prompts, turn]]
    _finish(by_calls)
    assert [one.text for one in again] == [*(one.text for one in asked), text]


def test_rows_are_packed_by_a_recording(recordings_of_run):
    batch, reader = Batch(_model("lstm"), 3 * PACKED), Reader(_model("lstm"))
    for row in range(batch.rows):
        memory = batch.new_cache()
        reader.read(_prompt(row, 5 + row), memory)
        batch.join(row, memory)
    for rows in ([3], [*range(PACKED)], [*range(20, 3, -1)]):
        for _ in range(3):
            batch.step([*range(batch.rows)])
            assert torch.equal(batch.packed(rows), pack(batch.memories(rows)))
    shapes = [tuple(recording.tokens.shape) for recording in recordings_of_run]
    assert sorted(shapes) == [(PACKED,), (batch.rows,)]


def test_rows_that_differ_are_noticed(monkeypatch):
    batch = Batch(_model(), 4)
    step = batch.step

    def uneven(tokens):
        logits = step(tokens)
        logits[-1, 0] += 1e-6
        return logits

    monkeypatch.setattr(batch, "step", uneven)
    assert not batch.is_repeatable()


def test_decoding_equals_the_models_own():
    """A text's tokens are the likeliest by one pass over all of it."""
    model, prompt = _model(), _prompt(8, 19)
    engine = Engine(Batch(model, ROWS), chunk=5)
    _, record = _submit(engine, prompt, max_tokens=25, temperature=0.0)
    _finish(engine)
    tokens = [ord(letter) - 0x100 for letter in record.text]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chosen, logits.amax(1), rtol=1e-4, atol=1e-4)
    assert len(set(tokens)) > 2


def test_prompts_are_read_in_chunks_beside_decoding(monkeypatch):
    model = _model()
    batch = Batch(model, ROWS)
    engine = Engine(batch, chunk=4)
    calls: list[str] = []
    read, step = engine.reader.read, batch.step
    monkeypatch.setattr(
        engine.reader, "read", lambda t, m: calls.append(f"read {len(t)}") or read(t, m)
    )
    monkeypatch.setattr(batch, "step", lambda t: calls.append("step") or step(t))
    _submit(engine, _prompt(0, 2), max_tokens=8)
    engine.step()
    _submit(engine, _prompt(1, 11), max_tokens=3)
    _finish(engine)
    assert calls[:8] == ["read 2", "step", "read 4", "step", "read 4", "step", "read 3", "step"]


def test_samples_share_their_prompts_reading(monkeypatch):
    batch = Batch(_model(), ROWS)
    engine = Engine(batch, chunk=64)
    reads = []
    read = engine.reader.read
    monkeypatch.setattr(engine.reader, "read", lambda t, m: reads.append(len(t)) or read(t, m))
    prompt = Prompt(_prompt(0, 10))
    samples = [_submit(engine, prompt, max_tokens=8, seed=i)[1] for i in range(6)]
    _finish(engine)
    assert reads == [10]
    assert len({record.text for record in samples}) == 6
    engine = Engine(Batch(_model(), ROWS), chunk=3)
    _, alone = _submit(engine, prompt.tokens, max_tokens=8, seed=4)
    _finish(engine)
    assert alone.text == samples[4].text


def test_more_texts_than_rows_wait_and_too_many_are_refused():
    engine = Engine(Batch(_model(), 2), places=3)
    texts = [_submit(engine, [i], max_tokens=4)[1] for i in range(5)]
    with pytest.raises(QueueFull, match="5 texts wait for 2 rows, and the queue has 3 places"):
        _submit(engine, [1])
    engine.step()
    assert (engine.active, len(engine.waiting)) == (2, 3)
    _finish(engine)
    assert [record.deltas[-1].finish for record in texts] == ["length"] * 5
    _submit(engine, [1])


def test_cancelled_texts_leave_their_rows_and_the_queue():
    engine = Engine(Batch(_model(), 1))
    running, record = _submit(engine, [1], max_tokens=1000)
    second, second_record = _submit(engine, [2], max_tokens=1000)
    _, third = _submit(engine, [3], max_tokens=3)
    engine.step()
    engine.cancel([running, second])
    _finish(engine)
    assert len(record.text) == 2
    assert second_record.deltas == []
    assert third.deltas[-1].finish == "length"
    assert engine.active == 0


def test_end_tokens_end_a_text():
    engine = Engine(Batch(_model(), ROWS))
    _, free = _submit(engine, [1], max_tokens=12, temperature=0.0)
    _finish(engine)
    end = ord(free.text[7]) - 0x100
    first = free.text.index(chr(0x100 + end))
    _, record = _submit(engine, [1], max_tokens=12, temperature=0.0, ends=[end])
    _finish(engine)
    assert record.text == free.text[:first]
    assert record.deltas[-1][1:3] == (first + 1, "stop")


def test_stop_strings_end_a_text_before_them():
    engine = Engine(Batch(_model(), ROWS))
    _, free = _submit(engine, [1], max_tokens=12, seed=1)
    _finish(engine)
    stop = free.text[4:7]
    _, record = _submit(engine, [1], max_tokens=12, seed=1, stop=["none", stop, free.text[8]])
    _finish(engine)
    assert record.text == free.text[: free.text.index(stop)]
    assert record.deltas[-1].finish == "stop"
    assert record.deltas[-1].tokens == free.text.index(stop) + 3


def test_a_failing_model_ends_its_texts_and_serves_the_next(monkeypatch, capsys):
    batch = Batch(_model(), 2)
    engine = Engine(batch)
    _, record = _submit(engine, [1], max_tokens=1000)
    step = batch.step

    def fail(tokens):
        engine.stop()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(batch, "step", fail)
    engine.run()
    assert record.deltas[-1].finish == "error"
    assert record.deltas[-1].text == "RuntimeError: out of memory"
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setattr(batch, "step", step)
    engine.is_running = True
    _, record = _submit(engine, [1], max_tokens=3)
    _finish(engine)
    assert record.deltas[-1].finish == "length"


def test_texts_that_run_and_wait_are_told_that_the_server_stops(monkeypatch):
    engine = Engine(Batch(_model(), 1))
    records = [_submit(engine, [1], max_tokens=10, seed=1)[1] for _ in range(2)]
    monkeypatch.setattr(engine, "step", lambda: engine.stop() or Engine.step(engine))
    engine.run()
    ends = [Delta("the server is being stopped", tokens, "error") for tokens in (2, 0)]
    assert [record.deltas[-1] for record in records] == ends
    assert (engine.active, len(engine.waiting)) == (0, 0)


def test_a_text_that_fails_at_its_first_token_is_told(capsys):
    """It is in no row then, and waits no more."""

    def fail(tokens):
        raise RuntimeError("no such token")

    engine, record = Engine(Batch(_model(), 1)), Record()
    engine.submit([Continuation(Prompt([1]), fail, record.deltas.append, seed=1)])
    assert engine._try()
    assert record.deltas == [Delta("RuntimeError: no such token", 1, "error")]
    assert "Traceback" in capsys.readouterr().err
    assert not engine.waiting


def test_logits_that_are_not_finite_end_that_text_alone():
    model = _model()
    engine = Engine(Batch(model, ROWS))
    _, good = _submit(engine, [1], max_tokens=5, seed=0)
    _, bad = _submit(engine, [2], max_tokens=5, seed=0)
    with torch.no_grad():
        model.embed_tokens.weight[2] = torch.nan
    _finish(engine)
    assert bad.deltas == [Delta("the model's logits are not finite", 1, "error")]
    assert len(good.text) == 5


def test_nothing_of_a_text_is_left():
    engine = Engine(Batch(_model(), ROWS))
    text, _ = _submit(engine, _prompt(0, 20), max_tokens=6)
    references = [weakref.ref(text), weakref.ref(text.prompt)]
    _finish(engine)
    del text
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def _engine(model: LanguageModel, chunk: int = 16, budget: int = 1 << 30, **options) -> Engine:
    return Engine(Batch(model, ROWS), chunk, prefixes=Prefixes(model, budget), **options)


def _ask(engine: Engine, prompt: list[int], **options) -> tuple[str, int]:
    text, record = _submit(engine, prompt, **options)
    _finish(engine)
    return record.text, text.prompt.cached


def test_prompts_continue_from_the_states_of_earlier_ones():
    """Cut at multiples of the grain, with a hit and without a text has the same bits."""
    model, shared = _model("lstm"), _prompt(0, 75)
    prompts = [[*shared[:cut], *_prompt(cut, 9)] for cut in (75, 75, 40, 64, 75, 15)]
    prompts[1] = [*prompts[0], 5]
    options = {"max_tokens": 20, "seed": 3}
    engine = _engine(model, keeps_answers=False)
    hits = [_ask(engine, prompt, **options) for prompt in prompts]
    assert [cached for _, cached in hits] == [0, 80, 32, 64, 80, 0]
    alone = [_ask(Engine(Batch(model, ROWS), 16), prompt, **options)[0] for prompt in prompts]
    assert [text for text, _ in hits] == alone
    assert len(set(alone)) > 4
    unshared, record = _submit(engine, prompts[0], **options)
    again = Prompt(prompts[0], reuses=False)
    _, other = _submit(engine, again, **options)
    _finish(engine)
    assert (unshared.prompt.cached, again.cached) == (80, 0)
    assert record.text == other.text == alone[0]


def test_prompts_are_cut_at_the_same_places_from_any_state(monkeypatch):
    engine = _engine(_model(), chunk=64)
    read, lengths = engine.prefixes.read, []

    def record(tokens, *rest):
        lengths.append(len(tokens))
        return read(tokens, *rest)

    monkeypatch.setattr(engine.prefixes, "read", record)
    prompt = _prompt(0, 150)
    for text in ([*prompt[:20], *prompt[:4]], prompt):
        _ask(engine, text, max_tokens=1)
    assert lengths == [24, 48, 64, 22]


def test_a_conversation_continues_from_its_answers():
    model = _model()
    engine = _engine(model, chunk=512)
    turn, other = _prompt(0, 30), _prompt(1, 30)
    answer, _ = _ask(engine, turn, max_tokens=40, temperature=0.0)
    written = [ord(letter) - 0x100 for letter in answer]
    dialogue = [*turn, *written, *other]
    assert len(dialogue) == 100
    reference = Engine(Batch(model, ROWS))
    # The last token of an answer is not read: 30 + 39 tokens are.
    text, cached = _ask(engine, dialogue, max_tokens=12, temperature=0.0)
    assert (text, cached) == (_ask(reference, dialogue, max_tokens=12, temperature=0.0)[0], 64)
    branch = [*turn, *written[:25], *other]  # the user edits the answer
    text, cached = _ask(engine, branch, max_tokens=12, temperature=0.0)
    assert (text, cached) == (_ask(reference, branch, max_tokens=12, temperature=0.0)[0], 48)


def test_cancelled_prompts_leave_their_states_and_no_reference():
    engine = _engine(_model())
    text, record = _submit(engine, _prompt(0, 100), max_tokens=5)
    engine.step()
    engine.step()
    running, _ = _submit(engine, _prompt(1, 20), max_tokens=500)
    engine.cancel([text])
    for _ in range(4):
        engine.step()
    engine.cancel([running])
    references = [weakref.ref(x) for x in (text, text.prompt, text.prompt.memory, running)]
    _finish(engine)
    del text, running
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert record.deltas == []
    counts = engine.prefixes.counts
    assert counts.bytes == counts.states * engine.prefixes.state_bytes
    assert _ask(engine, _prompt(0, 100), max_tokens=2)[1] == 32


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(strategies.randoms(use_true_random=False), strategies.integers(1, 40))
def test_any_conversations_with_cancels_are_those_without_kept_states(random, states):
    """Turns that go on from answers or branch off, texts that are given up, rows that are full."""
    model = _model("lstm")
    engine = _engine(model, budget=states * Prefixes(model).state_bytes)
    engine.keeps_answers = engine.is_exact()
    alone = Engine(Batch(model, ROWS), 16)
    dialogues, running = [_prompt(0, 40)], []
    for _ in range(12):
        before = random.choice(dialogues)
        prompt = [*before[: random.randrange(1, 1 + len(before))], *_prompt(random.randrange(9), 5)]
        options = {"max_tokens": random.randrange(1, 40), "seed": random.randrange(9)}
        text, record = _submit(engine, prompt, **options)
        running.append((text, record, prompt, options))
        for _ in range(random.randrange(6)):
            engine.step()
        if random.random() < 0.3:
            engine.cancel([random.choice(running)[0]])
        dialogues += [
            [*prompt, *(ord(letter) - 0x100 for letter in record.text)]
            for _, record, prompt, _ in running
        ]
    _finish(engine)
    for text, record, prompt, options in running:
        whole, _ = _ask(alone, prompt, **options)
        assert record.text == whole or (text.is_cancelled and whole.startswith(record.text))
    assert engine.prefixes.counts.states <= states


def test_a_small_budget_keeps_what_is_used():
    model, shared = _model(), _prompt(0, 64)
    size = Prefixes(model).state_bytes
    engine = _engine(model, budget=6 * size, keeps_answers=False)
    cached = [_ask(engine, [*shared, *_prompt(i, 40)], max_tokens=3)[1] for i in range(1, 9)]
    assert cached == [0] + [64] * 7
    assert engine.prefixes.counts.bytes == 6 * size


def test_whether_hits_are_exact_is_known():
    model = _model()
    engine = Engine(Batch(model, ROWS), 48, prefixes=Prefixes(model))
    assert engine.is_exact()
    assert engine.prefixes.counts[:4] == (0, 0, 0, 0)
    assert Engine(Batch(model, ROWS)).is_exact()
    # Pieces of less than the grain: which products they are depends on the state, and the machine.
    assert _engine(model, chunk=6).is_exact() in (True, False)
    call = LanguageModel.hidden

    def by_length(self, tokens, cache=None, **rows):
        return call(self, tokens, cache, **rows) + 1e-6 * (tokens.shape[1] > 30)

    def by_rows(self, tokens, cache=None, **rows):
        hidden = call(self, tokens, cache, **rows)
        if len(tokens) > 1:
            for layer in cache.layers:
                layer.read()[1].add_(1e-6)
        return hidden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "hidden", by_length)
        assert not engine.is_exact()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "hidden", by_rows)
        assert not engine.is_exact()
        engine.keeps_answers = False
        assert engine.is_exact()


def test_models_without_a_convolution_run():
    engine = Engine(Batch(plain("no convolution"), 2))
    _, record = _submit(engine, [1, 2], max_tokens=5)
    _finish(engine)
    assert len(record.text) == 5


def _logs(model: LanguageModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0].log_softmax(-1)


@pytest.mark.parametrize("kept", [False, True])
def test_scores_are_the_models_log_chances(kept):
    """Of a prompt over several chunks and slices, and of the tokens that are drawn."""
    model, prompt = _model(), _prompt(0, 300)
    prefixes = Prefixes(model) if kept else None
    engine = Engine(Batch(model, ROWS), 200, prefixes=prefixes)
    _ask(engine, prompt, max_tokens=1)
    scored = Prompt(prompt, top=3)
    text, record = _submit(engine, scored, max_tokens=9, seed=1, top=2)
    bare, _ = _submit(engine, scored, max_tokens=0)
    other, other_record = _submit(engine, prompt, max_tokens=9, seed=1)
    _finish(engine)
    assert scored.cached == 0  # all of it is read
    assert record.text == other_record.text
    assert other.scores == [] == bare.scores
    written = [ord(letter) - 0x100 for letter in record.text]
    logs = _logs(model, [*prompt, *written])
    drawn = [score for delta in record.deltas for score in delta.scores]
    for found, tokens, first, top in (
        (scored.scores, prompt[1:], 0, 3),
        (drawn, written, len(prompt) - 1, 2),
    ):
        assert [score.token for score in found] == tokens
        reference = logs[first : first + len(tokens)]
        chosen = reference.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        values = torch.tensor([score.logprob for score in found])
        torch.testing.assert_close(values, chosen, rtol=0, atol=1e-4)
        tops = torch.tensor([[log for _, log in score.top] for score in found])
        torch.testing.assert_close(tops, reference.topk(top, -1).values, rtol=0, atol=1e-4)
        for score in found:
            assert all(log == score.logprob for token, log in score.top if token == score.token)
    assert text.logprob == pytest.approx(sum(score.logprob for score in drawn))


@pytest.mark.parametrize("size", [64, 5000])
def test_the_first_of_equal_tokens_are_likeliest_however_many_are_asked_for(size):
    """Rows of a batch are scored together, with as many tokens as one of them asks for."""
    logits = torch.randint(-3, 3, (4, size), generator=torch.Generator().manual_seed(0)).float()
    logits[0, :3] = -torch.inf
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :20].tolist()
    for count in (1, 2, 5, 20):
        rows = scores(Head(1, size, bias=False), logits, [9] * 4, count)
        assert [[token for token, _ in row.top] for row in rows] == [row[:count] for row in order]


def test_scores_of_impossible_tokens_are_finite():
    logits = torch.tensor([[0.0, -torch.inf, 3e38]])
    (score,) = scores(Head(1, 3, bias=False), logits, [1], 5)
    assert score.logprob == torch.finfo(torch.float32).min
    assert [token for token, _ in score.top] == [2, 0, 1]
    assert score.top[0][1] == 0


def test_a_prompt_alone_writes_nothing():
    engine = Engine(Batch(_model(), ROWS))
    _, record = _submit(engine, [1, 2, 3], max_tokens=0)
    _finish(engine)
    assert record.deltas == [Delta("", 0, "length")]


def test_scores_beside_a_row_without_numbers():
    head, logits = Head(1, 9, bias=False), torch.randn(3, 9)
    want = scores(head, logits[[0, 2]], [1, 2], 2)
    logits[1, 4] = torch.nan
    first, _, last = scores(head, logits, [1, 1, 2], 2)
    assert [first, last] == want


def test_top_k_draws_among_the_likeliest():
    torch.manual_seed(0)
    logits = torch.randn(1, 6)
    chances = logits.softmax(-1)[0]
    order = chances.argsort(descending=True)
    numbers = [(i + 0.5) / 2000 for i in range(2000)]

    def counts(**options):
        tokens = draw(logits.expand(2000, 6), [Choice(1.0, number=n, **options) for n in numbers])
        return torch.bincount(torch.tensor(tokens), minlength=6) / 2000

    def among(count):
        few = chances[order[:count]]
        return torch.zeros(6).index_copy(0, order[:count], few / few.sum())

    torch.testing.assert_close(counts(top_k=3), among(3), rtol=0, atol=1e-3)
    assert counts(top_k=1)[order[0]] == 1
    for count in (6, 9):
        torch.testing.assert_close(counts(top_k=count), counts(), rtol=0, atol=1e-3)
    # top_p is a share of the three: the first two have it.
    share = float(chances[order[:2]].sum() / chances[order[:3]].sum())
    torch.testing.assert_close(counts(top_k=3, top_p=share - 1e-4), among(2), rtol=0, atol=1e-3)
    assert torch.equal(counts(top_p=0.6), counts(top_k=6, top_p=0.6))
    # No number of tokens and no share is too large or small for a float.
    assert torch.equal(counts(top_p=0.6), counts(top_k=10**400, top_p=0.6))
    equal = torch.zeros(1, 64)
    assert draw(equal, [Choice(1.0, 5e-324, 0.9, 3)]) == [0]


def test_draws_follow_the_chances():
    torch.manual_seed(0)
    logits = torch.randn(1, 6) * 2
    chances = (logits / 0.7).softmax(-1)[0]
    numbers = [(i + 0.5) / 2000 for i in range(2000)]
    tokens = draw(logits.expand(2000, 6), [Choice(0.7, 1.0, number) for number in numbers])
    counts = torch.bincount(torch.tensor(tokens), minlength=6) / 2000
    torch.testing.assert_close(counts, chances, rtol=0, atol=1e-3)
    order = chances.argsort(descending=True)
    top_p = float(chances[order[:2]].sum()) + 1e-4  # two are not quite enough
    tokens = draw(logits.expand(2000, 6), [Choice(0.7, top_p, number) for number in numbers])
    few = torch.zeros(6).index_copy(0, order[:3], chances[order[:3]] / chances[order[:3]].sum())
    counts = torch.bincount(torch.tensor(tokens), minlength=6) / 2000
    torch.testing.assert_close(counts, few, rtol=0, atol=1e-3)


def test_a_draw_depends_on_its_own_row_alone():
    torch.manual_seed(0)
    logits = torch.randn(5, 300) * 3
    choices = [
        Choice(),
        Choice(0.7, 1.0, 0.3),
        Choice(1.0, 0.4, 0.9),
        Choice(1e-30, 1.0, 0.999999),
        Choice(1.0, 1e-9, 0.999999),
    ]
    together = draw(logits, choices)
    alone = [draw(logits[i : i + 1], [choice])[0] for i, choice in enumerate(choices)]
    assert together == alone
    likeliest = logits.argmax(-1).tolist()
    assert [together[i] for i in (0, 3, 4)] == [likeliest[i] for i in (0, 3, 4)]
    logits[1, 5], logits[2, 7] = torch.nan, torch.inf
    logits[0] = logits[3, 0] = -torch.inf
    assert draw(logits, choices) == [-1, -1, -1, *likeliest[3:]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_temperatures_and_top_p_have_their_limits(dtype):
    logits = torch.tensor([[0.0, 3.0, -torch.inf, 2.0, -6e4]], dtype=dtype)

    def drawn(**options):
        return {draw(logits, [Choice(number=i / 100, **options)])[0] for i in range(100)}

    tiny = (0.0, 1e-37, 1e-44, 1e-46, 1e-320)
    assert all(drawn(temperature=each) == {1} for each in tiny)
    assert all(drawn(temperature=each, top_p=0.9) == {1} for each in tiny)
    assert all(drawn(temperature=each, top_p=5e-324) == {1} for each in (1e-46, 1.0, 1e300))
    assert all(drawn(temperature=each) == {0, 1, 3, 4} for each in (1e38, 1e300))


def _bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize(
    "data",
    [
        b"plain",
        "a\u00e9\u20ac\U0001f600 z".encode(),
        b"a\xff\xfe\xe2\x82b",
        b"\xe2\x82",
        b"\xf0\x9f\x98",
        "\ufffd literal \ufffd".encode(),
        b"\xff" * (3 * LONGEST) + "\u20ac".encode(),
    ],
)
def test_pieces_of_text_are_the_text(data):
    decoder = Decoder(_bytes)
    deltas = [decoder.add(byte) for byte in data] + [decoder.end()]
    assert "".join(deltas) == data.decode("utf-8", "replace")
    assert len(decoder.tokens) == 0


def test_characters_wait_for_their_bytes():
    decoder = Decoder(_bytes)
    assert [decoder.add(byte) for byte in "a\u20acb".encode()] == ["a", "", "", "\u20ac", "b"]


def _fallback(tokens):
    """The text of bytes, a replacement for each of a run that is no text, as Llama's tokenizers."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(tokens)


def test_characters_wait_for_their_bytes_where_each_byte_is_shown():
    decoder = Decoder(_fallback)
    bytes_ = "a\U0001f600\U0001f601\u00e9".encode()
    wanted = ["a", "", "", "", "\U0001f600", "", "", "", "\U0001f601", "", "\u00e9"]
    assert [decoder.add(byte) for byte in bytes_] == wanted
    assert decoder.end() == ""


def test_a_character_that_a_prompt_begins_is_no_text():
    for before in (b"a", b"a\xf0\x9f"):
        decoder = Decoder(_bytes, list(before))
        assert "".join([decoder.add(byte) for byte in b"\x98bc"]) == "\ufffdbc"


def test_a_texts_first_space_needs_the_prompts_end():
    engine, record = Engine(Batch(_model(), 1)), Record()
    words = lambda tokens: " ".join(f"w{token}" for token in tokens)  # noqa: E731
    text = Continuation(Prompt(_prompt(0, 20)), words, record.deltas.append, max_tokens=3)
    engine.submit([text])
    _finish(engine)
    assert record.text == " " + words(text.written)


def test_spaces_between_tokens_need_the_token_before():
    """As in tokenizers of words, whose text of a token alone has no space."""
    decoder = Decoder(lambda tokens: " ".join(f"w{token}" for token in tokens))
    assert "".join([decoder.add(i) for i in range(5)] + [decoder.end()]) == "w0 w1 w2 w3 w4"


def test_spaces_need_the_token_before_those_without_a_text():
    decoder = Decoder(lambda tokens: " ".join(f"w{token}" for token in tokens if token))
    tokens = [1, 0, 2, 0, 0, 3, *[0] * (2 * LONGEST)]
    assert "".join([decoder.add(token) for token in tokens] + [decoder.end()]) == "w1 w2 w3"
    assert len(decoder.tokens) <= LONGEST


@pytest.mark.parametrize(
    ("stops", "deltas", "texts", "is_found"),
    [
        ([], ["ab", "c"], ["ab", "c"], False),
        (["xy"], ["ax", "yb"], ["a", ""], True),
        (["xy"], ["ax", "zb"], ["a", "xzb"], False),
        (["aab"], ["aaa", "ab"], ["a", "a"], True),
        (["long", "g"], ["a lon", "g"], ["a ", ""], True),
        (["b", "abc"], ["a", "b", "c"], ["", "a"], True),
    ],
)
def test_stops_hold_back_what_may_be_their_beginning(stops, deltas, texts, is_found):
    filter_ = Stops(stops)
    results = []
    for delta in deltas:
        results.append(filter_.add(delta))
        if filter_.is_found:
            break
    assert results == texts
    assert filter_.is_found == is_found
    assert filter_.end() == ""
