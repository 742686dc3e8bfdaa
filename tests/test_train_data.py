import errno
import json
import lzma
import pickle
import sys
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from pararnn.errors import MissingExtra, PararnnError
from pararnn.train import data as data_module
from pararnn.train.config import DataConfig
from pararnn.train.data import positions_of, prepare
from pararnn.train.order import RowSampler, StreamSampler
from pararnn.train.sources import DataError, documents, files_of
from pararnn.train.tokenizer import ENDS, load_tokenizer, train_tokenizer

END = 256
TEXTS = ["Call me Ishmael.\r\n", "ὕβρις — hubris", "Some years ago", "x" * 40]


def json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def source(tmp_path):
    return json_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture
def config(tmp_path, source):
    return DataConfig(train=source, sequence_length=8, cache=str(tmp_path / "cache"))


def tokens_of(rows):
    """All tokens of a part, those that are left over behind the rows too."""
    return rows.tokens.tolist()


def expected(texts):
    return [token for text in texts for token in [*text.encode(), END]]


# --- sources ---


def test_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second\r\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt.xz").write_bytes(lzma.compress("fïrst".encode()))
    json_lines(tmp_path / "c.jsonl", [{"text": "third"}, {"text": "fourth", "other": 1}])
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert list(documents(str(tmp_path))) == ["fïrst", "second\r\n", "third", "fourth"]
    assert list(documents(str(tmp_path / "a" / "z.txt.xz"))) == ["fïrst"]


LINE = b'{"text": "fine"}\n'
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
    "zip.txt": (b"PK\n\0\0", "line 2: found a NUL byte"),
    "cut.txt.xz": (lzma.compress(b"text" * 99)[:-20], "not a whole xz file"),
    "not.txt.xz": (b"plain text", "not a whole xz file"),
    "picture.png": (b"\x89PNG", r"is of a kind that is not read; files must end in \.txt"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_the_line(tmp_path, name):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=message) as caught:
            list(documents(str(source)))
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, PararnnError)


def test_missing_and_empty_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no files"):
        list(documents(str(tmp_path / "empty")))
    for missing in ("", "missing.txt", str(tmp_path / "missing"), "../missing"):
        with pytest.raises(DataError, match="there is no file or folder"):
            list(documents(missing))


def test_documents_are_read_as_they_are_asked_for(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(LINE + b"bad\n")
    texts = documents(str(tmp_path / "bad.jsonl"))
    assert next(texts) == "fine"
    with pytest.raises(DataError, match="line 2"):
        next(texts)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    assert list(documents(str(path))) == TEXTS
    with pytest.raises(DataError, match=r"no column 'body', it has \['text'\]"):
        list(documents(str(path), "body"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="not a whole Parquet file"):
        list(documents(str(path)))


@pytest.mark.parametrize(("module", "source"), [("pyarrow", "a.parquet"), ("datasets", "some/set")])
def test_packages_that_are_missing_are_named(tmp_path, monkeypatch, module, source):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtra, match=rf"{module} is needed here.*pararnn\[train\]"):
        list(documents(source))


class Hub:
    """The part of the package datasets that is used: one dataset, with its revision."""

    def __init__(self):
        self.asked, self.hash, self.rows = [], "revision-1", [{"text": text} for text in TEXTS]

    def load_dataset_builder(self, name, configuration):
        if name != "some/set":
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist\non the Hub")
        self.asked.append((name, configuration))
        return SimpleNamespace(hash=self.hash, as_streaming_dataset=self.stream)

    def stream(self, split):
        self.asked.append(split)
        if split == "broken":
            raise ValueError("Bad split: broken")
        return iter(self.rows)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("some/set", [("some/set", None), "train"]),
        ("some/set:test", [("some/set", None), "test"]),
        ("some/set/small:train[:5%]", [("some/set", "small"), "train[:5%]"]),
    ],
)
def test_a_dataset_is_streamed(hub, source, asked):
    assert list(documents(source)) == TEXTS
    assert sorted(map(str, hub.asked)) == sorted(map(str, asked))


def test_a_dataset_that_cannot_be_read(hub):
    for source, message in {
        "other/set": "no file or folder 'other/set', and no dataset.*'other/set' doesn't exist$",
        "some/set:broken": "Bad split",
    }.items():
        with pytest.raises(DataError, match=message):
            list(documents(source))
    with pytest.raises(DataError, match=r"some/set, row 1: no column 'body', it has \['text'\]"):
        list(documents("some/set", "body"))


def test_a_dataset_is_packed_again_when_its_revision_changes(hub, config):
    config = replace(config, train="some/set")
    first = prepare(config)
    assert tokens_of(first.train) == expected(TEXTS[:3])
    hub.asked.clear()
    assert prepare(config).folder == first.folder
    assert "train" not in hub.asked
    hub.hash = "revision-2"
    assert prepare(config).folder != first.folder


# --- the cache ---


@pytest.fixture
def packings(monkeypatch):
    """The configurations that were tokenised, one for each time."""
    seen = []
    pack = data_module._pack

    def counted(config, tokenizer, folder):
        seen.append(config)
        pack(config, tokenizer, folder)

    monkeypatch.setattr(data_module, "_pack", counted)
    return seen


def test_rows_reproduce_the_source(config):
    packed = prepare(config)
    assert (packed.vocabulary, packed.end) == (257, END)
    assert tokens_of(packed.train) == expected(TEXTS[:3])
    assert tokens_of(packed.valid) == expected(TEXTS[3:])
    part = packed.train.part
    assert (part.documents, part.bytes) == (3, len("".join(TEXTS[:3]).encode()))
    assert part.bytes_per_token == part.bytes / (part.bytes + 3)
    rows = [packed.train[index] for index in range(len(packed.train))]
    assert (
        torch.cat([row["input_ids"] for row in rows]).tolist()
        == (expected(TEXTS[:3])[: 8 * len(rows)])
    )
    assert all(set(row) == {"input_ids", "labels"} for row in rows)
    assert all(row["input_ids"].dtype == torch.int64 for row in rows)
    assert all(row["labels"].equal(row["input_ids"]) for row in rows)
    for outside in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"{len(rows)} rows, got index {outside}"):
            packed.train[outside]


def test_tokens_are_made_once(config, packings, source, tmp_path):
    first = prepare(config)
    assert prepare(replace(config, sequence_length=4, resets=True)).folder == first.folder
    assert len(packings) == 1
    # Content and names count, not where the files are.
    moved = tmp_path / "elsewhere" / "texts.jsonl"
    moved.parent.mkdir()
    content = bytearray(Path(source).read_bytes())
    moved.write_bytes(content)
    assert prepare(replace(config, train=str(moved))).folder == first.folder
    assert len(packings) == 1
    content[content.index(b"Ishmael")] = ord("i")
    moved.write_bytes(content)
    changed = prepare(replace(config, train=str(moved)))
    assert changed.folder != first.folder
    assert tokens_of(changed.train)[8:15] == list(b"ishmael")
    others = [replace(config, holdout=0.5), replace(config, valid=source)]
    assert len({first.folder, changed.folder, *(prepare(each).folder for each in others)}) == 4
    assert len(packings) == 4


@pytest.mark.parametrize("kept", [[], ["tokens.bin"], ["meta.json"], ["meta.json", "tokens.bin"]])
def test_a_half_written_folder_is_not_used(config, packings, kept):
    folder = prepare(config).folder
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
        elif kept == ["meta.json", "tokens.bin"] and path.name == "tokens.bin":
            path.write_bytes(path.read_bytes()[:-1])
    again = prepare(config)
    assert len(packings) == 2
    assert tokens_of(again.train) == expected(TEXTS[:3])
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_corrupt_source_leaves_nothing_behind(config, tmp_path):
    json_lines(tmp_path / "texts.jsonl", [{"text": "fine"}, {"body": "x"}])
    with pytest.raises(DataError, match="line 2"):
        prepare(config)
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_processes_at_once_agree(config, monkeypatch):
    pack = data_module._pack

    def slow(config, tokenizer, folder):
        monkeypatch.setattr(data_module, "_pack", pack)
        prepare(config)
        pack(config, tokenizer, folder)

    monkeypatch.setattr(data_module, "_pack", slow)
    packed = prepare(config)
    assert tokens_of(packed.train) == expected(TEXTS[:3])
    assert len(list(packed.folder.parent.iterdir())) == 1


def test_a_full_disk_says_what_to_do(config, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data_module, "_append", full)
    with pytest.raises(DataError, match="No space left on device; make room there"):
        prepare(config)


@pytest.mark.parametrize(("holdout", "held"), [(0.01, 1), (0.25, 1), (0.5, 2), (0.99, 3)])
def test_holdout_is_the_last_documents(config, holdout, held):
    packed = prepare(replace(config, holdout=holdout))
    assert tokens_of(packed.train) == expected(TEXTS[:-held])
    assert tokens_of(packed.valid) == expected(TEXTS[-held:])


def test_of_a_single_document_the_end_is_held_out(config, tmp_path):
    (tmp_path / "one.txt").write_text("0123456789" * 10)
    packed = prepare(replace(config, train=str(tmp_path / "one.txt"), holdout=0.1))
    assert tokens_of(packed.train) == expected(["0123456789" * 9])
    assert tokens_of(packed.valid) == expected(["0123456789"])


def test_valid_of_its_own(config, tmp_path):
    (tmp_path / "valid.txt").write_text("held out by hand")
    packed = prepare(replace(config, valid=str(tmp_path / "valid.txt")))
    assert tokens_of(packed.train) == expected(TEXTS)
    assert tokens_of(packed.valid) == expected(["held out by hand"])
    assert packed.valid.part.documents == 1


def test_parts_and_settings_that_do_not_fit(config, tmp_path):
    with pytest.raises(DataError, match=r"the valid part .* has 41 tokens, fewer than a row of 42"):
        prepare(replace(config, sequence_length=42))
    for wrong in ({"sequence_length": 0}, {"holdout": 0.0}, {"holdout": 1.0}):
        with pytest.raises(DataError, match="sequence_length must be positive and holdout"):
            prepare(replace(config, **wrong))
    json_lines(tmp_path / "texts.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match=r"no document of .* has any text"):
        prepare(config)


# --- documents within rows ---


def test_positions_restart_behind_each_end(config):
    packed = prepare(replace(config, resets=True))
    seen = torch.cat([packed.train[i]["position_ids"] for i in range(len(packed.train))])
    tokens = torch.tensor(expected(TEXTS[:3]))[: len(seen)]
    begins = torch.cat([torch.tensor([True]), tokens[:-1] == END])
    assert torch.equal(seen == 0, begins)
    follows = ~begins[1:] & (torch.arange(1, len(seen)) % 8 != 0)
    assert torch.equal(seen[1:][follows], seen[:-1][follows] + 1)


def test_positions_of_a_row():
    ids = np.array([5, END, 6, 7, END, END, 8])
    assert positions_of(ids, END, True).tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert positions_of(ids, END, False).tolist() == [1, 2, 0, 1, 2, 0, 0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=8),
    st.integers(1, 12),
)
def test_any_documents_become_rows(tmp_path_factory, texts, length):
    folder = tmp_path_factory.mktemp("any")
    source = json_lines(
        folder / "a.jsonl", [{"text": text} for text in [*texts, "a" * 12, "b" * 12]]
    )
    config = DataConfig(
        train=source, sequence_length=length, resets=True, cache=str(folder / "cache")
    )
    rows = prepare(config).train
    tokens = expected([text for text in [*texts, "a" * 12] if text])
    assert tokens_of(rows) == tokens
    assert len(rows) == len(tokens) // length
    for index in range(len(rows)):
        row = rows[index]
        start = index * length
        assert row["input_ids"].tolist() == tokens[start : start + length]
        for place, position in enumerate(row["position_ids"].tolist(), start):
            assert (position == 0) == (place == 0 or tokens[place - 1] == END)


def test_rows_go_to_workers(config):
    rows = prepare(replace(config, resets=True)).train
    rows[0]
    assert rows.tokens[:16].tobytes() not in pickle.dumps(rows)
    assert pickle.loads(pickle.dumps(rows))[1]["input_ids"].equal(rows[1]["input_ids"])
    batches = list(DataLoader(rows, batch_size=2, num_workers=1))
    assert torch.cat([batch["input_ids"] for batch in batches]).equal(
        torch.stack([rows[index]["input_ids"] for index in range(len(rows))])
    )


# --- tokenizers ---


def test_bytes_as_tokens():
    tokenizer = load_tokenizer("bytes")
    assert list(tokenizer.encode("é")) == [0xC3, 0xA9]
    assert (tokenizer.end, tokenizer.vocabulary) == (256, 257)


@pytest.fixture
def trained(tmp_path):
    pytest.importorskip("tokenizers")
    folder = tmp_path / "tokenizer"
    return folder, train_tokenizer(TEXTS * 3, 280, folder)


def test_a_tokenizer_is_trained_and_loaded(trained, config):
    folder, tokenizer = trained
    assert 257 < tokenizer.vocabulary <= 280
    for name in (folder, folder / "tokenizer.json"):
        loaded = load_tokenizer(str(name))
        assert (loaded.end, loaded.vocabulary) == (tokenizer.end, tokenizer.vocabulary)
        assert loaded.key == tokenizer.key
        assert [loaded.tokenizer.decode(loaded.encode(text)) for text in TEXTS] == TEXTS
    packed = prepare(replace(config, sequence_length=2, tokenizer=str(folder)))
    ids = [token for text in TEXTS[:3] for token in [*tokenizer.encode(text), tokenizer.end]]
    assert tokens_of(packed.train) == ids
    assert packed.folder != prepare(config).folder


def test_a_text_cannot_spell_the_end_of_a_document(trained):
    _, tokenizer = trained
    text = "a<|endoftext|>b"
    assert tokenizer.end not in tokenizer.encode(text)
    assert tokenizer.tokenizer.decode(tokenizer.encode(text)) == text


def test_a_tokenizer_that_cuts_and_pads_does_neither_here(trained):
    folder, tokenizer = trained
    ids = tokenizer.encode(TEXTS[0])
    tokenizer.tokenizer.enable_truncation(3)
    tokenizer.tokenizer.enable_padding(length=50)
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(str(folder))
    assert loaded.encode(TEXTS[0]) == loaded.encode_all(TEXTS)[0] == ids


def test_tokenizers_that_cannot_be_used(trained, tmp_path):
    folder, tokenizer = trained
    with pytest.raises(ValueError, match=r"size must be at least 257.*got 256"):
        train_tokenizer(TEXTS, 256, tmp_path)
    with pytest.raises(DataError, match=r"there is no tokenizer file .*missing\.json"):
        load_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "bad.json"))
    text = tokenizer.tokenizer.to_str().replace(ENDS[0], "<|other|>")
    (tmp_path / "endless.json").write_text(text)
    with pytest.raises(DataError, match="no token for the end of documents"):
        load_tokenizer(str(tmp_path / "endless.json"))
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(DataError, match="names no end of text"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1 << 16, "uint16"), (70_000, "uint32")])
def test_a_large_vocabulary_takes_wider_numbers(config, monkeypatch, vocabulary, dtype):
    class Wide:
        end, key = vocabulary - 1, f"wide {vocabulary}"

        def encode_all(self, texts):
            return [[self.end - 1 - ord(letter) for letter in text] for text in texts]

    wide = Wide()
    wide.vocabulary = vocabulary
    monkeypatch.setattr(data_module, "load_tokenizer", lambda name: wide)
    packed = prepare(config)
    assert packed.train.tokens.dtype == dtype
    ids = [*(wide.end - 1 - ord(letter) for letter in "".join(TEXTS[:1])), wide.end]
    assert packed.train[0]["input_ids"].tolist() == ids[:8]
    assert tokens_of(packed.train)[: len(ids)] == ids


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
def test_rows_go_on_where_they_were_left(length, epoch, data):
    count = data.draw(st.integers(0, length))
    whole, rest = RowSampler(length, 1), RowSampler(length, 1)
    for sampler in (whole, rest):
        sampler.set_epoch(epoch)
    rest.skip(count)
    rest.set_epoch(epoch)
    assert len(rest) == length - count
    assert list(rest) == list(whole)[count:]
    rest.set_epoch(epoch + 1)
    assert len(rest) == length


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
def test_streams_go_on_row_by_row(batch, more, data):
    rows = batch + more
    batches = list(StreamSampler(rows, batch))
    assert len(batches) == rows // batch
    assert all(len(each) == batch for each in batches)
    for before, after in pairwise(batches):
        assert after == [row + 1 for row in before]
    assert sorted(chain(*batches)) == list(range(rows - rows % batch))
    resumed = StreamSampler(rows, batch)
    count = data.draw(st.integers(0, len(batches)))
    resumed.skip(count)
    assert list(resumed) == batches[count:]
    assert len(resumed) == len(batches) - count


def test_a_stream_through_a_loader_goes_on(config):
    rows = prepare(config).train
    loader = DataLoader(rows, batch_sampler=StreamSampler(len(rows), 2))
    seen = torch.cat([batch["input_ids"] for batch in loader], 1)
    half = seen.shape[1]
    assert seen.flatten().tolist() == expected(TEXTS[:3])[: 2 * half]


def test_orders_that_cannot_be():
    with pytest.raises(ValueError, match="length must be positive, got 0"):
        RowSampler(0)
    for batch in (0, 4):
        with pytest.raises(ValueError, match=f"from 1 to the 3 rows, got {batch}"):
            StreamSampler(3, batch)


def test_a_name_is_a_dataset_only_where_it_can_be_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files_of("owner/name") == files_of("name:test") == files_of("o/n/c:train[:1%]") == []
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "a.txt").write_text("a")
    assert [path.name for path in files_of("name")] == ["a.txt"]


@pytest.mark.parametrize("name", ["bytes", "trained"])
def test_what_packs_is_what_transformers_reads(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    if name == "trained":
        train_tokenizer(["the cat sat on the mat"] * 9, 300, tmp_path / "given")
    tokenizer = load_tokenizer("bytes" if name == "bytes" else str(tmp_path / "given"))
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "the cät sat\n"
    assert read(text)["input_ids"] == list(tokenizer.encode(text))
    assert read.eos_token_id == tokenizer.end
    assert read.decode(list(tokenizer.encode(text))) == text
    assert load_tokenizer(str(tmp_path / "saved")).end == tokenizer.end
