"""The queue of texts and the rows that they run in: each call computes a token of every row."""

from __future__ import annotations

import itertools
import random
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.lab.serving.batch import Batch
from pararnn.lab.serving.drafts import DraftCounts, Drafts
from pararnn.lab.serving.draw import Choice, Score, draw, scores
from pararnn.lm.beginnings import Names
from pararnn.lm.cache import LMCache
from pararnn.lm.drafts import paying
from pararnn.lm.lookup import Lookup, Text
from pararnn.lm.pages import Page
from pararnn.lm.prefixes import Prefixes, release
from pararnn.lm.reading import Reader
from pararnn.lm.states import pack
from pararnn.lm.text import CONTEXT, Decoder, Stops

SCORED = 128
"""Number of a prompt's tokens whose logits are made at once for scores."""


class QueueFull(Exception):
    """More texts wait than the queue has places for."""


class TextTooLong(Exception):
    """A text's keys need more pages than there are, whatever else runs."""


class EngineEnded(Exception):
    """The engine does not run any more, as the server is being stopped."""


class Delta(NamedTuple):
    """Text that was added, and the number of tokens so far.

    scores: of tokens that were added, where they are wanted. finish: None, or why the text has
    ended: "stop" at an end token or a stop string, "length" at the largest number of tokens,
    "error" where the model failed; then `text` says how.
    """

    text: str
    tokens: int
    finish: str | None = None
    scores: tuple[Score, ...] = ()


@dataclass(eq=False)
class Prompt:
    """Tokens to continue, and the model's memory of those that it has read.

    Several samples share one: it is read once, or again where its pages had to go. A reference to
    it goes with the last of them. reuses: whether it may continue from states of earlier texts.
    cached: tokens that it has from them, None before it is read. top: with how many likeliest
    tokens its own ones are scored; None for no scores, which need all of it to be read. prediction:
    tokens that the texts may have, in which drafts are looked up too. text: where they are. scores:
    of its tokens from the second on.
    """

    tokens: Sequence[int]
    reuses: bool = True
    top: int | None = None
    prediction: Sequence[int] = ()
    position: int = 0
    cached: int | None = None
    memory: LMCache | None = None
    names: Names | None = None
    logits: Tensor | None = None
    text: Text | None = None
    scores: list[Score] = field(default_factory=list)

    def drafts(self, lookup: Lookup) -> Drafts:
        """Return the drafts of a text after this prompt."""
        return Drafts(partial(self._text, lookup))

    def _text(self, lookup: Lookup) -> Text:
        """Return the text that goes on from this prompt."""
        if self.text is None:
            # The prompt's end stands again after the prediction, which so follows it.
            ends = self.tokens[-lookup.longest :] if self.prediction else ()
            tokens = [*self.tokens, *self.prediction, *ends]
            self.text = lookup.text(tokens, later=len(self.tokens))
        return self.text.fork()

    def forget(self) -> None:
        """Give back the pages of what was read; it is read again when it is needed."""
        if self.memory is not None:
            release(self.memory)
        self.memory, self.position = None, 0


@dataclass(eq=False)
class Continuation:
    """One text that is written after a prompt.

    deliver: called with each `Delta`, in the engine's thread. max_tokens: 0 reads the prompt only.
    ends: tokens that end the text. seed: decides all draws; None is another each time. top: with
    how many likeliest tokens those of the text are scored; None for no scores. logprob: sum of the
    scores, with the end token's. number: in order of arrival. written: the text's tokens. given:
    how many of them the row has read; a text that has left its row reads those that it had again.
    drafts: None where none are looked up. is_over: whether its end was delivered.
    """

    prompt: Prompt
    decode: Callable[[list[int]], str]
    deliver: Callable[[Delta], None]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | str | None = None
    stop: Sequence[str] = ()
    ends: Collection[int] = ()
    top: int | None = None
    is_cancelled: bool = False
    number: int = 0
    written: list[int] = field(default_factory=list)
    given: int = 0
    tokens: int = 0
    names: Names | None = None
    drafts: Drafts | None = None
    logprob: float = 0.0
    is_over: bool = False
    scores: list[Score] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed if self.seed is None else str(self.seed))
        self.stops = Stops(self.stop)

    @cached_property
    def decoder(self) -> Decoder:
        """What makes text of the tokens, in the engine's thread."""
        return Decoder(self.decode, self.prompt.tokens[-CONTEXT:])

    def choice(self) -> Choice:
        """Return the rule of the next draw."""
        number = self.random.random() if self.temperature > 0 else 0.0
        return Choice(self.temperature, self.top_p, number, self.top_k)

    def add(self, token: int, score: Score | None = None) -> bool:
        """Add a token, deliver the text that it brings, and return whether it was the last."""
        self.is_over = self._add(token, score)
        return self.is_over

    def _add(self, token: int, score: Score | None) -> bool:
        self.tokens += 1
        self.written.append(token)
        if self.drafts is not None:
            self.drafts.extend(token)
        if token < 0:
            self.fail("the model's logits are not finite")
            return True
        if not self.max_tokens:
            self.tokens = 0
            self.deliver(Delta("", 0, "length"))
            return True
        is_end = token in self.ends
        if score is not None:
            self.logprob += score.logprob
            self.scores += [] if is_end else [score]
        text = self.stops.add(self.decoder.end() if is_end else self.decoder.add(token))
        is_last = is_end or self.tokens >= self.max_tokens
        if is_last:
            text += self.stops.add(self.decoder.end())
        is_stop = is_end or self.stops.is_found
        finish = "stop" if is_stop else "length" if is_last else None
        if finish:
            text += self.stops.end()
        if text or finish:
            self.deliver(Delta(text, self.tokens, finish, tuple(self.scores)))
            self.scores.clear()
        return finish is not None

    def fail(self, message: str) -> None:
        """Deliver that the text cannot be written."""
        self.deliver(Delta(message, self.tokens, "error"))


class Engine:
    """Continuations of prompts in a running batch.

    Where keys of attention are in pages, a text that would need more than all of them is refused. A
    text gets a row when there is room for the tokens that it has. If the texts in rows need more
    than there is, the youngest one leaves its row, and waits: it reads its prompt again, and its
    tokens by the same steps as before, so that it has the same bits.

    Args:
        batch: the rows.
        chunk: the largest number of prompt tokens that are read between two tokens of the rows.
            Prompts are cut at its multiples, and on a GPU into recorded pieces (`Reader`).
        places: number of texts that may wait for a row.
        prefixes: states of earlier texts, from which prompts that begin alike continue, and the
            pages of the batch's keys; None keeps none.
        keeps_answers: whether those of texts that are written are kept too.
        keeps_prompts: whether any are kept.

    `step` does the work, in one thread; `submit` and `cancel` may be called from others.
    """

    def __init__(
        self,
        batch: Batch,
        chunk: int = 512,
        places: int = 256,
        prefixes: Prefixes | None = None,
        keeps_answers: bool = True,
        keeps_prompts: bool = True,
    ) -> None:
        self.batch, self.chunk, self.places = batch, chunk, places
        self.prefixes, self.keeps_answers = prefixes, keeps_answers
        self.keeps_prompts = keeps_prompts
        grain = prefixes.grain if prefixes is not None and keeps_prompts else 0
        self.reader = Reader(batch.model, grain, chunk, batch.pool)
        self.reading: list[Prompt] = []  # prompts that have pages, the youngest last
        self.preempted, self.numbers = 0, itertools.count()
        self.lookup = Lookup(batch.drafts) if batch.drafts else None
        self.counts = DraftCounts()
        self.rows: list[Continuation | None] = [None] * batch.rows
        self.waiting: deque[Continuation] = deque()
        self.condition = threading.Condition()
        self.is_running = True

    @property
    def active(self) -> int:
        """Number of rows in use."""
        return sum(text is not None for text in self.rows)

    @property
    def capacity(self) -> int:
        """Largest number of texts at once: in rows and waiting."""
        return self.places + self.batch.rows

    @property
    def longest(self) -> int | None:
        """Largest number of tokens of a prompt and its text together, None for any."""
        return None if self.batch.pool is None else self.batch.pool.longest

    def submit(self, texts: Sequence[Continuation]) -> None:
        """Let texts wait for rows; none of them waits where there are too many (QueueFull), or one
        is too long (TextTooLong)."""
        for text in texts:
            tokens = len(text.prompt.tokens) + text.max_tokens
            if self.longest is not None and tokens > self.longest:
                raise TextTooLong(
                    f"the memory of keys holds a text of {self.longest} tokens, got a prompt of "
                    f"{len(text.prompt.tokens)} and max_tokens = {text.max_tokens}: ask for fewer, "
                    "or give more bytes"
                )
        with self.condition:
            if not self.is_running:
                raise EngineEnded("the server is being stopped: start it again")
            if self.active + len(self.waiting) + len(texts) > self.capacity:
                raise QueueFull(
                    f"{len(self.waiting)} texts wait for {self.batch.rows} rows, and the queue has "
                    f"{self.places} places: try again later"
                )
            for text in texts:
                text.number = next(self.numbers)
            self.waiting.extend(texts)
            self.condition.notify()

    def cancel(self, texts: Sequence[Continuation]) -> None:
        """Give up texts: their rows are free from the next step on."""
        with self.condition:
            for text in texts:
                text.is_cancelled = True
            self.condition.notify()

    def run(self) -> None:
        """Work until `stop`. What fails, and the end, is told to those whose texts were running."""
        try:
            while self.is_running:
                if not self._try():
                    with self.condition:
                        self.condition.wait_for(lambda: self.waiting or not self.is_running)
        finally:
            self.stop()
            self._fail("the server is being stopped")

    def _try(self) -> bool:
        try:
            return self.step()
        except Exception as error:
            traceback.print_exc()
            self._fail(f"{type(error).__name__}: {error}")
            return True

    def stop(self) -> None:
        """End `run`."""
        with self.condition:
            self.is_running = False
            self.condition.notify()

    def step(self) -> bool:
        """Read prompts, up to a chunk, and write a token of every row; False if none was to do."""
        self._drop_cancelled()
        is_busy = self._admit()
        self._make_room()
        if not self.active:
            return is_busy
        tokens = [0 if text is None else text.written[text.given] for text in self.rows]
        drafts = self._drafts()
        is_pass = any(drafts)
        if is_pass:
            logits = self.batch.verify(tokens, drafts)
        else:
            logits = self.batch.step(tokens).unsqueeze(1)
        counts, ended = self._add(logits, drafts)
        self._keep_answers(
            [[token, *draft] for token, draft in zip(tokens, drafts, strict=True)], counts
        )
        if is_pass:
            self.batch.keep(counts)
            self._settle(drafts, counts)
        for row in ended:
            self._leave(row)
        return True

    def _drafts(self) -> list[list[int]]:
        """Return a draft for each row, none where texts cannot pay for a pass or have no room."""
        none: list[list[int]] = [[] for _ in self.rows]
        texts = {row: text for row, text in enumerate(self.rows) if text is not None}
        # A seed promises the same text, and so the same bits.
        has_seed = any(text.seed is not None for text in texts.values())
        if self.lookup is None or (has_seed and not self.batch.verifies_exactly):
            return none
        guesses = {
            row: (text.drafts, draft)
            for row, text in texts.items()
            # A text that was in a row before has drawn its next tokens.
            if text.drafts is not None and text.given + 1 == len(text.written)
            if (draft := text.drafts.guess(text.max_tokens - text.tokens - 1))
        }
        rows = paying({row: one.credit for row, (one, _) in guesses.items()}, self.active)
        drafts = [guesses[row][1] if row in rows else [] for row in range(len(self.rows))]
        return drafts if self.batch.has_room(drafts) else none

    def _add(self, logits: Tensor, drafts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Add tokens to texts as far as their drafts are right, and one more.

        logits: (rows, W, V), after the tokens that the rows read. Tokens are drawn one after the
        other, as by steps. Returns how many tokens each row has read so, and rows whose texts have
        ended.
        """
        counts, ended = [0] * len(self.rows), []
        running = [row for row, text in enumerate(self.rows) if text is not None]
        for index in range(logits.shape[1]):
            texts: list[Continuation | None] = [None] * len(self.rows)
            for row in running:
                text = self.rows[row]
                assert text is not None
                counts[row] += 1
                text.given += 1
                texts[row] = text if text.given == len(text.written) else None
            drawn = self._draw(logits[:, index], texts)
            running = []
            for row, (text, (token, score)) in enumerate(zip(texts, drawn, strict=True)):
                if text is None:
                    continue
                if text.add(token, score):
                    ended.append(row)
                elif drafts[row][index : index + 1] == [token]:
                    running.append(row)
            if not running:
                break
        return counts, ended

    def _settle(self, drafts: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """Let the texts with drafts pay for a pass, and count what was right."""
        share = self.active / sum(map(bool, drafts))
        self.counts.passes += 1
        for text, draft, count in zip(self.rows, drafts, counts, strict=True):
            if draft and text is not None and text.drafts is not None:
                text.drafts.settle(share, len(draft), count - 1)
                self.counts.drafted += len(draft)
                self.counts.accepted += count - 1

    def _leave(self, row: int) -> None:
        """Free a row."""
        self.rows[row] = None
        self.batch.leave(row)

    def _make_room(self) -> None:
        """Let the youngest texts give their pages back until the next step has what it needs."""
        while not self.batch.has_room():
            if self.reading:
                self._forget(self.reading[-1])
                continue
            row, text = max(
                ((row, text) for row, text in enumerate(self.rows) if text is not None),
                key=lambda pair: pair[1].number,
            )
            self._leave(row)
            text.given = 0
            self.preempted += 1
            with self.condition:
                self.waiting.appendleft(text)

    def _has_room(self, text: Continuation) -> bool:
        """Return whether there is room for what a waiting text has still to read, and a token.

        Its prompt has pages, perhaps of a beginning that is kept.
        """
        pool, memory = self.batch.pool, text.prompt.memory
        if pool is None or memory is None:
            return True
        length = len(text.prompt.tokens)
        to_read = pool.pages_of(length) - pool.pages_of(memory.length)
        to_write = pool.pages_of(length + len(text.written) + 1) - length // pool.grain
        return to_read + to_write <= pool.room

    def _admit(self) -> bool:
        """Read the prompts of waiting texts, and give them the free rows, in order."""
        budget, is_busy = self.chunk, False
        while budget > 0 and self.waiting and None in self.rows:
            text, prompt = self.waiting[0], self.waiting[0].prompt
            if prompt.memory is None:
                self._begin(prompt)
            if not self._has_room(text):
                younger = [other for other in self.reading if other is not prompt]
                if not younger:
                    break
                self._forget(younger[-1])
                continue
            is_busy = True
            if prompt.position < len(prompt.tokens):
                budget -= self._read(prompt)
                if prompt.position < len(prompt.tokens):
                    break
            assert prompt.logits is not None
            assert prompt.memory is not None
            is_last = False
            if self.lookup is not None and text.drafts is None:
                text.drafts = prompt.drafts(self.lookup)
            if not text.written:
                ((token, score),) = self._draw(prompt.logits, [text])
                is_last = text.add(token, score)
            with self.condition:  # not before: a text that fails is told so where it waits
                self.waiting.popleft()
            if not is_last:
                row = self.rows.index(None)
                self.rows[row] = text
                self.batch.join(row, prompt.memory)
                if prompt.names is not None and self.keeps_answers:
                    text.names = prompt.names.fork()
            self._forget_prompts()
        return is_busy

    def _forget_prompts(self) -> None:
        """Give back the pages of prompts that no waiting text needs."""
        with self.condition:  # others may submit texts meanwhile
            needed = {id(text.prompt) for text in self.waiting}
        for prompt in [*self.reading]:
            if id(prompt) not in needed:
                self._forget(prompt)

    def _forget(self, prompt: Prompt) -> None:
        """Give back the pages of a prompt."""
        self.reading.remove(prompt)
        prompt.forget()

    def _begin(self, prompt: Prompt) -> None:
        """Give a prompt its memory: of the longest beginning that is kept, or none."""
        hidden = None
        if self.prefixes is not None and self.keeps_prompts:
            prompt.names = self.prefixes.names(prompt.tokens)
        if prompt.names is not None and prompt.reuses and prompt.top is None:
            assert self.prefixes is not None
            prompt.memory, hidden = self.prefixes.find(prompt.names)
        else:
            prompt.memory = self.batch.new_cache()
        prompt.position = prompt.memory.length
        if prompt.cached is None:  # later it finds states of its own
            prompt.cached = prompt.position
        if hidden is not None:
            prompt.logits = self.batch.head(hidden)
        if prompt.memory.places is not None:
            self.reading.append(prompt)

    def _read(self, prompt: Prompt) -> int:
        """Read the next tokens of a prompt; return their number."""
        assert prompt.memory is not None
        end = prompt.position - prompt.position % self.chunk + self.chunk
        chunk = prompt.tokens[prompt.position : end]
        if self.prefixes is None or prompt.names is None:
            hidden, _ = self.reader.read(chunk, prompt.memory)
        else:
            hidden = self.prefixes.read(chunk, prompt.names, prompt.memory, self.reader)
        prompt.logits = self.batch.head(hidden[:, -1])
        is_scored = len(prompt.scores) > prompt.position  # when it was read before
        first, prompt.position = prompt.position + 1, prompt.position + len(chunk)
        if prompt.top is not None and not is_scored:
            for some in hidden[0].split(SCORED):
                tokens = prompt.tokens[first : first + len(some)]
                if tokens:
                    logits = self.batch.head(some[: len(tokens)])
                    prompt.scores += scores(self.batch.model.lm_head, logits, tokens, prompt.top)
                first += len(some)
        return len(chunk)

    def _draw(
        self, logits: Tensor, texts: Sequence[Continuation | None]
    ) -> list[tuple[int, Score | None]]:
        """Draw a token of each text, with its score where that is wanted."""
        tokens = draw(logits, [Choice() if text is None else text.choice() for text in texts])
        scored = {
            row: text.top
            for row, (text, token) in enumerate(zip(texts, tokens, strict=True))
            if text is not None and text.top is not None and token >= 0
        }
        by_row: dict[int, Score] = {}
        if scored:
            index, most = list(scored), max(scored.values())
            head = self.batch.model.lm_head
            every = scores(head, logits[index], [tokens[row] for row in index], most)
            by_row = {
                row: score._replace(top=score.top[: scored[row]])
                for row, score in zip(index, every, strict=True)
            }
        return [(token, by_row.get(row)) for row, token in enumerate(tokens)]

    def _keep_answers(self, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """Keep the states of rows' texts at multiples of the prefixes' tokens.

        tokens: those that each row was given; counts: how many of them its text has.
        """
        kept: list[tuple[int, int, bytes, Page | None]] = []
        for row, text in enumerate(self.rows):
            if text is None or text.names is None:
                continue
            names, start = text.names, text.names.length
            first = len(names)
            names.extend(tokens[row][: counts[row]])
            for index, name in enumerate(names[first:], first):
                count = (index + 1) * names.grain - start
                kept.append((row, count, name, self.batch.page(row, index)))
        if kept and self.prefixes is not None:
            rows, numbers, named, pages = zip(*kept, strict=True)
            self.prefixes.keep(named, self.batch.packed(rows, numbers), pages, is_open=True)

    def is_exact(self) -> bool:
        """Return whether a text that continues from a kept state has the bits of one read whole.

        Products of some numbers of rows sum in another order. It reads a prompt longer than a
        chunk, whole and from states within a chunk and after one, and writes a text. It writes to
        all rows. Models with keys in pages are not tried: they are exact with `batch_invariant`.
        """
        if self.prefixes is None or not self.keeps_prompts:
            return True
        if self.batch.pool is not None:
            return self.batch.model.config.batch_invariant
        kept, grain, size = self.prefixes, self.prefixes.grain, self.batch.model.config.vocab_size
        end = self.chunk - self.chunk % grain + 2 * grain  # a chunk's end is between the two cuts
        tokens = [i % size for i in range(end + 5)]

        def fresh() -> Prefixes:
            return Prefixes(self.batch.model, kept.state_bytes * (len(tokens) // grain + 1), grain)

        try:
            self.prefixes = trial = fresh()
            whole = self._whole(Prompt(tokens))
            if self.keeps_answers and not self._writes_exactly(trial, tokens[:end]):
                return False
            for cut in (grain, end - grain):
                self.prefixes = fresh()
                self._whole(Prompt(tokens[:cut]))
                if not torch.equal(self._whole(Prompt(tokens)), whole):
                    return False
            return True
        finally:
            self.prefixes = kept

    def _whole(self, prompt: Prompt) -> Tensor:
        """Read all of a prompt; return the logits of the next token."""
        self._begin(prompt)
        while prompt.position < len(prompt.tokens):
            self._read(prompt)
        assert prompt.logits is not None
        return prompt.logits

    def _writes_exactly(self, trial: Prefixes, tokens: Sequence[int]) -> bool:
        """Return whether steps of a row, and passes over drafts, lead to the states of a prompt,
        whose end is kept."""
        names, first = trial.names(tokens), len(tokens) - trial.grain
        if self.batch.drafts and not self.batch.verifies_exactly:
            return False
        after, _ = trial.find(names)
        expected = pack([layer.read() for layer in after.layers])
        # The pieces of a prompt's end may be smaller than those of a longer one.
        for end in {first, len(tokens) - 1 if self.reader.most else first}:
            before, _ = trial.find(trial.names([*tokens[:first], 0]))
            if first < end:
                self.reader.read(tokens[first:end], before)
            self.batch.join(0, before)
            for token in tokens[end:]:
                self.batch.step([token] * self.batch.rows)
            if not torch.equal(self.batch.packed([0]), expected):
                return False
        return True

    def _drop_cancelled(self) -> None:
        for row, text in enumerate(self.rows):
            if text is not None and text.is_cancelled:
                self._leave(row)
        with self.condition:
            if any(text.is_cancelled for text in self.waiting):
                self.waiting = deque(text for text in self.waiting if not text.is_cancelled)
                self._forget_prompts()

    def _fail(self, message: str) -> None:
        """End all texts: rows' memory may be half written. New texts overwrite it."""
        with self.condition:
            texts = [*self.rows, *self.waiting]
            self.rows, self.waiting = [None] * self.batch.rows, deque()
            self._forget_prompts()
        for row in range(self.batch.rows):
            self.batch.leave(row)
        for text in texts:
            if text is not None and not text.is_over:
                text.fail(message)
