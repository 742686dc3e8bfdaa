"""Files and folders that are whole or absent."""

from pathlib import Path

import pytest

from pararnn.base.atomic import write_text, write_whole


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_file_and_a_folder_appear_when_they_are_whole(tmp_path, concurrent):
    write_text(tmp_path / "a", "old")
    with write_whole(tmp_path / "a", concurrent) as new:
        new.write_text("new")
        assert (tmp_path / "a").read_text() == "old"
    with write_whole(tmp_path / "b", concurrent) as new:
        new.mkdir()
        (new / "c").touch()
        assert not (tmp_path / "b").exists()
    assert (tmp_path / "a").read_text() == "new"
    assert names(tmp_path) == ["a", "b"]
    assert names(tmp_path / "b") == ["c"]


@pytest.mark.parametrize("concurrent", [False, True])
def test_an_error_leaves_what_was_there(tmp_path, concurrent):
    (tmp_path / "a").write_text("old")

    def interrupt():
        with write_whole(tmp_path / "a", concurrent) as new:
            new.mkdir()
            (new / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    with pytest.raises(FileNotFoundError), write_whole(tmp_path / "a", concurrent):
        pass  # nothing is written
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".a.new").mkdir()
    (tmp_path / ".a.new" / "half").touch()
    write_text(tmp_path / "a", "whole")
    assert names(tmp_path) == ["a"]


def test_concurrent_writers_do_not_meet(tmp_path):
    with write_whole(tmp_path / "a", True) as first, write_whole(tmp_path / "a", True) as second:
        Path(first).write_text("first")
        Path(second).write_text("second")
    assert (tmp_path / "a").read_text() == "first"  # its block ended last
    assert names(tmp_path) == ["a"]
