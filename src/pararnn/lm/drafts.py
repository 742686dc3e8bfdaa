"""Decoding with drafts: tokens that a drafter guesses, verified by one pass over all rows.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023).
"""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import Copy, type_of, upload
from pararnn.lm.cache import LayerCache, LMCache, copy_pairs, memory_pairs
from pararnn.lm.draws import Drawer, Draws, Noise, join
from pararnn.lm.fused_step import fused_pass, takes
from pararnn.lm.model import LanguageModel
from pararnn.lm.replay import Replayed, Steps, make_steady, next_logits, replayable
from pararnn.lm.states import Memory, read_once, why_keys

CREDIT = 8.0
"""What wrong drafts of a text may cost at first, in times of a step. It has at most twice that."""
HINT = 1 / 8
"""What a text earns where no pass verified a guess, and the next token was its first one."""
INCOME = 1 / 64
"""What a text earns for a token that a step wrote, where guesses are costly and none was made."""
AHEAD = 16
"""Steps without drafts that begin before the tokens of the first of them are read, at most."""


class DraftCounts(NamedTuple):
    """Tokens that were written, and passes of the model that they took after the prompts, one for
    each row that was not ended; tokens that were drafted, and how many of them were right."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0


class Written(NamedTuple):
    """New tokens of each row, from which a drafter continues.

    tokens: those since the last call; none of a row that has ended. hidden: (B, d), the head's
    inputs from which the rows' last tokens were drawn; None after a step of one token, which runs
    where no row has a draft. draw: a function of logits (B, V) and i = 0, 1, ... to the tokens (B,)
    that sampling would draw from these logits i places after the rows' last tokens. Drafts that are
    drawn so are right more often in sampled texts than the likeliest tokens are.
    """

    tokens: Sequence[Sequence[int]]
    hidden: Tensor | None
    draw: Callable[[Tensor, int], Tensor]


Guess = Callable[[Written], Sequence[Sequence[int]]]
"""Function that returns a draft for each row: at most `Drafter.drafts` tokens, or none."""


class Drafter:
    """A drafter of next tokens, for `sample(draft=)`: subclasses define `begin`.

    drafts: the most tokens of a draft; a pass verifies as many, whatever their number. counts:
    `DraftCounts` of all texts so far, to which `sample` adds. price: by how many times of a step a
    pass takes longer than a step, which its right tokens must earn (`Credits`); None for a quarter
    of `drafts`, 0 for passes over all of them. is_costly: whether a guess takes time next to a
    step, as that of a model does. It is then asked for only where a pass can be paid, and
    `Written.hidden` is known.
    """

    drafts: int
    counts = DraftCounts()
    price: float | None = None
    is_costly: bool = False

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that a pass wrote to a row, 1 without drafts; NaN before any."""
        return self.counts.tokens / self.counts.passes if self.counts.passes else math.nan

    def begin(self, model: LanguageModel, prompts: Sequence[Sequence[int]], length: int) -> Guess:
        """Return a function that drafts for these prompts' texts.

        It is called before each pass and each step of one token, or where drafts are costly before
        passes only. model: of the texts. length: tokens that it writes to each.
        """
        raise NotImplementedError(f"{type(self).__name__} must define begin")


def check_drafts(model: LanguageModel, paged: bool = False) -> None:
    """Raise ValueError where drafts for a model cannot be verified by one pass.

    paged: whether keys of attention are in pages, where those of wrong drafts are written over.
    """
    if not paged and (reason := why_keys(model)):
        raise ValueError(f"drafts need states to go back to: {reason}")
    for layer, block in enumerate(model.backbone.blocks):
        if not (block.mixer.marks or (paged and block.mixer.paged)):
            raise ValueError(
                f"layer {layer} of the model ({type(block.mixer).__name__}) does not give its "
                "memory after the steps of a pass (Mixer.marks), which drafts go back to: leave "
                "draft out"
            )
        if block._compiled_call_impl is not None:
            raise ValueError(
                f"block {layer} of the model is compiled, and compiled code gives no memory after "
                "the steps of a pass, which drafts go back to: leave draft out, or take the "
                "model before block.compile()"
            )


def price_of(drafter: Drafter) -> float:
    """Return `Drafter.price`, or what passes over so many tokens cost about on CPUs and GPUs."""
    return drafter.drafts / 4 if drafter.price is None else drafter.price


def paying(credits: Mapping[int, float], price: float) -> set[int]:
    """Return the rows that can pay equal shares of a pass's price, as many as can."""
    rows = set(credits)
    while poor := {row for row in rows if credits[row] * len(rows) < price}:
        rows = rows - poor
    return rows


def changed(credit: float, amount: float, texts: int = 1) -> float:
    """Return the credit of so many texts after it has earned an amount, or paid a negative one."""
    return min(2 * CREDIT * texts, credit + amount)


def hint(guess: Sequence[int], tokens: Sequence[int]) -> float:
    """Return what a guess earns that no pass verified. tokens: what was written then."""
    return HINT if guess and tokens and guess[0] == tokens[0] else 0.0


class Credits:
    """What passes over drafts may still cost, of a batch whose rows begin and end together.

    A pass takes longer than a step, by `price` steps, for all rows that have not ended. So it costs
    `price` for each of them, of which rows with a draft pay equal shares (`paying`). A row begins
    with `CREDIT` and earns 1 for a right token. But the batch ends with its slowest row: it has a
    credit too, of `CREDIT` for each row, pays `price` for a pass, and earns 1 for each step that
    the slowest row is ahead by. So texts take at most as much longer as this credit, where a pass
    takes no longer than said.

    A row earns `HINT` where a guess came true without a pass, and the batch where those of all its
    slowest rows did, so that a text which begins to repeat itself late drafts again. Where guesses
    are costly and none are made, steps earn `INCOME`, so that they are tried again.
    """

    def __init__(self, rows: int, price: float) -> None:
        if not 0 <= price < math.inf:
            raise ValueError(f"the price of a pass must be at least 0 and finite, got {price}")
        self.rows, self.batch, self.price = [CREDIT] * rows, CREDIT * rows, price

    def payers(
        self, missing: Sequence[int], rows: Iterable[int], passes: int = 1, earned: float = 0.0
    ) -> set[int]:
        """Return which rows can pay for so many passes; none where the batch cannot.

        missing: tokens that all rows lack. earned: what all had earned before.
        """
        price = passes * self.price
        if self.batch + earned < price:
            return set()
        active = sum(left > 0 for left in missing)
        return paying({row: self.rows[row] + earned for row in rows}, price * active)

    def steps_before(self, missing: Sequence[int], passes: int, income: float) -> int:
        """Return how many steps come before any row can pay for passes, from 1 to `AHEAD`.

        income: the most that a step earns.
        """
        for steps in range(1, min(AHEAD, max(missing))):
            later = [max(0, left - steps) for left in missing]
            rows = [row for row, left in enumerate(later) if left > 1]
            if self.payers(later, rows, passes, steps * income):
                return steps
        return min(AHEAD, max(missing))

    def settle(
        self,
        missing: Sequence[int],
        payers: set[int],
        guesses: Sequence[Sequence[int]] | None,
        new: Sequence[Sequence[int]],
    ) -> None:
        """Let rows pay for a pass, or a step without payers, and earn what was right.

        missing: tokens that rows lacked before. guesses: None where none were made.
        """
        left = [lacked - len(tokens) for lacked, tokens in zip(missing, new, strict=True)]
        if guesses is None:
            amounts = [INCOME] * len(new)
        else:
            amounts = [hint(*pair) for pair in zip(guesses, new, strict=True)]
        active = sum(lacked > 0 for lacked in missing)
        for row in payers:
            amounts[row] = len(new[row]) - 1 - self.price * active / len(payers)
        slowest = [row for row, lacked in enumerate(missing) if lacked == max(missing)]
        ahead = max(missing) - max(left) - 1
        amount = ahead - self.price if payers else min(amounts[row] for row in slowest)
        self.rows = [changed(*pair) for pair in zip(self.rows, amounts, strict=True)]
        self.batch = changed(self.batch, amount, len(new))


class Texts:
    """Texts of a batch's rows, which grow at their own pace up to a length.

    lengths: tokens of each so far. last: their last tokens.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.length = length
        self.lengths, self.last = [0] * rows, [0] * rows
        self.columns: list[Draws] = []
        self.drawn = 0  # tokens of all columns
        self.indices: list[list[int]] = [[] for _ in range(rows)]  # into all columns, joined

    @property
    def missing(self) -> list[int]:
        """Number of tokens that each row lacks."""
        return [self.length - length for length in self.lengths]

    def add(
        self, draws: Draws, read: list[int], drafts: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Add to each row what its draft had right, and one token more; return the new tokens.

        draws: (B width,), each row's tokens after its last one and after those of its draft. read:
        these tokens, on the host.
        """
        width = len(read) // len(drafts)
        start = self.drawn
        new = []
        for row, draft in enumerate(drafts):
            tokens = read[row * width : (row + 1) * width]
            left = self.length - self.lengths[row]
            count = min(left, _right_beginning(tokens, draft))
            assert count or not left, "a pass must write a token to every row that has not ended"
            self.indices[row] += range(start + row * width, start + row * width + count)
            self.lengths[row] += count
            new.append(tokens[:count])
            if count:
                self.last[row] = tokens[count - 1]
        self.columns.append(draws)
        self.drawn += len(read)
        return new

    def draws(self) -> Draws:
        """Return the draws of all rows, (B, length), when all have ended."""
        index = torch.tensor(self.indices, device=self.columns[0].tokens.device)
        return join(self.columns, lambda column: torch.cat([*column])[index])


def draw_with_drafts(
    model: LanguageModel,
    cache: LMCache,
    hidden: Tensor,
    length: int,
    draw: Drawer,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
) -> Draws:
    """Draw `length` tokens (B, length) after prompts, those that steps of one token draw.

    hidden: (B, d), the head's inputs after the prompts, whose states the cache holds. Rows that
    have ended are computed and ignored. Counts in `drafter`.
    """
    step, verify = passes_of(model, cache, length)
    device, logits = hidden.device, model.lm_head(hidden)
    noise, texts = Noise(draw, logits), Texts(len(prompts), length)

    def add(logits: Tensor, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        numbers = noise.windows(texts.lengths, len(logits) // len(prompts))
        draws = draw.draws(logits, numbers)
        return texts.add(draws, draws.tokens.tolist(), drafts)

    def draw_ahead(logits: Tensor, ahead: int) -> Tensor:
        starts = [done + ahead for done in texts.lengths]
        return draw.choose(logits, noise.windows(starts, 1))[1]

    def take_steps(count: int) -> None:
        for _ in range(count):
            tokens = steps[-1][0].tokens if steps else upload(texts.last, device)
            starts = [min(done + len(steps), length) for done in texts.lengths]
            draws = draw.draws(step(tokens), noise.windows(starts, 1))
            steps.append((draws, type_of(device).send(draws.tokens)))

    none: list[list[int]] = [[] for _ in prompts]
    guess, new, last = drafter.begin(model, prompts, length), add(logits, none), hidden.clone()
    keep = keeper_of(verify, cache, device, last)
    counts, credits = drafter.counts, Credits(len(prompts), price_of(drafter))
    income = INCOME if drafter.is_costly else HINT
    unread, is_known = new, True
    # Steps that began and are not read; steps since the last draft.
    steps, quiet = deque[tuple[Draws, Copy]](), 0
    while any(missing := texts.missing):
        drafts, guesses = none, None
        open_rows = [row for row, left in enumerate(missing) if left > 1]
        # After a step a pass without drafts makes the hidden states that costly guesses read.
        is_blind = drafter.is_costly and not is_known
        able = set() if len(steps) > 1 else credits.payers(missing, open_rows, 1 + is_blind)
        before = functools.partial(credits.steps_before, missing, 1 + is_blind, income)
        if len(steps) == 1:
            if not able:  # others run while the host reads this one
                take_steps(before() - 1)
            able = set()
        payers = able if drafter.is_costly else set()
        if open_rows and not is_blind and (payers or not drafter.is_costly):
            written = Written(unread, last if is_known else None, draw_ahead)
            guesses = _drafts(guess(written), missing, drafter.drafts)
            unread = none
            payers = able and credits.payers(missing, [r for r in open_rows if guesses[r]])
            drafts = [draft if row in payers else [] for row, draft in enumerate(guesses)]
        is_known = bool(payers)
        quiet = 0 if is_known else quiet + 1
        if is_known:
            logits, memories = verify(token_rows(texts.last, drafts, drafter.drafts, device))
            new = add(logits, drafts)
            keep(memories, [len(row) for row in new])
        else:
            if not steps:
                # Texts that have had no guess for long, which could be paid, have none soon.
                take_steps(min(1 + quiet // 4 if able else before(), AHEAD, max(missing)))
            draws, copy_of = steps.popleft()
            read = copy_of(True)
            assert read is not None
            new = texts.add(draws, read.tolist(), none)
        credits.settle(missing, payers, guesses, new)
        unread = [[*row, *more] for row, more in zip(unread, new, strict=True)]
        tokens, passes = sum(map(len, new)), sum(left > 0 for left in missing)
        more = (tokens, passes, sum(map(len, drafts)), tokens - passes)
        counts = DraftCounts(*map(sum, zip(counts, more, strict=True)))
    noise.leave(length)
    drafter.counts = counts
    return texts.draws()


def _drafts(guesses: Sequence[Sequence[int]], missing: Sequence[int], most: int) -> list[list[int]]:
    """Return the drafts of rows that lack more than a token, none of others."""
    longest = max(map(len, guesses))
    if longest > most or len(guesses) != len(missing):
        raise ValueError(
            f"a drafter returns a draft of at most {most} tokens (Drafter.drafts) for each of "
            f"{len(missing)} rows, got {len(guesses)} of up to {longest}"
        )
    return [list(guess) if left > 1 else [] for guess, left in zip(guesses, missing, strict=True)]


def token_rows(
    last: Sequence[int], drafts: Sequence[Sequence[int]], most: int, device: torch.device
) -> Tensor:
    """Return last tokens and drafts (B, 1 + most), filled up with any token."""
    rows = [
        [token, *draft, *[token] * (most - len(draft))]
        for token, draft in zip(last, drafts, strict=True)
    ]
    return upload(rows, device)


def passes_of(
    model: LanguageModel, cache: LMCache, length: int
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, list[Memory]]]]:
    """Return functions of a step of tokens (B,), and of a pass over tokens (B, T).

    A step writes into the cache. A pass leaves it, except for keys in pages, and returns logits
    (B T, V) and what each layer remembers after each of the tokens, and as the last of these the
    head's inputs. Both are recorded where that is faster and safe, and then by fused kernels where
    there are.
    """
    if replayable(model, length, paged=cache.places is not None):
        # Chosen by the first call: to look at 8-bit weights is not permitted while recording.
        choice = functools.cache(lambda *size: fused_pass if takes(model, *size) else called_pass)
        verify = Replayed(lambda tokens, cache: choice(*tokens.shape)(model, tokens, cache), cache)
        return Steps(model, cache), verify
    make_steady(cache)
    return (
        lambda tokens: next_logits(model, tokens.unsqueeze(1), cache),
        lambda tokens: called_pass(model, tokens, cache),
    )


def called_pass(
    model: LanguageModel, tokens: Tensor, cache: LMCache
) -> tuple[Tensor, list[Memory]]:
    """Return what `fused_pass` does, by calls of the model."""
    steps = range(1, tokens.shape[1] + 1)
    hidden, memories = read_once(model, tokens, copy.copy(cache), steps)
    return model.lm_head(hidden.flatten(0, 1)), [*memories, (None, hidden)]


def _right_beginning(tokens: Sequence[int], draft: Sequence[int]) -> int:
    """Return how many tokens a pass gives: those that the draft has right, and one more.

    tokens: drawn after the last token and after those of the draft.
    """
    pairs = zip(tokens[: len(draft)], draft, strict=True)
    return next((i for i, (token, guess) in enumerate(pairs) if token != guess), len(draft)) + 1


def keeper_of(
    verify: Callable[..., object], cache: LMCache, device: torch.device, last: Tensor | None = None
) -> Callable[[Sequence[Memory], Sequence[int]], None]:
    """Return a function that writes into a cache what it remembers after some tokens of a pass.

    The function takes what the pass `verify` returned, and a count of tokens for each row. It is
    recorded where passes are, whose results then are in the same tensors each time. last: (B, d),
    takes the head's inputs too.
    """
    layers = [*cache.layers, *([] if last is None else [LayerCache(None, last)])]
    pairs: list[tuple[Tensor, Tensor]] = []

    def keep(index: Tensor, _: LMCache) -> None:
        rows = torch.arange(len(index), device=device)
        copy_pairs([(old, new[rows, index]) for old, new in pairs])

    run = (
        Replayed(keep, cache) if isinstance(verify, Replayed) else functools.partial(keep, _=cache)
    )

    def keep_counts(memories: Sequence[Memory], counts: Sequence[int]) -> None:
        pairs[:] = memory_pairs(layers, memories)
        if pairs:  # there are none where all memory is in pages
            # Of rows that have ended, any.
            run(upload([max(count - 1, 0) for count in counts], device))

    return keep_counts
