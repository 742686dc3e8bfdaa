"""Folders that one process makes while others wait."""

import fcntl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from data_files import TEXTS, json_lines
from processes import on_processes
from table import HANGS_AFTER

from pararnn.lab.train import locks
from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.corpus import prepare as data
from pararnn.lab.train.corpus.sources import DataError
from pararnn.lab.train.corpus.store import make_once


def whole(folder):
    return (folder / "done").exists()


@pytest.fixture
def waiting(monkeypatch):
    """Return an event that is set when a thread waits for a lock."""
    event = threading.Event()

    class Lock(locks.FileLock):
        def acquire(self, blocking=True):
            if blocking:
                event.set()
            return super().acquire(blocking=blocking)

    monkeypatch.setattr(locks, "FileLock", Lock)
    return event


def test_a_waiting_process_uses_the_folder_of_the_first(tmp_path, waiting):
    folders = []

    def make(folder):
        folders.append(folder)
        assert waiting.wait(HANGS_AFTER)
        (folder / "done").touch()

    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(make_once, tmp_path / "a", whole, make, "it") for _ in range(2)]
        assert [task.result(HANGS_AFTER) for task in tasks] == [None, None]
    assert len(folders) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.lock", "a"]


def test_a_waiting_process_fails_with_the_first(tmp_path, waiting):
    folders = []

    def fail(folder):
        folders.append(folder)
        assert waiting.wait(HANGS_AFTER)
        raise DataError("line 2 is odd")

    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(make_once, tmp_path / "a", whole, fail, "it") for _ in range(2)]
        messages = sorted(str(task.exception(HANGS_AFTER)) for task in tasks)
    assert messages == ["another process could not make it: line 2 is odd", "line 2 is odd"]
    assert len(folders) == 1
    assert not (tmp_path / "a").exists()
    # Who comes later tries again.
    make_once(tmp_path / "a", whole, lambda folder: (folder / "done").touch(), "it")
    assert whole(tmp_path / "a")


def test_a_waiting_process_takes_over_after_a_kill(tmp_path, waiting):
    (tmp_path / ".a.new").mkdir()
    (tmp_path / ".a.new" / "half").touch()
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(1, flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / ".a.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"1\n"
    with ThreadPoolExecutor(1) as pool:
        make = lambda folder: (folder / "done").touch()  # noqa: E731
        task = pool.submit(make_once, tmp_path / "a", whole, make, "it")
        assert waiting.wait(HANGS_AFTER)
        assert not task.done()
        holder.kill()
        holder.communicate()
        task.result(HANGS_AFTER)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".pararnn.json", "done"]
    assert not (tmp_path / ".a.new").exists()


def test_an_earlier_failure_does_not_count(tmp_path, waiting):
    def fail(folder):
        raise DataError("long ago")

    with pytest.raises(DataError, match="long ago"):
        make_once(tmp_path / "a", whole, fail, "it")

    def interrupt(folder):
        began.set()
        assert waiting.wait(HANGS_AFTER)
        raise KeyboardInterrupt

    began = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make_once, tmp_path / "a", whole, interrupt, "it")
        assert began.wait(HANGS_AFTER)
        second = pool.submit(make_once, tmp_path / "a", whole, lambda a: (a / "done").touch(), "it")
        assert isinstance(first.exception(HANGS_AFTER), KeyboardInterrupt)
        second.result(HANGS_AFTER)
    assert whole(tmp_path / "a")


def test_a_file_system_without_locks_raises(tmp_path, monkeypatch):
    def none(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(DataError, match=r"Function not implemented; .*set data\.cache to another"):
        make_once(tmp_path / "a", whole, lambda folder: None, "it")


def prepares(source, broken, log, cache, rank):
    pack = data.pack

    def slow(config, *args):
        with log.open("a") as file:
            file.write(config.train + "\n")
        time.sleep(0.2)
        pack(config, *args)

    data.pack = slow
    config = {"cache": str(cache), "holdout": 0.45, "sequence_length": 8}
    data_of_run = data.prepare(DataConfig(train=source, **config))
    torch.distributed.init_process_group("gloo")
    results = [None, None]
    torch.distributed.all_gather_object(
        results, (str(data_of_run.folder), data_of_run.train.tokens.tolist())
    )
    assert results[0] == results[1], results
    with pytest.raises(DataError, match=r"b\.jsonl has 4 tokens"):
        data.prepare(DataConfig(train=str(broken), **config))


def test_of_two_processes_one_tokenises(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    broken, log, cache = (tmp_path / name for name in ("b.jsonl", "log", "cache"))
    broken.write_text('{"text": "fine"}\n{"text": "cut\n')
    on_processes(partial(prepares, source, broken, log, cache))
    assert log.read_text().splitlines().count(source) == 1
