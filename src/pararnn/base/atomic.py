"""Files and folders that are whole or absent: written under another name, then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_whole(path: Path, concurrent: bool = False) -> Iterator[Path]:
    """Yield a path next to `path` to write a file or folder at, and rename it to `path` at the end.

    A file replaces the one that is there, a folder only an empty one. After an error `path` is as
    it was. A process that is killed leaves `.NAME.new`, which the next call removes.

    concurrent: other processes may write the same path at the same time. Each then writes in a new
    folder, `.NAME-*.new`, which stays if the process is killed.
    """
    if concurrent:
        scratch = Path(tempfile.mkdtemp(".new", f".{path.name}-", path.parent))
        new = scratch / path.name
    else:
        scratch = new = path.with_name(f".{path.name}.new")
        remove(new)
    try:
        yield new
        os.replace(new, path)
    finally:
        remove(scratch)


def write_text(path: Path, text: str, concurrent: bool = False) -> None:
    """Write a text file as UTF-8, see `write_whole`."""
    with write_whole(path, concurrent) as new:
        new.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # another process may be removing it too
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
