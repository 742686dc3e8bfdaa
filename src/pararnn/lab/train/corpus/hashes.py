"""Hashes of files, cached so that a file that has not changed is not read again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pararnn.base.atomic import write_text
from pararnn.lab.train.corpus.readers import cannot_read
from pararnn.lab.train.corpus.store import cannot_write
from pararnn.lab.train.locks import exclusive

SETTLED = 2_000_000_000
"""Nanoseconds after which another change of a file is sure to show in its time."""
Index = dict[str, Any]
"""[size, time of content, time of anything, inode, hash] by path."""


def sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hashes_of(
    paths: Sequence[Path], index: Path | None = None, hash_file: Callable[[Path], str] = sha256
) -> list[tuple[int, str]]:
    """Return size and hash of each file.

    Raises DataError for a file that cannot be read, and for an index that cannot be written.

    Args:
        paths: the files.
        index: JSON file that caches hashes: a file with the size, times and inode that stand there
            is not read. A corrupt index is written anew.
        hash_file: hashes a file; always the same function for one path.
    """
    keys = [str(path.absolute()) for path in paths]
    stats = {key: _stat(key) for key in keys}

    def hash_all(keys: Iterable[str]) -> Index:
        return {key: [*stats[key], _hash(Path(key), hash_file)] for key in keys}

    entries = hash_all(stats) if index is None else _valid(index, stats)
    if index is not None and len(entries) < len(stats):
        try:
            index.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(index):  # one process at a time
                entries = _valid(index, stats)
                begin = time.time_ns()
                new = hash_all(key for key in stats if key not in entries)
                lasting = {key: new[key] for key in new if new[key][1] < begin - SETTLED}
                if lasting:
                    write_text(index, json.dumps(_read(index) | lasting, indent=0))
                entries |= new
        except OSError as error:
            raise cannot_write(index.parent, error) from error
    return [(entries[key][0], entries[key][-1]) for key in keys]


def _valid(index: Path, stats: dict[str, list[int]]) -> Index:
    """Return the entries of files that have not changed."""
    entries = _read(index)
    return {key: entries[key] for key, stat in stats.items() if entries.get(key, [])[:-1] == stat}


def _read(index: Path) -> Index:
    """Return the index; empty if it is missing or corrupt."""
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    whole = isinstance(entries, dict) and all(
        isinstance(each, list) and len(each) == 5 and isinstance(each[-1], str)
        for each in entries.values()
    )
    return entries if whole else {}


def _stat(path: str) -> list[int]:
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise cannot_read(path, error) from error
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _hash(path: Path, hash_file: Callable[[Path], str]) -> str:
    try:
        return hash_file(path)
    except OSError as error:
        raise cannot_read(path, error) from error
