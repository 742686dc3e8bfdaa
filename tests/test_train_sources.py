"""Sources of training data: files, folders and datasets as documents, and their errors."""

import codecs
import gzip
import itertools
import json
import lzma
import os
import pickle
import re
import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from data_files import TEXTS, json_lines, tokens_of, tokens_with_ends

from pararnn.base.errors import MissingExtra, PararnnError
from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.corpus import hashes, packing, readers, sources
from pararnn.lab.train.corpus.prepare import prepare
from pararnn.lab.train.corpus.readers import READERS, dataset_builder
from pararnn.lab.train.corpus.sources import (
    DataError,
    LeftOut,
    documents,
    files_of,
    fingerprint,
    pieces,
)


def test_the_files_of_a_folder_are_read_in_order(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second\r\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt.xz").write_bytes(lzma.compress("fïrst".encode()))
    json_lines(tmp_path / "c.jsonl", [{"text": "third"}, {"text": "fourth", "other": 1}])
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert list(documents(str(tmp_path))) == ["fïrst", "second\r\n", "third", "fourth"]
    assert list(documents(str(tmp_path / "a" / "z.txt.xz"))) == ["fïrst"]


LINE = b'{"text": "fine"}\n'


def of_zstandard(content):
    """Two frames, as parallel packers write them."""
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2
    return b"".join(zstandard.compress(part) for part in (content[:half], content[half:]))


PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": of_zstandard}


@pytest.mark.parametrize("block", [5, 1 << 20])
@pytest.mark.parametrize("packing", PACK)
def test_packed_files_are_read_as_they_were(tmp_path, monkeypatch, packing, block):
    monkeypatch.setattr(readers, "BLOCK", block)
    texts = [f"söme {n}\n" * 9 for n in range(5)]
    json_lines(tmp_path / "plain.jsonl", [{"text": text} for text in texts])
    content = (tmp_path / "plain.jsonl").read_bytes()
    (tmp_path / f"rows.jsonl{packing}").write_bytes(PACK[packing](content))
    assert list(documents(str(tmp_path / f"rows.jsonl{packing}"))) == texts
    assert list(documents(str(tmp_path / "plain.jsonl"))) == texts
    (tmp_path / f"a.txt{packing}").write_bytes(PACK[packing]("".join(texts).encode()))
    assert list(documents(str(tmp_path / f"a.txt{packing}"))) == ["".join(texts)]


@pytest.mark.parametrize("packing", PACK)
def test_damaged_packed_files_raise(tmp_path, packing):
    whole = PACK[packing](LINE * 999)
    for content in (whole[:-9], whole[: len(whole) // 3], b"no such packing", whole + b"more"):
        for name in (f"a.jsonl{packing}", f"a.txt{packing}"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(DataError, match=rf"{name} is not a whole \w+ file") as caught:
                list(documents(str(tmp_path / name)))
            assert "\n" not in str(caught.value)


BROKEN = {
    "corrupt.jsonl": (LINE + LINE + b'{"text": "cut off\n', 'line 3: found \'{"text": "cut off\''),
    "list.jsonl": (LINE + b"[1]\n", "line 2: found a value of type list"),
    "latin.jsonl": (LINE + b'{"text": "\xe9"}\n', "line 2: found .*not JSON"),
    "column.jsonl": (LINE + b'\n{"body": "x"}\n', r"line 3: no column 'text', it has \['body'\]"),
    "null.jsonl": (b'{"text": null}\n', "line 1: 'text' must be text, found nothing"),
    "half.jsonl": (LINE + b'{"text": "\\ud800"}\n', "line 2: found half a surrogate pair"),
    "none.jsonl": (b"\n", "is empty; each line must be"),
    "empty.txt": (b"", "is empty"),
    "latin.txt": (b"one\ntwo\nf\xe9\n", "line 3: found the byte 0xe9"),
    "half.txt": (b"fine\nh\xc3", "line 2: found the byte 0xc3"),
    "zip.txt": (b"PK\n\0\0", "line 2: found a NUL byte"),
    "cut.txt.xz": (lzma.compress(b"text" * 99)[:-20], "not a whole xz file"),
    "not.txt.xz": (b"plain text", "not a whole xz file"),
    "picture.txt": (b"\x89PNG\r\n\x1a\n", "line 1: found the byte 0x89"),
    "deep.jsonl": (b"[" * 10**6, "line 1: found .*not JSON"),
    "cut.parquet": (b"PAR1 and more", "not a whole Parquet file"),
    "empty.parquet": (b"", "not a whole Parquet file"),
    "picture.png": (b"\x89PNG", r"is of a kind that is not read; files must end in \.txt"),
}


FATAL = {"cut.txt.xz", "not.txt.xz", "cut.parquet", "empty.parquet", "picture.png"}
"""Files that raise even if others are fine: the user can copy them again, or remove them."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_the_line(tmp_path, name):
    """A single broken file raises; see the next test for one among others."""
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content.replace(LINE, b"\n"))
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=message) as caught:
            list(documents(str(source)))
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, PararnnError)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_beside_what_is_not_is_counted(tmp_path, name):
    content, message = BROKEN[name]
    (tmp_path / "a.txt").write_text("other")
    (tmp_path / name).write_bytes(content)
    left_out = LeftOut()
    if name in FATAL:
        with pytest.raises(DataError, match=message):
            list(documents(str(tmp_path), left_out=left_out))
        return
    results = list(documents(str(tmp_path), left_out=left_out))
    assert results == ["other"] + ["fine"] * content.count(LINE)
    assert list(left_out.counts.values()) == [1]
    (line,) = left_out.lines()
    assert re.search(rf"^left out 1 \w.*, the first: .*{name}.*{message}", line)


def test_a_damaged_text_file_is_left_out_as_a_whole(tmp_path, monkeypatch):
    """However long it is, and wherever it is found to be damaged."""
    for name, end in {"a.txt": b"", "b.txt": b"\xff"}.items():
        (tmp_path / name).write_bytes(b"a line\n" * 99 + end)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"short"))
    for limit in (1 << 24, 50):
        monkeypatch.setattr(readers, "MAX_HELD", limit)
        monkeypatch.setattr(readers, "BLOCK", 20)
        left_out = LeftOut()
        assert list(documents(str(tmp_path), left_out=left_out)) == ["a line\n" * 99, "short"]
        assert left_out.counts == {"files that are not UTF-8": 1}


def test_a_thousand_rows_without_the_column_end_reading(hub):
    """The column may be misnamed, and a dataset long."""
    hub.rows = itertools.chain([{"body": "x"}] * sources.LOOK, iter(pytest.fail, None))
    with pytest.raises(DataError, match=r"row 1: no column 'text', it has \['body'\]"):
        next(documents("some/set"))


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_byte_order_marks_are_not_text(tmp_path, packing):
    """Otherwise they are learned, and the first line of JSON is not JSON."""
    pack = PACK.get(packing, bytes)
    mark = codecs.BOM_UTF8
    (tmp_path / f"a.txt{packing}").write_bytes(pack(mark + "é\ufeff".encode()))
    (tmp_path / f"b.jsonl{packing}").write_bytes(
        pack(mark + LINE + mark + LINE)
    )  # two put together
    assert list(documents(str(tmp_path))) == ["é\ufeff", "fine", "fine"]


def test_suffixes_are_read_as_text(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("a.md", "b.py", "deep/c.json", "d.png", "e.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "f.md.gz").write_bytes(gzip.compress(b"f.md"))
    json_lines(tmp_path / "g.jsonl", [{"text": "g"}])
    for suffixes, names in {
        ".md": ["a.md", "f.md"],
        ".py, .json": ["b.py", "deep/c.json"],
        ".md,.txt,.jsonl": ["a.md", "e.txt", "f.md", "g"],
    }.items():
        assert list(documents(str(tmp_path), suffixes=suffixes)) == names
    assert list(documents(f"{tmp_path}/*", suffixes=".md")) == ["a.md", "f.md"]
    assert [name for name, *_ in fingerprint(str(tmp_path), suffixes=".py")] == ["b.py"]
    with pytest.raises(
        DataError, match=r"a\.md is of a kind that is not read.*data\.suffixes=\.md"
    ):
        files_of(str(tmp_path / "a.md"))
    with pytest.raises(DataError, match=r"has no files that end in \.rst"):
        files_of(str(tmp_path), ".rst")
    with pytest.raises(DataError, match=r"no file that end in \.rst is like"):
        files_of(f"{tmp_path}/*", ".rst")
    for wrong in ("md", ".", ".md,", "*.md"):
        with pytest.raises(DataError, match=r"suffixes must be ends of names.*\.md,\.py; got"):
            next(documents(str(tmp_path), suffixes=wrong))


def test_several_sources_are_read_one_after_the_other(tmp_path, hub):
    (tmp_path / "b").mkdir()
    for name in ("b/z.txt", "a.txt", "c,d.txt"):
        (tmp_path / name).write_text(name)
    several = f"{tmp_path}/b, some/set,{tmp_path}/a.*"
    assert list(documents(several)) == ["b/z.txt", *TEXTS, "a.txt"]
    assert [each[0] for each in fingerprint(several)] == ["z.txt", "some/set", "a.txt"]
    assert list(documents(f"{tmp_path}/c,d.txt")) == ["c,d.txt"]  # a name with a comma
    with pytest.raises(DataError, match=r"there is no file or folder 'missing\.txt'"):
        next(documents(f"{tmp_path}/a.txt,missing.txt"))
    with pytest.raises(DataError, match="there is no file or folder ''"):
        next(documents(f"{tmp_path}/a.txt,"))


def test_missing_and_empty_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no files"):
        list(documents(str(tmp_path / "empty")))
    for missing in ("", "missing.txt", str(tmp_path / "missing"), "../missing"):
        with pytest.raises(DataError, match="there is no file or folder"):
            list(documents(missing))


def test_documents_are_read_lazily(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(LINE + b"bad\n")
    left_out = LeftOut()
    texts = documents(str(tmp_path / "bad.jsonl"), left_out=left_out)
    assert next(texts) == "fine"
    assert not left_out.counts
    assert list(texts) == []
    assert left_out.counts == {"lines that are no JSON object": 1}


@pytest.fixture
def parquet():
    """Return a function that writes a table as Parquet, in groups of a few rows."""
    pyarrow = pytest.importorskip("pyarrow")
    module = pytest.importorskip("pyarrow.parquet")

    def write(path, **columns):
        path.parent.mkdir(parents=True, exist_ok=True)
        module.write_table(pyarrow.table(columns), path, row_group_size=3)

    return write


def test_parquet(tmp_path, parquet):
    path = tmp_path / "a.parquet"
    parquet(path, text=TEXTS, number=[1, 2, 3, 4])
    assert list(documents(str(path))) == TEXTS
    with pytest.raises(DataError, match=r"a\.parquet: no column 'body', it has \['number', 'text'"):
        list(documents(str(path), "body"))
    with pytest.raises(DataError, match=r"row 1: 'number' must be text, found .* int"):
        list(documents(str(path), "number"))
    parquet(path, text=["fine", "fine", "fine", None])
    left_out = LeftOut()
    assert list(documents(str(path), left_out=left_out)) == ["fine"] * 3
    assert "row 4: 'text' must be text, found nothing" in left_out.lines()[0]
    parquet(path, text=["web", "novel"], other=[0, 0], meta=[{"set": "C4"}, {"set": "Book"}])
    assert list(documents(str(path), drop="meta.set=Book")) == ["web"]
    parquet(path, text=[])
    with pytest.raises(DataError, match=r"a\.parquet is empty"):
        list(documents(str(path)))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="not a whole Parquet file"):
        list(documents(str(path)))


def test_parquet_is_read_in_batches(tmp_path, parquet, monkeypatch):
    for name in "ba":
        parquet(tmp_path / f"{name}.parquet", text=[f"{name}{row}" for row in range(3000)])
    module = sys.modules["pyarrow.parquet"]
    read, batches = module.ParquetFile.iter_batches, []

    def count_batches(*args, **options):
        for batch in read(*args, **options):
            batches.append(len(batch))
            yield batch

    monkeypatch.setattr(module.ParquetFile, "iter_batches", count_batches)
    texts = documents(str(tmp_path))
    assert next(texts) == "a0"
    assert batches == [1024]
    assert list(texts)[-2:] == ["b2998", "b2999"]
    assert sum(batches) == 6000


@pytest.mark.parametrize(("module", "source"), [("pyarrow", "a.parquet"), ("datasets", "some/set")])
def test_missing_packages_are_named(tmp_path, monkeypatch, module, source):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtra, match=rf"{module} is needed here.*pararnn\[train\]"):
        list(documents(source))


class Hub:
    """The part of the package datasets that is used: one dataset, with its revision."""

    def __init__(self):
        self.requests, self.hash, self.rows = [], "revision-1", [{"text": text} for text in TEXTS]

    def load_dataset_builder(self, name, configuration):
        if name != "some/set":
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist\non the Hub")
        self.requests.append((name, configuration))
        return SimpleNamespace(hash=self.hash, as_streaming_dataset=self.stream)

    def stream(self, split):
        self.requests.append(split)
        if split == "broken":
            raise ValueError("Bad split: broken")
        return iter(self.rows)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


@pytest.mark.parametrize(
    ("source", "requests"),
    [
        ("some/set", [("some/set", None), "train"]),
        ("some/set:test", [("some/set", None), "test"]),
        ("some/set/small:train[:5%]", [("some/set", "small"), "train[:5%]"]),
    ],
)
def test_a_dataset_is_streamed(hub, source, requests):
    assert list(documents(source)) == TEXTS
    assert sorted(map(str, hub.requests)) == sorted(map(str, requests))


def test_a_dataset_that_cannot_be_read_raises(hub):
    for source, message in {
        "other/set": "no file or folder 'other/set', and no dataset.*'other/set' doesn't exist$",
        "some/set:broken": "Bad split",
    }.items():
        with pytest.raises(DataError, match=message):
            list(documents(source))
    with pytest.raises(DataError, match=r"some/set, row 1: no column 'body', it has \['text'\]"):
        list(documents("some/set", "body"))


def test_a_dataset_is_packed_again_when_its_revision_changes(hub, tmp_path):
    cache = str(tmp_path / "cache")
    config = DataConfig("some/set", holdout=0.45, sequence_length=8, cache=cache)
    first = prepare(config)
    assert tokens_of(first.train) == tokens_with_ends(TEXTS[:3])
    hub.requests.clear()
    assert prepare(config).folder == first.folder
    assert "train" not in hub.requests
    hub.hash = "revision-2"
    assert prepare(config).folder != first.folder


def test_a_limit_ends_a_stream(hub, tmp_path):
    def rows():
        yield from ({"text": text} for text in TEXTS[:2])
        raise AssertionError("read too far")

    hub.rows = rows()
    (tmp_path / "valid.txt").write_text("held out")
    config = DataConfig("some/set", str(tmp_path / "valid.txt"), cache=str(tmp_path / "cache"))
    small = replace(config, tokens=20, sequence_length=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CHUNK", 1)
        assert tokens_of(prepare(small).train) == tokens_with_ends(TEXTS[:2])


def test_a_folder_is_preferred_to_a_dataset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files_of("owner/name") == files_of("name:test") == files_of("o/n/c:train[:1%]") == []
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "a.txt").write_text("a")
    assert [path.name for path in files_of("name")] == ["a.txt"]


def test_a_pattern_reads_the_files_that_match_it(tmp_path):
    for name in ("train-1.txt", "train-0.txt", "test-0.txt", "deep/er/train-2.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(documents(f"{tmp_path}/train-*.txt")) == ["train-0.txt", "train-1.txt"]
    assert len(list(documents(f"{tmp_path}/**/train-?.txt"))) == 3
    names = [name for name, _, _ in fingerprint(f"{tmp_path}/**/train-?.txt")]
    assert names == ["deep/er/train-2.txt", "train-0.txt", "train-1.txt"]
    with pytest.raises(DataError, match=r"no file is like .*train-\*\.jsonl"):
        files_of(f"{tmp_path}/train-*.jsonl")


def test_files_that_the_system_refuses_are_named(tmp_path, monkeypatch):
    (tmp_path / "link.txt").symlink_to(tmp_path / "nothing.txt")
    with pytest.raises(DataError, match=r"link\.txt is no file: a link to nothing"):
        files_of(str(tmp_path))
    (tmp_path / "link.txt").unlink()
    for name in READERS:
        (tmp_path / f"a{name}").write_bytes(b"")

    def refuse(self_or_path, *_, **__):
        raise PermissionError(13, "Permission denied", str(self_or_path))

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    for name in READERS:
        if name == ".parquet" and "pyarrow" not in sys.modules:
            continue
        with pytest.raises(DataError, match=rf"cannot read .*a{name}: Permission denied"):
            fingerprint(str(tmp_path / f"a{name}"))
    for name in READERS.keys() - {".parquet"}:
        with pytest.raises(DataError, match=rf"cannot read .*a{name}: Permission denied"):
            list(documents(str(tmp_path / f"a{name}")))
    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read .*: Permission denied"):
        files_of(str(tmp_path))


# --- long documents ---


@pytest.mark.parametrize("block", [7, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_long_documents_are_pieces_cut_behind_lines(tmp_path, monkeypatch, block, end):
    monkeypatch.setattr(readers, "BLOCK", block)
    text = end.join(f"líne {row}" + end * (row % 7 == 0) for row in range(60_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_text("short")
    results = list(pieces(str(tmp_path)))
    assert [piece.ends for piece in results] == [False] * (len(results) - 2) + [True, True]
    assert len(results) > 3
    assert "".join(piece.text for piece in results[:-1]) == text
    for piece, later in pairwise(results[:-1]):
        assert sources.PIECE // 2 < len(piece.text) <= sources.PIECE
        assert piece.text.endswith(end)
        assert piece.text.removesuffix(end)[-1].isdigit()
        assert later.text.startswith("l")
    assert list(documents(str(tmp_path))) == [text, "short"]
    assert list(pieces(json_lines(tmp_path / "c.jsonl", [{"text": text}]))) == results[:-1]


def test_no_cut_is_next_to_an_empty_line(tmp_path):
    line = "a" * (sources.PIECE * 3 // 4)
    (tmp_path / "a.txt").write_text(f"{line}\nb" + "\n\nc" * sources.PIECE)
    assert next(pieces(str(tmp_path))).text == line + "\n"
    (tmp_path / "a.txt").write_text("x" * (2 * sources.PIECE))
    assert [len(piece.text) for piece in pieces(str(tmp_path))] == [sources.PIECE] * 2


@pytest.mark.parametrize(("bad", "what"), [(b"\0", "a NUL byte"), (b"\xe9", "the byte 0xe9")])
def test_an_error_names_its_line_in_any_block(tmp_path, monkeypatch, bad, what):
    monkeypatch.setattr(readers, "BLOCK", 10)
    (tmp_path / "a.txt").write_bytes("é\n".encode() * 1000 + bad + b"more\n")
    with pytest.raises(DataError, match=f"line 1001: found {what}"):
        list(documents(str(tmp_path / "a.txt")))


# --- rows that are left out ---

ROWS = [
    {"text": "web", "meta": {"set": "C4", "year": 2020}},
    {"text": "novel", "meta": {"set": "Book", "year": 2020}},
    {"text": "old", "meta": {"set": "C4", "year": 1900}, "flag": True},
    {"text": "plain"},
]


@pytest.mark.parametrize(
    ("drop", "remainder"),
    [
        ("meta.set=Book", ["web", "old", "plain"]),
        ("meta.set=Book,meta.year=1900", ["web", "plain"]),
        (" meta.set = C4 , meta.set = Book ", ["plain"]),
        ("flag=true", ["web", "novel", "plain"]),
        ("text=web", ["novel", "old", "plain"]),
    ],
)
def test_drop_leaves_rows_out(tmp_path, drop, remainder):
    source = json_lines(tmp_path / "a.jsonl", ROWS)
    assert list(documents(source, drop=drop)) == remainder


def test_drop_raises_for_a_field_that_no_row_has(tmp_path, monkeypatch):
    source = json_lines(tmp_path / "a.jsonl", ROWS)
    for wrong in ("meta.sett=Book", "meta.set=Book,meta.sett=Book"):
        with pytest.raises(
            DataError, match=r"first 4 rows of .*a\.jsonl has 'meta\.sett', the last"
        ):
            next(documents(source, drop=wrong))
    monkeypatch.setattr(sources, "LOOK", 2)
    with pytest.raises(DataError, match=r"none of the first 2 rows of .* has 'flag'"):
        next(documents(source, drop="flag=true"))
    assert [piece.text for piece in pieces(source, drop="no=1", strict=False)] == [
        row["text"] for row in ROWS
    ]
    (tmp_path / "b.txt").write_text("text has no fields")
    with pytest.raises(DataError, match=r"b\.txt has 'set'.*name a field of JSON lines"):
        next(documents(str(tmp_path / "b.txt"), drop="set=Book"))


def test_drop_warns_of_a_value_that_no_row_has(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", ROWS)
    with pytest.warns(UserWarning, match=r"no row of .* has meta\.set=Books"):
        assert len(list(documents(source, drop="meta.set=Books,meta.set=C4"))) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(documents(source, drop="meta.set=Book"))
        list(pieces(source, drop="meta.set=Books", strict=False))


@pytest.mark.parametrize("drop", ["meta.set", "=Book", "set=", "set=Book,", ","])
def test_drop_must_be_field_and_value(tmp_path, drop):
    source = json_lines(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"drop must be field=value.*such as meta\.kind=book; got"):
        next(documents(source, drop=drop))


# --- datasets, by the package itself ---


@pytest.fixture
def local_dataset(tmp_path, monkeypatch, parquet):
    """Make a folder as datasets have on the Hub; the package reads it by `name:split`."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    meta = [{"set": "Book"}, {"set": "C4"}]
    for shard in (0, 1):
        path = tmp_path / "own/set/data" / f"train-0000{shard}-of-00002.parquet"
        parquet(path, text=[f"{shard} a", f"{shard} b"], meta=meta)
    parquet(tmp_path / "own/set/data/test-00000-of-00001.parquet", text=["held out"], meta=meta[:1])
    return tmp_path / "own/set/data"


def test_a_local_dataset_is_read_by_the_package(local_dataset):
    assert list(documents("own/set:train")) == ["0 a", "0 b", "1 a", "1 b"]
    assert list(documents("own/set:train", drop="meta.set=Book")) == ["0 b", "1 b"]
    assert list(documents("own/set:test")) == ["held out"]
    assert list(documents("own/set/data/train-*.parquet")) == ["0 a", "0 b", "1 a", "1 b"]
    with pytest.raises(DataError, match="Bad split: valid"):
        next(documents("own/set:valid"))
    with pytest.raises(DataError, match="'small' not found"):
        next(documents("own/set/small:train"))
    old_hash = dataset_builder("own/set:train").hash
    assert dataset_builder("own/set:train").hash == old_hash
    file = local_dataset / "train-00001-of-00002.parquet"
    file.write_bytes(file.read_bytes()[:-9])
    assert fingerprint("own/set:train") != [["own/set:train", old_hash]]
    with pytest.raises(DataError, match=r"cannot read the dataset own/set:train: .*Parquet"):
        list(documents("own/set:train"))


# --- hashes ---


@pytest.fixture
def files_read(monkeypatch):
    """Record the files that are read for their hashes."""
    names = []
    read = hashes._hash
    monkeypatch.setattr(
        hashes, "_hash", lambda path, options: (names.append(path.name), read(path, options))[1]
    )
    return names


def old(path):
    os.utime(path, (10**9, 10**9))


def test_files_that_have_not_changed_are_not_read_again(tmp_path, files_read):
    folder, index = tmp_path / "texts", tmp_path / "cache" / "sources.json"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(name)
        old(folder / name)
    first = fingerprint(str(folder), index)
    assert files_read == ["a.txt", "b.txt"]
    assert fingerprint(str(folder), index) == first == fingerprint(str(folder))
    assert len(files_read) == 4  # of the last, which has no index
    files_read.clear()
    # Another source beside it.
    assert fingerprint(str(folder / "a.txt"), index) == first[:1]
    (tmp_path / "other.txt").write_text("other")
    old(tmp_path / "other.txt")
    for source in (tmp_path / "other.txt", folder):
        fingerprint(str(source), index)
    assert files_read == ["other.txt"]
    files_read.clear()
    # Another content of the same size and time of change.
    (folder / "a.txt").write_text("A.txt")
    old(folder / "a.txt")
    assert fingerprint(str(folder), index) != first
    assert files_read == ["a.txt"]
    files_read.clear()
    (folder / "b.txt").write_text("longer")
    assert fingerprint(str(folder), index)[1][1] == 6
    assert files_read == ["b.txt"]
    # What has just been written may change again within the same tick of the clock.
    assert fingerprint(str(folder), index)[1][1] == 6
    assert files_read == ["b.txt", "b.txt"]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"a": 1}', b'{"a": [1]}', b"\xff"])
def test_a_corrupt_index_is_made_again(tmp_path, files_read, content):
    file, index = tmp_path / "a.txt", tmp_path / "sources.json"
    file.write_text("a")
    old(file)
    index.write_bytes(content.replace(b'"a"', json.dumps(str(file)).encode()))
    first = fingerprint(str(file), index)
    assert fingerprint(str(file), index) == first
    assert files_read == ["a.txt"]


def test_an_index_that_cannot_be_written_raises(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*taken.*set data\.cache to another"):
        fingerprint(str(tmp_path / "a.txt"), tmp_path / "taken" / "sources.json")
