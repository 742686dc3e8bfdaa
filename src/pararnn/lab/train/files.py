"""Folders that pararnn has written: their marks with checksums, and replacing only such files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pararnn.base.atomic import remove, write_text, write_whole
from pararnn.base.errors import TrainingError

MARK = ".pararnn.json"
"""File in a folder that pararnn has written: the folder's kind, and checksums of the files."""
NEW = ".unfinished"
"""Subfolder for files that are being written or removed."""
BLOCK = 1 << 24

Files = Mapping[str, list[str]]
"""Checksums that a file may have, by its name within its folder."""


def digest(path: Path) -> str:
    """Return the sha256 of a file."""
    result = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            result.update(block)
    return result.hexdigest()


def names_below(folder: Path) -> list[str]:
    """Return the names of all files below a folder but its mark, sorted."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted({path.relative_to(folder).as_posix() for path in files} - {MARK})


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the checksums of files."""
    return {name: [digest(folder / name)] for name in names}


def write_mark(folder: Path, kind: str, files: Files) -> None:
    """Mark a folder as written by pararnn."""
    write_text(folder / MARK, json.dumps({"kind": kind, "files": files}, indent=1) + "\n")


def read_mark(folder: Path, kind: str) -> Files | None:
    """Return the files that a folder's mark lists; None without a mark of this kind."""
    try:
        record = json.loads((folder / MARK).read_text(encoding="utf-8"))
        files = {name: list(sums) for name, sums in record["files"].items()}
        return files if record["kind"] == kind else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def damage(folder: Path, files: Files) -> str | None:
    """Return the damage of a folder's files, in words; None if they are unchanged."""
    for name, sums in files.items():
        try:
            if digest(folder / name) not in sums:
                return f"{name} has changed since it was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
    return None


def written_files(folder: Path, kind: str) -> Files:
    """Return the files that an earlier `replace_written` of this kind wrote in a folder.

    Raises TrainingError if something else wrote the folder, or a file has changed since.
    """
    if not folder.is_dir():
        if folder.exists() or folder.is_symlink():
            raise TrainingError(f"{folder} is no folder: name one that is new or empty")
        return {}
    files = read_mark(folder, kind)
    if files is None:
        names = sorted(path.name for path in folder.iterdir() if path.name != NEW)
        if not names:
            return {}
        raise TrainingError(
            f"{folder} has {names[0]}, and is not marked as a {kind} folder of pararnn, so nothing "
            "is written there: name a folder that is new or empty, or move this one"
        )
    problem = damage(folder, {name: files[name] for name in files if (folder / name).exists()})
    if problem is not None:
        raise TrainingError(
            f"{folder}: {problem}, and would be replaced: move {folder}, or name another folder"
        )
    return files


@contextmanager
def replace_written(folder: Path, kind: str) -> Iterator[Path]:
    """Yield a new folder, whose files move into `folder` when all have been written.

    They replace those of an earlier call of the same kind. Others in the folder stay.

    Args:
        folder: a folder that is new, empty or marked by an earlier call.
        kind: kind of the files, a word in the mark.

    Raises TrainingError as `written_files` does, and if another program's file would be replaced.
    """
    old = written_files(folder, kind)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(folder) as new:
            new.mkdir()
            yield new
            write_mark(new, kind, sums_of(new, names_below(new)))
        return
    new = folder / NEW
    remove(new)  # left by a process that was killed
    new.mkdir()
    try:
        yield new
        files = sums_of(new, names_below(new))
        clash = next((n for n in files if n not in old and (folder / n).exists()), None)
        if clash is not None:
            raise TrainingError(
                f"{folder / clash} is not by pararnn, and would be replaced: move it, or name "
                "another folder"
            )
        # A kill in between leaves old and new files: the mark lists both.
        both = {name: [*old.get(name, ()), *files.get(name, ())] for name in {**old, **files}}
        write_mark(folder, kind, both)
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / name, folder / name)
        for name in set(old) - set(files):
            (folder / name).unlink(missing_ok=True)
        write_mark(folder, kind, files)
    finally:
        remove(new)


def check_writable(folder: Path, names: Iterable[str], record: str, key: str) -> None:
    """Check that files of these names are not in a folder, or are those of an earlier call.

    record: one of the names, of JSON. If its `key` names pararnn's version, pararnn wrote them all.
    Raises TrainingError if another program wrote one of them.
    """
    try:
        if "pararnn" in json.loads((folder / record).read_text(encoding="utf-8"))[key]:
            return
    except (OSError, ValueError, LookupError, TypeError):
        pass
    clash = next((name for name in names if (folder / name).exists()), None)
    if clash is not None:
        raise TrainingError(
            f"{folder / clash} is there, and not by an earlier call of this command: name another "
            "folder (--out), or move it"
        )
