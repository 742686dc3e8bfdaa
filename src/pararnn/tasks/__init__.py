"""Tasks to train on: data and its baselines."""

from pararnn.tasks.text import (
    Corpus,
    TextError,
    bigram_bits,
    file_corpus,
    random_windows,
    spread_windows,
    stdlib_corpus,
    unigram_bits,
)

__all__ = [
    "Corpus",
    "TextError",
    "bigram_bits",
    "file_corpus",
    "random_windows",
    "spread_windows",
    "stdlib_corpus",
    "unigram_bits",
]
