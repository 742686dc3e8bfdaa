"""Folders that commands write into: made, or refused with advice."""

import tempfile

import pytest

from pararnn.base.errors import TrainingError
from pararnn.lab.folders import make_folder


def test_a_folder_is_made_and_stays_empty(tmp_path):
    for _ in range(2):
        make_folder(tmp_path / "a" / "b")
    assert [*(tmp_path / "a").iterdir()] == [tmp_path / "a" / "b"]
    assert not [*(tmp_path / "a" / "b").iterdir()]


def test_a_file_in_its_place_is_named(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(TrainingError, match=r"^cannot write to .*file.*: .*; name another"):
            make_folder(folder)


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(TrainingError, match=r"run: Permission denied; take another$"):
        make_folder(tmp_path / "run", "take another")
