"""Files and folders that are whole or absent, and replace only what we wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pararnn.base.atomic import remove, write_text, write_whole
from pararnn.base.errors import TrainingError
from pararnn.lab.train.sums import Mark, digest, mark_of, names_below, read_mark, sums_of

MARK = ".pararnn.json"
"""File in a folder that lists which of its files are ours."""
NEW = ".unfinished"
"""Folder in a folder, for what is being written or removed."""

Files = Mapping[str, list[str]]


@contextmanager
def replace_own(folder: Path, kind: str) -> Iterator[Path]:
    """Yield a new folder, whose files move into `folder` when all have been written.

    They replace those of an earlier call of the same kind. Others in the folder stay.

    Args:
        folder: a folder that is new, empty or marked by an earlier call.
        kind: kind of the files, a word in the mark.

    Raises TrainingError as `own_files` does, and if a file would replace one that is not ours.
    """
    own = own_files(folder, kind)
    if folder.exists():
        new = folder / NEW
        remove(new)  # left by a process that was killed
        new.mkdir()
        try:
            yield new
            _move(new, folder, own, _mark_of_all(new, kind))
        finally:
            remove(new)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(folder) as new:
        new.mkdir()
        yield new
        write_text(new / MARK, _mark_of_all(new, kind).text())


def _mark_of_all(folder: Path, kind: str) -> Mark:
    """Return the mark of all files in a new folder, without a mark that was copied into it."""
    return mark_of(kind, sums_of(folder, (name for name in names_below(folder) if name != MARK)))


def own_files(folder: Path, kind: str) -> Files:
    """Return the files that an earlier `replace_own` of this kind wrote in a folder, and sums.

    Raises TrainingError if it did not write the folder and there is something in it, or one of its
    files has changed since.
    """
    if not folder.is_dir():
        if folder.exists() or folder.is_symlink():
            raise TrainingError(f"{folder} is no folder: name one that is new or empty")
        return {}
    mark = read_mark(folder / MARK)
    if mark is None or mark.kind != kind:
        names = sorted(path.name for path in folder.iterdir() if path.name != NEW)
        if not names:
            return {}
        raise TrainingError(
            f"{folder} has {names[0]}, and is not marked as a {kind} folder of pararnn, so nothing "
            "is written there: name a folder that is new or empty, or move this one"
        )
    for name, sums in mark.files.items():
        if (folder / name).exists() and digest(folder / name) not in sums:
            raise TrainingError(
                f"{folder / name} has changed since pararnn wrote it, and would be replaced: move "
                f"{folder}, or name another folder"
            )
    return mark.files


def check_own(folder: Path, names: Iterable[str], record: str, part: str) -> None:
    """Check that files of these names are not in a folder, or are those of an earlier call.

    record: one of the names, of JSON. If its `part` names our version, all are ours.
    Raises TrainingError if others wrote one of them.
    """
    try:
        if "pararnn" in json.loads((folder / record).read_text(encoding="utf-8"))[part]:
            return
    except (OSError, ValueError, LookupError, TypeError):
        pass
    other = next((name for name in names if (folder / name).exists()), None)
    if other is not None:
        raise TrainingError(
            f"{folder / other} is there, and not by an earlier call of this command: name another "
            "folder (--out), or move it"
        )


def _move(new: Path, folder: Path, own: Files, mark: Mark) -> None:
    """Move files into a folder, and remove those of ours that they replace."""
    for name in mark.files:
        if name not in own and (folder / name).exists():
            raise TrainingError(
                f"{folder / name} is not by pararnn, and would be replaced: move it, or name "
                "another folder"
            )
    # A kill in between leaves old and new files: both are ours.
    both = {name: [*own.get(name, ()), *mark.files.get(name, ())] for name in {**own, **mark.files}}
    write_text(folder / MARK, Mark(mark.kind, both).text())
    for name in mark.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / name, folder / name)
    for name in set(own) - set(mark.files):
        (folder / name).unlink(missing_ok=True)
    write_text(folder / MARK, mark.text())
