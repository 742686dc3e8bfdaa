"""A process of its own for what may crash or hang: only its results are lost, and the reason known.

runner = Isolated()
for result in runner.results(generator_function, *arguments, seconds=60): ...
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

RESULT, ERROR, END = "result", "error", "end"


class LostError(RuntimeError):
    """A function that ended without all its results, and why."""


class Isolated:
    """A process that runs one function after the other; a new one follows a failure.

    The process leads a group of its own, which ends with it: compilers that it started too. Its
    standard output is dropped.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def results(
        self, function: Callable[..., Iterable[Any]], *args: Any, seconds: float
    ) -> Iterator[Any]:
        """Yield what `function(*args)` yields there, as it comes.

        Raises LostError where it raises, where the process ends, and where there are no more
        results after `seconds`. Function, arguments and results are pickled.
        """
        if self._process is None:
            self._start()
        self._send((function, args))
        end = time.monotonic() + seconds
        while True:
            remaining = end - time.monotonic()
            if remaining <= 0 or not self._pipe.poll(remaining):
                self.close()
                raise LostError(f"no end within {seconds:.0f} s")
            kind, value = self._receive()
            if kind == END:
                return
            if kind == ERROR:
                self.close()  # an error of CUDA stays with its process
                raise LostError(value)
            yield value

    def close(self) -> None:
        """End the process and what it started; the next call starts another one."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._process = None

    def _start(self) -> None:
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()  # so that the end of the process ends the wait
        self._receive()  # it leads its group now

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise self._lost() from None

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise self._lost() from None

    def _lost(self) -> LostError:
        """End what is left of the process, and return the error that says how it ended."""
        self._process.join(timeout=60)  # a busy machine takes a while to end it
        code = self._process.exitcode
        self.close()
        return LostError(f"its process ended with code {code}")


def _serve(pipe: Connection) -> None:
    """Run what the pipe brings, until it is closed."""
    os.setpgrp()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            try:
                for result in function(*args):
                    pipe.send((RESULT, result))
            except Exception as error:
                pipe.send((ERROR, reason_of(error)))
            else:
                pipe.send((END, None))


def reason_of(error: Exception) -> str:
    """Return the type and the telling line of an error: the first with "error:", or the first, and
    the last of a place in a source, which Triton's begin with; then that of its cause."""
    cause = f"; {reason_of(error.__cause__)}" if isinstance(error.__cause__, Exception) else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    telling = next((line for line in lines if "error:" in line.lower()), lines[0])
    if telling.startswith("at ") and telling.endswith(":"):
        telling = f"{telling} {lines[-1]}"
    return f"{type(error).__name__}: {telling[:200]}{cause}"
