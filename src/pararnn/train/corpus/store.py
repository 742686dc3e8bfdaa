"""Folders that are made once: by one process, while others that want them wait."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

from pararnn.train.corpus.readers import DataError
from pararnn.train.files import beside


class Held(Exception):
    """Another process holds a lock; the text is what it left for others."""


class Lock(NamedTuple):
    """A lock file that is held. waited: whether another process had it before."""

    file: TextIO
    waited: bool

    def note(self) -> str:
        """What an earlier holder left for those that wait."""
        self.file.seek(0)
        return self.file.read()

    def leave(self, text: str) -> None:
        """Leave a text for those that wait."""
        self.file.seek(0)
        self.file.truncate()
        self.file.write(text)
        self.file.flush()


@contextmanager
def alone(path: Path, wait: bool = True) -> Iterator[Lock]:
    """Hold the lock file of a path, beside it; waits while another process has it, or raises Held.

    The system lets go of it when its holder ends, in whatever way, so that none is ever stale.
    Processes that share the file system wait for each other, on one machine or on many, without a
    connection between them.
    """
    with path.with_name(f".{path.name}.lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            waited = False
        except BlockingIOError:
            if not wait:
                file.seek(0)
                raise Held(file.read()) from None
            fcntl.flock(file, fcntl.LOCK_EX)
            waited = True
        yield Lock(file, waited)


def made_once(
    folder: Path, whole: Callable[[Path], bool], make: Callable[[Path], None], what: str
) -> None:
    """Make a folder that is not whole: written beside by `make`, and renamed.

    One process does it, and the others wait. Where it fails they raise too; where it is killed, the
    next one takes over.

    Args:
        folder: what is to be there.
        whole: whether a folder is what it should be.
        make: fills an empty folder.
        what: its name in messages.

    Raises DataError where it cannot be written, and what `make` raises.
    """
    if whole(folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder) as lock:
            if whole(folder):
                return
            if lock.waited and lock.note():
                raise DataError(f"another process could not make {what}: {lock.note()}")
            lock.leave("")
            try:
                with beside(folder, "cache", ours=True) as new:
                    make(new)
            except Exception as error:
                lock.leave(str(error) or type(error).__name__)
                raise
    except OSError as error:
        raise cannot_write(folder.parent, error) from error


def cannot_write(folder: Path, error: OSError) -> DataError:
    """What to raise where a cache cannot be written."""
    return DataError(
        f"cannot write to {folder}: {error.strerror or error}; make room there, or set data.cache "
        "to another folder"
    )
