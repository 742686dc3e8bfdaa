"""Drafts from the text on a GPU: passes recorded as graphs, and the tokens of plain sampling."""

from __future__ import annotations

import pytest
import torch
from invariance import DTYPES, model_of
from test_invariant_gpu import HEADS, WIDTH, gpu_model

from pararnn.lm import DraftHead, LanguageModel, LMConfig, Lookup, replay, sample
from pararnn.lm.fused_step import LANE_ROWS, fused_pass, takes

KINDS = ("gru", "lstm", "head-lstm", "gated-delta", "m2rnn")
LENGTH = 160


def prompt_of(period: int = 5, rows: int = 1) -> torch.Tensor:
    """Return a row that repeats itself, and others that do not."""
    generator = torch.Generator().manual_seed(period)
    first = torch.randint(48, (1, period), generator=generator).repeat(1, 4)
    others = torch.randint(48, (rows - 1, 4 * period), generator=generator)
    return torch.cat([first, others]).cuda()


def lookup_of(drafts: int, price: float) -> Lookup:
    """Return a drafter of many drafts; a price of 0 is for passes over all of them."""
    lookup = Lookup(drafts, least=1)
    lookup.price = price
    return lookup


def test_wrong_drafts_end_and_come_back() -> None:
    """Recorded steps and passes take turns: drafts are wrong at first, and then right."""
    model, prompt, late = gpu_model("gru", torch.float32), prompt_of(rows=2), 80
    plain = sample(model, prompt, LENGTH, 0)
    texts = plain.tolist()

    class Late(Lookup):
        def begin(self, model, prompts, length):
            done = [0] * len(prompts)

            def drafts(written):
                for row, tokens in enumerate(written.tokens):
                    done[row] += len(tokens)
                return [
                    [token ^ (start < late) for token in text[start : start + self.drafts]]
                    for text, start in zip(texts, done, strict=True)
                ]

            return drafts

    lookup = Late()
    assert torch.equal(sample(model, prompt, LENGTH, 0, draft=lookup), plain)
    assert lookup.counts.accepted >= 100
    assert lookup.counts.tokens - lookup.counts.accepted > 2 * late


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_sampling(
    kind: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with the log-probabilities and what the generator draws after."""
    model, record, shapes = gpu_model(kind, dtype), replay.record, []
    prompt = prompt_of(rows=rows)

    def watched(function, tokens, cache, *memory):
        shapes.append(tuple(tokens.shape))
        return record(function, tokens, cache, *memory)

    monkeypatch.setattr(replay, "record", watched)
    accepted = 0
    for temperature in (0, 0.05, 1.0):
        for drafts, price in ((3, 1.0), (7, 0.0)):
            results = []
            for lookup in (None, lookup_of(drafts, price)):
                shapes.clear()
                generator = torch.Generator("cuda").manual_seed(3)
                options = {"return_log_probs": True, "draft": lookup}
                drawn = sample(model, prompt, LENGTH, temperature, generator, **options)
                results.append((*drawn, torch.rand(3, generator=generator, device="cuda")))
            assert all(map(torch.equal, *results)), (temperature, drafts)
            assert (rows, 1 + drafts) in shapes
            assert lookup.counts.tokens == rows * (LENGTH - 1)
            accepted += lookup.counts.accepted
    assert accepted


def test_the_default_generator_is_left_as_without_drafts() -> None:
    model, ends = gpu_model("gru", torch.float32), []
    for lookup in (None, Lookup(5, least=1)):
        torch.manual_seed(4)
        ends.append((sample(model, prompt_of(), 60, draft=lookup), torch.rand(3, device="cuda")))
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_steps_and_passes_share_a_cache(dtype: torch.dtype) -> None:
    """A step by fused kernels and a pass of more tokens by calls write the same memory; a wide gap
    between the likeliest tokens leaves no choice to rounding."""
    torch.manual_seed(0)
    config = LMConfig(256, 2, vocab_size=64, num_heads=4, tie_word_embeddings=True)
    model = LanguageModel(config, device="cuda", dtype=dtype).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    lookup = Lookup(LANE_ROWS, least=1)
    plain, of_plain = sample(model, prompt_of(), LENGTH, 0, return_log_probs=True)
    ahead, of_ahead = sample(model, prompt_of(), LENGTH, 0, return_log_probs=True, draft=lookup)
    same = (plain == ahead).cumprod(1).bool()
    assert same[:, :32].all()
    bound = 1e-2 if dtype == torch.float32 else 0.5
    assert (of_plain - of_ahead)[same].abs().max() < bound
    assert lookup.counts.passes < LENGTH - 1


@pytest.mark.parametrize(("rows", "drafts"), [(1, 3), (1, 7), (2, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_fused_passes_draw_the_tokens_of_fused_steps(
    kind: str, dtype: torch.dtype, rows: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, without `batch_invariant`, of a model whose sizes have kernels for passes."""
    model = model_of(kind, dtype, False, "cuda", WIDTH, HEADS, 2 * WIDTH, norm="rms")
    prompt, sizes, accepted = prompt_of(rows=rows), [], 0
    assert takes(model, rows)
    assert takes(model, rows, 1 + drafts)

    def watched(model, tokens, cache):
        sizes.append(tuple(tokens.shape))
        return fused_pass(model, tokens, cache)

    monkeypatch.setattr("pararnn.lm.drafts.fused_pass", watched)
    for temperature in (0, 1.0):
        results = []
        for lookup in (None, lookup_of(drafts, 0.0)):
            generator = torch.Generator("cuda").manual_seed(3)
            options = {"return_log_probs": True, "draft": lookup}
            drawn = sample(model, prompt, LENGTH, temperature, generator, **options)
            results.append((*drawn, torch.rand(3, generator=generator, device="cuda")))
        assert all(map(torch.equal, *results)), temperature
        accepted += lookup.counts.accepted
    assert accepted
    assert {*sizes} == {(rows, 1 + drafts)}


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_learn_and_draft(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head trained on texts of the model: recorded drafts, and the tokens of plain sampling."""
    model, record, shapes = gpu_model("gru", dtype), replay.record, []
    size, prompt = model.config.hidden_size, prompt_of(rows=rows)
    generator = torch.Generator("cuda").manual_seed(3)
    texts = sample(model, prompt.repeat(16, 1)[:16], LENGTH, 0.3, generator)
    wide, losses = DraftHead(size, 4, device="cuda"), []
    optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-2)
    for step in range(60):
        optimizer.zero_grad()
        loss = wide.loss(model, texts, step % 4)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    head = DraftHead(size, 4, device="cuda", dtype=dtype)
    head.load_state_dict(wide.state_dict())

    def watched(function, tokens, cache, *memory):
        shapes.append(tuple(tokens.shape))
        return record(function, tokens, cache, *memory)

    monkeypatch.setattr(replay, "record", watched)
    for temperature in (0, 0.3, 1.0):
        results = []
        for draft in (None, head.eval()):
            shapes.clear()
            generator = torch.Generator("cuda").manual_seed(3)
            options = {"return_log_probs": True, "draft": draft}
            drawn = sample(model, prompt, LENGTH, temperature, generator, **options)
            results.append((*drawn, torch.rand(3, generator=generator, device="cuda")))
        assert all(map(torch.equal, *results)), temperature
        assert {(rows,), (rows, 5)} <= {*shapes}
    assert head.counts.tokens == 3 * rows * (LENGTH - 1)
    assert head.counts.accepted
