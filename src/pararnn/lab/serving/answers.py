"""Answers to requests, as a whole and in pieces, from the deltas of their texts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pararnn.lab.serving.draw import Score
from pararnn.lab.serving.engine import Continuation, Delta, Prompt
from pararnn.lab.serving.load import ServedModel
from pararnn.lab.serving.protocol import STYLES, Completion, Request, Word, answer, usage


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
        return usage(read, written, sum(prompt.cached for prompt in self.prompts), drafted)

    def chosen(self) -> list[int]:
        """Return the texts to answer: of each prompt the likeliest by the mean of their tokens."""
        size, count = self.request.samples, self.request.n
        groups = [range(first, first + size) for first in range(0, len(self.items), size)]
        if size == count:
            return [index for group in groups for index in group]

        def unlikely(index: int) -> float:
            return -self.items[index].logprob / max(1, self.items[index].tokens)

        return [index for group in groups for index in sorted(group, key=unlikely)[:count]]


class Writer:
    """The answer to a request, as a whole and in pieces."""

    def __init__(self, texts: Texts, served_model: ServedModel) -> None:
        self.texts, self.request = texts, texts.request
        self.style = STYLES[type(texts.request)]
        self.head, self.text = self.style.head(served_model.name), served_model.text
        self.lengths = [0] * len(texts.items)
        self.has_begun = [False] * len(texts.items)

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> Any:
        """Build the answer of all deltas of each text."""
        choices = []
        for number, index in enumerate(self.texts.chosen()):
            prompt_text, words = self._beginning(index)
            words += self._words([score for delta in deltas[index] for score in delta.scores])
            text = prompt_text + "".join(delta.text for delta in deltas[index])
            logprobs, finish = self._logprobs(words, 0), deltas[index][-1].finish
            choices.append(self.style.choice(number, text, logprobs, finish))
        ends = {index: several[-1] for index, several in enumerate(deltas)}
        usage = self.texts.usage(ends)
        return answer(self.head, self.style.whole, choices, usage=usage)

    def pieces(self, index: int, delta: Delta, **more: Any) -> list[Any]:
        """Build the pieces that a delta of a text brings; a message begins with one of its own."""
        text, opening = "", []
        words: list[Word] = []
        if not self.has_begun[index]:
            self.has_begun[index] = True
            text, words = self._beginning(index)
            if self.style.whole != self.style.piece:
                opening = [self.style.delta(index, "", None, None)]
        words += self._words(delta.scores)
        text, offset = text + delta.text, self.lengths[index]
        self.lengths[index] += sum(len(word.text) for word in words)
        piece = self.style.delta(index, text, self._logprobs(words, offset), delta.finish)
        return [answer(self.head, self.style.piece, [own], **more) for own in (*opening, piece)]

    def ending(self, ends: Mapping[int, Delta]) -> Any:
        """Build the piece with the count of tokens."""
        return answer(self.head, self.style.piece, [], usage=self.texts.usage(ends))

    def _beginning(self, index: int) -> tuple[str, list[Word]]:
        """Return what an answer echoes of a prompt: its text, and its tokens' chances."""
        if not (isinstance(self.request, Completion) and self.request.echo):
            return "", []
        number = index // self.request.samples
        prompt, given = self.texts.prompts[number], self.texts.given[number]
        words: list[Word] = []
        if prompt.top is not None:
            words = [Word(self.text(prompt.tokens[:1]), None), *self._words(prompt.scores)]
        return given if isinstance(given, str) else self.text(given), words

    def _words(self, scores: Sequence[Score]) -> list[Word]:
        def named(token: int, logprob: float) -> tuple[str, float]:
            return self.text([token]), logprob

        return [
            Word(*named(score.token, score.logprob), tuple([named(*top) for top in score.top]))
            for score in scores
        ]

    def _logprobs(self, words: Sequence[Word], offset: int) -> Any:
        if self.request.top is None or (
            isinstance(self.request, Completion) and self.request.logprobs is None
        ):
            return None
        return self.style.logprobs(words, offset)
