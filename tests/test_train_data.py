"""Training data: sources, what is learned and held out, the cache, rows and their order."""

import codecs
import errno
import fcntl
import gzip
import importlib
import json
import lzma
import os
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import END, TEXTS, json_lines, tokens_of, tokens_with_ends
from data_files import config as config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from pararnn.base.errors import MissingExtra
from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.corpus import packing, sources
from pararnn.lab.train.corpus import prepare as data_module
from pararnn.lab.train.corpus.prepare import positions_of, prepare
from pararnn.lab.train.corpus.sources import DataError, documents, files_of, lines_of
from pararnn.lab.train.order import RowSampler, StreamSampler


@pytest.fixture
def parquet():
    """Return a function that writes a table as Parquet, in groups of a few rows."""
    pyarrow = pytest.importorskip("pyarrow")
    module = pytest.importorskip("pyarrow.parquet")

    def write(path, **columns):
        path.parent.mkdir(parents=True, exist_ok=True)
        module.write_table(pyarrow.table(columns), path, row_group_size=3)

    return write


def texts_of(rows):
    """Return the documents of a part, by their ends."""
    texts = bytes(min(token, 255) for token in tokens_of(rows)).split(b"\xff")
    assert texts.pop() == b""  # each part ends with an end
    return [text.decode() for text in texts]


# --- files ---


def of_zstandard(content):
    """Two frames, as parallel packers write them."""
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2
    return b"".join(zstandard.compress(part) for part in (content[:half], content[half:]))


PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": of_zstandard}
EXACT = [
    "a\r\nb\rc\n",
    "form\ffeed\v\x1c\x85\u2028",
    "no end",
    "\n\n",
    " \ufeff\0é🙂",
    "2020-01-01",
]


@pytest.mark.parametrize("packed", PACK)
def test_files_are_read_to_the_byte(config, tmp_path, packed):
    """Line ends, blanks and what looks like a date are learned as they are."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(EXACT):
        (folder / f"{number}.txt{packed}").write_bytes(PACK[packed](text.encode()))
    lines = "".join(json.dumps({"text": text}) + "\r\n\n" for text in EXACT)
    lines += json.dumps({"text": "é", "late": 1}, ensure_ascii=False)
    (folder / f"rows.jsonl{packed}").write_bytes(PACK[packed](lines.encode()))
    data = prepare(replace(config, train=str(folder), valid=config.train))
    assert tokens_of(data.train) == tokens_with_ends([*EXACT, *EXACT, "é"])


@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_packed_files_that_are_cut_raise(tmp_path, packed, kind):
    """zstandard's own reader takes a file that ends within a frame as whole."""
    json_lines(tmp_path / "a.jsonl", [{"text": f"{number}"} for number in range(2000)])
    whole = PACK[packed]((tmp_path / "a.jsonl").read_bytes())
    path = tmp_path / f"a.{kind}{packed}"
    for content in (whole[:-9], whole[: len(whole) // 3], b"no such packing", whole + b"more"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"cannot read .*{path.name}: "):
            list(documents(str(path)))


def test_byte_order_marks_are_not_text(tmp_path):
    mark, line = codecs.BOM_UTF8, b'{"text": "fine"}\n'
    (tmp_path / "a.txt").write_bytes(mark + "é\ufeff".encode())
    (tmp_path / "b.jsonl").write_bytes(mark + line + mark + line)  # two put together
    assert list(documents(str(tmp_path))) == ["é\ufeff", "fine", "fine"]


BROKEN = {
    "cut.jsonl": (b'{"text": "cut off\n', "line 1, of []"),
    "list.jsonl": (b"\n[1]\n", "line 2, of []"),
    "latin.jsonl": (b'{"text": "\xe9"}\n', "line 1, of []"),
    "deep.jsonl": (b"[" * 10**5, "line 1, of []"),
    "column.jsonl": (b'{"body": "x"}\n', "line 1, of ['body']"),
    "null.jsonl": (b'{"text": null}\n', "line 1, of ['text']"),
    "number.jsonl": (b'{"text": 1}\n', "line 1, of ['text']"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', "line 1, of ['text']"),
    "empty.txt": (b"", ", of ['text']"),
    "latin.txt": (b"one\ntwo\nf\xe9\n", ", of ['text']"),
    "half.txt.gz": (gzip.compress(b"fine\nh\xc3"), ", of ['text']"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_beside_what_is_not_is_counted(tmp_path, name):
    content, position = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        DataError, match=f"no document of .* has text in 'text': .*{name}"
    ) as caught:
        list(documents(str(tmp_path)))
    assert str(caught.value).endswith(position)
    (tmp_path / "other.txt").write_text("other")
    left_out = {}
    assert list(documents(str(tmp_path), left_out=left_out)) == ["other"]
    (line,) = lines_of(left_out)
    assert line.startswith("left out 1 documents without text in UTF-8, the first: ")
    assert name in line
    assert line.endswith(position)


def test_a_misnamed_column_ends_reading(tmp_path):
    rows = [{"body": "x"}] * (sources.LOOK + 9)
    source = json_lines(tmp_path / "a.jsonl", [*rows, {"text": "much later"}])
    with pytest.raises(DataError, match=rf"left out {sources.LOOK + 1:,} .* line 1, of \['body'\]"):
        next(documents(source))
    source = json_lines(tmp_path / "a.jsonl", [{"text": "x", "kind": "a"}] * 2000 + [{"text": "y"}])
    assert list(documents(source, drop="kind=a")) == ["y"]


def test_the_files_of_a_folder_are_read_in_order(tmp_path, monkeypatch):
    for name in (
        "b.txt",
        "a/z.txt",
        "c[1].txt",
        "c,d.txt",
        ".hidden/x.txt",
        ".y.txt",
        "e.md",
        "f.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "g.md.gz").write_bytes(gzip.compress(b"g.md"))
    read = lambda source, **options: list(documents(source, **options))  # noqa: E731
    assert read(str(tmp_path)) == ["a/z.txt", "b.txt", "c,d.txt", "c[1].txt"]
    assert read(f"{tmp_path}/**/?.txt") == ["a/z.txt", "b.txt"]
    assert read(f"{tmp_path}/b.txt, {tmp_path}/a") == ["b.txt", "a/z.txt"]
    (tmp_path / "a").rename(tmp_path / "a[0]")
    assert read(f"{tmp_path}/a[0]") == ["a/z.txt"]
    for name in ("c,d.txt", "c[1].txt"):
        assert read(f"{tmp_path}/{name}") == [name]
    assert read(str(tmp_path), suffixes=".md, .py") == ["e.md", "f.py", "g.md"]
    assert read(f"{tmp_path}/*", suffixes=".md,.txt") == [
        "b.txt",
        "c,d.txt",
        "c[1].txt",
        "e.md",
        "g.md",
    ]
    for missing in (
        "",
        "no.txt",
        f"{tmp_path}/no",
        f"{tmp_path}/b.txt,",
        f"{tmp_path}/e.md",
        f"{tmp_path}/*.x",
    ):
        with pytest.raises(
            DataError, match=r"^'.*' (has|is) no file.* that end in \.txt, \.jsonl, \.parquet"
        ):
            read(missing)
    with pytest.raises(DataError, match=r"that end in \.rst, packed"):
        files_of(str(tmp_path), ".rst")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nothing.txt")
    with pytest.raises(DataError, match=r"cannot read .*link\.txt: .*No such file"):
        read(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert files_of("owner/name") == files_of("name:test") == files_of("o/n/c:train[:1%]") == []


# --- rows that are left out ---

ROWS = [
    {"text": "web", "meta": {"set": "C4", "year": 2020}},
    {"text": "novel", "meta": {"set": "Book", "year": 2020}},
    {"text": "old", "meta": {"set": "C4", "year": 1900}, "flag": True, "date": "1900-01-01"},
    {"text": "plain", "a.b": None},
]


@pytest.mark.parametrize(
    ("drop", "remainder"),
    [
        ("meta.set=Book", ["web", "old", "plain"]),
        ("meta.set=Book,meta.year=1900", ["web", "plain"]),
        (" meta.set = C4 , meta.set = Book ", ["plain"]),
        ("flag=true,a.b=null", ["web", "novel"]),
        ("date=1900-01-01,text=web", ["novel", "plain"]),
    ],
)
def test_drop_leaves_rows_out(tmp_path, drop, remainder):
    assert list(documents(json_lines(tmp_path / "a.jsonl", ROWS), drop=drop)) == remainder


def test_drop_is_counted_and_so_is_what_no_row_has(config, tmp_path, capsys):
    source = json_lines(tmp_path / "a.jsonl", [*ROWS, {"text": ""}])
    drop = "meta.set=Book,meta.set=Books"
    data = prepare(replace(config, train=source, valid=source, drop=drop, sequence_length=1))
    assert texts_of(data.train) == texts_of(data.valid) == ["web", "old", "plain"]
    lines = capsys.readouterr().err.splitlines()
    prepare(replace(config, train=source, valid=source, drop=drop))
    assert capsys.readouterr().err.splitlines() == lines  # at every start
    assert "left out 1 rows with meta.set=Book, the first: " in lines[0]
    assert lines[-1] == f"data: {source} has no rows with meta.set=Books"
    assert len(lines) == 5
    with pytest.raises(DataError, match=r"has text in 'text': left out 4 rows with meta=null"):
        list(documents(json_lines(tmp_path / "b.jsonl", [{"meta": None}] * 4), drop="meta=null"))


@pytest.mark.parametrize("drop", ["meta.set", "=Book", "set=", "set=Book,", ","])
def test_drop_must_be_field_and_value(tmp_path, drop):
    with pytest.raises(DataError, match=r"drop must be field=value.*such as meta\.kind=book; got"):
        next(documents(json_lines(tmp_path / "a.jsonl", ROWS), drop=drop))


# --- Parquet and datasets ---


def test_parquet(tmp_path, parquet):
    path = tmp_path / "a[1].parquet"
    parquet(
        path, text=[*TEXTS, None], number=[1, 2, 3, 4, 5], meta=[{"set": "a"}] * 4 + [{"set": "b"}]
    )
    assert list(documents(str(path))) == TEXTS
    with pytest.raises(DataError, match=r"row 1, of \['meta', 'number', 'text'\]"):
        list(documents(str(path), "body"))
    with pytest.raises(DataError, match=r"no document .* has text in 'number'"):
        list(documents(str(path), "number"))
    with pytest.raises(DataError, match=r"left out 4 rows with meta\.set=a"):
        list(documents(str(path), drop="meta.set=a"))
    parquet(path, text=[])
    with pytest.raises(DataError, match="has text in 'text': it is empty"):
        list(documents(str(path)))
    for content in (b"", b"PAR1 and more"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cannot read .*a\[1\]\.parquet: .*Parquet"):
            list(documents(str(path)))


@pytest.fixture
def local_dataset(tmp_path, monkeypatch, parquet):
    """Make a folder as datasets have on the Hub; the package reads it by `name:split`."""
    config = pytest.importorskip("datasets").config
    for module in (config, importlib.import_module("huggingface_hub.constants")):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    meta = [{"set": "Book"}, {"set": "C4"}]
    for shard in (0, 1):
        path = tmp_path / "own/set/data" / f"train-0000{shard}-of-00002.parquet"
        parquet(path, text=[f"{shard} a\r\n", f"{shard} b"], meta=meta, other=[1, 2])
    parquet(tmp_path / "own/set/data/test-00000-of-00001.parquet", text=["held out"], meta=meta[:1])
    return tmp_path / "own/set/data"


def test_a_dataset_is_streamed_by_its_name(local_dataset, config, tmp_path):
    assert list(documents("own/set:train")) == ["0 a\r\n", "0 b", "1 a\r\n", "1 b"]
    assert list(documents("own/set:train", drop="meta.set=Book")) == ["0 b", "1 b"]
    assert list(documents("own/set:test")) == ["held out"]
    assert list(documents("own/set/data/train-*.parquet")) == ["0 a\r\n", "0 b", "1 a\r\n", "1 b"]
    for source, message in {
        "own/set:valid": "Bad split: valid",
        "own/set/small:train": "'small' not found",
        "other/set": "no file or folder 'other/set', and no dataset of that name can be read",
    }.items():
        with pytest.raises(DataError, match=message):
            next(documents(source))
    with pytest.raises(DataError, match=r"own/set:train, row 1, of \['meta', 'other', 'text'\]"):
        next(documents("own/set:train", "body"))
    request = replace(config, train="own/set:train", valid="own/set:test", sequence_length=1)
    folder = prepare(request).folder
    assert prepare(request).folder == folder
    parquet = sys.modules["pyarrow.parquet"]
    path = local_dataset / "train-00001-of-00002.parquet"
    parquet.write_table(parquet.read_table(path).slice(1), path)
    assert texts_of(prepare(request).train) == ["0 a\r\n", "0 b", "1 b"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cannot read own/set:train: .*Parquet"):
        list(documents("own/set:train"))


def test_a_dataset_that_the_package_has_cached_is_read_offline(local_dataset, monkeypatch):
    sys.modules["datasets"].load_dataset("own/set")
    (local_dataset / "elsewhere").mkdir()
    monkeypatch.chdir(local_dataset / "elsewhere")
    assert list(documents("set:train", drop="other=1")) == ["0 b", "1 b"]


@pytest.mark.parametrize(("module", "source"), [("pyarrow", "a.parquet"), ("datasets", "some/set")])
def test_missing_packages_are_named(tmp_path, monkeypatch, module, source):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtra, match=rf"{module} is needed here.*\[train\]"):
        list(documents(source))


# --- the cache ---


@pytest.fixture
def packings(monkeypatch):
    """Record the configurations that are tokenised."""
    values = []
    pack = data_module.pack

    def count_calls(config, tokenizer, folder):
        values.append(config)
        pack(config, tokenizer, folder)

    monkeypatch.setattr(data_module, "pack", count_calls)
    return values


def test_tokens_are_cached_by_files_and_settings(config, packings, tmp_path):
    first = prepare(config)
    assert prepare(replace(config, sequence_length=4, resets=True)).folder == first.folder
    assert len(packings) == 1
    copy = tmp_path / "elsewhere.jsonl"
    content = Path(config.train).read_bytes()
    copy.write_bytes(content)
    os.utime(copy, (10**9, 10**9))
    second = prepare(replace(config, train=str(copy)))
    assert second.folder != first.folder
    assert second.content == first.content  # the same tokens
    copy.write_bytes(content.replace(b"Ishmael", b"ishmael"))
    os.utime(copy, (10**9, 10**9))  # the same size, and time of content
    other = prepare(replace(config, train=str(copy)))
    assert tokens_of(other.train)[8:15] == list(b"ishmael")
    assert other.content != first.content
    changes = ({"holdout": 0.5}, {"valid": config.train}, {"tokens": 20}, {"drop": "text=a"})
    folders = {prepare(replace(config, **change)).folder for change in changes}
    assert len({first.folder, second.folder, other.folder} | folders) == 7


def test_damaged_tokens_raise(config):
    folder = prepare(config).folder
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "train.bin", "valid.bin"]
    content = (folder / "meta.json").read_text()
    for meta in ("", "[]", "{}", '{"dtype": "uint16", "train": 1}'):
        (folder / "meta.json").write_text(meta)
        with pytest.raises(DataError, match=f"tokens in {folder} are damaged: remove that folder"):
            prepare(config)
    (folder / "meta.json").write_text(content)
    prepare(config)
    os.truncate(folder / "valid.bin", 2)
    with pytest.raises(DataError, match="damaged"):
        prepare(config)


def test_a_failure_leaves_nothing_behind(config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for module, name in ((packing, "digest"), (fcntl, "flock")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(DataError, match=r"No space left on device; .*set data\.cache to"):
                prepare(config)
    (path,) = (tmp_path / "cache").iterdir()
    assert path.suffix == ".lock"
    unfinished = path.with_suffix(".new")  # of a process that was killed
    unfinished.mkdir()
    (unfinished / "train.bin").write_bytes(b"half")
    assert texts_of(prepare(config).train)[:2] == TEXTS[:2]
    assert not unfinished.exists()
    monkeypatch.setattr(fcntl, "flock", full)  # what is there needs no lock
    assert texts_of(prepare(config).train)[:2] == TEXTS[:2]


def test_of_several_processes_one_tokenises(config, packings, monkeypatch):
    """Threads lock files as processes do."""
    pack = data_module.pack
    monkeypatch.setattr(data_module, "pack", lambda *args: (time.sleep(0.2), pack(*args)))
    with ThreadPoolExecutor(3) as pool:
        data, *others = pool.map(prepare, [config] * 3)
    assert [each.folder for each in others] == [data.folder] * 2
    assert len(packings) == 1


# --- what is learned and held out ---


@pytest.mark.parametrize(
    ("sizes", "holdout", "remainder", "valid_sizes"),
    [
        ([50, 30, 20], 0.2, [50, 30], [20]),
        ([50, 30, 20], 0.39, [50, 11], [19, 20]),  # the document at the border is cut
        ([50, 30, 20], 0.5, [50], [30, 20]),
        ([50, 30, 20], 0.001, [50, 30, 19], [1]),
        ([100], 0.1, [90], [10]),
        ([900, 100], 0.99, [10], [890, 100]),
    ],
)
def test_the_end_of_the_text_is_held_out(config, tmp_path, sizes, holdout, remainder, valid_sizes):
    whole = "".join(chr(ord("a") + index % 26) for index in range(sum(sizes)))
    texts = [whole[sum(sizes[:at]) : sum(sizes[: at + 1])] for at in range(len(sizes))]
    source = json_lines(tmp_path / "a.jsonl", [{"text": text} for text in ["", *texts]])
    data = prepare(replace(config, train=source, holdout=holdout, sequence_length=1))
    train, valid = texts_of(data.train), texts_of(data.valid)
    assert [*map(len, train)] == remainder
    assert [*map(len, valid)] == valid_sizes
    assert "".join(train + valid) == whole
    for rows, texts in ((data.train, train), (data.valid, valid)):
        size = sum(map(len, texts))
        assert rows.part == packing.Part(size + len(texts), len(texts), size)
    assert data.bytes_per_token == sum(valid_sizes) / (sum(valid_sizes) + len(valid_sizes))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_long_documents_are_pieces_cut_behind_lines(config, tmp_path, monkeypatch, end):
    monkeypatch.setattr(packing, "CHUNK", 1 << 18)
    text = end.join(f"líne {row}" + end * (row % 7 == 0) for row in range(60_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_text("x" * (2 * packing.PASSAGE))
    request = replace(config, train=f"{tmp_path}/?.txt", sequence_length=1)
    passages = list(packing.passages(request, request.train))
    assert [len(text) for text, _ in passages[-2:]] == [packing.PASSAGE] * 2
    assert [ends for _, ends in passages] == [False] * (len(passages) - 3) + [True, False, True]
    assert len(passages) > 4
    for (passage, _), (later, _) in pairwise(passages[:-2]):
        assert packing.PASSAGE // 2 < len(passage) <= packing.PASSAGE
        assert passage.endswith(end)
        assert passage.removesuffix(end)[-1].isdigit()
        assert later.startswith("l")
    for holdout in (0.01, 0.2, 0.6):
        data = prepare(replace(request, holdout=holdout))
        train, valid = texts_of(data.train), texts_of(data.valid)
        assert "".join(train + valid) == text + "x" * (2 * packing.PASSAGE)
        assert len(train + valid) == 3
        size = data.train.part.bytes + data.valid.part.bytes
        assert 0 <= data.valid.part.bytes - int(size * holdout) <= 1  # a letter has two bytes


@pytest.mark.parametrize("tokens", [1, 19, 20, 60, 1000])
def test_a_limit_of_tokens_ends_reading(config, tmp_path, monkeypatch, tokens):
    monkeypatch.setattr(packing, "CHUNK", 1)
    (tmp_path / "valid.txt").write_text("held out by hand")
    request = replace(config, valid=str(tmp_path / "valid.txt"), tokens=tokens, sequence_length=1)
    ends = [len(tokens_with_ends(TEXTS[: count + 1])) for count in range(4)]
    count = next((count for count, end in enumerate(ends, 1) if end >= tokens), 4)

    def read(*args):
        for number, text in enumerate(documents(*args)):
            assert args[0] == request.valid or number < count, "read too far"
            yield text

    monkeypatch.setattr(packing, "documents", read)
    data = prepare(request)
    assert tokens_of(data.train) == tokens_with_ends(TEXTS[:count])
    assert texts_of(data.valid) == ["held out by hand"]


@pytest.mark.parametrize("tokens", [1, 40, 1000, 5000])
def test_a_limit_of_tokens_leaves_text_to_hold_out(config, tmp_path, monkeypatch, tokens):
    monkeypatch.setattr(packing, "CHUNK", 1)
    texts = [f"{number:09}" for number in range(400)]
    source = json_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    data = prepare(replace(config, train=source, holdout=0.2, tokens=tokens, sequence_length=1))
    train, valid = texts_of(data.train), texts_of(data.valid)
    assert train + valid == texts[: len(train + valid)]
    assert len(train) == min(-(-tokens // 10), 320)
    assert 0 <= len(valid) - len(train + valid) // 5 <= 1


def test_a_limit_ends_a_long_document(config, tmp_path):
    source = json_lines(tmp_path / "a.jsonl", [{"text": "line\n" * 200_000}, {"text": "behind"}])
    part = prepare(replace(config, train=source, valid=config.train, tokens=300_000)).train.part
    assert 300_000 <= part.tokens <= 300_000 + packing.PASSAGE
    assert (part.documents, part.bytes) == (1, part.tokens - 1)


def test_impossible_settings_and_short_parts_raise(config, tmp_path):
    for change, message in [
        ({"train": ""}, "there is nothing to learn"),
        ({"sequence_length": 45}, r"the valid part .* has 44 tokens, fewer than a row of 45"),
        ({"tokens": 0}, "tokens must be positive, or none for all, got 0"),
        ({"sequence_length": 0}, "sequence_length must be positive and holdout"),
        ({"holdout": 0.0}, "sequence_length must be positive and holdout"),
        ({"holdout": 1.0}, "sequence_length must be positive and holdout"),
    ]:
        with pytest.raises(DataError, match=message):
            prepare(replace(config, **change))
    for text in ("x", "é"):
        json_lines(tmp_path / "texts.jsonl", [{"text": text}])
        with pytest.raises(DataError, match=r"the train part of .* has 0 tokens"):
            prepare(config)


def test_a_terminal_shows_a_progress_bar(config, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    prepare(config)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    prepare(replace(config, valid=config.train))
    size = len("".join(TEXTS).encode())
    assert f"tokenising: {size:.1f}B [" in capsys.readouterr().err


# --- rows ---


def test_positions_of_a_row():
    ids = np.array([5, END, 6, 7, END, END, 8])
    assert positions_of(ids, END, True).tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert positions_of(ids, END, False).tolist() == [1, 2, 0, 1, 2, 0, 0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=8),
    st.integers(1, 12),
    st.floats(0.01, 0.99),
)
def test_any_documents_become_rows(tmp_path_factory, texts, length, holdout):
    folder = tmp_path_factory.mktemp("any")
    texts = [*texts, "é" * 1500, "🙂" * 1500]
    source = json_lines(folder / "a.jsonl", [{"text": text} for text in texts])
    options = {"holdout": holdout, "resets": True, "cache": str(folder / "cache")}
    data = prepare(DataConfig(source, sequence_length=length, **options))
    size = len("".join(texts).encode())
    assert 0 <= data.valid.part.bytes - int(holdout * size) <= 3
    parts = texts_of(data.train), texts_of(data.valid)
    assert "".join([*parts[0], *parts[1]]) == "".join(texts)
    for rows, documents_of_part in zip((data.train, data.valid), parts, strict=True):
        tokens = tokens_with_ends(documents_of_part)
        assert tokens_of(rows) == tokens
        assert len(rows) == len(tokens) // length
        for index in range(min(len(rows), 40)):
            row = rows[index]
            start = index * length
            assert row["input_ids"].tolist() == tokens[start : start + length]
            assert row["labels"].equal(row["input_ids"])
            for place, position in enumerate(row["position_ids"].tolist(), start):
                assert (position == 0) == (place == 0 or tokens[place - 1] == END)


def test_rows_can_be_read_by_workers(config):
    rows = prepare(replace(config, resets=True)).train
    for outside in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"{len(rows)} rows, got index {outside}"):
            rows[outside]
    rows[0]
    assert rows.tokens[:16].tobytes() not in pickle.dumps(rows)
    assert pickle.loads(pickle.dumps(rows))[1]["input_ids"].equal(rows[1]["input_ids"])
    batches = list(DataLoader(rows, batch_size=2, num_workers=1))
    assert torch.cat([batch["input_ids"] for batch in batches]).equal(
        torch.stack([rows[index]["input_ids"] for index in range(len(rows))])
    )


# --- the order of rows ---


@pytest.mark.parametrize("length", [1, 7, 300, 70_000])
def test_every_row_once_an_epoch(length):
    sampler = RowSampler(length, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(length))
    assert list(RowSampler(length, seed=3)) == first
    if length > 7:
        sampler.set_epoch(1)
        assert list(sampler) != first
        assert sorted(sampler) == list(range(length))
        assert list(RowSampler(length, seed=4)) != first


@given(st.integers(1, 200), st.integers(0, 5), st.data())
def test_an_order_of_rows_resumes_at_any_row(length, epoch, data):
    count = data.draw(st.integers(0, length))
    whole, tail = RowSampler(length, 1), RowSampler(length, 1)
    for sampler in (whole, tail):
        sampler.set_epoch(epoch)
    tail.skip(count)
    tail.set_epoch(epoch)
    assert len(tail) == length - count
    assert list(tail) == list(whole)[count:]
    tail.set_epoch(epoch + 1)
    assert len(tail) == length


class Counting(Dataset):
    """Rows that say which of them were read."""

    def __init__(self, length):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor(index)


def test_skipped_rows_are_not_read():
    rows = Counting(200_010)
    sampler = RowSampler(len(rows))
    sampler.skip(200_000)
    batches = list(DataLoader(rows, batch_size=5, sampler=sampler))
    assert len(rows.read) == 10
    assert torch.cat(batches).tolist() == list(RowSampler(len(rows)))[200_000:]
    for wrong in (-1, 200_011):
        with pytest.raises(ValueError, match=f"200010 items to skip, got {wrong}"):
            sampler.skip(wrong)


@given(st.integers(1, 12), st.integers(0, 60), st.data())
def test_streams_continue_row_by_row(batch, more, data):
    rows = batch + more
    batches = list(StreamSampler(rows, batch))
    assert len(batches) == rows // batch
    assert all(len(each) == batch for each in batches)
    for earlier, later in pairwise(batches):
        assert later == [row + 1 for row in earlier]
    assert sorted(chain(*batches)) == list(range(rows - rows % batch))
    continuation = StreamSampler(rows, batch)
    count = data.draw(st.integers(0, len(batches)))
    continuation.skip(count)
    assert list(continuation) == batches[count:]
    assert len(continuation) == len(batches) - count


def test_a_loader_reads_streams_in_order(config):
    rows = prepare(config).train
    loader = DataLoader(rows, batch_sampler=StreamSampler(len(rows), 2))
    values = torch.cat([batch["input_ids"] for batch in loader], 1)
    half = values.shape[1]
    assert values.flatten().tolist() == tokens_with_ends(TEXTS[:3])[: 2 * half]


def test_impossible_orders_raise():
    with pytest.raises(ValueError, match="length must be positive, got 0"):
        RowSampler(0)
    for batch in (0, 4):
        with pytest.raises(ValueError, match=f"from 1 to the 3 rows, got {batch}"):
            StreamSampler(3, batch)
