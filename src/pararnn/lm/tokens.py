"""Bytes as tokens, in the files of Hugging Face's tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BYTES = 256
"""Vocabulary of a model on bytes: every byte is a token."""


def save_byte_tokenizer(folder: Path | str, end: str | None = None) -> None:
    """Write tokenizer.json and tokenizer_config.json: token ids are the bytes of UTF-8 text.

    `end` is the text of token 256, which ends documents and pads rows; None is no such token.
    `transformers.AutoTokenizer` reads them; writing them needs no other package.
    """
    names = {} if end is None else {"eos_token": end, "pad_token": end}
    files: dict[str, Any] = {
        "tokenizer.json": byte_tokenizer(end),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"} | names,
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (Path(folder) / name).write_text(text, encoding="utf-8")


def byte_tokenizer(end: str | None = None) -> dict[str, Any]:
    """Return a byte-level BPE without merges, in the format of the package tokenizers."""
    no = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    ends = [] if end is None else [{"id": BYTES, "content": end, "special": True, **no}]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": ends,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }


def byte_characters() -> list[str]:
    """Return the character of each byte in byte-level vocabularies.

    A byte that is a visible character of Latin-1 stands for itself; the others, in order, are the
    characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(characters)) for byte in range(BYTES)]
