"""Locks by files, which end with the process that holds them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pararnn.base.errors import TrainingError
from pararnn.lab.folders import make_folder


def lock(file: Path, busy: str) -> AbstractContextManager[Any]:
    """Lock a file, whose folder is made, until the returned context or the process ends.

    Raises TrainingError with the message `busy` if another process holds the lock, and if the
    folder cannot be written into or its file system has no locks.
    """
    make_folder(file.parent)
    try:
        return FileLock(file).acquire(blocking=False)
    except Timeout as held:
        raise TrainingError(f"{busy} ({held})") from None
    except OSError as error:
        raise TrainingError(
            f"{file.parent} cannot be locked ({error}): name a folder on another file system "
            "(--out)"
        ) from error
