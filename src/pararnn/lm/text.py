"""Text of tokens that are generated one at a time, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""Character for bytes that are no text, or not yet complete."""

LONGEST = 64
"""Number of tokens after which bytes that are no text are given up and shown as `REPLACEMENT`."""


CONTEXT = 16
"""Number of a prompt's last tokens that spaces after it may depend on."""


class Decoder:
    """Text of tokens that are added one by one: a character appears once all its bytes are there.

    decode: returns the text of token ids, as a tokenizer does. before: tokens before the text, on
    which its first spaces may depend; without effect where they end within a character.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self.decode = decode
        text = decode([*before]) if before else ""
        self.tokens = [] if text.endswith(REPLACEMENT) else [*before]
        self.num_before = len(self.tokens)
        self.position = len(text) if self.tokens else 0

    def add(self, token: int) -> str:
        """Return the text that this token adds."""
        self.tokens.append(token)
        text = self.decode(self.tokens)
        # Some tokenizers show each byte of an open character, and those of whole ones before it.
        end = len(text.rstrip(REPLACEMENT))
        is_open = end < len(text)
        new = text[self.position : end]
        self.position += len(new)
        is_long = len(self.tokens) > LONGEST
        if is_open:
            return new + self.end() if is_long else new
        if new or is_long:  # spaces may depend on the last token with a text: it stays
            self.tokens = self.tokens[self.num_before :]
            self.num_before = len(self.tokens)
            self.position = len(self.decode(self.tokens))
        return new

    def end(self) -> str:
        """Return the rest of the text, and start again."""
        remainder = self.decode(self.tokens)[self.position :]
        self.tokens, self.num_before, self.position = [], 0, 0
        return remainder


class Stops:
    """Text up to the first of some strings. Text that may be the beginning of one waits.

    is_found: whether one of them was in the text.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.waiting = ""
        self.is_found = False

    def add(self, text: str) -> str:
        """Return the text that is certainly before a string; none after it."""
        if self.is_found:
            return ""
        if not self.strings:
            return text
        self.waiting += text
        positions = [
            position for string in self.strings if (position := self.waiting.find(string)) >= 0
        ]
        self.is_found = bool(positions)
        cut = min(positions) if positions else len(self.waiting) - self._open_size()
        text, self.waiting = self.waiting[:cut], "" if positions else self.waiting[cut:]
        return text

    def end(self) -> str:
        """Return the waiting text, which turned out to be no beginning."""
        remainder, self.waiting = self.waiting, ""
        return remainder

    def _open_size(self) -> int:
        """Return how many characters at the end may begin a string."""
        longest = max(map(len, self.strings), default=1) - 1
        for size in range(min(longest, len(self.waiting)), 0, -1):
            if any(string.startswith(self.waiting[-size:]) for string in self.strings):
                return size
        return 0
