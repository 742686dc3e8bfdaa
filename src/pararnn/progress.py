"""How far long work is: a bar on a terminal, a line now and then in a file."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from types import TracebackType
from typing import Any

from pararnn.extras import require

EVERY = 30.0
"""Seconds between two lines in a file."""


UNITS = ("", "k", "M", "G", "T")


def say(line: str) -> None:
    """Write a line to standard error, of several processes of a launcher the first alone."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A time in words, in its two largest units: 3 h 25 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((at for at, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def amount(count: float) -> str:
    """A number with a unit in front of what is counted: 12.3 M."""
    power = 0
    while count >= 999.5 and power < len(UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {UNITS[power]}"


class Progress:
    """Shows what is done of some work while it lasts; `update` is called as often as one likes.

    what: its name. total: how much there is, None where that is not known. unit: of what is
    counted.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "B") -> None:
        self.what, self.total, self.unit, self.bar = what, total, unit, None
        self.start = self.said = time.monotonic()
        # A bar where someone watches and tqdm is installed.
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            options: dict[str, Any] = {"unit": unit, "unit_scale": True, "leave": total is None}
            self.bar = require("tqdm").tqdm(desc=what, total=total, **options)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, done: int, **figures: str) -> None:
        """Say that so much is done in all, and figures by their names."""
        if self.bar is not None:
            self.bar.set_postfix(figures, refresh=False)
            self.bar.update(done - self.bar.n)
            return
        now = time.monotonic()
        if now - self.said < EVERY:
            return
        self.said = now
        print(self.line(done, now - self.start, figures), file=sys.stderr, flush=True)

    def line(self, done: int, seconds: float, figures: dict[str, str]) -> str:
        """What is said in a file."""
        parts = [f"{amount(done)}{self.unit}", f"{amount(done / seconds)}{self.unit}/s"]
        if self.total is not None:
            parts[0] = f"{done:,} of {self.total:,} {self.unit}"
            parts.append(f"{duration(seconds / max(done, 1) * (self.total - done))} left")
        parts += [f"{name} {value}" for name, value in figures.items()]
        return f"{self.what}: {', '.join(parts)}"
