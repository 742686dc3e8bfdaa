"""Sampling from a language model, token by token."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pararnn.lm import replay
from pararnn.lm.cache import LMCache
from pararnn.lm.drafts import Drafter, check_drafts, draw_with_drafts
from pararnn.lm.draws import Drawer, Draws, join
from pararnn.lm.model import LanguageModel
from pararnn.lm.prefixes import Prefixes
from pararnn.lm.replay import next_logits


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
    draft: Drafter | None = None,
    return_log_probs: bool = False,
) -> Any:
    """Draw `length` tokens after each prompt: (B, T) with T >= 1 to int64 (B, length).

    state: what the model remembers of tokens before the prompts, of B rows or of one for all. It
    stays as it is. prefixes: states of earlier prompts, from which those that begin alike continue
    (then rows are read one by one), and which gets those of these prompts.

    Temperature 0 takes the likeliest token. `generator` is on the model's device. On a GPU the step
    of a token is recorded and replayed, where that is faster and no hook or mode sees the calls:
    see `pararnn.lm.replay`. A logit of -inf is a chance of zero.
    draft: a drafter of tokens, such as `Lookup` or `DraftHead`, which are verified by one pass;
    rows go on at their own pace, and drafts that do not pay for their passes end
    (`pararnn.lm.drafts.Credits`). The tokens are those without it where the logits of both have the
    same bits, as with `batch_invariant`; else they may differ where rounding decides. For models
    whose layers are all recurrent and not compiled.
    return_log_probs: return the tokens and their log-probabilities, (B, length) in float32, which
    are the model's at temperature 1.

    Raises ValueError for an empty prompt, for a length or temperature that is negative or not
    finite, for both a state and prefixes, for a state of another number of rows and prefixes of
    another model, for drafts of another model;
    FloatingPointError where a logit is NaN or +inf, or all of a row are -inf.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be (B, T) with T >= 1, got {tuple(prompt.shape)}")
    if length < 0 or not 0 <= temperature < math.inf:
        raise ValueError(
            "length and temperature may not be negative, and temperature must be finite, got "
            f"{length} and {temperature}"
        )
    if not length or not len(prompt):
        empty = prompt.new_empty(len(prompt), length, dtype=torch.long)
        return (empty, empty.float()) if return_log_probs else empty
    if draft is not None:
        check_drafts(model)
    if state is not None and prefixes is not None:
        raise ValueError("prefixes are of whole texts: give them, or the state of earlier tokens")
    if prefixes is None:
        cache = model.new_cache() if state is None else state.fork(len(prompt))
        hidden = model.hidden(prompt, cache)[:, -1]
    else:
        cache, hidden = prefixes.read_rows(model, prompt)
    draw = Drawer(model.lm_head, temperature, generator, return_log_probs)
    if draft is None:
        drawn = _draw_by_steps(model, cache, hidden, length, draw)
    else:
        drawn = draw_with_drafts(model, cache, hidden, length, draw, draft, prompt.tolist())
    tokens, largest, log_probs = drawn
    if not largest.isfinite().all():  # looked at once: on a GPU the host waits for it
        row, step = (~largest.isfinite()).nonzero()[0].tolist()
        raise FloatingPointError(
            f"logits of token {step} of row {row} are not finite, the largest is "
            f"{largest[row, step].item()}: look for NaN in the weights, or for a dtype that "
            "overflows"
        )
    return (tokens, log_probs) if return_log_probs else tokens


def _draw_by_steps(
    model: LanguageModel, cache: LMCache, hidden: Tensor, length: int, draw: Drawer
) -> Draws:
    """Draw `length` tokens of each row by steps of one token, from the head's inputs (B, d)."""
    draws = [draw(model.lm_head(hidden))]
    records = replay.replayable(model, length, replay.takes_pages_of(cache))
    steps = replay.Steps(model, cache, length) if records else None
    while len(draws) < length:
        token = draws[-1].tokens
        draws.append(draw(steps(token) if steps else next_logits(model, token.unsqueeze(1), cache)))
    return join(draws, partial(torch.stack, dim=1))
