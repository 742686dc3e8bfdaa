"""Hashes of files, kept so that a file that has not changed is not read again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pararnn.atomic import write_text
from pararnn.train.corpus.readers import cannot_read
from pararnn.train.corpus.store import cannot_write
from pararnn.train.locks import exclusive

SETTLED = 2_000_000_000
"""Nanoseconds after which another change of a file is sure to show in its time."""
Index = dict[str, Any]
"""By path: [size, time of content, time of anything, inode, hash]."""


def sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def hashes_of(
    paths: Sequence[Path], index: Path | None = None, how: Callable[[Path], str] = sha256
) -> list[tuple[int, str]]:
    """Size and hash of each file.

    index: a file (JSON) that keeps them: what has the same size, times and inode as there is not
    read. One that is corrupt is written anew. how: hashes a file; of one path always the same.
    Raises DataError for what cannot be read or written.
    """
    stats = {str(path.absolute()): _stat(path) for path in paths}
    known = {} if index is None else _known(index, stats)
    if len(known) < len(stats):
        known = _hashed(stats, how) if index is None else _hashed_once(stats, index, how)
    found = (known[str(path.absolute())] for path in paths)
    return [(each[0], each[-1]) for each in found]


def _hashed_once(stats: dict[str, list[int]], index: Path, how: Callable[[Path], str]) -> Index:
    """Hash what the index does not know, one process at a time, and put it there."""
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(index):
            known = _known(index, stats)
            begin = time.time_ns()
            new = _hashed({path: stats[path] for path in stats if path not in known}, how)
            settled = {path: new[path] for path in new if new[path][1] < begin - SETTLED}
            if settled:
                write_text(index, json.dumps(_read(index) | settled, indent=0))
    except OSError as error:
        raise cannot_write(index.parent, error) from error
    return known | new


def _hashed(stats: dict[str, list[int]], how: Callable[[Path], str]) -> Index:
    return {path: [*stat, _hash(Path(path), how)] for path, stat in stats.items()}


def _known(index: Path, stats: dict[str, list[int]]) -> Index:
    kept = _read(index)
    return {path: kept[path] for path, stat in stats.items() if kept.get(path, [])[:-1] == stat}


def _read(index: Path) -> Index:
    """The index; empty where it is missing or corrupt."""
    try:
        kept = json.loads(index.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    whole = isinstance(kept, dict) and all(
        isinstance(each, list) and len(each) == 5 and isinstance(each[-1], str)
        for each in kept.values()
    )
    return kept if whole else {}


def _stat(path: Path) -> list[int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise cannot_read(path, error) from error
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _hash(path: Path, how: Callable[[Path], str]) -> str:
    try:
        return how(path)
    except OSError as error:
        raise cannot_read(path, error) from error
