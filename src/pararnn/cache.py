"""Compiled libraries and traced steps on disk: one folder an entry, complete or absent.

An entry holds the library, the source it was made from, and a manifest with the library's checksum.
It is built in a folder of its own and renamed into place, so that processes may build the same one
at once, and one that is killed leaves no half entry. Deleting the cache is always safe.
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
from typing import Generic, TypeVar

from pararnn.errors import BackendWarning, EngineError, warn_user

MANIFEST = "manifest.json"

Build = Callable[[Path, Path], None]
"""Makes a library: (source file, library file to write)."""

Opened = TypeVar("Opened")


@dataclass(frozen=True)
class Kind(Generic[Opened]):
    """What entries of a target hold: the names of their files, and how a library is opened.

    `open` raises OSError or ValueError for what cannot be used here.
    """

    library: str
    source: str
    open: Callable[[Path], Opened]


CPP = Kind("kernels.so", "kernels.cpp", lambda path: ctypes.CDLL(str(path)))
CUDA = Kind("kernels.cubin", "kernels.cu", Path.read_bytes)


Key = TypeVar("Key")
Value = TypeVar("Value")


def remembered(
    memory: dict[Key, Value | EngineError], key: Key, make: Callable[[], Value]
) -> Value:
    """What `make` returned at the first use of `key` in this process; its EngineError, again."""
    found = memory.get(key)
    if found is None:
        try:
            found = make()
        except EngineError as error:
            found = error
        memory[key] = found
    if isinstance(found, EngineError):
        raise found
    return found


_FORGET: list[Callable[[], None]] = []


def on_forget(clear: Callable[[], None]) -> None:
    """Have `clear` called by `forget`: it empties what a process remembers of kernels."""
    _FORGET.append(clear)


def forget() -> None:
    """Empty what this process remembers of kernels, and of those that could not be made."""
    for clear in _FORGET:
        clear()


def cache_folder() -> Path:
    """$PARARNN_CACHE_DIR, else `pararnn` in the user's cache folder."""
    given = os.environ.get("PARARNN_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pararnn"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pararnn"


def load(
    kind: Kind[Opened],
    name: str,
    key: str,
    source: str,
    build: Build,
    builder: Callable[[], str] | None = None,
) -> Opened:
    """The library of `source`, from the cache, or built by `build` and put there.

    `name` makes the entry readable; `key` is everything that the library depends on, but for what
    builds it: `builder` tells that, or raises EngineError where nothing can build here. Then what
    any other has built serves. Entries that are damaged, foreign or cannot be loaded are removed
    and built anew. Where the cache cannot be written, a folder of this process stands in, with a
    BackendWarning. Raises what `build` and `builder` raise.
    """
    entry, digest = _named(name, key)
    try:
        if builder is not None:
            entry, digest = _named(entry, f"{digest} {builder()}")
    except EngineError:
        for candidate in sorted(cache_folder().glob(f"{entry}-*")):
            found = _open(kind, candidate, None)
            if found is not None:
                return found
        raise
    try:
        return _load_from(cache_folder(), kind, entry, digest, source, build)
    except OSError as error:
        _warn_unwritable(cache_folder(), error)
    return _load_from(_own_folder(), kind, entry, digest, source, build)


def _named(name: str, key: str) -> tuple[str, str]:
    """An entry's name, and the digest of its key."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"{name}-{digest[:24]}", digest


def keep_failed(name: str, source: str) -> Path:
    """Write what did not compile where the user can look at it; returns its path."""
    try:
        folder = cache_folder() / "failed"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source, encoding="utf-8")
    except OSError:
        folder = _own_folder()
        (folder / name).write_text(source, encoding="utf-8")
    return folder / name


def _load_from(
    folder: Path, kind: Kind[Opened], name: str, digest: str, source: str, build: Build
) -> Opened:
    entry = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    found = _open(kind, entry, digest)
    if found is None:
        _make(kind, entry, digest, source, build)
        found = _open(kind, entry, digest)
    if found is None:
        raise EngineError(
            f"{entry / kind.library} was built, but cannot be loaded; set PARARNN_CACHE_DIR or "
            "TMPDIR to a folder from which programs may run"
        )
    return found


def _open(kind: Kind[Opened], entry: Path, digest: str | None) -> Opened | None:
    """The entry's library if it is whole; whatever else is in its place is removed.

    Without a digest the entry's name has to agree with its own.
    """
    if not os.path.lexists(entry):
        return None
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        content = (entry / kind.library).read_bytes()
        checksum = hashlib.sha256(content).hexdigest()
        if digest is None and entry.name.endswith(f"-{str(manifest['key'])[:24]}"):
            digest = manifest["key"]
        if manifest == {"key": digest, "checksum": checksum}:
            return kind.open(entry / kind.library)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # unreadable, or not loadable here: as good as damaged
    _remove(entry)
    return None


def _make(kind: Kind[Opened], entry: Path, digest: str, source: str, build: Build) -> None:
    with tempfile.TemporaryDirectory(prefix=".building-", dir=entry.parent) as scratch:
        made = Path(scratch) / entry.name
        made.mkdir()
        (made / kind.source).write_text(source, encoding="utf-8")
        build(made / kind.source, made / kind.library)
        checksum = hashlib.sha256((made / kind.library).read_bytes()).hexdigest()
        manifest = json.dumps({"key": digest, "checksum": checksum})
        (made / MANIFEST).write_text(manifest, encoding="utf-8")
        try:
            made.rename(entry)
        except OSError:
            # Another process was first. Its entry is checked like any other.
            if not entry.is_dir():
                raise


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)  # another process may be at it too
    else:
        entry.unlink(missing_ok=True)


@functools.cache
def _own_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="pararnn-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


_UNWRITABLE: set[Path] = set()


def _warn_unwritable(folder: Path, error: OSError) -> None:
    """Once a folder: what fails, and on which file, differs from one entry to the next."""
    if folder not in _UNWRITABLE:
        _UNWRITABLE.add(folder)
        warn_user(
            f"traced steps and compiled kernels cannot be kept in {folder} ({error}), so every "
            "process makes its own; set PARARNN_CACHE_DIR to a folder that can be written",
            BackendWarning,
        )
