"""Training of a head that drafts tokens, on a frozen model."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from torch import Tensor

from pararnn.base.errors import DivergenceError, TrainingError
from pararnn.lab.folders import make_folder
from pararnn.lab.progress import say
from pararnn.lab.train.config import DataConfig, OptimiserConfig, RunConfig
from pararnn.lab.train.corpus.prepare import prepare
from pararnn.lab.train.feed import make_loader
from pararnn.lab.train.optimiser import make_adamw, set_rate
from pararnn.lab.train.setup import TrainingData, check_rows
from pararnn.lm.checkpoint import load_checkpoint, model_folder
from pararnn.lm.draft_head import DraftHead, save_draft_head
from pararnn.lm.drafts import check_drafts
from pararnn.lm.model import LanguageModel
from pararnn.lm.sample import sample

TRIED = 4
"""Rows of held-out text whose beginnings are continued at the end, greedily."""


def train_draft_head(
    model: Path | str,
    texts: str,
    *,
    drafts: int = 4,
    steps: int = 1000,
    batch: int = 16,
    length: int = 512,
    learning_rate: float = 3e-3,
    seed: int = 0,
    column: str = "text",
    suffixes: str = "",
    device: str = "cpu",
) -> float:
    """Train a `DraftHead` on a model's folder, and write it there; return its tokens a pass.

    Those are of continuations of held-out text, greedily. The head learns in float32, and is stored
    in the model's dtype. The model stays as it is. Options as of `pararnn draft`, see
    `commands.draft`.

    Raises CheckpointError for a folder without a model, DataError for texts, TrainingError for a
    folder that cannot be written into, for a model that drafts cannot be verified for, for too
    little text and rows shorter than a draft, and DivergenceError for a loss that is not finite.
    """
    folder = model_folder(model)
    make_folder(folder, "copy the model into a folder that can be written")
    frozen = load_checkpoint(folder, device).requires_grad_(False)
    try:
        check_drafts(frozen)
    except ValueError as error:
        raise TrainingError(f"{folder}: {error}") from error
    if length < 2 * drafts + 2:
        raise TrainingError(
            f"rows must have {2 * drafts + 2} tokens at least for drafts of {drafts}, got "
            f"length={length}"
        )
    config = RunConfig(
        "draft",
        frozen.config,
        DataConfig(
            texts, column=column, suffixes=suffixes, tokenizer=str(folder), sequence_length=length
        ),
        OptimiserConfig(learning_rate=learning_rate),
        steps=steps,
        batch=batch,
        device_batch=batch,
        seed=seed,
    )
    data = prepare(config.data)
    check_rows(config, data, 1)
    torch.manual_seed(seed)
    size, dtype = frozen.config.hidden_size, frozen.embed_tokens.weight.dtype
    head = train_head(frozen, DraftHead(size, drafts, device=device), config, data)
    narrow = DraftHead(size, drafts, device=device, dtype=dtype)
    narrow.load_state_dict(head.state_dict())
    save_draft_head(narrow, folder)
    narrow.price = 0.0  # so that the figure is of all drafts, also of a head that does not pay
    tried = range(min(TRIED, len(data.valid)))
    rows = torch.stack([data.valid[index]["input_ids"] for index in tried]).to(device)
    sample(frozen, rows[:, : length // 2], length - length // 2, 0, draft=narrow)
    say(f"{narrow.tokens_per_pass:.2f} tokens a pass, greedily after held-out text")
    return narrow.tokens_per_pass


def train_head(
    model: LanguageModel, head: DraftHead, config: RunConfig, data: TrainingData
) -> DraftHead:
    """Train a head on a frozen model by a run's optimiser, rows and steps; return it."""
    device, begin = head.out_proj.weight.device, time.monotonic()
    optimizer = make_adamw(head, config.optimiser)
    for step, rows in enumerate(make_loader(config, data.train, 0, 1, 0)):
        set_rate(optimizer, config.optimiser, step, config.steps)
        tokens: Tensor = rows["input_ids"].to(device)
        loss = head.loss(model, tokens, step % head.drafts)  # each token at each place of a draft
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(head.parameters(), config.optimiser.grad_norm)
        optimizer.step()
        done = step + 1
        if done % config.log_every == 0 or done == config.steps:
            if not math.isfinite(norm.item()):
                raise DivergenceError(
                    f"the gradient is NaN or infinite by step {done}: look for NaN in the model's "
                    "weights, or give a smaller learning_rate",
                    done,
                )
            say(f"step {done}: loss {loss.item():.4f}, {time.monotonic() - begin:.0f} s")
    return head
