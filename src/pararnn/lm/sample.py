"""Sampling from a language model, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pararnn.lm import replay
from pararnn.lm.model import LanguageModel
from pararnn.lm.replay import next_logits


@torch.no_grad()
def sample(
    model: LanguageModel,
    prompt: Tensor,
    length: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw `length` tokens after each prompt: (B, T) with T >= 1 to int64 (B, length).

    Temperature 0 takes the likeliest token. `generator` is on the model's device. On a GPU a model
    of recurrent mixers only records the step of a token and replays it, where that is faster and no
    hook or mode sees the calls: see `pararnn.lm.replay`. Raises ValueError for an empty prompt, a
    negative length or a negative temperature.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be (B, T) with T >= 1, got {tuple(prompt.shape)}")
    if length < 0 or temperature < 0:
        raise ValueError(
            f"length and temperature may not be negative, got {length} and {temperature}"
        )
    tokens = list(_tokens(model, prompt, length, temperature, generator))
    return torch.stack(tokens, 1) if tokens else prompt.new_empty(len(prompt), 0, dtype=torch.long)


def _tokens(
    model: LanguageModel,
    prompt: Tensor,
    length: int,
    temperature: float,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    if not length:
        return
    cache = model.new_cache()
    token = _draw(next_logits(model, prompt, cache), temperature, generator)
    yield token
    steps = replay.Steps(model, cache) if replay.replayable(model, length) else None
    for _ in range(length - 1):
        logits = steps(token) if steps else next_logits(model, token.unsqueeze(1), cache)
        token = _draw(logits, temperature, generator)
        yield token


def _draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    chances = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(chances, 1, generator=generator).squeeze(-1)
