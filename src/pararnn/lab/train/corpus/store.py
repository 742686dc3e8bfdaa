"""Folders of the cache: one process makes each, while others wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pararnn.base.atomic import remove, write_text, write_whole
from pararnn.lab.train.corpus.readers import DataError
from pararnn.lab.train.files import names_below, sums_of, write_mark
from pararnn.lab.train.locks import exclusive


def make_once(
    folder: Path, whole: Callable[[Path], bool], make: Callable[[Path], None], what: str
) -> None:
    """Make a folder that is not whole: `make` fills another one, which is then renamed.

    One process does it, and the others wait. Where it fails they raise too; where it is killed, the
    next one takes over.

    Args:
        folder: to be made.
        whole: returns True if a folder is complete.
        make: fills an empty folder.
        what: its name in messages.

    Raises DataError where it cannot be written, and what `make` raises.
    """
    if whole(folder):
        return
    failure = folder.with_name(f".{folder.name}.failed")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder) as was_held:
            if whole(folder):
                return
            if was_held and failure.exists():
                message = failure.read_text(encoding="utf-8")
                raise DataError(f"another process could not make {what}: {message}")
            failure.unlink(missing_ok=True)
            try:
                with write_whole(folder) as new:
                    new.mkdir()
                    make(new)
                    write_mark(new, "cache", sums_of(new, names_below(new)))
                    remove(folder)
            except Exception as error:
                write_text(failure, str(error) or type(error).__name__)
                raise
    except OSError as error:
        raise cannot_write(folder.parent, error) from error


def cannot_write(folder: Path, error: OSError) -> DataError:
    """Return the error to raise where a cache cannot be written."""
    return DataError(
        f"cannot write to {folder}: {error.strerror or error}; make room there, or set data.cache "
        "to another folder"
    )
