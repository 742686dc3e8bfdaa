"""Progress of long work: a bar on a terminal, a line now and then in a file."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from types import TracebackType
from typing import Any

from pararnn.base.extras import require

EVERY = 30.0
"""Seconds between two lines in a file."""
UNITS = ("", "k", "M", "G", "T")


def say(line: str) -> None:
    """Write a line to standard error; of a launcher's processes only the first writes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Return a time in words, in its two largest units: 3 h 25 min."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next((index for index, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2])


def amount(count: float) -> str:
    """Return a number with a prefix for the unit that follows: 12.3 M."""
    power = 0
    while count >= 999.5 and power < len(UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {UNITS[power]}"


class Progress:
    """Bar or lines of some work's progress; `update` may be called at any rate.

    what: name of the work. total: its size, None if unknown. unit: of the size.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "B") -> None:
        self.what, self.total, self.unit, self.bar = what, total, unit, None
        self.start = self.last_line = time.monotonic()
        # A bar where someone watches and tqdm is installed.
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            options: dict[str, Any] = {"unit": unit, "unit_scale": True, "leave": total is None}
            self.bar = require("tqdm").tqdm(desc=what, total=total, **options)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, count: int, **figures: str) -> None:
        """Show the amount of work done in all, and figures by their names."""
        if self.bar is not None:
            self.bar.set_postfix(figures, refresh=False)
            self.bar.update(count - self.bar.n)
            return
        now = time.monotonic()
        if now - self.last_line < EVERY:
            return
        self.last_line = now
        print(self.line(count, now - self.start, figures), file=sys.stderr, flush=True)

    def line(self, count: int, seconds: float, figures: dict[str, str]) -> str:
        """Return the line for a file."""
        texts = [f"{amount(count)}{self.unit}", f"{amount(count / seconds)}{self.unit}/s"]
        if self.total is not None:
            texts[0] = f"{count:,} of {self.total:,} {self.unit}"
            texts.append(f"{duration(seconds / max(count, 1) * (self.total - count))} left")
        texts += [f"{name} {value}" for name, value in figures.items()]
        return f"{self.what}: {', '.join(texts)}"
