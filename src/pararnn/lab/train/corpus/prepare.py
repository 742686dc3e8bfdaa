"""Tokens on disk: documents are tokenised once, and rows of them are read through a memory map."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset

from pararnn.base.atomic import flush, write_whole
from pararnn.lab.progress import say
from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.corpus.packing import SAMPLE, Part, meta_of, pack, tokenizer_sample
from pararnn.lab.train.corpus.sources import DataError, fingerprint
from pararnn.lab.train.corpus.tokenizer import Tokenizer, load_tokenizer, size_of, train_tokenizer

FORMAT = 3
"""Version of the files' layout, in the key of a cached folder."""


class TokenRows(Dataset[dict[str, Tensor]]):
    """Contiguous rows of tokens: row i begins at token i * length; the remainder is no row.

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
        """Tokens of the part: a memory map."""
        return np.memmap(self.path, self.dtype, "r", shape=(self.part.tokens,))

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be copied into each worker as a whole.
        return {name: value for name, value in vars(self).items() if name != "tokens"}

    def __len__(self) -> int:
        return self.part.tokens // self.length

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
    """Tokenised data: the rows to learn and to hold out, and their tokenizer.

    folder: holds them. content: hash of all tokens, "" if it is unknown.
    """

    folder: Path
    tokenizer: Tokenizer
    train: TokenRows
    valid: TokenRows
    content: str = ""

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the text that is held out."""
        return self.valid.part.bytes_per_token


def prepare(config: DataConfig) -> Packed:
    """Return the rows of a configuration's data, tokenised on the first call only.

    They are cached in a folder of `config.cache`, whose name is a hash of the files' sizes and
    times, the tokenizer, and all else that tokens depend on. One of several processes tokenises
    while the others wait. Without `config.valid` the end of the text is held out, see `learned`. A
    line reports documents that are left out.

    Raises DataError for data that cannot be used, see `documents` and `load_tokenizer`, for a part
    that is shorter than a row, and where the folder cannot be written.
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
    if config.tokens is not None and config.tokens < 1:
        raise DataError(f"tokens must be positive, or none for all, got {config.tokens}")
    valid = fingerprint(config.valid, config.suffixes) if config.valid else config.holdout
    content = [
        FORMAT,
        fingerprint(config.train, config.suffixes),
        valid,
        *(config.column, config.drop, config.tokens),
    ]
    tokenizer = _tokenizer(config, content)
    folder = Path(config.cache) / _hash([*content, tokenizer.key])
    make_once(folder, partial(pack, config, tokenizer))
    meta = meta_of(folder)
    if meta is None:
        raise DataError(f"the cached tokens in {folder} are damaged: remove that folder")
    for line in meta["left_out"]:
        say(f"data: {line}")
    end = tokenizer.end if config.resets else None
    rows = {}
    for name, source in (("train", config.train), ("valid", config.valid or config.train)):
        part = Part(**meta[name])
        if part.tokens < config.sequence_length:
            raise DataError(
                f"the {name} part of {source} has {part.tokens} tokens, fewer than a row of "
                f"{config.sequence_length}: give more text, or set data.sequence_length (--length "
                f"of `pararnn draft`){'' if config.valid else ' or data.holdout'}"
            )
        path = folder / f"{name}.bin"
        rows[name] = TokenRows(path, meta["dtype"], part, config.sequence_length, end)
    tokens_hash = _hash({name: meta[name] for name in ("sums", "dtype", "end")})
    return Packed(folder, tokenizer, content=tokens_hash, **rows)


def make_once(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a folder of the cache, which `make` fills, unless it is there.

    One of several processes does it, and the others wait. Where it fails or is killed, the next one
    takes over. Raises DataError where it cannot be written, and what `make` raises.
    """
    if folder.exists():  # the cache may be read-only
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The system releases it when its holder ends or is killed: no lock is stale.
        with FileLock(folder.with_name(f".{folder.name}.lock"), fallback_to_soft=False):
            if not folder.exists():
                with write_whole(folder) as new:
                    new.mkdir()
                    make(new)
                    for path in new.iterdir():
                        flush(path)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder.parent}: {error.strerror or error}; make room there, or set "
            "data.cache to another folder"
        ) from error


def _tokenizer(config: DataConfig, content: list[Any]) -> Tokenizer:
    """Return the tokenizer of a configuration; "bpe:N" is trained on the first call only."""
    size = size_of(config.tokenizer)
    if size is None:
        return load_tokenizer(config.tokenizer)
    folder = Path(config.cache) / f"tokenizer-{_hash([*content, size, SAMPLE])}"

    def train(new: Path) -> None:
        print(f"training a tokenizer of {size:,} ids", file=sys.stderr, flush=True)
        train_tokenizer(tokenizer_sample(config), size, new)

    make_once(folder, train)
    return load_tokenizer(str(folder))


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def positions_of(ids: np.ndarray, end: int, begins: bool) -> np.ndarray:
    """Return the index of each token in its document, whose last token is `end`: int64 (T,).

    begins: True if the first token is a document's first; otherwise it counts as its second.
    """
    index = np.arange(len(ids))
    first = np.where(np.concatenate([[False], ids[:-1] == end]), index, 0 if begins else -1)
    return index - np.maximum.accumulate(first)
