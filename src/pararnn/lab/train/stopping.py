"""Signals: a run ends its step, saves and exits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal ended a run; the message says from where the same command continues."""

    def __init__(self, number: int, goes_on: str) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}: the same command goes on from {goes_on}")


class Stop:
    """Requests to stop a run.

    signal: number of the first signal, 0 for none. waits: True if there is something to save, which
    the run does at the end of its step. Otherwise a request raises Stopped at once.
    """

    def __init__(self, goes_on: Callable[[], str]) -> None:
        self.goes_on, self.signal, self.waits = goes_on, 0, False

    def request(self, number: int, _: Any = None) -> None:
        """Request to stop; a second Ctrl-C ends a run of one process at once."""
        if self.signal and number == signal.SIGINT and "RANK" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = self.signal or number
        if not self.waits:
            self.obey()

    def obey(self, other: int = 0) -> None:
        """Raise Stopped if there was a request. other: another process's signal, 0 for none."""
        self.waits = False
        if self.signal or other:
            raise Stopped(self.signal or other, self.goes_on())


class Ballot:
    """Vote of all processes, by which they stop at the end of the same step.

    Each step's vote is counted at the end of the next one: nobody waits for it.
    """

    def __init__(self, world: int) -> None:
        self.group = dist.new_group(backend="gloo") if world > 1 else None
        self.votes, self.work = torch.zeros(1, dtype=torch.int64), None

    def cast(self, own: int) -> int:
        """Return the number of the signal that any process got before the last call, 0 for none."""
        if self.group is None:
            return own
        if self.work is not None:
            self.work.wait()
        result, self.votes = int(self.votes), torch.tensor([own])
        self.work = dist.all_reduce(self.votes, dist.ReduceOp.MAX, self.group, async_op=True)
        return result


@contextmanager
def stopping(goes_on: Callable[[], str]) -> Iterator[Stop]:
    """Let signals request a run to stop within a block.

    Signals that the process ignores stay ignored; only the main thread gets any.
    goes_on: returns where the same command goes on, in words.
    """
    stop = Stop(goes_on)
    with ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):
                    signal.signal(number, stop.request)
                    undo.callback(signal.signal, number, handler)
        yield stop
