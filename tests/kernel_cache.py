"""Cache of kernels that test runs compile, in one folder for all clones of the repository.

The cache checks each entry's key and checksum on loading. Entries are dropped here once they are
old or too many. One that is still in use is then rebuilt.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path

DAYS, BYTES = 30, 2 << 30
DROPPED = ".dropped-"
"""Prefix of folders that are being removed. A process is at work in a folder whose name begins with
a dot; one that is a day old was left by a process that was killed."""


def folder() -> Path:
    """`pararnn-tests` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pararnn-tests"


def prune(folder: Path, most: int = BYTES) -> None:
    """Drop what was made DAYS ago, and the oldest of the rest, so that `most` bytes are left.

    Other processes may do so at the same time, and may use what is dropped.
    """
    now, size = time.time(), 0
    ages = {
        entry: now - birth for entry in folder.iterdir() if (birth := _birth(entry)) is not None
    }
    for entry, age in sorted(ages.items(), key=lambda item: item[1]):
        is_temporary = entry.name.startswith(".")
        size += sum(_sizes(entry))
        if age > (1 if is_temporary else DAYS) * 24 * 3600 or (size > most and not is_temporary):
            _drop(entry)


def _birth(entry: Path) -> float | None:
    with contextlib.suppress(FileNotFoundError):  # another process has dropped it
        return entry.stat().st_mtime
    return None


def _sizes(entry: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [file.stat().st_size for file in entry.rglob("*")]
    return []


def _drop(entry: Path) -> None:
    """Move it out of the way first, so that nobody sees half of an entry."""
    away = entry.with_name(f"{DROPPED}{os.getpid()}-{entry.name}")
    with contextlib.suppress(FileNotFoundError):
        entry.rename(away)
        shutil.rmtree(away, ignore_errors=True)  # another process may be at it too
