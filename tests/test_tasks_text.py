import math

import pytest
import torch

from pararnn.lab.tasks import (
    TextError,
    bigram_bits,
    file_corpus,
    random_windows,
    spread_windows,
    stdlib_corpus,
    unigram_bits,
)


def as_bytes(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


@pytest.fixture
def library(tmp_path):
    """Make a folder like a standard library: 40 modules, and files that do not belong."""
    for index in range(40):
        path = tmp_path / ("pkg" if index % 2 else ".") / f"m{index:02d}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{index:02d}>")
    for folder in ("site-packages", "test", "pkg/tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text("EXCLUDED")
    (tmp_path / "data.txt").write_text("EXCLUDED")
    return tmp_path


def test_the_library_is_split_by_files_and_excludes_tests(library):
    corpus = stdlib_corpus(library, valid_share=0.25)
    train, valid = (bytes(part.tolist()).split(b"\n") for part in (corpus.train, corpus.valid))
    assert sorted(train + valid) == sorted(b"<%02d>" % index for index in range(40))
    assert 3 <= len(valid) <= 18
    # In order of the paths: the odd files lie in pkg/, which sorts behind m*.py.
    for part in (train, valid):
        numbers = [int(text[1:-1]) for text in part]
        assert numbers == sorted(numbers, key=lambda number: (number % 2, number))


def test_the_split_depends_on_paths_only(library):
    early_split = stdlib_corpus(library)
    extra = library / "aaa.py"
    extra.write_text("new")
    late_split = stdlib_corpus(library)
    for old, new in ((early_split.train, late_split.train), (early_split.valid, late_split.valid)):
        assert bytes(new.tolist()).removeprefix(b"new\n") == bytes(old.tolist())
    with pytest.raises(TextError, match="no Python source"):
        stdlib_corpus(library / "test")


def test_the_installed_library_is_large_and_mostly_for_training():
    corpus = stdlib_corpus()
    assert corpus.train.dtype == corpus.valid.dtype == torch.uint8
    assert len(corpus.train) > 2_000_000
    assert 0.03 < len(corpus.valid) / (len(corpus.train) + len(corpus.valid)) < 0.3
    assert b"import " in bytes(corpus.valid[:100_000].tolist())


@pytest.mark.parametrize("character", ["é", "€", "🎉"])
def test_no_character_is_cut_in_two(character, tmp_path):
    """Half a character is no UTF-8: what it stands in could not be read as text."""
    for count in range(3000, 3004):
        text = "a" * (count % 4) + character * count
        (tmp_path / "text").write_text(text, encoding="utf-8")
        corpus = file_corpus(tmp_path / "text", min_bytes=256)
        halves = [bytes(data.tolist()).decode() for data in (corpus.train, corpus.valid)]
        assert "".join(halves) == text
        assert len(corpus.valid) - len(text.encode()) // 10 in range(4)


def test_a_files_tail_is_held_out(tmp_path):
    data = bytes(index % 251 for index in range(3000))
    path = tmp_path / "text.bin"
    path.write_bytes(data)
    corpus = file_corpus(path, valid_share=0.2, min_bytes=600)
    assert corpus.name == "text.bin"
    assert bytes(corpus.train.tolist()) == data[:2400]
    assert bytes(corpus.valid.tolist()) == data[2400:]


def test_unusable_files_are_named(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"x" * 10_000)
    with pytest.raises(TextError, match=r"cannot read the text file .*missing: No such file"):
        file_corpus(tmp_path / "missing")
    with pytest.raises(TextError, match="cannot read the text file"):
        file_corpus(tmp_path)
    with pytest.raises(TextError, match="empty is empty"):
        file_corpus(tmp_path / "empty")
    with pytest.raises(TextError, match=r"has 10000 bytes, too few.*10% need 1024"):
        file_corpus(tmp_path / "short")


def test_random_windows_are_pieces_of_the_data():
    data = torch.arange(256, dtype=torch.uint8)
    windows = random_windows(data, 500, 7, torch.Generator().manual_seed(0))
    assert windows.dtype == torch.uint8
    assert windows.shape == (500, 8)
    assert torch.equal(windows.int().diff(), torch.ones(500, 7, dtype=torch.int32))
    assert windows[:, 0].min() < 8  # both ends are reached
    assert windows[:, -1].max() > 247
    again = random_windows(data, 500, 7, torch.Generator().manual_seed(0))
    other = random_windows(data, 500, 7, torch.Generator().manual_seed(1))
    assert torch.equal(windows, again)
    assert not torch.equal(windows, other)


def test_spread_windows_reach_both_ends_without_overlap():
    data = torch.arange(200, dtype=torch.uint8)
    windows = spread_windows(data, 5, 10)
    assert windows.shape == (5, 11)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 199
    # 199 targets hold 19 windows of 10 targets: more are not made, and none is counted twice.
    targets = spread_windows(data, 1000, 10)[:, 1:].flatten().tolist()
    assert len(targets) == len(set(targets)) == 190
    assert torch.equal(spread_windows(data[:11], 9, 10), data[:11].unsqueeze(0))


def test_windows_longer_than_the_data_are_refused():
    data = torch.zeros(10, dtype=torch.uint8)
    with pytest.raises(TextError, match=r"10 bytes are too few for a window of 10 \+ 1"):
        random_windows(data, 1, 10, torch.Generator())
    with pytest.raises(TextError, match="too few"):
        spread_windows(data, 1, 10)


def test_unigram_baseline_by_hand():
    train, valid = as_bytes(b"aab"), as_bytes(b"xabz")
    chances = [(2 + 1) / 259, (1 + 1) / 259, 1 / 259]  # a, b and the unseen z; x is context
    reference = -sum(math.log2(p) for p in chances) / 3
    assert unigram_bits(train, valid) == pytest.approx(reference, rel=1e-12)


def test_bigram_baseline_by_hand():
    train, valid = as_bytes(b"aabac"), as_bytes(b"abz")
    # After a: a, b, c once each. After b: a once. Unigram: b (1 + 1) / 261, z 1 / 261.
    chances = [(1 + 2 / 261) / (3 + 1), (0 + 1 / 261) / (1 + 1)]
    reference = -sum(math.log2(p) for p in chances) / 2
    assert bigram_bits(train, valid) == pytest.approx(reference, rel=1e-12)
