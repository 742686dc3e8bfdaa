"""Sampling from a language model, token by token."""

from __future__ import annotations

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
    if not length:
        return prompt.new_empty(len(prompt), 0, dtype=torch.long)
    cache = model.new_cache()
    tokens = [_draw(next_logits(model, prompt, cache), temperature, generator)]
    steps = replay.Steps(model, cache) if replay.replayable(model, length) else None
    while len(tokens) < length:
        token = tokens[-1]
        logits = steps(token) if steps else next_logits(model, token.unsqueeze(1), cache)
        tokens.append(_draw(logits, temperature, generator))
    return torch.stack(tokens, 1)


def _draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    chances = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(chances, 1, generator=generator).squeeze(-1)
