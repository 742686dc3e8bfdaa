"""Decoding with drafts: tokens that followed the last ones earlier in the text, verified by one
pass.

Saxena, "Prompt Lookup Decoding" (2023); Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding" (ICML 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.private import foreach_copy
from pararnn.lm.cache import LMCache
from pararnn.lm.draws import Drawer, Draws, join
from pararnn.lm.model import LanguageModel
from pararnn.lm.replay import Replayed, Steps, make_steady, next_logits, replayable
from pararnn.lm.states import Memory, cache_of, read_with_marks, why_keys


class LookupCounts(NamedTuple):
    """Tokens that were written, passes of the model that they took after the prompts, tokens that
    were drafted, and how many of them were right."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0


class Lookup:
    """Drafts of the next tokens, looked up in a row's text: what followed its last tokens before.

    Where the last `longest` tokens stand earlier in the text, or fewer, down to `least`, what
    followed them the last time is the draft. It may run into what it drafts, so that a text that
    repeats itself is continued. A pass over the last token and the draft says how many of its
    tokens are right. counts: `LookupCounts` of all texts so far.

    Args:
        drafts: tokens that a pass verifies.
        longest, least: tokens of an n-gram.

    Raises ValueError for numbers that are not positive, and longest < least.
    """

    def __init__(self, drafts: int = 7, *, longest: int = 4, least: int = 2) -> None:
        if drafts < 1 or not 1 <= least <= longest:
            raise ValueError(
                "drafts and least must be positive, and longest no smaller than least, got "
                f"drafts={drafts}, longest={longest}, least={least}"
            )
        self.drafts, self.longest, self.least = drafts, longest, least
        self.counts = LookupCounts()

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that a pass wrote, 1 without drafts; NaN before any pass."""
        return self.counts.tokens / self.counts.passes if self.counts.passes else math.nan

    def begin(self, tokens: Sequence[int]) -> Text:
        """Return the text of a row that begins with these tokens."""
        return Text(self, tokens)


class Text:
    """A text that grows, with an index of where its n-grams stood last."""

    def __init__(self, lookup: Lookup, tokens: Sequence[int]) -> None:
        self.lookup = lookup
        self.sizes = range(lookup.longest, lookup.least - 1, -1)
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens. The n-grams that end the text are indexed once a token follows them."""
        for token in tokens:
            for ngram in self._last():
                self.ends[ngram] = len(self.tokens)
            self.tokens.append(token)

    def draft(self) -> list[int]:
        """Return `Lookup.drafts` tokens that may come next, or none."""
        end = next((self.ends[ngram] for ngram in self._last() if ngram in self.ends), None)
        if end is None:
            return []
        found = self.tokens[end : end + self.lookup.drafts]
        return [found[i % len(found)] for i in range(self.lookup.drafts)]

    def _last(self) -> list[tuple[int, ...]]:
        """Return the n-grams that end the text, the longest first."""
        return [tuple(self.tokens[-n:]) for n in self.sizes if n <= len(self.tokens)]


def check_lookup(model: LanguageModel, rows: int) -> None:
    """Raise ValueError where drafts for rows of a model cannot be verified by one pass."""
    if rows != 1:
        raise ValueError(
            f"lookup drafts for one row, whose pace is its own, got {rows} rows: sample them one "
            "by one, or leave lookup out"
        )
    if reason := why_keys(model):
        raise ValueError(f"lookup needs states to go back to: {reason}")
    for layer, block in enumerate(model.backbone.blocks):
        if not block.mixer.marks:
            raise ValueError(
                f"layer {layer} of the model ({type(block.mixer).__name__}) does not give its "
                "memory after the steps of a pass (Mixer.marks), which lookup goes back to: leave "
                "lookup out"
            )
        if block._compiled_call_impl is not None:
            raise ValueError(
                f"block {layer} of the model is compiled, and compiled code gives no memory after "
                "the steps of a pass, which lookup goes back to: leave lookup out, or take the "
                "model before block.compile()"
            )


def draw_by_lookup(
    model: LanguageModel,
    cache: LMCache,
    logits: Tensor,
    length: int,
    draw: Drawer,
    lookup: Lookup,
    prompt: Sequence[int],
) -> Draws:
    """Draw `length` tokens (1, length) after a prompt, those that steps of one token draw.

    logits: (1, V) of the token after the prompt, whose states the cache holds. Counts in `lookup`.
    """
    step, verify = _passes(model, cache, length)
    columns, text = [draw(logits)], lookup.begin(prompt)
    text.extend(columns[0].tokens.tolist())
    passes, drafted, missing = 0, 0, length - 1
    while missing:
        draft = text.draft() if missing > 1 else []
        if draft:
            row = torch.tensor([[text.tokens[-1], *draft]], device=logits.device)
            logits, memories = verify(row)
            draws, states = draw.in_order(logits[:missing])
            tokens = draws.tokens.tolist()
            count = _right_beginning(tokens, draft)
            draw.rewind(states, count, logits.device)
            _keep(cache, memories, count)
        else:
            draws, count = draw(step(columns[-1].tokens[-1:])), 1
            tokens = draws.tokens.tolist()
        columns.append(draws.first(count))
        text.extend(tokens[:count])
        passes, drafted, missing = passes + 1, drafted + len(draft), missing - count
    new = (length - 1, passes, drafted, length - 1 - passes)
    lookup.counts = LookupCounts(*map(sum, zip(lookup.counts, new, strict=True)))
    return join(columns, lambda column: torch.cat([*column]).unsqueeze(0))


def _passes(
    model: LanguageModel, cache: LMCache, length: int
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, list[Memory]]]]:
    """Return functions of a step of a token (1,), and of a pass over tokens (1, T).

    A step writes into the cache. A pass leaves it, and returns logits (T, V) and what each layer
    remembers after each of the tokens. Both are recorded where that is faster and safe.
    """

    def verify(tokens: Tensor, cache: LMCache) -> tuple[Tensor, list[Memory]]:
        steps = range(1, tokens.shape[1] + 1)
        hidden, memories = read_with_marks(model, tokens, cache_of(cache.layers, 0), steps)
        return model.lm_head(hidden[0]), memories

    if replayable(model, length):
        return Steps(model, cache), Replayed(verify, cache)
    make_steady(cache)
    return (
        lambda token: next_logits(model, token.unsqueeze(1), cache),
        lambda tokens: verify(tokens, cache),
    )


def _right_beginning(tokens: Sequence[int], draft: Sequence[int]) -> int:
    """Return how many tokens a pass gives: those that the draft has right, and one more.

    tokens: drawn after the last token and after those of the draft.
    """
    pairs = zip(tokens[: len(draft)], draft[: len(tokens)], strict=True)
    wrong = (i for i, (token, guess) in enumerate(pairs) if token != guess)
    return next(wrong, len(tokens) - 1) + 1


def _keep(cache: LMCache, memories: Sequence[Memory], count: int) -> None:
    """Write into a cache what its layers remember after `count` tokens of a pass."""
    pairs = [
        (old, new[count - 1 : count])
        for layer, memory in zip(cache.layers, memories, strict=True)
        for old, new in zip(layer.read(), memory, strict=True)
        if old is not None and new is not None
    ]
    old, new = zip(*pairs, strict=True)
    foreach_copy(old, new)  # a few kernels for all layers
