"""Compiled libraries on disk: one folder an entry, complete or absent.

An entry holds the library, the source it was made from, and a manifest with the library's checksum.
Several processes may build the same entry at the same time. One that is killed leaves no half
entry. Deleting the cache is always safe.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pararnn.base.atomic import remove, write_whole
from pararnn.base.errors import BackendWarning, EngineError, warn_user

MANIFEST = "manifest.json"

Build = Callable[[Path, Path], None]
"""Function that makes a library: (source file, library file to write)."""

DAMAGED = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    ValueError,
    KeyError,
    TypeError,
)
"""Errors of a damaged or foreign entry, which is rebuilt. Other errors, such as missing permission
or too many open files, say nothing about the entry: it stays."""

Opened = TypeVar("Opened")


@dataclass(frozen=True)
class EntryFiles(Generic[Opened]):
    """Files of a target's entries, by name, and the function that opens a library.

    `open` raises CannotLoad for a whole library that this machine cannot load, ValueError for a
    file that holds no library.
    """

    library: str
    source: str
    open: Callable[[Path], Opened]


class CannotLoad(Exception):
    """The system's loader refused a library; the text says why."""


def _open_library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotLoad(str(error)) from error


CPP = EntryFiles("kernels.so", "kernels.cpp", _open_library)
CUDA = EntryFiles("kernels.cubin", "kernels.cu", Path.read_bytes)


ABSENT: Any = object()
"""Value of a key that a cache does not have, where None may be a value."""

Key = TypeVar("Key")
Value = TypeVar("Value")


def cached_or_error(
    memory: dict[Key, Value | EngineError], key: Key, make: Callable[[], Value]
) -> Value:
    """Return what `make` returned at the first use of `key` in this process; or raise its error."""
    value: Any = memory.get(key, ABSENT)
    if value is ABSENT:
        try:
            value = make()
        except EngineError as error:
            value = error
        memory[key] = value
    if isinstance(value, EngineError):
        raise value
    return value


_OF_KERNELS: list[Callable[[], None]] = []
_OF_REST: list[Callable[[], None]] = []


def on_clear(clear: Callable[[], None], kernels: bool = True) -> None:
    """Have `clear_caches` call `clear`, and `clear_kernels` too if it is about kernels."""
    (_OF_KERNELS if kernels else _OF_REST).append(clear)


def clear_kernels() -> None:
    """Drop this process's kernels, launch plans, and errors of kernels that could not be made."""
    for clear in _OF_KERNELS:
        clear()


def clear_caches() -> None:
    """Drop all that this process has cached for its calls, as a new process would begin.

    These are loaded kernels, launch plans, errors of kernels that could not be made, and
    measurements of `autotune`. The next call loads kernels from the cache on disk, which stays. So
    do the Programs of steps: a step is traced again where what it reads has changed.
    """
    clear_kernels()
    for clear in _OF_REST:
        clear()


def cache_folder() -> Path:
    """Return $PARARNN_CACHE_DIR, else `pararnn` in the user's cache folder."""
    chosen = os.environ.get("PARARNN_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pararnn"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pararnn"


def load(
    files: EntryFiles[Opened],
    name: str,
    key: str,
    source: str,
    build: Build,
    builder: Callable[[], str] | None = None,
) -> Opened:
    """Load the library of `source` from the cache, or have `build` make it and put it there.

    `name` makes the entry readable. `key` is everything that the library depends on, except for
    the builder. `builder` returns the builder's identity, or raises EngineError where nothing can
    build here: then an entry of any other builder is used. Damaged and foreign entries are removed
    and rebuilt. So are entries that cannot be loaded, with a BackendWarning. If the cache cannot be
    read or written, a folder of this process is used instead, with a BackendWarning. Raises what
    `build` and `builder` raise.
    """
    entry, digest = _entry_name(name, key)
    try:
        if builder is not None:
            entry, digest = _entry_name(entry, f"{digest} {builder()}")
    except EngineError:
        for candidate in sorted(cache_folder().glob(f"{entry}-*")):
            try:
                library = _open(files, candidate, None)
            except OSError as error:
                _warn_unusable(cache_folder(), error)
                continue
            if library is not None:
                return library
        raise
    try:
        return _load_from(cache_folder(), files, entry, digest, source, build)
    except OSError as error:
        _warn_unusable(cache_folder(), error)
    return _load_from(_process_folder(), files, entry, digest, source, build)


def _entry_name(name: str, key: str) -> tuple[str, str]:
    """Return an entry's name, and the digest of its key."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"{name}-{digest[:24]}", digest


def write_failed(name: str, source: str) -> Path:
    """Write a source that did not compile for the user to look at; return its path."""
    try:
        folder = cache_folder() / "failed"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source, encoding="utf-8")
    except OSError:
        folder = _process_folder()
        (folder / name).write_text(source, encoding="utf-8")
    return folder / name


def _load_from(
    folder: Path, files: EntryFiles[Opened], name: str, digest: str, source: str, build: Build
) -> Opened:
    entry = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    library = _open(files, entry, digest)
    if library is None:
        _build_entry(files, entry, digest, source, build)
        library = _open(files, entry, digest)
    if library is None:
        raise EngineError(
            f"{entry / files.library} was built, but cannot be loaded; set PARARNN_CACHE_DIR or "
            "TMPDIR to a folder from which programs may run"
        )
    return library


def _open(files: EntryFiles[Opened], entry: Path, digest: str | None) -> Opened | None:
    """Return the entry's library if the entry is whole; otherwise remove the entry.

    Without a digest the entry's name has to agree with the key in its manifest. Raises OSError
    for errors that are not in `DAMAGED`.
    """
    if not os.path.lexists(entry):
        return None
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        content = (entry / files.library).read_bytes()
        checksum = hashlib.sha256(content).hexdigest()
        if digest is None and entry.name.endswith(f"-{str(manifest['key'])[:24]}"):
            digest = manifest["key"]
        if manifest == {"key": digest, "checksum": checksum}:
            return files.open(entry / files.library)
    except DAMAGED:
        pass
    except CannotLoad as error:
        warn_user(f"{entry} cannot be loaded here and is removed: {error}", BackendWarning)
    remove(entry)
    return None


def _build_entry(
    files: EntryFiles[Opened], entry: Path, digest: str, source: str, build: Build
) -> None:
    try:
        with write_whole(entry, concurrent=True) as new:
            new.mkdir()
            (new / files.source).write_text(source, encoding="utf-8")
            build(new / files.source, new / files.library)
            checksum = hashlib.sha256((new / files.library).read_bytes()).hexdigest()
            manifest = json.dumps({"key": digest, "checksum": checksum})
            (new / MANIFEST).write_text(manifest, encoding="utf-8")
    except OSError:
        # Another process was first. Its entry is checked like any other.
        if not entry.is_dir():
            raise


@functools.cache
def _process_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="pararnn-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


_UNUSABLE: set[Path] = set()
"""Folders that a warning has named."""


def _warn_unusable(folder: Path, error: OSError) -> None:
    if folder not in _UNUSABLE:
        _UNUSABLE.add(folder)
        warn_user(
            f"compiled kernels cannot be cached in {folder} ({error}), so every "
            "process makes its own; set PARARNN_CACHE_DIR to a folder that can be read and written",
            BackendWarning,
        )
