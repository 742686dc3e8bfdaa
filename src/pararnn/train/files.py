"""Files and folders that are whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_beside(path: Path, text: str) -> None:
    """Write a file beside, and give it its name when it is whole."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


@contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """A new folder that takes a folder's place when all has been written into it."""
    # The name is fixed, so that what a killed process left is removed.
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
