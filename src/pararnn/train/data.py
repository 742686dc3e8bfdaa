"""Tokens on disk: documents are tokenised once, and rows of them are read through a memory map."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pararnn.extras import require
from pararnn.train.config import DataConfig
from pararnn.train.sources import DataError, documents, fingerprint
from pararnn.train.tokenizer import Tokenizer, load_tokenizer

FORMAT = 1
"""Part of the key of a cached folder: another number for another layout of its files."""
CHUNK = 1 << 20
"""Characters that are tokenised at once, at least; documents stay whole."""


@dataclass(frozen=True)
class Part:
    """Where a part's tokens are: [start, stop). documents, bytes (of UTF-8): what they were."""

    start: int
    stop: int
    documents: int
    bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text over tokens, ends of documents among them."""
        return self.bytes / (self.stop - self.start)


class TokenRows(Dataset[dict[str, Tensor]]):
    """Contiguous rows of tokens: row i begins at token i * length; what is left over is no row.

    Each is input_ids and labels, which are the same: int64 (length,). With `end`, the id behind
    documents, also position_ids, which are 0 at the first token of each document and there only: a
    row that begins within a document begins at 1.
    """

    def __init__(
        self, path: Path, dtype: str, part: Part, length: int, end: int | None = None
    ) -> None:
        self.path, self.dtype, self.part, self.length, self.end = path, dtype, part, length, end

    @cached_property
    def tokens(self) -> np.ndarray:
        """The part's tokens: a memory map."""
        size = self.part.stop - self.part.start
        offset = self.part.start * np.dtype(self.dtype).itemsize
        return np.memmap(self.path, self.dtype, "r", offset, (size,))

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be copied into each worker as a whole.
        return {name: value for name, value in vars(self).items() if name != "tokens"}

    def __len__(self) -> int:
        return (self.part.stop - self.part.start) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} rows, got index {index}")
        start = index * self.length
        ids = self.tokens[start : start + self.length].astype(np.int64)
        row = {"input_ids": torch.from_numpy(ids)}
        row["labels"] = row["input_ids"]
        if self.end is not None:
            begins = start == 0 or self.tokens[start - 1] == self.end
            row["position_ids"] = torch.from_numpy(positions_of(ids, self.end, bool(begins)))
        return row


@dataclass(frozen=True)
class Packed:
    """Tokenised data: the rows to train on and those held out, and what tokenised them.

    folder: where they are. vocabulary, end: as in `Tokenizer`.
    """

    folder: Path
    tokenizer: Tokenizer
    vocabulary: int
    end: int
    train: TokenRows
    valid: TokenRows


def prepare(config: DataConfig) -> Packed:
    """The rows of a configuration's data, tokenised on the first call only.

    They are kept in a folder of `config.cache` that is named by a hash of the sources' content,
    the tokenizer and the holdout; it is written beside and renamed, so that a folder of that name
    is whole. Without `config.valid` the last documents are held out, at least one; of a single
    document, its end. Documents without any text are left out.

    Raises DataError for data that cannot be used, see `documents` and `load_tokenizer`, for a
    part that is shorter than a row, and where the folder cannot be written.
    """
    if not config.train:
        raise DataError(
            "there is nothing to learn: name a file, a folder or a dataset, data.train=PATH"
        )
    if config.sequence_length < 1 or not 0 < config.holdout < 1:
        raise DataError(
            "sequence_length must be positive and holdout between 0 and 1, got "
            f"{config.sequence_length} and {config.holdout}"
        )
    tokenizer = load_tokenizer(config.tokenizer)
    content = {
        "format": FORMAT,
        "train": fingerprint(config.train),
        "valid": fingerprint(config.valid) if config.valid else config.holdout,
        "column": config.column,
        "tokenizer": tokenizer.key,
    }
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
    folder = Path(config.cache) / key
    meta = _meta(folder)
    if meta is None:
        try:
            with _beside(folder) as beside:
                _pack(config, tokenizer, beside)
        except OSError as error:
            raise DataError(
                f"cannot write tokenised data to {config.cache}: {error.strerror or error}; make "
                "room there, or set cache to another folder"
            ) from error
        meta = _meta(folder)
        assert meta is not None, folder
    parts = {name: Part(**meta[name]) for name in ("train", "valid")}
    sources = {"train": config.train, "valid": config.valid or config.train}
    for name, part in parts.items():
        if part.stop - part.start < config.sequence_length:
            raise DataError(
                f"the {name} part of {sources[name]} has {part.stop - part.start} tokens, fewer "
                f"than a row of {config.sequence_length}: give more text, or set sequence_length"
                + ("" if config.valid else " or holdout")
            )
    end = tokenizer.end if config.resets else None
    rows = {
        name: TokenRows(folder / "tokens.bin", meta["dtype"], part, config.sequence_length, end)
        for name, part in parts.items()
    }
    return Packed(
        folder, tokenizer, tokenizer.vocabulary, tokenizer.end, rows["train"], rows["valid"]
    )


def positions_of(ids: np.ndarray, end: int, begins: bool) -> np.ndarray:
    """The place of each token in its document, whose last is `end`: int64 (T,).

    begins: whether the first token is a document's first; if not, it is counted as its second.
    """
    index = np.arange(len(ids))
    first = np.where(np.concatenate([[False], ids[:-1] == end]), index, 0 if begins else -1)
    return index - np.maximum.accumulate(first)


def _pack(config: DataConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokens.bin, sizes.bin, int64 (tokens, bytes) of each document, and meta.json."""
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32)
    texts = _some(documents(config.train, config.column), config.train)
    with (
        _progress() as bar,
        _new(folder / "tokens.bin") as tokens,
        _new(folder / "sizes.bin") as sizes,
    ):
        if config.valid:
            cut = _append(texts, tokenizer, dtype, tokens, sizes, bar)
            held_out = _some(documents(config.valid, config.column), config.valid)
            _append(held_out, tokenizer, dtype, tokens, sizes, bar)
        else:
            texts = _at_least_two(texts, config.holdout)
            count = _append(texts, tokenizer, dtype, tokens, sizes, bar)
            cut = count - max(1, int(count * config.holdout))
    lengths = np.memmap(folder / "sizes.bin", np.int64, "r").reshape(-1, 2)
    meta: dict[str, Any] = {"dtype": dtype.name, "vocabulary": tokenizer.vocabulary}
    start = 0
    for name, part in (("train", lengths[:cut]), ("valid", lengths[cut:])):
        size, text = (int(total) for total in part.sum(0))
        meta[name] = asdict(Part(start, start + size, len(part), text))
        start += size
    meta |= {"end": tokenizer.end, "config": asdict(config)}
    with _new(folder / "meta.json") as file:
        file.write(json.dumps(meta, indent=2).encode())


def _append(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    tokens: BinaryIO,
    sizes: BinaryIO,
    bar: Any,
) -> int:
    """Write the tokens of texts, and `end` behind each; returns how many texts there were."""
    count = 0
    for chunk in _chunks(texts):
        for text, ids in zip(chunk, tokenizer.encode_all(chunk), strict=True):
            array = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.array(ids)
            tokens.write(np.append(array, tokenizer.end).astype(dtype).tobytes())
            size = len(text.encode("utf-8"))
            sizes.write(np.array([len(ids) + 1, size], np.int64).tobytes())
            if bar is not None:
                bar.update(size)
        count += len(chunk)
    return count


def _chunks(texts: Iterable[str]) -> Iterator[Sequence[str]]:
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _some(texts: Iterable[str], source: str) -> Iterator[str]:
    """The texts that are not empty, of which there must be some."""
    found = False
    for text in texts:
        if text:
            found = True
            yield text
    if not found:
        raise DataError(f"no document of {source} has any text")


def _at_least_two(texts: Iterator[str], holdout: float) -> Iterator[str]:
    """The texts; a single one is cut in two, of which the second is the held-out share."""
    first, second = next(texts), next(texts, None)
    if second is None:
        cut = len(first) - max(1, int(len(first) * holdout))
        first, second = first[:cut], first[cut:]
    yield first
    yield second
    yield from texts


def _meta(folder: Path) -> dict[str, Any] | None:
    """What meta.json says; None where it is missing, or its tokens are."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        size = (folder / "tokens.bin").stat().st_size
        whole = size == meta["valid"]["stop"] * np.dtype(meta["dtype"]).itemsize
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return meta if whole else None


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new folder to write to, which takes `folder`'s name when the block ends well."""
    beside = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    beside.mkdir(parents=True)
    try:
        yield beside
        if folder.exists() and _meta(folder) is None:
            shutil.rmtree(folder)
        try:
            beside.rename(folder)
        except OSError:
            # Another process was first, with the same content.
            if _meta(folder) is None:
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def _new(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which is on the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _progress() -> AbstractContextManager[Any]:
    """A bar of bytes where someone watches and tqdm is installed; None otherwise."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return nullcontext()
    return require("tqdm").tqdm(desc="tokenising", unit="B", unit_scale=True)
