"""Packing: a source's texts as two files of tokens, what is learned and what is held out."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pararnn.progress import Progress
from pararnn.train.config import DataConfig
from pararnn.train.corpus.sources import DataError, LeftOut, Piece, pieces
from pararnn.train.corpus.tokenizer import Tokenizer

FORMAT = 2
"""Part of the key of a cached folder: another number for another layout of its files."""
CHUNK = 1 << 22
"""Characters that are tokenised at once, at least; pieces stay whole."""
SAMPLE = 1 << 27
"""Bytes of text that a tokenizer is trained on, at most: the first."""


@dataclass(frozen=True)
class Part:
    """A file of tokens. documents, bytes (of UTF-8): what they were."""

    tokens: int
    documents: int
    bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text over tokens, ends of documents among them."""
        return self.bytes / self.tokens


def pack(config: DataConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Write train.bin, valid.bin and meta.json, from which `meta_of` reads parts and dtype."""
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32)
    names = ("train", "valid")
    left_out = LeftOut()
    with Progress("tokenising") as shown:
        writers = {name: Writer(folder / f"{name}.bin", tokenizer, dtype) for name in names}
        counted = Counted(shown)
        writers["train"].write(counted(train_pieces(config, left_out)), token_limit(config))
        if config.valid:
            writers["valid"].write(counted(valid_pieces(config, left_out)))
        else:
            sizes = writers["train"].sizes
            at, keep = where_to_cut(sizes, held_out_bytes(int(sizes[:, 1].sum()), config.holdout))
            _move_tail(config, at, keep, writers["train"], writers["valid"])
    meta: dict[str, Any] = {name: asdict(writers[name].part()) for name in names}
    meta |= {"dtype": dtype.name, "vocabulary": tokenizer.vocabulary, "end": tokenizer.end}
    meta["left_out"] = left_out.lines()
    for writer in writers.values():
        writer.sizes_path.unlink()
    with _new(folder / "meta.json") as file:
        file.write(json.dumps(meta | {"config": asdict(config)}, indent=2).encode())


def meta_of(folder: Path) -> dict[str, Any] | None:
    """What meta.json says; None where it is missing, or its tokens are not whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        width = np.dtype(meta["dtype"]).itemsize
        whole = all(
            (folder / f"{name}.bin").stat().st_size == meta[name]["tokens"] * width
            for name in ("train", "valid")
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return meta if whole else None


def train_pieces(config: DataConfig, left_out: LeftOut | None = None) -> Iterator[Piece]:
    """The texts to learn and, without `config.valid`, to hold out."""
    return _pieces(config, config.train, True, left_out or LeftOut())


def valid_pieces(config: DataConfig, left_out: LeftOut) -> Iterator[Piece]:
    """The texts of `config.valid`."""
    return _pieces(config, config.valid, False, left_out)


def _pieces(config: DataConfig, source: str, strict: bool, left_out: LeftOut) -> Iterator[Piece]:
    more: dict[str, Any] = {"suffixes": config.suffixes, "left_out": left_out}
    found = pieces(source, config.column, config.drop, strict=strict, **more)
    return some(found, source, left_out)


def tokenizer_sample(config: DataConfig) -> Iterator[str]:
    """The texts to train a tokenizer on: the first `SAMPLE` bytes, none of them held out."""
    size = sample_size(config)
    for piece in train_pieces(config):
        text = piece.text.encode()[:size].decode(errors="ignore")
        size -= len(piece.text.encode())
        yield text
        if size <= 0:
            return


def sample_size(config: DataConfig) -> int:
    """Bytes of text that a tokenizer may see.

    How much text `config.tokens` are is not known before there is a tokenizer. They are no less
    than as many bytes, so that what is beyond the sample of those is not counted on.
    """
    if config.valid:
        return min(SAMPLE, token_limit(config) or SAMPLE)
    limit, enough = token_limit(config) or math.inf, SAMPLE / (1 - config.holdout)
    tokens = total = 0
    for piece in train_pieces(config):
        size = len(piece.text.encode())
        total, tokens = total + size, tokens + size + piece.ends
        if tokens >= limit or total > enough + 1:
            break
    return min(SAMPLE, total - held_out_bytes(total, config.holdout))


def token_limit(config: DataConfig) -> int | None:
    """Tokens after which no more are made: those to learn, and those held out of them."""
    if config.tokens is None or config.valid:
        return config.tokens
    return math.ceil(config.tokens / (1 - config.holdout))


def held_out_bytes(total: int, holdout: float) -> int:
    """Of so many bytes of text, how many are held out at most."""
    return max(1, int(total * holdout))


def where_to_cut(sizes: np.ndarray, target: int) -> tuple[int, int]:
    """Where what is held out begins: a piece, and a byte in it.

    Whole documents at the end are held out as long as they fit in `target` bytes. Where these are
    less than half of it, the document before them is cut, so that its end makes up the rest.

    sizes: int (N, 3), tokens, bytes and whether a document ends there, of each piece.
    """
    at = cut = len(sizes)
    size = held = 0
    while at > 0 and size + sizes[at - 1, 1] <= target:
        at -= 1
        size += int(sizes[at, 1])
        if at == 0 or sizes[at - 1, 2]:
            cut, held = at, size
    if 2 * held >= target or at == 0:
        return cut, 0
    return at - 1, size + int(sizes[at - 1, 1]) - target


def some(texts: Iterable[Piece], source: str, left_out: LeftOut) -> Iterator[Piece]:
    """The texts that are not empty, of which there must be some."""
    found = False
    for number, piece in enumerate(texts, 1):
        if piece.text:
            found = True
            yield piece
        else:
            left_out.add("documents without text", f"number {number:,} of {source}")
    if not found:
        raise DataError(f"no document of {source} has any text")


class Writer:
    """A file of tokens that is being written, and beside it the size of each piece."""

    def __init__(self, path: Path, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        self.path, self.tokenizer, self.dtype = path, tokenizer, dtype
        self.sizes_path = path.with_suffix(".sizes")
        path.touch()
        self.sizes_path.touch()

    @property
    def sizes(self) -> np.ndarray:
        """int64 (N, 3): tokens, bytes and whether a document ends there, of each piece."""
        whole = self.sizes_path.stat().st_size > 0
        sizes = np.memmap(self.sizes_path, np.int64, "r") if whole else np.empty(0, np.int64)
        return sizes.reshape(-1, 3)

    def part(self) -> Part:
        """What has been written."""
        tokens, size, documents = (int(total) for total in self.sizes.sum(0))
        return Part(tokens, documents, size)

    def write(self, texts: Iterable[Piece], limit: int | None = None) -> None:
        """Append texts, `end` behind each document; with `limit`, until there are so many tokens.

        The piece that reaches the limit is whole, and the end of its document.
        """
        total = 0
        with _new(self.path, "ab") as tokens, _new(self.sizes_path, "ab") as sizes:
            for chunk in _chunks(texts):
                found = self.tokenizer.encode_all([piece.text for piece in chunk])
                for piece, ids in zip(chunk, found, strict=True):
                    last = limit is not None and total + len(ids) + piece.ends >= limit
                    ends = piece.ends or last
                    array = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else ids
                    tokens.write(np.asarray(array, self.dtype).tobytes())
                    if ends:
                        tokens.write(np.array(self.tokenizer.end, self.dtype).tobytes())
                    size = len(piece.text.encode())
                    sizes.write(np.array([len(ids) + ends, size, ends], np.int64).tobytes())
                    total += len(ids) + ends
                    if last:
                        return

    def append(self, other: Writer, start: int) -> None:
        """Append what another one has from its piece `start` on."""
        width, row = self.dtype.itemsize, 3 * np.dtype(np.int64).itemsize
        offset = int(other.sizes[:start, 0].sum()) * width
        for ours, theirs, begin in (
            (self.path, other.path, offset),
            (self.sizes_path, other.sizes_path, start * row),
        ):
            with _new(ours, "ab") as file, theirs.open("rb") as source:
                source.seek(begin)
                shutil.copyfileobj(source, file, CHUNK)

    def truncate(self, count: int) -> None:
        """Keep `count` pieces."""
        tokens = int(self.sizes[:count, 0].sum())
        os.truncate(self.path, tokens * self.dtype.itemsize)
        os.truncate(self.sizes_path, count * 3 * np.dtype(np.int64).itemsize)


def _move_tail(config: DataConfig, at: int, keep: int, train: Writer, valid: Writer) -> None:
    """Move what is behind byte `keep` of piece `at` from one file to the other."""
    if keep == 0:
        valid.append(train, at)
        train.truncate(at)
        return
    # Read again: of texts that a document is a large part of, there are not many.
    piece = next(islice(train_pieces(config), at, None))
    first = piece.text.encode()[:keep].decode(errors="ignore")
    ends = bool(train.sizes[at, 2])
    valid.write([Piece(piece.text[len(first) :], ends)])
    valid.append(train, at + 1)
    train.truncate(at)
    train.write([Piece(first, True)] if first else [])


class Counted:
    """Passes texts on, and shows how many bytes of them are done."""

    def __init__(self, shown: Progress) -> None:
        self.shown, self.bytes = shown, 0

    def __call__(self, texts: Iterable[Piece]) -> Iterator[Piece]:
        """The texts."""
        for piece in texts:
            yield piece
            self.bytes += len(piece.text.encode())
            self.shown.update(self.bytes)


def _chunks(texts: Iterable[Piece]) -> Iterator[list[Piece]]:
    chunk: list[Piece] = []
    size = 0
    for piece in texts:
        chunk.append(piece)
        size += len(piece.text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@contextmanager
def _new(path: Path, mode: str = "wb") -> Iterator[BinaryIO]:
    """A file to write, which is on the disk when the block ends."""
    with path.open(mode) as file:
        yield file  # type: ignore[misc]
        file.flush()
        os.fsync(file.fileno())
