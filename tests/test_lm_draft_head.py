"""A trained head's drafts: right where the text is certain, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from lm_kinds import VOCABULARY
from recordings import recordings_of_run as recordings_of_run
from torch import Tensor, nn

from pararnn.lm import (
    CheckpointError,
    DraftHead,
    LanguageModel,
    LMConfig,
    load_checkpoint,
    load_draft_head,
    sample,
    save_checkpoint,
    save_draft_head,
)
from pararnn.lm.drafts import DraftCounts, Written
from pararnn.lm.replay import Recording

WIDTH, DRAFTS, LENGTH = 32, 4, 30
WORDS = torch.randint(2, VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(5))
"""Words of five tokens; the first of the next word is left to chance."""


def text(rows: int, words: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return WORDS[torch.randint(len(WORDS), (rows, words), generator=generator)].flatten(1)


def train(module: nn.Module, loss_of, steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 10) * (1 - step / steps)
        optimizer.zero_grad()
        loss_of(text(16, 5, step), step).backward()
        optimizer.step()


@cache
def trained() -> tuple[LanguageModel, DraftHead]:
    torch.manual_seed(0)
    config = LMConfig(WIDTH, 1, vocab_size=VOCABULARY, num_heads=2)
    model = LanguageModel(config)
    train(model, lambda rows, step: model.loss(rows), 40, 2e-2)
    head = DraftHead(WIDTH, DRAFTS)
    train(head, lambda rows, step: head.loss(model, rows, step % DRAFTS), 50, 4e-2)
    exact = LanguageModel(replace(config, batch_invariant=True))
    exact.load_state_dict(model.state_dict())
    return exact.eval(), head.eval()


def counted(
    model: LanguageModel, head: DraftHead, temperature: float, prompt: Tensor
) -> DraftCounts:
    """Check that drafts change nothing that plain sampling gives, and return their counts."""
    results, head.counts = [], DraftCounts()
    for draft in (None, head):
        generator = torch.Generator().manual_seed(1)
        options = {"return_log_probs": True, "draft": draft}
        drawn = sample(model, prompt, LENGTH, temperature, generator, **options)
        results.append((*drawn, torch.rand(3, generator=generator)))
    assert all(map(torch.equal, *results))
    return head.counts


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_trained_head_writes_words_by_passes(temperature: float) -> None:
    """Also where tokens are drawn: the head draws by the same numbers."""
    model, head = trained()
    prompt = text(3, 3, seed=999)
    counts = counted(model, head, temperature, prompt)
    assert counts.tokens == 3 * (LENGTH - 1)
    assert counts.accepted == counts.tokens - counts.passes
    assert counts.tokens > 2 * counts.passes
    torch.manual_seed(0)
    fresh = counted(model, DraftHead(WIDTH, DRAFTS), temperature, prompt)
    assert fresh.tokens < 1.5 * fresh.passes


def test_drawn_drafts_are_right_where_chances_are_known() -> None:
    """A head draws as the model does, where both have the same logits, which no token decides."""
    model = LanguageModel(trained()[0].config).eval()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(
            model.embed_tokens.weight[:1].expand(VOCABULARY, -1).clone()
        )
        model.backbone.blocks[0].mixer.out_proj.weight.zero_()
    head = DraftHead(WIDTH, DRAFTS)
    counts = counted(model, head, 1.0, text(3, 1, seed=994))
    assert counts.passes == 3 * -(-(LENGTH - 1) // (DRAFTS + 1))


def test_recorded_drafts_are_the_same(recordings_of_run: list[Recording]) -> None:
    model, head = trained()
    prompt = text(2, 3, seed=998)
    counts = counted(model, head, 0.8, prompt)
    shapes = {tuple(recording.tokens.shape) for recording in recordings_of_run}
    assert {(2,), (2, 1 + DRAFTS)} <= shapes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pararnn.lm.replay._records", lambda device: False)
        assert counted(model, head, 0.8, prompt) == counts


def test_steps_draft_what_training_sees() -> None:
    """Draft by draft, from the hidden state and the tokens drafted so far."""
    model, head = trained()
    tokens = text(3, 3, seed=997)
    with torch.no_grad():
        hidden = model.hidden(tokens)[:, -1]
        guess = head.begin(model, tokens.tolist(), 2)
        last = model.lm_head(hidden).argmax(-1)
        for _ in range(2):  # the second starts anew
            new = [[token] for token in last.tolist()]
            drafts = guess(Written(new, hidden, lambda logits, ahead: logits.argmax(-1)))
            row = torch.cat([last.unsqueeze(1), torch.tensor(drafts)], 1)
            inputs = head(hidden, model.embed_tokens(row[:, :-1]))
            assert torch.equal(model.lm_head(inputs).argmax(-1), row[:, 1:])


def test_the_loss_is_that_of_each_window() -> None:
    model, head = trained()
    rows, logs = text(2, 4, seed=996), []
    with torch.no_grad():
        hidden = model.hidden(rows)
        for place in range(1, rows.shape[1] - DRAFTS - 1, DRAFTS):
            window = rows[:, place + 1 : place + 2 + DRAFTS]
            inputs = head(hidden[:, place], model.embed_tokens(window[:, :-1]))
            logits = model.lm_head(inputs).log_softmax(-1)
            logs.append(logits.gather(2, window[:, 1:, None]).squeeze(2))
        expected = -torch.cat(logs, 1).mean()
    loss = head.loss(model, rows, 1)
    torch.testing.assert_close(loss, expected)
    assert rows.shape[1] - 2 - 1 >= len(logs) * DRAFTS > rows.shape[1] - 2 - 1 - DRAFTS
    loss.backward()
    assert all(p.grad is not None for p in head.parameters())
    model.zero_grad()
    head.loss(model, rows, 0).backward()
    assert all(p.grad is None for p in model.parameters())
    head.zero_grad()
    with pytest.raises(ValueError, match=r"after token 3 needs rows of 9 tokens, got 8"):
        head.loss(model, rows[:, :8], 3)


def test_wide_heads_learn_on_narrow_models() -> None:
    model = LanguageModel(trained()[0].config, dtype=torch.bfloat16)
    head = DraftHead(WIDTH, 2)
    head.loss(model, text(2, 3, 1)).backward()
    assert head.out_proj.weight.grad.dtype == torch.float32
    narrow = DraftHead(WIDTH, 2, dtype=torch.bfloat16)
    narrow.load_state_dict(head.state_dict())
    assert narrow.layer.bias.dtype == torch.float32
    counted(model, narrow, 0.8, text(2, 3, seed=999))


def test_heads_are_kept_beside_their_models(tmp_path: Path) -> None:
    model, head = trained()
    with pytest.raises(CheckpointError, match="there is no model in"):
        save_draft_head(head, tmp_path)
    save_checkpoint(model, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"no draft head in .*: train one by `pararnn draft /"
    ):
        load_draft_head(tmp_path)
    save_draft_head(head, tmp_path)
    loaded = load_draft_head(tmp_path)
    prompt = text(2, 3, seed=995)
    assert counted(load_checkpoint(tmp_path), loaded, 0, prompt) == counted(model, head, 0, prompt)
    (tmp_path / "draft_head.json").write_text(
        '{"hidden_size": 16, "drafts": 2, "dtype": "float32"}'
    )
    with pytest.raises(CheckpointError, match="holds a weight of another shape"):
        load_draft_head(tmp_path)
    for wrong in ("[", "{}", '{"hidden_size": 0, "drafts": 2, "dtype": "float32"}'):
        (tmp_path / "draft_head.json").write_text(wrong)
        with pytest.raises(CheckpointError, match="describes no draft head"):
            load_draft_head(tmp_path)


def test_heads_of_other_models_are_refused() -> None:
    model, _ = trained()
    for head in (DraftHead(16), DraftHead(WIDTH, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"the draft head is of hidden_size=.* and the model"):
            sample(model, text(1, 2, 0), 5, draft=head)
    for sizes in ((0, 4), (16, 0)):
        with pytest.raises(ValueError, match="must be positive"):
            DraftHead(*sizes)
