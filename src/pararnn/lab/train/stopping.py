"""Signals and closed pipes: a run saves, prints one line and exits with the usual code."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pararnn.lab.train.checkpoints import all_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal, or a closed pipe, ended a run. code: the exit code for its process.

    The message says from where the same command goes on.
    """

    def __init__(self, number: int, goes_on: str) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}: the same command goes on from {goes_on}")
        self.code = 128 + number


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
def watching(others: Sequence[int]) -> Iterator[None]:
    """End this process at a signal if one of the others has ended, since then no step ends.

    A launcher sends the signal to the remaining processes. They wait for the lost one within a
    collective, where Python handles no signal, so a thread reads it.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    previous = signal.set_wakeup_fd(write)
    threading.Thread(target=_end_with, args=(others, read), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(write)  # which ends the thread


def _end_with(others: Sequence[int], read: int) -> None:
    with open(read, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] in SIGNALS and any(map(_has_ended, others)):
                os._exit(128 + number[0])


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{process}/stat")  # of one that nobody has waited for yet
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"


def neighbours() -> list[int]:
    """Return the processes of a run that are on this machine; all of them must call."""
    host = socket.gethostname()
    return [process for name, process in all_of((host, os.getpid())) if name == host]


@contextmanager
def stopping(goes_on: Callable[[], str]) -> Iterator[Stop]:
    """Let signals, and closed pipes, request a run to stop within a block.

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
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            setattr(sys, name, _Output(stream, lambda: stop.request(signal.SIGPIPE)))
            undo.callback(setattr, sys, name, stream)
        yield stop


class _Output:
    """A stream that calls `broken` when nobody reads it any more, and discards what follows."""

    def __init__(self, stream: Any, broken: Callable[[], None]) -> None:
        self._stream, self._broken = stream, broken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            discard(self._stream)
            self._broken()
            return len(text)

    def flush(self) -> None:
        """Flush as the stream does."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            discard(self._stream)
            self._broken()


def discard(stream: Any) -> None:
    """Discard what a stream without a reader holds and gets."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
