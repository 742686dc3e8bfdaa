"""The training loop: AdamW on random windows, bounded by a budget of seconds and of steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.errors import TrainingError
from pararnn.extras import require
from pararnn.layers import clip_after_step
from pararnn.lm import LanguageModel, bits_per_byte
from pararnn.tasks import Corpus, random_windows, spread_windows
from pararnn.train.optimiser import parameter_groups


@dataclass(frozen=True)
class Recipe:
    """Settings of the training loop.

    seconds: wall-clock budget, validation included. steps: optimizer steps at most; None for no
    bound. batch, length: windows a step (B) and bytes of each (T). learning_rate: the peak;
    it rises over the first `warmup` of the run and falls to `final` of the peak by a cosine.
    weight_decay: of matrices, see `make_optimizer`. grad_norm: gradients are scaled down to it.
    validations: how often to validate, evenly over the run; valid_windows, valid_length: on how
    much. seed: of windows.
    """

    seconds: float
    steps: int | None = None
    batch: int = 16
    length: int = 128
    learning_rate: float = 4e-3
    warmup: float = 0.05
    final: float = 0.02
    weight_decay: float = 0.1
    grad_norm: float = 1.0
    validations: int = 10
    valid_windows: int = 64
    valid_length: int = 512
    seed: int = 0


class Record(NamedTuple):
    """A point of a curve: optimizer steps and seconds so far, and bits per byte."""

    step: int
    seconds: float
    bits: float


class History(NamedTuple):
    """The curves of a run: the loss of each step's batch, and the validations."""

    train: tuple[Record, ...]
    valid: tuple[Record, ...]


def train(
    model: LanguageModel, corpus: Corpus, recipe: Recipe, show_progress: bool = False
) -> History:
    """Train `model` in place; it ends in evaluation mode. At least one step is made.

    Raises MissingExtra when progress is to be shown without tqdm, TextError when the corpus is
    shorter than a window, TrainingError when a loss is NaN or infinite.
    """
    device = model.lm_head.weight.device
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = make_optimizer(model, recipe)
    clipping = clip_after_step(optimizer, model)
    held_out = spread_windows(corpus.valid, recipe.valid_windows, recipe.valid_length)
    losses: list[Record] = []
    checks: list[Record] = []
    bar = progress_bar() if show_progress else None
    start, progress = time.perf_counter(), 0.0
    while progress < 1:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * schedule(progress, recipe.warmup, recipe.final)
        windows = random_windows(corpus.train, recipe.batch, recipe.length, generator)
        bits = update(model, optimizer, windows.to(device), recipe.grad_norm)
        elapsed, step = time.perf_counter() - start, len(losses) + 1
        if not math.isfinite(bits):
            raise TrainingError(
                f"the loss is NaN or infinite in step {step}: lower the learning rate, which is "
                f"{recipe.learning_rate:g} at its peak, or grad_norm, which is {recipe.grad_norm:g}"
            )
        losses.append(Record(step, elapsed, bits))
        progress = max(elapsed / recipe.seconds, step / recipe.steps if recipe.steps else 0.0)
        if progress * recipe.validations >= len(checks) + 1 or progress >= 1:
            checks.append(Record(step, elapsed, evaluate(model, held_out)))
        if bar is not None:
            valid = f", valid {checks[-1].bits:.3f}" if checks else ""
            text = f"step {step}, train {recent(losses):.3f}{valid} bits/byte"
            bar.set_postfix_str(text, refresh=False)
            bar.update(min(progress, 1.0) - bar.n)
    clipping.remove()
    model.eval()
    if bar is not None:
        bar.close()
    return History(tuple(losses), tuple(checks))


def update(
    model: LanguageModel, optimizer: torch.optim.Optimizer, windows: Tensor, grad_norm: float
) -> float:
    """One optimizer step on windows (B, T + 1) on the model's device; the loss in bits per byte."""
    loss = bits_per_byte(model(windows[:, :-1]), windows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_norm)
    optimizer.step()
    # Reading the loss waits for the device, without which the clock would not see its work.
    return loss.item()


@torch.no_grad()
def evaluate(model: LanguageModel, windows: Tensor, batch: int = 32) -> float:
    """Bits per byte of windows (B, T + 1) on any device, each read from the zero state."""
    model.eval()
    device = model.lm_head.weight.device
    total = 0.0
    for part in windows.split(batch):
        part = part.to(device)
        total += len(part) * bits_per_byte(model(part[:, :-1]), part[:, 1:]).item()
    return total / len(windows)


def make_optimizer(model: LanguageModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices only, see `parameter_groups`; the decay scales with the rate."""
    groups = parameter_groups(model, recipe.weight_decay)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))


def schedule(progress: float, warmup: float, final: float) -> float:
    """Return the share of the peak learning rate at `progress` in [0, 1] of the run.

    Linear from `final` to 1 over the first `warmup`, then a cosine down to `final`.
    """
    if progress < warmup:
        return final + (1 - final) * progress / warmup
    rest = min((progress - warmup) / (1 - warmup), 1.0) if warmup < 1 else 1.0
    return final + (1 - final) * (1 + math.cos(math.pi * rest)) / 2


def recent(losses: list[Record], count: int = 20) -> float:
    """Return the mean of the last losses: single batches are too noisy to read."""
    bits = [record.bits for record in losses[-count:]]
    return sum(bits) / len(bits)


def progress_bar() -> Any:
    """Return a tqdm bar from 0 to 1, silent without a terminal; MissingExtra without tqdm."""
    layout = "{l_bar}{bar}| {elapsed}{postfix}"
    return require("tqdm").tqdm(
        total=1.0, desc="training", bar_format=layout, mininterval=1.0, disable=None
    )
