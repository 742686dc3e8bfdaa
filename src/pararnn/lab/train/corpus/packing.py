"""Packing: texts as two files of tokens, one to learn and one that is held out."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pararnn.lab.progress import Progress
from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.corpus.sources import LeftOut, conditions_of, documents, kind_of, lines_of
from pararnn.lab.train.corpus.tokenizer import Tokenizer
from pararnn.lab.train.files import digest

PASSAGE = 1 << 18
"""Characters of a passage, at most."""
CHUNK = 1 << 22
"""Characters that are tokenised at once, at least; passages stay whole."""
SAMPLE = 1 << 27
"""Bytes of text that a tokenizer is trained on, and the rest of a passage: the first."""
LINE = re.compile(r"\S\r?\n(?=\S)")
"""End of a line that neither ends in nor precedes blanks. Tokenizers of words cut there too, so
that a passage has the tokens that its text has elsewhere."""


class Passage(NamedTuple):
    """A document, or a segment of a long one. ends: True if the document ends with it."""

    text: str
    ends: bool

    @property
    def bytes(self) -> int:
        """Bytes of the text as UTF-8."""
        return len(self.text.encode())


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
    """Write train.bin and valid.bin, and meta.json, which `meta_of` reads."""
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32)
    paths = [folder / "train.bin", folder / "valid.bin"]
    tail: deque[Passage] = deque()
    train_left_out: LeftOut = {}
    valid_left_out: LeftOut = {}
    with Progress("tokenising") as progress:
        texts = learned(config, tail, train_left_out)
        train = _write(paths[0], texts, tokenizer, dtype, progress, config.tokens)
        held_out = passages(config, config.valid, valid_left_out) if config.valid else tail
        valid = _write(paths[1], held_out, tokenizer, dtype, progress)
    kinds = [kind_of(field, value) for field, value in conditions_of(config.drop)]
    never = [f"{config.train} has no {kind}" for kind in kinds if kind not in train_left_out]
    meta = {
        "train": asdict(train),
        "valid": asdict(valid),
        "dtype": dtype.name,
        "vocabulary": tokenizer.vocabulary,
        "end": tokenizer.end,
        "sums": [digest(path) for path in paths],
        "left_out": [*lines_of(train_left_out), *lines_of(valid_left_out), *never],
        "config": asdict(config),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")


def meta_of(folder: Path) -> dict[str, Any] | None:
    """Return the content of meta.json; None if it is missing or corrupt, or tokens are missing."""
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        width = np.dtype(meta["dtype"]).itemsize
        for name in ("train", "valid"):
            if Part(**meta[name]).tokens * width != (folder / f"{name}.bin").stat().st_size:
                return None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return meta


def passages(config: DataConfig, source: str, left_out: LeftOut | None = None) -> Iterator[Passage]:
    """Yield the texts of a source, long ones in passages, which end with a line if one can."""
    for text in documents(source, config.column, config.drop, config.suffixes, left_out):
        start = 0
        while len(text) - start > PASSAGE:
            lines = LINE.finditer(text, start + PASSAGE // 2, start + PASSAGE)
            end = max((line.end() for line in lines), default=start + PASSAGE)
            yield Passage(text[start:end], False)
            start = end
        yield Passage(text[start:], True)


def learned(
    config: DataConfig, tail: deque[Passage], left_out: LeftOut | None = None
) -> Iterator[Passage]:
    """Yield the texts to learn; leave those to hold out in `tail`, unless `config.valid` has them.

    They are the last `config.holdout` of the bytes; a document at the border is cut there. Who
    reads fewer than all finds the end of what was read in `tail`, in whole passages.
    """
    held = total = target = 0
    for passage in passages(config, config.train, left_out):
        tail.append(passage)
        held, total = held + passage.bytes, total + passage.bytes
        target = 0 if config.valid else max(1, int(total * config.holdout))
        while tail and held - tail[0].bytes >= target:
            held -= tail[0].bytes
            yield tail.popleft()
    if tail:
        text, ends = tail.popleft()
        first = text.encode()[: held - target].decode(errors="ignore")
        tail.appendleft(Passage(text[len(first) :], ends))
        if first:
            yield Passage(first, True)


def tokenizer_sample(config: DataConfig) -> Iterator[str]:
    """Yield the texts to train a tokenizer on: the first of those to learn.

    `config.tokens` bytes of them are learned, as a token has a byte or more.
    """
    size = 0
    for passage in learned(config, deque()):
        yield passage.text
        size += passage.bytes + passage.ends
        if size >= min(SAMPLE, config.tokens or SAMPLE):
            return


def _write(
    path: Path,
    texts: Iterable[Passage],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    progress: Progress,
    limit: int | None = None,
) -> Part:
    """Write the tokens of texts, `end` after each document, up to a number of tokens.

    The passage that reaches the limit is whole, and the end of its document.
    """
    tokens = documents = size = 0
    is_open = False
    end = np.array(tokenizer.end, dtype).tobytes()
    with path.open("wb") as file:
        for passage, ids in _encoded(texts, tokenizer):
            file.write(np.asarray(ids, dtype).tobytes() + end * passage.ends)
            tokens, documents = tokens + len(ids) + passage.ends, documents + passage.ends
            size, is_open = size + passage.bytes, not passage.ends
            progress.update(size)
            if limit is not None and tokens >= limit:
                break
        file.write(end * is_open)
    return Part(tokens + is_open, documents + is_open, size)


def _encoded(texts: Iterable[Passage], tokenizer: Tokenizer) -> Iterator[tuple[Passage, Any]]:
    """Yield passages and their ids, tokenised many passages at a time."""
    chunk: list[Passage] = []
    size = 0
    for passage in texts:
        chunk.append(passage)
        size += len(passage.text)
        if size >= CHUNK:
            yield from zip(chunk, tokenizer.encode_all([text for text, _ in chunk]), strict=True)
            chunk, size = [], 0
    yield from zip(chunk, tokenizer.encode_all([text for text, _ in chunk]), strict=True)
