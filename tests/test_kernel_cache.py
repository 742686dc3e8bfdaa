"""Kernels that test runs cache are dropped when they are old or too many, and only then."""

import os
import time

import kernel_cache

DAY = 24 * 3600


def _entry(folder, name, days, size=10):
    (folder / name).mkdir()
    (folder / name / "kernels.so").write_bytes(bytes(size))
    birth = time.time() - days * DAY
    os.utime(folder / name, (birth, birth))


def _names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_old_and_unfinished_entries_are_dropped(tmp_path):
    most = kernel_cache.DAYS
    for name, days in {"new": 0, "used": most - 1, "old": most + 1}.items():
        _entry(tmp_path, name, days)
    for prefix in (".building-", kernel_cache.DROPPED):
        _entry(tmp_path, f"{prefix}running", 0.5)
        _entry(tmp_path, f"{prefix}killed", 2)
    kernel_cache.prune(tmp_path)
    assert _names_in(tmp_path) == [".building-running", ".dropped-running", "new", "used"]


def test_the_oldest_of_too_much_is_dropped(tmp_path):
    for days in (3, 1, 2):
        _entry(tmp_path, f"{days} days", days, size=100_000)
    _entry(tmp_path, ".building-another", 0.9, size=100_000)
    kernel_cache.prune(tmp_path, most=350_000)
    assert _names_in(tmp_path) == [".building-another", "1 days", "2 days"]


def test_the_folder_is_the_users(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(kernel_cache.folder()) == "/somewhere/pararnn-tests"
