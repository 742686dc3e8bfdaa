"""Sampling from a language model, token by token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pararnn.lm import replay
from pararnn.lm.cache import LMCache
from pararnn.lm.model import LanguageModel
from pararnn.lm.prefixes import Prefixes
from pararnn.lm.replay import next_logits

WARMEST = 2.0**126
"""Largest temperature that is distinct from infinity: its reciprocal is a normal float32."""


@torch.no_grad()
def sample(
    model: LanguageModel,
    prompt: Tensor,
    length: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    state: LMCache | None = None,
    prefixes: Prefixes | None = None,
    return_log_probs: bool = False,
) -> Any:
    """Draw `length` tokens after each prompt: (B, T) with T >= 1 to int64 (B, length).

    state: what the model remembers of tokens before the prompts, of B rows or of one for all. It
    stays as it is. prefixes: states of earlier prompts, from which those that begin alike continue
    (then rows are read one by one), and which gets those of these prompts.

    Temperature 0 takes the likeliest token. `generator` is on the model's device. On a GPU a model
    of recurrent mixers only records the step of a token and replays it, where that is faster and no
    hook or mode sees the calls: see `pararnn.lm.replay`. A logit of -inf is a chance of zero.
    return_log_probs: return the tokens and their log-probabilities, (B, length) in float32, which
    are the model's at temperature 1.

    Raises ValueError for an empty prompt, for a length or temperature that is negative or not
    finite, for both a state and prefixes, for a state of another number of rows and prefixes of
    another model; FloatingPointError where a logit is NaN or +inf, or all of a row are -inf.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be (B, T) with T >= 1, got {tuple(prompt.shape)}")
    if length < 0 or not 0 <= temperature < math.inf:
        raise ValueError(
            "length and temperature may not be negative, and temperature must be finite, got "
            f"{length} and {temperature}"
        )
    if not length:
        empty = prompt.new_empty(len(prompt), 0, dtype=torch.long)
        return (empty, empty.float()) if return_log_probs else empty
    if state is not None and prefixes is not None:
        raise ValueError("prefixes are of whole texts: give them, or the state of earlier tokens")
    if prefixes is None:
        cache = model.new_cache() if state is None else state.fork(len(prompt))
        logits = next_logits(model, prompt, cache)
    else:
        cache, hidden = prefixes.read_rows(model, prompt)
        logits = model.lm_head(hidden)
    log_probs = list[Tensor]()
    draws = [_draw(logits, temperature, generator)]
    steps = replay.Steps(model, cache) if replay.replayable(model, length) else None
    while len(draws) < length:
        token, _ = draws[-1]
        if return_log_probs:
            log_probs.append(model.lm_head.log_prob(logits, token))
        logits = steps(token) if steps else next_logits(model, token.unsqueeze(1), cache)
        draws.append(_draw(logits, temperature, generator))
    tokens, largest = (torch.stack(columns, 1) for columns in zip(*draws, strict=True))
    if not largest.isfinite().all():  # looked at once: on a GPU the host waits for it
        row, step = (~largest.isfinite()).nonzero()[0].tolist()
        raise FloatingPointError(
            f"logits of token {step} of row {row} are not finite, the largest is "
            f"{largest[row, step].item()}: look for NaN in the weights, or for a dtype that "
            "overflows"
        )
    if return_log_probs:
        log_probs.append(model.lm_head.log_prob(logits, tokens[:, -1]))
        return tokens, torch.stack(log_probs, 1)
    return tokens


def _draw(
    logits: Tensor, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row, and return it and the row's largest logit, (B,)."""
    largest, likeliest = logits.max(-1)
    if temperature == 0:
        return likeliest, largest
    # Rows of NaN, which raise in the end: multinomial would end the whole process's use of a GPU.
    chances = scaled(logits, temperature).softmax(-1).nan_to_num_(1.0)
    return torch.multinomial(chances, 1, generator=generator).squeeze(-1), largest


def scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return (logits - the largest of their row) / temperature, in float32 or wider.

    The largest have 0 at any temperature. So the likeliest token is certain where the others'
    quotients overflow, and where the dtype has no such temperature but 0.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    gaps = logits - logits.amax(-1, keepdim=True)
    warm = torch.as_tensor(temperature).clamp_max(WARMEST).to(gaps.dtype)
    return torch.where(gaps == 0, gaps, gaps / warm)
