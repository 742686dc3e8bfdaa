"""Tokenised data: what is learned and held out, the folders that keep it, rows and their order."""

import errno
import pickle
import sys
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import END, TEXTS, json_lines, tokens_of, tokens_with_ends
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.corpus import packing, sources
from pararnn.lab.train.corpus import prepare as data_module
from pararnn.lab.train.corpus.prepare import positions_of, prepare
from pararnn.lab.train.corpus.sources import DataError
from pararnn.lab.train.order import RowSampler, StreamSampler


@pytest.fixture
def source(tmp_path):
    return json_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture
def config(tmp_path, source):
    return DataConfig(train=source, holdout=0.45, sequence_length=8, cache=str(tmp_path / "cache"))


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


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


def test_rows_reproduce_the_source(config):
    data = prepare(config)
    assert (data.vocabulary, data.end) == (257, END)
    assert tokens_of(data.train) == tokens_with_ends(TEXTS[:3])
    assert tokens_of(data.valid) == tokens_with_ends(TEXTS[3:])
    part = data.train.part
    assert (part.documents, part.bytes) == (3, len("".join(TEXTS[:3]).encode()))
    assert part.bytes_per_token == part.bytes / (part.bytes + 3)
    rows = [data.train[index] for index in range(len(data.train))]
    assert (
        torch.cat([row["input_ids"] for row in rows]).tolist()
        == (tokens_with_ends(TEXTS[:3])[: 8 * len(rows)])
    )
    assert all(set(row) == {"input_ids", "labels"} for row in rows)
    assert all(row["input_ids"].dtype == torch.int64 for row in rows)
    assert all(row["labels"].equal(row["input_ids"]) for row in rows)
    for outside in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"{len(rows)} rows, got index {outside}"):
            data.train[outside]


def test_tokens_are_cached_by_content_and_settings(config, packings, source, tmp_path):
    first = prepare(config)
    assert prepare(replace(config, sequence_length=4, resets=True)).folder == first.folder
    assert len(packings) == 1
    # Content and names count, not where the files are.
    copy = tmp_path / "elsewhere" / "texts.jsonl"
    copy.parent.mkdir()
    content = bytearray(Path(source).read_bytes())
    copy.write_bytes(content)
    assert prepare(replace(config, train=str(copy))).folder == first.folder
    assert len(packings) == 1
    content[content.index(b"Ishmael")] = ord("i")
    copy.write_bytes(content)
    other = prepare(replace(config, train=str(copy)))
    assert other.folder != first.folder
    assert tokens_of(other.train)[8:15] == list(b"ishmael")
    others = [replace(config, holdout=0.5), replace(config, valid=source)]
    assert len({first.folder, other.folder, *(prepare(each).folder for each in others)}) == 4
    assert len(packings) == 4


@pytest.mark.parametrize(
    "remainder", [[], ["valid.bin"], ["meta.json"], ["meta.json", "train.bin", "valid.bin"]]
)
def test_a_half_written_folder_is_not_used(config, packings, remainder):
    folder = prepare(config).folder
    for path in folder.iterdir():
        if path.name not in remainder:
            path.unlink()
        elif remainder == ["meta.json", "train.bin", "valid.bin"] and path.name == "valid.bin":
            path.write_bytes(path.read_bytes()[:-1])
    again = prepare(config)
    assert len(packings) == 2
    assert tokens_of(again.train) == tokens_with_ends(TEXTS[:3])
    assert visible(folder.parent) == [folder.name]


@pytest.mark.parametrize(
    "meta", ["", "[]", "{}", '{"dtype": "int8"}', '{"dtype": "uint16", "train": 1}']
)
def test_a_corrupt_record_of_the_cache_is_not_used(tmp_path, meta):
    (tmp_path / "meta.json").write_text(meta)
    for name in packing.BINS:
        (tmp_path / name).touch()
    assert packing.meta_of(tmp_path) is None


def test_a_corrupt_source_leaves_nothing_behind(config, tmp_path):
    json_lines(tmp_path / "texts.jsonl", [{"body": "fine"}, {"body": "x"}])
    with pytest.raises(DataError, match="line 1"):
        prepare(config)
    assert visible(tmp_path / "cache") == []
    assert not list((tmp_path / "cache").glob(".*.new"))


def test_every_start_reports_data_that_are_left_out(config, source, capsys):
    rows = [{"text": text} for text in TEXTS] + [{"text": ""}, {"text": None}, {"text": ""}]
    json_lines(Path(source), rows)
    for _ in range(2):  # made, and found in the cache
        data = prepare(config)
        first, second = capsys.readouterr().err.splitlines()
        assert first == f"data: left out 2 documents without text, the first: number 5 of {source}"
        assert second.startswith("data: left out 1 rows without text, the first: ")
        assert "line 6: 'text' must be text, found nothing" in second
    assert data.train.part.documents + data.valid.part.documents == len(TEXTS)


def test_a_run_can_name_suffixes_and_several_sources(config, tmp_path):
    for name in ("a.md", "b.py", "c.png", "held.md"):
        (tmp_path / name).write_text(f"what is in {name}")
    train = f"{tmp_path}/b.py,{tmp_path}/a.md"
    request = replace(config, train=train, suffixes=".md,.py", valid=f"{tmp_path}/h*")
    data = prepare(request)
    assert tokens_of(data.train) == tokens_with_ends(["what is in b.py", "what is in a.md"])
    assert tokens_of(data.valid) == tokens_with_ends(["what is in held.md"])


def test_the_error_of_a_full_disk_says_what_to_do(config, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packing.Writer, "write", full)
    with pytest.raises(DataError, match="No space left on device; make room there"):
        prepare(config)


def texts_of(rows):
    """Return the documents of a part, by their ends."""
    data, texts = tokens_of(rows), [[]]
    for token in data:
        if token == END:
            texts.append([])
        else:
            texts[-1].append(token)
    assert texts.pop() == []  # each part ends with an end
    return [bytes(text).decode() for text in texts]


@pytest.mark.parametrize(
    ("sizes", "holdout", "remainder", "valid_sizes"),
    [
        ([50, 30, 20], 0.2, [50, 30], [20]),  # it fits
        ([50, 30, 20], 0.39, [50, 30], [20]),  # the next does not, and it is more than half
        ([50, 30, 20], 0.5, [50], [30, 20]),
        ([50, 30, 20], 0.41, [50, 9], [21, 20]),  # less than half: the one before is cut
        ([50, 30, 20], 0.1, [50, 30, 10], [10]),  # too large: cut
        ([50, 30, 20], 0.001, [50, 30, 19], [1]),
        ([50, 30, 20], 0.99, [50], [30, 20]),
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
    assert ([len(text) for text in train], [len(text) for text in valid]) == (
        remainder,
        valid_sizes,
    )
    assert "".join(train + valid) == whole
    for rows, texts in ((data.train, train), (data.valid, valid)):
        size = sum(map(len, texts))
        assert rows.part == packing.Part(size + len(texts), len(texts), size)
    assert sorted(path.name for path in data.folder.iterdir()) == [
        ".pararnn.json",
        "meta.json",
        "train.bin",
        "valid.bin",
    ]


def test_a_long_document_is_cut_to_hold_out_its_end(config, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "CHUNK", 1 << 18)
    counts = {"é": 60_000, "ü": 20_000}
    texts = ["".join(f"{name} {row}\n" for row in range(counts[name])) for name in counts]
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    config = replace(config, train=f"{tmp_path}/?.txt", sequence_length=1)
    size = len("".join(texts).encode())
    for holdout in (0.01, 0.2, 0.6):
        data = prepare(replace(config, holdout=holdout))
        train, valid = texts_of(data.train), texts_of(data.valid)
        assert train + valid == [*train[:-1], train[-1], valid[0], *valid[1:]]
        assert "".join(train + valid) == "".join(texts)
        assert len(train + valid) == 3
        assert 0 <= int(size * holdout) - data.valid.part.bytes <= 1  # a letter has two bytes
        assert data.valid.part.documents == len(valid)


def test_a_text_that_is_too_short_to_hold_out_raises(config, tmp_path):
    for text in ("x", "é"):
        source = json_lines(tmp_path / "a.jsonl", [{"text": text}])
        with pytest.raises(DataError, match=r"the train part of .* has 0 tokens"):
            prepare(replace(config, train=source))


@pytest.mark.parametrize("tokens", [1, 19, 20, 60, 1000])
def test_a_limit_of_tokens_ends_reading(config, tmp_path, tokens):
    (tmp_path / "valid.txt").write_text("held out by hand")
    request = replace(config, valid=str(tmp_path / "valid.txt"), tokens=tokens, sequence_length=1)
    data = prepare(request)
    ends = [len(tokens_with_ends(TEXTS[: count + 1])) for count in range(4)]
    count = next((count for count, end in enumerate(ends, 1) if end >= tokens), 4)
    assert tokens_of(data.train) == tokens_with_ends(TEXTS[:count])
    assert data.folder != prepare(replace(request, tokens=None)).folder
    # What is held out is not learned, and there is as much to learn.
    data = prepare(replace(request, valid="", holdout=0.1))
    total = data.train.part.tokens + data.valid.part.tokens
    assert total >= min(tokens / 0.9, ends[-1])
    whole = "".join(TEXTS)
    assert whole.startswith("".join(texts_of(data.train) + texts_of(data.valid)))


def test_a_limit_ends_a_long_document(config, tmp_path, monkeypatch):
    texts = ["line\n" * 200_000, "behind"]
    source = json_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    (tmp_path / "valid.txt").write_text("held out by hand")
    request = replace(config, train=source, valid=str(tmp_path / "valid.txt"), tokens=300_000)
    part = prepare(request).train.part
    assert 300_000 <= part.tokens <= 300_000 + sources.PIECE
    assert tokens_of(prepare(request).train)[-2:] == [ord("\n"), END]
    assert (part.documents, part.bytes) == (1, part.tokens - 1)


def test_a_terminal_shows_a_progress_bar(config, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    prepare(config)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    prepare(replace(config, holdout=0.3))
    size = len("".join(TEXTS).encode())
    assert f"tokenising: {size:.1f}B [" in capsys.readouterr().err


def test_drop_applies_to_both_parts(config, tmp_path):
    rows = [{"text": text, "kind": "ab"["e" in text]} for text in TEXTS]
    source = json_lines(tmp_path / "kinds.jsonl", rows)
    remainder = [row["text"] for row in rows if row["kind"] == "a"]
    assert 0 < len(remainder) < 4
    data = prepare(replace(config, train=source, valid=source, drop="kind=b"))
    assert tokens_of(data.train) == tokens_of(data.valid) == tokens_with_ends(remainder)
    assert data.folder != prepare(replace(config, train=source, valid=source)).folder
    (tmp_path / "valid.txt").write_text("text without fields")
    prepare(replace(config, train=source, valid=str(tmp_path / "valid.txt"), drop="kind=b"))
    with pytest.raises(DataError, match="'other'"):
        prepare(replace(config, train=source, drop="other=b"))


def test_validation_data_may_be_another_source(config, tmp_path):
    (tmp_path / "valid.txt").write_text("held out by hand")
    data = prepare(replace(config, valid=str(tmp_path / "valid.txt")))
    assert tokens_of(data.train) == tokens_with_ends(TEXTS)
    assert tokens_of(data.valid) == tokens_with_ends(["held out by hand"])
    assert data.valid.part.documents == 1


def test_impossible_settings_and_short_parts_raise(config, tmp_path):
    with pytest.raises(DataError, match=r"the valid part .* has 41 tokens, fewer than a row of 42"):
        prepare(replace(config, sequence_length=42))
    with pytest.raises(DataError, match="tokens must be positive, or none for all, got 0"):
        prepare(replace(config, tokens=0))
    for wrong in ({"sequence_length": 0}, {"holdout": 0.0}, {"holdout": 1.0}):
        with pytest.raises(DataError, match="sequence_length must be positive and holdout"):
            prepare(replace(config, **wrong))
    json_lines(tmp_path / "texts.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match=r"no document of .* has any text"):
        prepare(config)


# --- documents within rows ---


def test_positions_restart_after_each_end(config):
    data = prepare(replace(config, resets=True))
    values = torch.cat([data.train[i]["position_ids"] for i in range(len(data.train))])
    tokens = torch.tensor(tokens_with_ends(TEXTS[:3]))[: len(values)]
    begins = torch.cat([torch.tensor([True]), tokens[:-1] == END])
    assert torch.equal(values == 0, begins)
    follows = ~begins[1:] & (torch.arange(1, len(values)) % 8 != 0)
    assert torch.equal(values[1:][follows], values[:-1][follows] + 1)


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
    texts = [*texts, "a" * 1500, "b" * 1500]
    source = json_lines(folder / "a.jsonl", [{"text": text} for text in texts])
    config = DataConfig(
        train=source,
        sequence_length=length,
        holdout=holdout,
        resets=True,
        cache=str(folder / "cache"),
    )
    data = prepare(config)
    size = len("".join(texts).encode())
    assert holdout * size / 2 - 4 <= data.valid.part.bytes <= holdout * size
    parts = texts_of(data.train), texts_of(data.valid)
    assert "".join([*parts[0], *parts[1]]) == "".join(texts)
    for rows, part in zip((data.train, data.valid), parts, strict=True):
        tokens = tokens_with_ends(part)
        assert tokens_of(rows) == tokens
        assert len(rows) == len(tokens) // length
        for index in range(min(len(rows), 40)):
            row = rows[index]
            start = index * length
            assert row["input_ids"].tolist() == tokens[start : start + length]
            for place, position in enumerate(row["position_ids"].tolist(), start):
                assert (position == 0) == (place == 0 or tokens[place - 1] == END)


def test_rows_can_be_read_by_workers(config):
    rows = prepare(replace(config, resets=True)).train
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
