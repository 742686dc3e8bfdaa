"""The queue of texts and the rows that they run in: each call computes a token of every row."""

from __future__ import annotations

import random
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pararnn.lab.serving.batch import Batch
from pararnn.lab.serving.draw import Choice, draw
from pararnn.lm.cache import LMCache
from pararnn.lm.text import Decoder, Stops


class QueueFull(Exception):
    """More texts wait than the queue has places for."""


class EngineEnded(Exception):
    """The engine does not run any more, as the server is being stopped."""


class Delta(NamedTuple):
    """Text that was added, and the number of tokens so far; drawn: the tokens since the last one,
    and their log-probabilities, where these are requested.

    finish: None, or why the text has ended: "stop" at an end token or a stop string, "length" at
    the largest number of tokens, "error" where the model failed; then `text` says how.
    """

    text: str
    tokens: int
    finish: str | None = None
    drawn: Sequence[tuple[int, float]] = ()


@dataclass
class Prompt:
    """Tokens to continue, and the model's memory of those that it has read.

    Several samples share one: it is read once. A reference to it goes with the last of them.
    """

    tokens: Sequence[int]
    position: int = 0
    memory: LMCache | None = None
    logits: Tensor | None = None


@dataclass(eq=False)
class Continuation:
    """One text that is written after a prompt.

    deliver: called with each `Delta`, in the engine's thread. ends: tokens that end the text.
    has_log_probs: whether log-probabilities are delivered.
    seed: decides all draws; None is another each time.
    """

    prompt: Prompt
    decode: Callable[[list[int]], str]
    deliver: Callable[[Delta], None]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | str | None = None
    stop: Sequence[str] = ()
    ends: Collection[int] = ()
    has_log_probs: bool = False
    is_cancelled: bool = False
    last: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed if self.seed is None else str(self.seed))
        self.decoder, self.stops = Decoder(self.decode), Stops(self.stop)
        self.drawn: list[tuple[int, float]] = []

    def choice(self) -> Choice:
        """Return the rule of the next draw."""
        number = self.random.random() if self.temperature > 0 else 0.0
        return Choice(self.temperature, self.top_p, number)

    def add(self, token: int, log_prob: float) -> bool:
        """Add a token, deliver the text that it brings, and return whether it was the last."""
        self.last, self.tokens = token, self.tokens + 1
        if token < 0:
            self.fail("the model's logits are not finite")
            return True
        if self.has_log_probs:
            self.drawn.append((token, log_prob))
        is_end = token in self.ends
        text = self.stops.add(self.decoder.end() if is_end else self.decoder.add(token))
        is_last = is_end or self.tokens >= self.max_tokens
        if is_last:
            text += self.stops.add(self.decoder.end())
        is_stop = is_end or self.stops.is_found
        finish = "stop" if is_stop else "length" if is_last else None
        if finish:
            text += self.stops.end()
        if text or finish:
            self.deliver(Delta(text, self.tokens, finish, self.drawn))
            self.drawn = []
        return finish is not None

    def fail(self, message: str) -> None:
        """Deliver that the text cannot be written."""
        self.deliver(Delta(message, self.tokens, "error"))


class Engine:
    """Continuations of prompts in a running batch.

    Args:
        batch: the rows.
        chunk: the largest number of prompt tokens that are read between two tokens of the rows.
        places: number of texts that may wait for a row.

    `step` does the work, in one thread; `submit` and `cancel` may be called from others.
    """

    def __init__(self, batch: Batch, chunk: int = 512, places: int = 256) -> None:
        self.batch, self.chunk, self.places = batch, chunk, places
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

    def submit(self, texts: Sequence[Continuation]) -> None:
        """Let texts wait for rows; none of them waits where there are too many (QueueFull)."""
        with self.condition:
            if not self.is_running:
                raise EngineEnded("the server is being stopped: start it again")
            if self.active + len(self.waiting) + len(texts) > self.capacity:
                raise QueueFull(
                    f"{len(self.waiting)} texts wait for {self.batch.rows} rows, and the queue has "
                    f"{self.places} places: try again later"
                )
            self.waiting.extend(texts)
            self.condition.notify()

    def cancel(self, texts: Sequence[Continuation]) -> None:
        """Give up texts: their rows are free from the next step on."""
        with self.condition:
            for text in texts:
                text.is_cancelled = True
            self.condition.notify()

    def run(self) -> None:
        """Work until `stop`. What fails is told to those whose texts were running."""
        try:
            while self.is_running:
                if not self._try():
                    with self.condition:
                        self.condition.wait_for(lambda: self.waiting or not self.is_running)
        finally:
            self.stop()

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
        if not self.active:
            return is_busy
        texts = self.rows
        logits = self.batch.step([0 if text is None else text.last for text in texts])
        tokens = draw(logits, [Choice() if text is None else text.choice() for text in texts])
        log_probs = self._log_probs(texts, logits, tokens)
        for row, (text, token) in enumerate(zip(texts, tokens, strict=True)):
            if text is not None and text.add(token, log_probs[row]):
                self.rows[row] = None
        return True

    def _admit(self) -> bool:
        """Read the prompts of waiting texts, and give them the free rows, in order."""
        budget, is_busy = self.chunk, False
        while budget > 0 and self.waiting and None in self.rows:
            text, prompt = self.waiting[0], self.waiting[0].prompt
            is_busy = True
            if prompt.position < len(prompt.tokens):
                chunk = prompt.tokens[prompt.position : prompt.position + self.chunk]
                prompt.memory = prompt.memory or self.batch.model.new_cache()
                prompt.logits = self.batch.read(chunk, prompt.memory)
                prompt.position += len(chunk)
                budget -= len(chunk)
                if prompt.position < len(prompt.tokens):
                    break
            with self.condition:
                self.waiting.popleft()
            assert prompt.logits is not None
            assert prompt.memory is not None
            (token,) = tokens = draw(prompt.logits, [text.choice()])
            (log_prob,) = self._log_probs([text], prompt.logits, tokens)
            if not text.add(token, log_prob):
                row = self.rows.index(None)
                self.rows[row] = text
                self.batch.join(row, prompt.memory)
        return is_busy

    def _log_probs(
        self, texts: Sequence[Continuation | None], logits: Tensor, tokens: Sequence[int]
    ) -> Sequence[float]:
        """Return the log-probabilities of tokens, zeros where no text wants them."""
        if any(text is not None and text.has_log_probs for text in texts):
            return self.batch.log_probs(logits, tokens)
        return [0.0] * len(tokens)

    def _drop_cancelled(self) -> None:
        for row, text in enumerate(self.rows):
            if text is not None and text.is_cancelled:
                self.rows[row] = None
        with self.condition:
            if any(text.is_cancelled for text in self.waiting):
                self.waiting = deque(text for text in self.waiting if not text.is_cancelled)

    def _fail(self, message: str) -> None:
        """End all texts: rows' memory may be half written. New texts overwrite it."""
        with self.condition:
            texts = [*self.rows, *self.waiting]
            self.rows, self.waiting = [None] * self.batch.rows, deque()
        for text in texts:
            if text is not None:
                text.fail(message)
