"""Tokenizers: bytes, and those of the packages tokenizers and transformers; training of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pararnn.base.atomic import write_text
from pararnn.base.extras import require
from pararnn.lab.train.corpus.sources import DataError
from pararnn.lm.tokens import BYTES, save_byte_tokenizer

END = "<|endoftext|>"
"""The end of a document in tokenizers that are trained here."""
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names of that token in a tokenizer.json that does not say it: the first that it has."""
SETTINGS = "tokenizer_config.json"
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
LONGEST = r"[\s\S]{1,128}"
"""Patterns of words, in which byte pairs are merged, and of the parts of longer words. Text without
blanks is one word, and each merge in a word reads all of it."""
ENCODES = ("added_tokens", "normalizer", "pre_tokenizer", "model")
"""Parts of a tokenizer.json that the ids of a text depend on."""


class Tokenizer(Protocol):
    """Interface of tokenizers that packing uses."""

    @property
    def end(self) -> int:
        """Id behind each document, to which no text is encoded."""

    @property
    def vocabulary(self) -> int:
        """Largest id plus one."""

    @property
    def key(self) -> str:
        """Hash of all that ids depend on."""

    def encode_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Return the ids of each text, without any in front of it or behind it."""

    def save(self, folder: Path) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` reads."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Bytes of UTF-8, and one more id for the end of a document."""

    end: int = BYTES
    vocabulary: int = BYTES + 1
    key: str = "bytes"

    def encode_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode("utf-8") for text in texts]

    def save(self, folder: Path) -> None:
        save_byte_tokenizer(folder, end=END)


@dataclass(frozen=True)
class FastTokenizer:
    """Tokenizer of the package tokenizers, several threads at work. pad: id that fills rows."""

    tokenizer: Any
    end: int
    vocabulary: int
    key: str
    pad: int

    def encode_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in encodings]

    def save(self, folder: Path) -> None:
        self.tokenizer.save(str(folder / "tokenizer.json"))
        _write_settings(folder, *map(self.tokenizer.id_to_token, (self.end, self.pad)))


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

    The end of documents is the eos_token of the folder or the Hub; for a single file, the first of
    `ENDS` that it knows. Raises DataError where there is none, or the file is corrupt, and
    MissingExtra without the package that reads it.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir() and not (path / SETTINGS).exists():
        path = path / "tokenizer.json"
    if path.is_file() or path.suffix == ".json":
        return _of_file(path)
    try:
        tokenizer = require("transformers").AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f'there is no tokenizer {name!r}: {reason}; allowed are "bytes", "bpe:N" to train one, '
            "a tokenizer.json, a folder with one, and a name on the Hub"
        ) from error
    if not tokenizer.is_fast:
        raise DataError(f"the tokenizer {name!r} has no tokenizer.json, which is needed")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer {name!r} names no end of text: set eos_token in its "
            "tokenizer_config.json"
        )
    return _fast(tokenizer.backend_tokenizer, tokenizer.eos_token_id, tokenizer.pad_token_id)


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
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_settings(folder, END, END)
    return _of_file(folder / "tokenizer.json")


def ends_of(folder: Path) -> tuple[int, int] | None:
    """Return the ids of a saved tokenizer that end a text and fill a row; None without an end.

    A tokenizer that an earlier version saved names no pad token: the end is written there as one.
    """
    path = folder / SETTINGS
    settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if settings.get("eos_token") is None:
        return None
    if settings.get("pad_token") is None:
        _write_settings(folder, settings["eos_token"], settings["eos_token"])
    tokenizer = require("transformers").AutoTokenizer.from_pretrained(folder)
    return tokenizer.eos_token_id, tokenizer.pad_token_id


def _write_settings(folder: Path, end: str, pad: str) -> None:
    kind = "PreTrainedTokenizerFast"
    settings = {"tokenizer_class": kind, "eos_token": end, "pad_token": pad}
    write_text(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")


def _of_file(path: Path) -> Tokenizer:
    if not path.is_file():
        raise DataError(f"there is no tokenizer file {path}")
    tokenizers = require("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    # The package raises plain Exception for a file that it cannot read.
    except Exception as error:
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error
    ends = [tokenizer.token_to_id(each) for each in ENDS if tokenizer.token_to_id(each) is not None]
    if not ends:
        raise DataError(
            f"{path} has no token for the end of documents, it must be one of {ENDS}, or named as "
            "eos_token in a tokenizer_config.json: give the folder of both"
        )
    return _fast(tokenizer, ends[0])


def _fast(tokenizer: Any, end: int, pad: int | None = None) -> Tokenizer:
    # A file may cut or pad texts. A text that spells the end must not encode to it.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    parts = json.loads(tokenizer.to_str())
    content = json.dumps([end, *(parts[name] for name in ENCODES)])
    key = hashlib.sha256(content.encode()).hexdigest()
    largest = max(tokenizer.get_vocab().values())
    return FastTokenizer(tokenizer, end, largest + 1, key, end if pad is None else pad)
