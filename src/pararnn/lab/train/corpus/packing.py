"""Packing: a source's texts as two files of tokens, one to learn and one that is held out."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pararnn.base.atomic import flush
from pararnn.lab.progress import Progress
from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.corpus.sources import DataError, LeftOut, Piece, pieces
from pararnn.lab.train.corpus.tokenizer import Tokenizer

FORMAT = 2
"""Version of the files' layout, in the key of a cached folder."""
CHUNK = 1 << 22
"""Characters that are tokenised at once, at least; pieces stay whole."""
SAMPLE = 1 << 27
"""Bytes of text that a tokenizer is trained on, at most: the first."""
BINS = ("train.bin", "valid.bin")
"""Files of tokens in a folder of the cache."""


@dataclass(frozen=True)
class Part:
    """Sizes of a file of tokens. documents, bytes (of UTF-8): of its text."""

    tokens: int
    documents: int
    bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text over tokens; ends of documents are tokens."""
        return self.bytes / self.tokens


def pack(config: DataConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Write `BINS` and meta.json, from which `meta_of` reads parts and dtype."""
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32)
    train, valid = (Writer(folder / name, tokenizer, dtype) for name in BINS)
    left_out, bytes_done = LeftOut(), 0
    with Progress("tokenising") as progress:

        def show(texts: Iterable[Piece]) -> Iterator[Piece]:
            nonlocal bytes_done
            for piece in texts:
                yield piece
                bytes_done += len(piece.text.encode())
                progress.update(bytes_done)

        train.write(show(train_pieces(config, left_out)), token_limit(config))
        if config.valid:
            valid.write(show(_pieces(config, config.valid, False, left_out)))
        else:
            sizes = train.sizes
            target = held_out_bytes(int(sizes[:, 1].sum()), config.holdout)
            _move_tail(config, *where_to_cut(sizes, target), train, valid)
    meta = {
        "train": asdict(train.part()),
        "valid": asdict(valid.part()),
        "dtype": dtype.name,
        "vocabulary": tokenizer.vocabulary,
        "end": tokenizer.end,
        "left_out": left_out.lines(),
        "config": asdict(config),
    }
    for writer in (train, valid):
        writer.sizes_path.unlink()
    (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    for name in (*BINS, "meta.json"):
        flush(folder / name)


def meta_of(folder: Path) -> dict[str, Any] | None:
    """Return the content of meta.json; None if it is missing or corrupt, or tokens are missing."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        sizes = [(folder / name).stat().st_size for name in BINS]
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not isinstance(meta, dict) or meta.get("dtype") not in ("uint16", "uint32"):
        return None
    width = np.dtype(meta["dtype"]).itemsize
    for name, size in zip(("train", "valid"), sizes, strict=True):
        part = meta.get(name)
        if not isinstance(part, dict) or set(part) != set(Part.__dataclass_fields__):
            return None
        if part["tokens"] * width != size:
            return None
    return meta


def train_pieces(config: DataConfig, left_out: LeftOut | None = None) -> Iterator[Piece]:
    """Yield the texts to learn and, without `config.valid`, to hold out."""
    return _pieces(config, config.train, True, left_out or LeftOut())


def _pieces(config: DataConfig, source: str, strict: bool, left_out: LeftOut) -> Iterator[Piece]:
    """Yield the pieces of a source that have text; DataError if none has."""
    options: dict[str, Any] = {"suffixes": config.suffixes, "left_out": left_out}
    empty = True
    texts = pieces(source, config.column, config.drop, strict=strict, **options)
    for number, piece in enumerate(texts, 1):
        if piece.text:
            empty = False
            yield piece
        else:
            left_out.add("documents without text", f"number {number:,} of {source}")
    if empty:
        raise DataError(f"no document of {source} has any text")


def tokenizer_sample(config: DataConfig) -> Iterator[str]:
    """Yield the texts to train a tokenizer on: the first `SAMPLE` bytes, none of them held out."""
    size = sample_size(config)
    for piece in train_pieces(config):
        text = piece.text.encode()
        yield text[:size].decode(errors="ignore")
        size -= len(text)
        if size <= 0:
            return


def sample_size(config: DataConfig) -> int:
    """Return the bytes of text that a tokenizer may see.

    The size of `config.tokens` in bytes is unknown before there is a tokenizer. It is at least as
    many bytes, so a sample of that size has no text that is held out.
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
    """Return the number of tokens to make: those to learn, and those held out of them."""
    if config.tokens is None or config.valid:
        return config.tokens
    return math.ceil(config.tokens / (1 - config.holdout))


def held_out_bytes(total: int, holdout: float) -> int:
    """Return the largest number of bytes to hold out of `total`."""
    return max(1, int(total * holdout))


def where_to_cut(sizes: np.ndarray, target: int) -> tuple[int, int]:
    """Return where the held-out text begins: a piece, and a byte in it.

    Whole documents at the end are held out as long as they fit in `target` bytes. If they are less
    than half of it, the document before them is cut, and its end is held out too.

    sizes: int (N, 3), tokens, bytes and whether a document ends there, of each piece.
    """
    start = cut = len(sizes)
    size = cut_size = 0
    while start > 0 and size + sizes[start - 1, 1] <= target:
        start -= 1
        size += int(sizes[start, 1])
        if start == 0 or sizes[start - 1, 2]:
            cut, cut_size = start, size
    if 2 * cut_size >= target or start == 0:
        return cut, 0
    return start - 1, size + int(sizes[start - 1, 1]) - target


class Writer:
    """A file of tokens under construction, and a second file with the size of each piece."""

    def __init__(self, path: Path, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        self.path, self.tokenizer, self.dtype = path, tokenizer, dtype
        self.sizes_path = path.with_suffix(".sizes")
        path.touch()
        self.sizes_path.touch()

    @property
    def sizes(self) -> np.ndarray:
        """Tokens, bytes and whether a document ends there, of each piece: int64 (N, 3)."""
        some = self.sizes_path.stat().st_size > 0  # or there is nothing to map
        sizes = np.memmap(self.sizes_path, np.int64, "r") if some else np.empty(0, np.int64)
        return sizes.reshape(-1, 3)

    def part(self) -> Part:
        """Return the sizes of the text so far."""
        tokens, size, documents = (int(total) for total in self.sizes.sum(0))
        return Part(tokens, documents, size)

    def write(self, texts: Iterable[Piece], limit: int | None = None) -> None:
        """Append texts, `end` behind each document; with `limit`, up to that number of tokens.

        The piece that reaches the limit is whole, and the end of its document.
        """
        total = 0
        with self.path.open("ab") as tokens, self.sizes_path.open("ab") as sizes:
            for chunk in _chunks(texts):
                ids_of_all = self.tokenizer.encode_all([piece.text for piece in chunk])
                for piece, ids in zip(chunk, ids_of_all, strict=True):
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

    def offsets(self, start: int) -> dict[Path, int]:
        """Return the offset of the piece `start` in each of the two files."""
        tokens = int(self.sizes[:start, 0].sum())
        return {
            self.path: tokens * self.dtype.itemsize,
            self.sizes_path: start * 3 * np.dtype(np.int64).itemsize,
        }

    def append(self, other: Writer, start: int) -> None:
        """Append the pieces of another writer from its piece `start` on."""
        offsets = other.offsets(start).items()
        for path, (source, offset) in zip((self.path, self.sizes_path), offsets, strict=True):
            with path.open("ab") as target, source.open("rb") as file:
                file.seek(offset)
                shutil.copyfileobj(file, target, CHUNK)

    def truncate(self, count: int) -> None:
        """Keep the first `count` pieces."""
        for path, offset in self.offsets(count).items():
            os.truncate(path, offset)


def _move_tail(config: DataConfig, start: int, keep: int, train: Writer, valid: Writer) -> None:
    """Move all behind byte `keep` of the piece `start` from one file to the other."""
    if keep:
        # The text is read again: documents that are a large fraction of it are few.
        piece = next(islice(train_pieces(config), start, None))
        first = piece.text.encode()[:keep].decode(errors="ignore")
        valid.write([Piece(piece.text[len(first) :], bool(train.sizes[start, 2]))])
    valid.append(train, start + bool(keep))
    train.truncate(start)
    if keep and first:
        train.write([Piece(first, True)])


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
