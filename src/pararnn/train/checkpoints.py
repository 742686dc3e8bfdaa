"""Checkpoints on disk: which ones were written to their end, and which may go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pararnn.errors import TrainingError

MARKER = "complete"
"""The file that is written last into a checkpoint, and removed first."""


def checkpoints(out: Path) -> list[tuple[int, Path]]:
    """The steps and folders of all checkpoints in a run's folder, complete or not, oldest first."""
    names = [path for path in out.glob("checkpoint-*") if path.name[11:].isdigit()]
    return sorted((int(path.name[11:]), path) for path in names)


def last_complete(out: Path) -> tuple[int, Path] | None:
    """The newest checkpoint that was written to its end."""
    found = [(step, path) for step, path in checkpoints(out) if (path / MARKER).exists()]
    return found[-1] if found else None


def mark_complete(folder: Path) -> None:
    """Say that a checkpoint is whole, once all of it is on the disk."""
    for path in sorted(folder.rglob("*")):
        _flush(path)
    _flush(folder)
    marker = folder / MARKER
    marker.touch()
    _flush(marker)
    _flush(folder)
    _flush(folder.parent)


def remove_unmarked(out: Path) -> list[Path]:
    """Remove checkpoints that were not written to their end, or not removed to it."""
    left = [path for _, path in checkpoints(out) if not (path / MARKER).exists()]
    for path in left:
        shutil.rmtree(path)
    return left


def remove_old(out: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; what a kill leaves of one has no marker."""
    for _, path in checkpoints(out)[:-keep]:
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)


@contextmanager
def writing(path: Path, out: Path, errors: type[Exception] = Exception) -> Iterator[None]:
    """TrainingError where `path` cannot be written, with what a run in `out` goes on from."""
    try:
        yield
    except errors as error:
        found = last_complete(out)
        raise TrainingError(
            f"{path} could not be written: {error}. Make room or mend the folder, then the same "
            f"command goes on from {found[1] if found else 'the start'}"
        ) from error


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
