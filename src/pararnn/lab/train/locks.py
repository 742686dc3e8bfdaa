"""Locks of files: one process holds one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


class Held(Exception):
    """Another process holds a lock; the text is the note that it left."""


@contextmanager
def exclusive(path: Path, wait: bool = True, note: str = "") -> Iterator[None]:
    """Hold `.NAME.lock` next to a path.

    The system releases it when its holder ends, in whatever way, so that no lock is stale.
    Processes that share the file system exclude each other, on one machine or on many, without a
    connection between them. Raises OSError where the file system has no locks.

    wait: wait for a holder; otherwise Held is raised. note: text for that message.
    """
    # A lock by a file's existence, the other kind, stays when its holder is killed.
    lock = FileLock(path.with_name(f".{path.name}.lock"), fallback_to_soft=False)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise Held(Path(lock.lock_file).read_text(encoding="utf-8")) from None
    try:
        if note:
            Path(lock.lock_file).write_text(note, encoding="utf-8")
        yield
    finally:
        lock.release()
