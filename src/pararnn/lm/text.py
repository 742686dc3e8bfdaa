"""Text of tokens that come one at a time, up to a string that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""Character that stands for bytes which are no text, or not yet."""

LONGEST = 64
"""Number of tokens after which bytes that are no text are shown as such, and decoded no more."""


class Decoder:
    """Text of tokens, added one by one: characters appear when all their bytes are there.

    decode: returns the text of token ids, as a tokenizer does. context: tokens before the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self.decode = decode
        self.tokens = list(context)
        self.context = len(self.tokens)
        self.position = len(decode(self.tokens)) if context else 0

    def add(self, token: int) -> str:
        """Return the text that this token adds."""
        self.tokens.append(token)
        text = self.decode(self.tokens)
        # The last one may be the beginning of a character; those before it are final.
        is_open = text.endswith(REPLACEMENT)
        new = text[self.position : len(text) - is_open]
        self.position += len(new)
        if not is_open:  # spaces may depend on the token before, so that some stay as context
            self.tokens = self.tokens[self.context :]
            self.context = len(self.tokens)
            self.position = len(self.decode(self.tokens))
        elif len(self.tokens) > LONGEST:
            new += self.end()
        return new

    def end(self) -> str:
        """Return what is left, and begin anew."""
        remainder = self.decode(self.tokens)[self.position :]
        self.tokens, self.context, self.position = [], 0, 0
        return remainder


class Stops:
    """Text up to the first of some strings. What may be the beginning of one waits.

    is_found: whether one of them was in the text.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.waiting = ""
        self.is_found = False

    def add(self, text: str) -> str:
        """Return the text that is surely before a string; none after it."""
        if self.is_found:
            return ""
        self.waiting += text
        places = [place for each in self.strings if (place := self.waiting.find(each)) >= 0]
        self.is_found = bool(places)
        cut = min(places) if places else len(self.waiting) - self._open_size()
        text, self.waiting = self.waiting[:cut], "" if places else self.waiting[cut:]
        return text

    def end(self) -> str:
        """Return the text that was no beginning after all."""
        remainder, self.waiting = self.waiting, ""
        return remainder

    def _open_size(self) -> int:
        """Return how many characters at the end may begin a string."""
        longest = max(map(len, self.strings), default=1) - 1
        for size in range(min(longest, len(self.waiting)), 0, -1):
            if any(each.startswith(self.waiting[-size:]) for each in self.strings):
                return size
        return 0
