"""Signals, and pipes that nobody reads: a run saves, says one line and ends with the usual code."""

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

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal, or a pipe that nobody reads, ended a run. code: what its process should exit with.

    The message says from where the same command goes on.
    """

    def __init__(self, number: int, goes_on: str) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}: the same command goes on from {goes_on}")
        self.code = 128 + number


class Stop:
    """What asks a run to stop.

    asked: the number of the first signal, 0 for none. deferred: whether there is something to save,
    which the run does at the end of its step; it raises Stopped at once where there is not.
    """

    def __init__(self, goes_on: Callable[[], str]) -> None:
        self.goes_on, self.asked, self.deferred = goes_on, 0, False

    def ask(self, number: int, _: Any = None) -> None:
        """Ask to stop; a second Ctrl-C, of a run that is alone, ends it at once."""
        if self.asked and number == signal.SIGINT and "RANK" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = self.asked or number
        if not self.deferred:
            self.obey()

    def obey(self, also: int = 0) -> None:
        """Raise Stopped where the run was asked to stop; also: by a signal of another process."""
        self.deferred = False
        if self.asked or also:
            raise Stopped(self.asked or also, self.goes_on())


class Ballot:
    """What processes agree by that one of them was asked to stop, at the end of the same step.

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
        found, self.votes = int(self.votes), torch.tensor([own])
        self.work = dist.all_reduce(self.votes, dist.ReduceOp.MAX, self.group, async_op=True)
        return found


@contextmanager
def watching(others: Sequence[int]) -> Iterator[None]:
    """End this process at a signal if one of the others has ended, without which no step ends.

    A launcher sends the signal to those that are left. They wait for the lost one within a
    collective, where Python handles no signal, so a thread reads it.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    threading.Thread(target=_end_with, args=(others, read), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
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
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), os.getpid()))
    return [process for host, process in found if host == socket.gethostname()]


@contextmanager
def stopping(goes_on: Callable[[], str]) -> Iterator[Stop]:
    """Let signals, and output that nobody reads, ask a run to stop; and put back how it was.

    Signals that the process ignores stay ignored; threads but the main one get none.
    goes_on: what the same command goes on from.
    """
    stop = Stop(goes_on)
    with ExitStack() as before:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):
                    signal.signal(number, stop.ask)
                    before.callback(signal.signal, number, handler)
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            setattr(sys, name, _Output(stream, lambda: stop.ask(signal.SIGPIPE)))
            before.callback(setattr, sys, name, stream)
        yield stop


class _Output:
    """A stream that, where nobody reads it any more, says so and goes to nowhere."""

    def __init__(self, stream: Any, broken: Callable[[], None]) -> None:
        self._stream, self._broken = stream, broken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            to_nowhere(self._stream)
            self._broken()
            return len(text)

    def flush(self) -> None:
        """Flush as the stream does."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            to_nowhere(self._stream)
            self._broken()


def to_nowhere(stream: Any) -> None:
    """Let a stream whose reader is gone write to nowhere, what it has kept included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
