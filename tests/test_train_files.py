"""Folders that are written as a whole, and replace no foreign files."""

import hashlib

import pytest

from pararnn.base.errors import TrainingError
from pararnn.lab.train import files
from pararnn.lab.train.files import MARK, replace_written


def write(folder, names, kind="model", text="ours"):
    with replace_written(folder, kind) as new:
        for name in names:
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_text(f"{text} {name}")


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MARK
    }


@pytest.mark.parametrize("folder_exists", [False, True], ids=["new", "empty"])
def test_a_new_or_empty_folder_is_filled(tmp_path, folder_exists):
    folder = tmp_path / "a" / "b"
    if folder_exists:
        folder.mkdir(parents=True)
    write(folder, ["x", "deep/y"])
    assert content(folder) == {"x": "ours x", "deep/y": "ours deep/y"}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["b"]


def test_the_current_folder_can_be_filled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(files.Path("."), ["x"])
    assert content(tmp_path) == {"x": "ours x"}


def test_foreign_files_stay(tmp_path):
    write(tmp_path / "a", ["x", "old"])
    (tmp_path / "a" / "eval").mkdir()
    (tmp_path / "a" / "eval" / "results.md").write_text("mine")
    (tmp_path / "a" / "README.md").write_text("mine")
    write(tmp_path / "a", ["x", "new"], text="later")
    mine = {"README.md": "mine", "eval/results.md": "mine"}
    assert content(tmp_path / "a") == mine | {"x": "later x", "new": "later new"}
    assert not (tmp_path / "a" / files.NEW).exists()


def full(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "thesis").write_text("mine")
    return folder, "a has thesis, and is not marked as a model folder"


def of_another_kind(tmp_path):
    write(tmp_path / "a", ["x"], "tokenizer")
    return tmp_path / "a", "not marked as a model folder"


def damaged_mark(tmp_path):
    write(tmp_path / "a", ["x"])
    (tmp_path / "a" / MARK).write_text("{")
    return tmp_path / "a", "not marked as a model folder"


def changed_file(tmp_path):
    write(tmp_path / "a", ["x"])
    (tmp_path / "a" / "x").write_text("mine")
    return tmp_path / "a", "x has changed since it was written, and would be replaced"


def name_in_use(tmp_path):
    write(tmp_path / "a", ["y"])
    (tmp_path / "a" / "x").write_text("mine")
    return tmp_path / "a", "x is not by pararnn"


def a_file(tmp_path):
    (tmp_path / "a").write_text("mine")
    return tmp_path / "a", "a is no folder"


def a_broken_link(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "nowhere")
    return tmp_path / "a", "a is no folder"


@pytest.mark.parametrize(
    "make", [full, of_another_kind, damaged_mark, changed_file, name_in_use, a_file, a_broken_link]
)
def test_foreign_files_are_neither_replaced_nor_removed(tmp_path, make):
    folder, message = make(tmp_path)
    old_content = content(tmp_path)
    with pytest.raises(TrainingError, match=message):
        write(folder, ["x"])
    assert content(tmp_path) == old_content


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", range(4))  # the mark, x, new, the mark
def test_a_kill_between_renames_leaves_our_files_only(tmp_path, monkeypatch, call):
    """The mark lists old files and new ones."""
    write(tmp_path / "a", ["x", "old"])
    (tmp_path / "a" / "mine").write_text("mine")
    calls, replace = [], files.os.replace

    def killing(*args):
        calls.append(args)
        if len(calls) == call + 1:
            raise Killed
        replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", killing)
        patch.setattr(files, "remove", lambda _: None)  # a kill cleans nothing
        with pytest.raises(Killed):
            write(tmp_path / "a", ["x", "new"], text="later")
    write(tmp_path / "a", ["x", "new"], text="last")
    assert content(tmp_path / "a") == {"x": "last x", "new": "last new", "mine": "mine"}


def test_a_folder_that_fails_is_as_it_was(tmp_path):
    write(tmp_path / "a", ["x"])
    for name in ("a", "b"):
        with pytest.raises(TypeError):
            write(tmp_path / name, ["y", None], text="half")
    assert content(tmp_path) == {"a/x": "ours x"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("record", [None, "", "[]", '{"versions": 1}', '{"versions": {}}'])
def test_a_report_replaces_reports_only(tmp_path, record):
    names = ("results.json", "results.md")
    files.check_writable(tmp_path, names, "results.json", "versions")
    if record is not None:
        (tmp_path / "results.json").write_text(record)
    (tmp_path / "results.md").write_text("mine")
    message = "results.(json|md) is there, and not by an earlier call"
    with pytest.raises(TrainingError, match=message):
        files.check_writable(tmp_path, names, "results.json", "versions")
    (tmp_path / "results.json").write_text('{"versions": {"pararnn": "1.0"}}')
    files.check_writable(tmp_path, names, "results.json", "versions")


def test_checksums_see_every_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 4)
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    checksums = files.sums_of(tmp_path, files.names_below(tmp_path))
    assert checksums == {"a": [hashlib.sha256(b"0123456789").hexdigest()]}
    assert files.damage(tmp_path, checksums) is None
    for change in (b"", b"0123", b"4567012389", b"0123456788"):
        path.write_bytes(change)
        assert files.damage(tmp_path, checksums) == "a has changed since it was written"
    path.unlink()
    assert files.damage(tmp_path, checksums) == "a cannot be read: No such file or directory"


def test_a_mark_is_read_as_it_was_written(tmp_path):
    marked = {"x": ["0"], "ü/y": ["1", "2"]}
    files.write_mark(tmp_path, "model", marked)
    assert files.read_mark(tmp_path, "model") == marked
    assert files.read_mark(tmp_path, "checkpoint") is None
    for text in ("", "[]", "{}", '{"kind": "model", "files": [1]}', '{"kind": "model"}'):
        (tmp_path / MARK).write_text(text)
        assert files.read_mark(tmp_path, "model") is None, text
    assert files.read_mark(tmp_path / "nowhere", "model") is None
