"""Tokenizers: bytes, and those of the packages tokenizers and transformers; training of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pararnn.base.atomic import write_text
from pararnn.base.extras import require
from pararnn.lab.train.corpus.sources import DataError
from pararnn.lm.tokens import BYTES, save_byte_tokenizer

END = "<|endoftext|>"
"""The end of a document in tokenizers that are trained here."""
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names of that token in a tokenizer that does not say it: the first that it has."""
SETTINGS = "tokenizer_config.json"
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
LONGEST = r"[\s\S]{1,128}"
"""Patterns of words, in which byte pairs are merged, and of the segments of longer words. Text
without blanks is one word, and each merge in a word reads all of it."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Bytes of UTF-8, and one more id for the end of a document."""

    end: int = BYTES
    vocabulary: int = BYTES + 1
    key: str = "bytes"

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of texts."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def save(self, folder: Path) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` reads."""
        save_byte_tokenizer(folder, end=END)


@dataclass(frozen=True)
class FastTokenizer:
    """Tokenizer of the package tokenizers, several threads at work.

    end: id after each document, to which no text is encoded. pad: id that fills rows. vocabulary:
    largest id plus one. key: hash of all that ids depend on.
    """

    tokenizer: Any
    end: int
    pad: int
    vocabulary: int
    key: str

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, without any before or after them."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def save(self, folder: Path) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` reads."""
        _save(self.tokenizer, folder, *map(self.tokenizer.id_to_token, (self.end, self.pad)))


Tokenizer = ByteTokenizer | FastTokenizer


def size_of(name: str) -> int | None:
    """Return N of "bpe:N"; None for the name of an existing tokenizer."""
    if not name.startswith("bpe:"):
        return None
    size = name.removeprefix("bpe:")
    if not (size.isdecimal() and int(size) > BYTES):
        raise DataError(
            f'the tokenizer to train must be "bpe:N", N at least {BYTES + 1}, such as bpe:16384; '
            f"got {name!r}"
        )
    return int(size)


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer: "bytes", a tokenizer.json file, a folder with one, or a name on the Hub.

    The end of documents is its eos_token, or the first of `ENDS` that it knows. Raises DataError
    where there is none, or the file is corrupt, and MissingExtra without the package transformers.
    """
    if name == "bytes":
        return ByteTokenizer()
    transformers, path = require("transformers"), Path(name)
    if path.is_dir() and not (path / SETTINGS).exists():
        path = path / "tokenizer.json"
    try:
        if path.suffix == ".json":
            loaded = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            loaded = transformers.AutoTokenizer.from_pretrained(name)
        tokenizer = loaded.backend_tokenizer
    except Exception as error:  # the package tokenizers raises nothing more specific
        reason = str(error).partition("\n")[0]
        raise DataError(
            f'there is no tokenizer {name!r}: {reason}; allowed are "bytes", "bpe:N" to train one, '
            "a tokenizer.json, a folder with one, and a name on the Hub that has one"
        ) from error
    known = (loaded.eos_token_id, *map(tokenizer.token_to_id, ENDS))
    end = next((token for token in known if token is not None), None)
    if end is None:
        raise DataError(
            f"the tokenizer {name!r} has no token for the end of documents: set eos_token in its "
            f"{SETTINGS}; without one it must have one of {ENDS}"
        )
    # A file may cut or pad texts. A text that spells the end must not encode to it.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    key = hashlib.sha256(f"{end} {tokenizer.to_str()}".encode()).hexdigest()
    pad = end if loaded.pad_token_id is None else loaded.pad_token_id
    return FastTokenizer(tokenizer, end, pad, max(tokenizer.get_vocab().values()) + 1, key)


def train_tokenizer(documents: Iterable[str], size: int, folder: Path | str) -> Tokenizer:
    """Train byte-level BPE with at most `size` ids and write it to `folder`; returns it.

    The 256 bytes and `END` are among the ids, so `size` must be at least 257; a short text gives
    fewer than `size`. The folder can be pretrained by `transformers.AutoTokenizer`.
    """
    if size <= BYTES:
        raise ValueError(f"size must be at least {BYTES + 1}, the bytes and {END}, got {size}")
    tokenizers = require("tokenizers")
    split, byte_level = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            *(split(tokenizers.Regex(pattern), "isolated") for pattern in (WORDS, LONGEST)),
            byte_level(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    Path(folder).mkdir(parents=True, exist_ok=True)
    _save(tokenizer, Path(folder), END, END)
    return load_tokenizer(str(folder))


def ends_of(folder: Path) -> tuple[int, int] | None:
    """Return the ids of a saved tokenizer that end a text and fill a row; None without an end.

    A tokenizer that an earlier version saved names no pad token: the end is written there as one.
    """
    if not (folder / SETTINGS).exists():
        return None
    tokenizer = require("transformers").AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token is not None and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        _save(tokenizer.backend_tokenizer, folder, tokenizer.eos_token, tokenizer.pad_token)
    return tokenizer.eos_token and (tokenizer.eos_token_id, tokenizer.pad_token_id)


def _save(tokenizer: Any, folder: Path, end: str, pad: str) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    class_name = "PreTrainedTokenizerFast"
    settings = {"tokenizer_class": class_name, "eos_token": end, "pad_token": pad}
    write_text(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")
