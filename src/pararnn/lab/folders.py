"""Folders that commands write into."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pararnn.base.errors import TrainingError


def make_folder(folder: Path, advice: str = "name another folder (--out)") -> None:
    """Make a folder, and those above it, unless it is there; check that files can be made in it.

    Raises TrainingError, which ends with the advice, if they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror or error
        raise TrainingError(f"cannot write to {folder}: {reason}; {advice}") from error
