"""`pararnn draft`: a head that drafts, trained on a model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from pararnn.base.errors import DivergenceError, TrainingError
from pararnn.lab import cli
from pararnn.lab.train.corpus.sources import DataError
from pararnn.lab.train.corpus.tokenizer import ByteTokenizer
from pararnn.lab.train.draft import train_draft_head
from pararnn.lm import (
    LanguageModel,
    LMConfig,
    load_checkpoint,
    load_draft_head,
    sample,
    save_checkpoint,
)

LINE = b"the same words again and again, "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of bytes that has learned a line, and text.txt."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(LINE * 400)
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(32, 1, vocab_size=ByteTokenizer().vocabulary, num_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model.loss(torch.tensor([list(LINE * 3)])).backward()
        optimizer.step()
    save_checkpoint(model, "model")
    ByteTokenizer().save(Path("model"))
    return tmp_path / "model"


def test_the_command_trains_a_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["draft", "model", "--texts", "text.txt", "--drafts", "3", "--steps", "40"]
    words += ["--batch", "4", "--length", "66", "--learning-rate", "3e-2", "--device", "cpu"]
    assert cli.main(words) == 0
    out = capsys.readouterr()
    assert "step 40: loss" in out.err
    head, model = load_draft_head(folder), load_checkpoint(folder)
    prompt = torch.tensor([list(LINE), list(LINE[7:] + LINE[:7])])
    texts = sample(model, prompt, 50, 0, draft=head)
    assert torch.equal(texts, sample(model, prompt, 50, 0))
    assert head.tokens_per_pass > 2
    assert float(out.out) > 2


def test_what_cannot_be_trained_is_refused(folder: Path) -> None:
    with pytest.raises(TrainingError, match="must have 10 tokens at least for drafts of 4"):
        train_draft_head(folder, "text.txt", length=9)
    with pytest.raises(DataError, match=r"data\.sequence_length \(--length of `pararnn draft`\)"):
        train_draft_head(folder, "text.txt", length=10**6)
    with pytest.raises(TrainingError, match="the train data has"):
        train_draft_head(folder, "text.txt", batch=1000, length=66)
    model = load_checkpoint(folder)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    save_checkpoint(model, folder)
    with pytest.raises(DivergenceError, match="NaN or infinite by step 10"):
        train_draft_head(folder, "text.txt", batch=2, length=40, steps=20)
    mixed = LMConfig(
        16, 1, vocab_size=ByteTokenizer().vocabulary, num_heads=2, mixers=("attention",)
    )
    save_checkpoint(LanguageModel(mixed), folder)
    with pytest.raises(TrainingError, match="drafts need states to go back to"):
        train_draft_head(folder, "text.txt")
    assert not (folder / "draft_head.json").exists()
