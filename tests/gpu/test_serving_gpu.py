"""The running batch on a GPU, whose step is recorded: texts are those alone, bit for bit."""

import gc
from functools import partial

import pytest
import torch
from lm_kinds import add_noise
from test_lm_prefixes import _read

from pararnn.lab.serving.batch import Batch
from pararnn.lab.serving.draw import Choice, draw
from pararnn.lab.serving.engine import Continuation, Delta, Engine, Prompt
from pararnn.lm import LanguageModel, LMConfig, Prefixes, quantise_weights, sample
from pararnn.lm.prefixes import release
from pararnn.lm.reading import Reader, pieces_of
from pararnn.lm.replay import Steps
from pararnn.lm.states import pack


def _write(engine: Engine, requests: list[dict]) -> list[str]:
    return ["".join(delta.text for delta in deltas) for deltas in _deltas(engine, requests)]


def _deltas(engine: Engine, requests: list[dict]) -> list[list[Delta]]:
    pieces = [[] for _ in requests]

    def submit(index: int) -> None:
        options = dict(requests[index])
        prompt = Prompt(options.pop("prompt"), prediction=options.pop("prediction", ()))
        words = lambda tokens: "".join(chr(0x100 + token) for token in tokens)  # noqa: E731
        engine.submit([Continuation(prompt, words, pieces[index].append, **options)])

    half = len(requests) // 2
    for index in range(half):
        submit(index)
    for _ in range(5):
        engine.step()
    for index in range(half, len(requests)):  # while others are running
        submit(index)
    while engine.step():
        pass
    assert all(own[-1].finish == "length" for own in pieces)
    return pieces


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")],
    ids=str,
)
def test_texts_that_join_and_leave_are_those_alone(cell, dtype, weights, device):
    torch.manual_seed(0)
    config = LMConfig(256, 2, vocab_size=500, num_heads=4, cell=cell)
    model = add_noise(LanguageModel(config, dtype=dtype)).to(device)
    if weights is not None:
        pytest.importorskip("torchao")
        quantise_weights(model, weights)
    generator = torch.Generator().manual_seed(1)
    requests = [
        {
            "prompt": torch.randint(500, (1 + 13 * i % 70,), generator=generator).tolist(),
            "max_tokens": 5 + 7 * i % 30,
            "temperature": (0, 1.0, 0.7)[i % 3],
            "top_p": (1.0, 0.8)[i % 2],
            "seed": i,
        }
        for i in range(40)
    ]
    batch = Batch(model, 16)
    assert batch.is_repeatable()
    assert batch.steps.recording is not None
    together = _write(Engine(batch, chunk=32), requests)
    alone = [_write(Engine(batch, chunk=32), [request])[0] for request in requests[::5]]
    assert together[::5] == alone
    assert len(set(together)) == 40


KINDS = {
    "gru": {},
    "lstm": {"cell": "lstm"},
    "head-lstm": {"cell": "head-lstm"},
    "gated-delta": {"cell": "gated-delta", "mixers": ("matrix",) * 2, "cell_config": {"K": 64}},
    "hybrid": {"mixers": ("rnn", "attention")},
    "delta hybrid": {
        "cell": "gated-delta",
        "mixers": ("matrix", "attention"),
        "cell_config": {"K": 64},
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_prompts_continue_from_kept_states(kind, dtype, device):
    """At most 15 tokens are read again, and what is left is that of a whole pass, to rounding."""
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(256, 2, vocab_size=500, num_heads=4, **KINDS[kind]), dtype=dtype)
    model = model.to(device).eval()
    text = torch.randint(500, (700,)).tolist()
    read = partial(_read, Prefixes(model), chunk=512)

    def whole(tokens: list[int]) -> torch.Tensor:
        return model(torch.tensor([tokens], device=device))[:, -1]

    scale = whole(text).abs().max().item()
    close = {"rtol": 0, "atol": scale * (5e-2 if dtype == torch.bfloat16 else 1e-4)}
    assert read(text)[0] == 700
    for length in (16, 100, 512, 520, 699, 700):
        again, logits = read(text[:length])
        assert again == length % 16
        torch.testing.assert_close(logits, whole(text[:length]), **close)
    branch = [*text[:531], *reversed(text[:40])]
    again, logits = read(branch)
    assert again == 571 - 528
    torch.testing.assert_close(logits, whole(branch), **close)


@torch.no_grad()
def test_the_host_does_not_wait_for_a_kept_state(device):
    """Nor while the rest of the prompt is read by a recorded piece, and its state kept."""
    torch.manual_seed(0)
    config = LMConfig(256, 4, vocab_size=500, num_heads=4)
    model = add_noise(LanguageModel(config, dtype=torch.bfloat16)).to(device).eval()
    prefixes, text = Prefixes(model), torch.randint(500, (528,)).tolist()
    reader = Reader(model, prefixes.grain, 64)
    reader.prepare()

    def read(tokens: list[int]) -> tuple[int, torch.Tensor]:
        names = prefixes.names(tokens)
        cache, _ = prefixes.find(names)
        first = cache.length
        hidden = [
            prefixes.read(tokens[start : start + 64], names, cache, reader)
            for start in range(first, len(tokens), 64)
        ]
        return first, hidden[-1][:, -1]

    assert read(text)[0] == 0
    assert read([*text[:512], *reversed(text[:16])])[0] == 512
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, last = read([*text[:512], *text[:16]])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first == 512
    whole = model.hidden(torch.tensor([[*text[:512], *text[:16]]], device=device))[:, -1]
    torch.testing.assert_close(last, whole, rtol=0, atol=5e-2 * whole.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_with_kept_states_answers_all(kind, device):
    """Texts, their answers and branches, next to others; states of recorded steps are kept too."""
    torch.manual_seed(0)
    config = LMConfig(256, 2, vocab_size=500, num_heads=4, **KINDS[kind])
    model = add_noise(LanguageModel(config, dtype=torch.bfloat16)).to(device)
    prefixes = Prefixes(model)
    engine = Engine(Batch(model, 16, prefixes.pool), 64, prefixes=prefixes)
    assert isinstance(engine.batch.steps, Steps)
    print(kind, "hits are exact here:", engine.is_exact())
    shared = torch.randint(500, (150,)).tolist()
    requests = [
        {"prompt": [*shared[: 150 - 7 * i], i], "max_tokens": 20, "temperature": 0}
        for i in range(20)
    ]
    first = _write(engine, requests)
    assert engine.prefixes.counts.hits >= 19
    second = _write(engine, requests)
    assert [len(text) for text in first] == [len(text) for text in second] == [20] * 20
    if engine.is_exact():
        assert first == second
    turn = [*requests[0]["prompt"], *(ord(letter) - 0x100 for letter in first[0]), 1, 2]
    before = engine.prefixes.counts.tokens_saved
    _write(engine, [{"prompt": turn, "max_tokens": 5, "temperature": 0}] * 2)
    # 151 tokens of the prompt and 19 of the answer have been read: 160 is a multiple of 16.
    assert engine.prefixes.counts.tokens_saved - before >= 2 * 160


@pytest.mark.parametrize("kind", ["hybrid", "delta hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hybrids_in_little_memory_have_the_bits_of_the_trainer(kind, dtype, device):
    """One recorded step for growing texts, which share pages, wait, and give pages back."""
    torch.manual_seed(0)
    config = LMConfig(256, 2, vocab_size=500, num_heads=4, batch_invariant=True, **KINDS[kind])
    model = add_noise(LanguageModel(config, dtype=dtype)).to(device)
    unit = Prefixes(model, 1 << 28).pool.unit_bytes
    prefixes = Prefixes(model, 70 * unit)
    engine = Engine(Batch(model, 16, prefixes.pool), 64, prefixes=prefixes)
    assert engine.batch.is_repeatable()
    assert engine.batch.steps.recording is not None
    assert engine.is_exact()
    shared = torch.randint(500, (100,)).tolist()
    requests = [
        {
            "prompt": [*shared[: 100 - 9 * (i % 10)], i],
            "max_tokens": 100 + 3 * i % 50,
            "temperature": (0, 1.0)[i % 2],
            "seed": i,
            "top": 0,
        }
        for i in range(20)
    ]
    written = _deltas(engine, requests)
    assert engine.preempted > 0
    assert prefixes.counts.tokens_saved > 0
    assert prefixes.pool.in_use == 0
    for request, deltas in zip(requests, written, strict=True):
        tokens = [ord(letter) - 0x100 for delta in deltas for letter in delta.text]
        row = torch.tensor([[*request["prompt"], *tokens]], device=device)
        with torch.no_grad():
            expected = model.log_probs(row)[0, len(request["prompt"]) :].tolist()
        assert [score.logprob for delta in deltas for score in delta.scores] == expected


def _requests(least: int, **options) -> list[dict]:
    """Prompts of many lengths, all ways to draw, texts of `least` tokens or more."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "prompt": torch.randint(500, (1 + 13 * i % 70,), generator=generator).tolist(),
            "max_tokens": least + 7 * i % 30,
            "temperature": (0, 1.0, 0.7)[i % 3],
            "seed": i,
            **options,
        }
        for i in range(24)
    ]


@pytest.mark.parametrize("kind", ["hybrid", "delta hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_texts_of_hybrids_are_those_alone(kind, dtype, device):
    """Without `batch_invariant`, with little memory and with much."""
    torch.manual_seed(0)
    config = LMConfig(256, 2, vocab_size=500, num_heads=4, **KINDS[kind])
    model = add_noise(LanguageModel(config, dtype=dtype)).to(device)
    requests = _requests(60)

    def write(requests: list[dict], pages: int) -> tuple[list[str], int]:
        prefixes = Prefixes(model, pages * Prefixes(model, 1 << 28).pool.unit_bytes)
        batch = Batch(model, 16, prefixes.pool)
        assert batch.is_repeatable()
        engine = Engine(batch, 32, prefixes=prefixes, keeps_prompts=False)
        return _write(engine, requests), engine.preempted

    together, preempted = write(requests, 50)
    assert preempted > 0
    alone = [write([request], 500)[0][0] for request in requests[::6]]
    assert together[::6] == alone
    assert len(set(together)) == 24


def _tokens(deltas: list[Delta]) -> list[int]:
    return [ord(letter) - 0x100 for delta in deltas for letter in delta.text]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("invariant", [True, False])
def test_drafts_change_no_text(kind, dtype, invariant, device):
    """Passes are recorded beside steps; texts, scores and kept states are those of steps, where the
    logits of both have the same bits."""
    torch.manual_seed(0)
    config = LMConfig(256, 2, vocab_size=500, num_heads=4, batch_invariant=invariant, **KINDS[kind])
    model = add_noise(LanguageModel(config, dtype=dtype)).to(device)
    requests = _requests(20, top=0, **({} if invariant else {"seed": None}))
    results, kept = [], []
    for drafts in (0, 7):
        prefixes = Prefixes(model, 1 << 28)
        batch = Batch(model, 16, prefixes.pool, drafts)
        engine = Engine(batch, 64, prefixes=prefixes)
        written = _deltas(engine, requests)
        results.append([[(d.text, d.finish) for d in deltas] for deltas in written])
        results[-1] += [[score for d in deltas for score in d.scores] for deltas in written]
        kept.append({*prefixes.kept})
        for request, deltas in zip(requests, written, strict=True):
            request["prediction"] = _tokens(deltas)
    assert batch.steps.recording is not None
    assert batch.passes.recording is not None
    assert engine.counts.passes > 0
    assert batch.verifies_exactly or not invariant
    print(kind, dtype, invariant, "passes are exact:", batch.verifies_exactly, vars(engine.counts))
    if invariant:
        assert results[0] == results[1]
        assert kept[0] == kept[1]
        assert engine.counts.accepted > 100


MATRICES = ("gated-delta", "delta hybrid", "m2rnn")
READ = KINDS | {
    "m2rnn": {"cell": "m2rnn", "mixers": ("matrix",) * 2, "cell_config": {"K": 64}},
    "no convolution": {"conv_kernel_size": 1},
}


def _reading_model(kind, dtype, invariant, device) -> LanguageModel:
    torch.manual_seed(0)
    config = LMConfig(256, 2, vocab_size=500, num_heads=4, batch_invariant=invariant, **READ[kind])
    return add_noise(LanguageModel(config, dtype=dtype)).to(device)


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("grain", [16, 0])
@torch.no_grad()
def test_recorded_pieces_have_the_bits_of_calls(kind, dtype, invariant, grain, device):
    """Of a text's first tokens and later ones, at a recording's first use and at others, with what
    is kept of them; and with `batch_invariant` of a whole pass."""
    model = _reading_model(kind, dtype, invariant, device)
    pools = [Prefixes(model, 1 << 28).pool for _ in range(2)]
    reader, other = Reader(model, grain, 256, pools[0]), Reader(model, grain, 0)
    assert reader.most == 256
    ends = (300, 512, 512 + 16 + 1, 900)

    def close(one: torch.Tensor, other: torch.Tensor) -> None:
        # Without marks a called matrix layer may run by segments of time, which records do not.
        if grain or invariant or kind not in MATRICES:
            assert torch.equal(one, other)
        else:
            scale = other.abs().max().item()
            accuracy = {"rtol": 0, "atol": scale * (5e-2 if dtype == torch.bfloat16 else 1e-3)}
            torch.testing.assert_close(one, other, **accuracy)

    for seed in (0, 1, 0):
        text = torch.randint(500, (900,), generator=torch.Generator().manual_seed(seed)).tolist()
        caches = [pool.new_cache() for pool in pools]
        for start, end in zip((0, *ends), ends, strict=False):
            hidden, states = reader.read(text[start:end], caches[0])
            expected = []
            for piece in pieces_of(start, end, 256, grain):
                first = caches[1].length
                expected.append(other.read(text[first : first + piece.size], caches[1]))
            close(hidden, torch.cat([one for one, _ in expected], 1))
            of_calls = torch.cat([kept for _, kept in expected])
            if grain or kind not in MATRICES:
                assert torch.equal(states, of_calls)
            if invariant:
                whole = model.hidden(torch.tensor([text[:end]], device=device))
                assert torch.equal(hidden, whole[:, start:])
        memories = [
            [layer.read() for layer in cache.layers if layer.read()[1] is not None]
            for cache in caches
        ]
        if grain or kind not in MATRICES:
            assert torch.equal(*map(pack, memories))
        for cache in caches:
            release(cache)
    assert len(reader.recordings) <= 2 * 9
    assert all(run.recording is not None for run in reader.recordings.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_kept", [True, False])
def test_texts_after_recorded_pieces_are_those_after_calls(kind, dtype, is_kept, device):
    """With `batch_invariant`, for prompts that begin alike and texts that are given up, too."""
    model, shared = _reading_model(kind, dtype, True, device), torch.randint(500, (700,)).tolist()
    requests = [
        {**request, "prompt": [*shared[: 97 * i % 650], *request["prompt"]]}
        for i, request in enumerate(_requests(20, top=0))
    ]
    results = []
    for most in (128, 0):
        prefixes = Prefixes(model, 1 << 28)
        engine = Engine(
            Batch(model, 16, prefixes.pool), 128, prefixes=prefixes, keeps_prompts=is_kept
        )
        engine.reader = Reader(model, engine.reader.grain, most, engine.batch.pool)
        assert engine.is_exact()
        for number in range(8):  # in the middle of prompts, and of texts
            given_up = Continuation(Prompt(shared[number:]), str, lambda delta: None, 100)
            engine.submit([given_up])
            for _ in range(number):
                engine.step()
            engine.cancel([given_up])
        written = _deltas(engine, requests)
        results.append([[(d.text, d.finish, d.scores) for d in deltas] for deltas in written])
        assert prefixes.pool.in_use == 0
        assert (prefixes.counts.hits > 0) == is_kept
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["gru", "gated-delta", "hybrid"])
def test_texts_depend_on_no_other_prompts(kind, device):
    """Without `batch_invariant`: how a prompt is cut follows from its length."""
    model = _reading_model(kind, torch.bfloat16, False, device)
    prefixes = Prefixes(model, 1 << 28)
    batch = Batch(model, 16, prefixes.pool)
    engine = Engine(batch, 64, prefixes=prefixes, keeps_prompts=False)
    assert engine.reader.most == 64
    requests = _requests(20)
    together = _write(engine, requests)
    assert together[::6] == [_write(engine, [request])[0] for request in requests[::6]]
    assert len(engine.reader.recordings) <= 2 * 7


@pytest.mark.parametrize("kind", ["gru", "gated-delta", "hybrid"])
def test_recordings_of_pieces_take_bounded_memory(kind, device):
    model = _reading_model(kind, torch.bfloat16, False, device)
    prefixes = Prefixes(model, 1 << 26)
    engine = Engine(Batch(model, 16, prefixes.pool), 128, prefixes=prefixes)
    generator, used = torch.Generator().manual_seed(2), []
    for _ in range(4):
        lengths = [*range(1, 260, 3), 512, 511]
        requests = [
            {
                "prompt": torch.randint(500, (length,), generator=generator).tolist(),
                "max_tokens": 3,
            }
            for length in lengths
        ]
        _write(engine, requests)
        gc.collect()
        torch.cuda.synchronize()
        used.append((torch.cuda.memory_allocated(), len(engine.reader.recordings)))
    print(kind, "bytes and recordings:", used, torch.cuda.memory_reserved())
    assert used[1:] == used[:1] * 3


@pytest.mark.parametrize("temperature", [1e-37, 1e-44, 1e-46, 5e-324])
def test_small_temperatures_have_their_limit(temperature, device):
    logits = torch.tensor([[0.0, 3.0, -torch.inf, 2.0, -6e4]], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        choices = [Choice(temperature, 1.0, 0.999), Choice(temperature, 5e-324, 0.999)]
        assert [draw(logits.to(dtype), [choice])[0] for choice in choices] == [1, 1]
    model = add_noise(LanguageModel(LMConfig(32, 2, vocab_size=50, num_heads=2))).to(device)
    prompt = torch.arange(6, device=device).view(2, 3)
    assert torch.equal(sample(model, prompt, 20, temperature), sample(model, prompt, 20, 0))


def test_broken_logits_raise_and_leave_the_gpu_usable(device):
    model = add_noise(LanguageModel(LMConfig(32, 2, vocab_size=50, num_heads=2))).to(device)
    prompt = torch.arange(6, device=device).view(2, 3)
    weight = model.lm_head.weight.detach().clone()
    for temperature in (0, 1e-46, 1.0):
        with torch.no_grad():
            model.lm_head.weight[3] = torch.nan
        with pytest.raises(FloatingPointError, match="logits of token 0 of row 0 are not finite"):
            sample(model, prompt, 20, temperature)
        with torch.no_grad():
            model.lm_head.weight.copy_(weight)
        assert sample(model, prompt, 20, temperature).shape == (2, 20)
