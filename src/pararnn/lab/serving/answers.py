"""Answers to requests, as a whole and in pieces, from the deltas of their texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pararnn.lab.serving.draw import Score
from pararnn.lab.serving.engine import Continuation, Delta, Prompt
from pararnn.lab.serving.load import ServedModel
from pararnn.lab.serving.protocol import STYLES, Completion, Request, Word, answer, usage
from pararnn.lm.text import CONTEXT, REPLACEMENT, Decoder


class Texts(NamedTuple):
    """The texts of a request, those of a prompt after each other, the queue of their deltas with
    each text's index, and its prompts, also as they were given."""

    request: Request
    items: list[Continuation]
    deltas: asyncio.Queue[tuple[int, Delta]]
    prompts: list[Prompt]
    given: Sequence[str | list[int]]

    def usage(self, ends: Mapping[int, Delta]) -> dict[str, Any]:
        """Return the count of tokens, when all texts have ended."""
        read = sum(len(prompt.tokens) for prompt in self.prompts)
        written = sum(delta.tokens for delta in ends.values())
        every = [text.drafts for text in self.items if text.drafts is not None]
        right = sum(drafts.accepted for drafts in every)
        drafted = (right, sum(drafts.drafted for drafts in every) - right) if every else None
        cached = sum(prompt.cached or 0 for prompt in self.prompts)
        return usage(read, written, cached, drafted)

    def chosen(self) -> list[int]:
        """Return the texts to answer: of each prompt the likeliest by the mean of their tokens."""
        size, count = self.request.samples, self.request.n
        groups = [range(first, first + size) for first in range(0, len(self.items), size)]
        if size == count:
            return [index for group in groups for index in group]

        def unlikely(index: int) -> float:
            return -self.items[index].logprob / max(1, self.items[index].tokens)

        return [index for group in groups for index in sorted(group, key=unlikely)[:count]]


class Offsets:
    """Where tokens begin in a text that they are added to.

    decode: returns the text of token ids. before: tokens before the text. start: its own place.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], before: Sequence[int] = (), start: int = 0
    ) -> None:
        self.decoder, self.end = Decoder(decode, before), start

    def add(self, token: int, text: str) -> int:
        """Return where a token begins whose text alone is given."""
        start = self.end
        self.end += len(self.decoder.add(token))
        # One with some bytes of a character begins where that does, after all the text so far.
        return start if REPLACEMENT in text else max(start, self.end - len(text))


class Writer:
    """The answer to a request, as a whole and in pieces."""

    def __init__(self, texts: Texts, served_model: ServedModel) -> None:
        self.texts, self.request = texts, texts.request
        self.style = STYLES[type(texts.request)]
        self.head, self.text = self.style.head(served_model.name), served_model.text
        self.offsets: dict[int, Offsets] = {}  # of texts that have begun

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> Any:
        """Build the answer of all deltas of each text."""
        choices = []
        for number, index in enumerate(self.texts.chosen()):
            prompt_text, words = self._beginning(index)
            scores = [score for delta in deltas[index] for score in delta.scores]
            words += self._words(scores, self.offsets[index])
            text = prompt_text + "".join(delta.text for delta in deltas[index])
            logprobs, finish = self._logprobs(words), deltas[index][-1].finish
            choices.append(self.style.choice(number, text, logprobs, finish))
        ends = {index: several[-1] for index, several in enumerate(deltas)}
        usage = self.texts.usage(ends)
        return answer(self.head, self.style.whole, choices, usage=usage)

    def pieces(self, index: int, delta: Delta, **more: Any) -> list[Any]:
        """Build the pieces that a delta of a text brings; a message begins with one of its own."""
        text, opening = "", []
        words: list[Word] = []
        if index not in self.offsets:
            text, words = self._beginning(index)
            if self.style.whole != self.style.piece:
                opening = [self.style.delta(index, "", None, None)]
        words += self._words(delta.scores, self.offsets[index])
        piece = self.style.delta(index, text + delta.text, self._logprobs(words), delta.finish)
        return [answer(self.head, self.style.piece, [own], **more) for own in (*opening, piece)]

    def ending(self, ends: Mapping[int, Delta]) -> Any:
        """Build the piece with the count of tokens."""
        return answer(self.head, self.style.piece, [], usage=self.texts.usage(ends))

    def _beginning(self, index: int) -> tuple[str, list[Word]]:
        """Begin an answer: return what it echoes of a prompt, its text and tokens' chances."""
        number = index // self.request.samples
        prompt, given = self.texts.prompts[number], self.texts.given[number]
        text, words = "", list[Word]()
        if isinstance(self.request, Completion) and self.request.echo:
            text = given if isinstance(given, str) else self.text(given)
        if prompt.top is not None:
            scores = [Score(prompt.tokens[0], 0.0), *prompt.scores]
            first, *others = self._words(scores, Offsets(self.text))
            words = [first._replace(logprob=None), *others]
        self.offsets[index] = Offsets(self.text, prompt.tokens[-CONTEXT:], len(text))
        return text, words

    def _words(self, scores: Sequence[Score], offsets: Offsets) -> list[Word]:
        def word(token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> Word:
            text = self.text([token])
            names = tuple([(self.text([other]), log) for other, log in top])
            return Word(text, logprob, names, offsets.add(token, text))

        return [word(*score) for score in scores]

    def _logprobs(self, words: Sequence[Word]) -> Any:
        if self.request.top is None or (
            isinstance(self.request, Completion) and self.request.logprobs is None
        ):
            return None
        return self.style.logprobs(words)
