"""Signals that end a run after its step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Collect the signals to stop that arrive within a block, which do not end the process there.

    Signals that the process ignores stay ignored; only the main thread gets any. A second Ctrl-C
    ends a run of one process at once. Launchers send it on to processes that have had it already.
    """
    signals: list[int] = []

    def note(number: int, _: Any) -> None:
        if signals and number == signal.SIGINT and "RANK" not in os.environ:
            raise KeyboardInterrupt
        signals.append(number)

    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if main}
    heeded = [n for n, handler in handlers.items() if handler not in (signal.SIG_IGN, None)]
    for number in heeded:
        signal.signal(number, note)
    try:
        yield signals
    finally:
        for number in heeded:
            signal.signal(number, handlers[number])
