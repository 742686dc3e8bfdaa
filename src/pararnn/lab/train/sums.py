"""Checksums of a folder's files, and whether they still hold."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

BLOCK = 1 << 24
"""Bytes that one thread hashes at a time."""
THREADS = 8

Sums = Mapping[str, str]
"""`digest` of each file, by its name within its folder."""


class Mark(NamedTuple):
    """Mark of a folder of ours. kind: of its content. files: allowed sums of each file, by name."""

    kind: str
    files: dict[str, list[str]]

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(self._asdict(), indent=1) + "\n"


def digest(path: Path) -> str:
    """Return the sha256 of a file; of more than one block, the sha256 of the blocks' sha256."""

    def digest_at(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(BLOCK)).digest()

    starts = range(0, max(1, path.stat().st_size), BLOCK)
    if len(starts) == 1:
        return digest_at(0).hex()
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return hashlib.sha256(b"".join(pool.map(digest_at, starts))).hexdigest()


def names_below(folder: Path) -> list[str]:
    """Return the names of all files below a folder, sorted."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in files)


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the sums of files."""
    return {name: digest(folder / name) for name in names}


def mark_of(kind: str, sums: Sums) -> Mark:
    """Return the mark of files that were just written."""
    return Mark(kind, {name: [value] for name, value in sums.items()})


def read_mark(path: Path) -> Mark | None:
    """Return the mark in a file; None if it is missing or no mark."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Mark(
            str(record["kind"]),
            {name: list(map(str, each)) for name, each in record["files"].items()},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def damage(folder: Path, files: Mapping[str, Iterable[str]]) -> str | None:
    """Return the damage of a folder's files, in words; None if they are as written."""
    for name, sums in files.items():
        try:
            if digest(folder / name) not in sums:
                return f"{name} has changed since it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
    return None
