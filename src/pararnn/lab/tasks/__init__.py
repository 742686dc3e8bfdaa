"""Tasks to train on: text with its baselines, and synthetic tasks with models for them.

The models and their training are in `pararnn.lab.tasks.run`.
"""

from pararnn.lab.tasks.base import Batch, Task, generator_of
from pararnn.lab.tasks.table import TASKS, task_of
from pararnn.lab.tasks.text import (
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
    "TASKS",
    "Batch",
    "Corpus",
    "Task",
    "TextError",
    "bigram_bits",
    "file_corpus",
    "generator_of",
    "random_windows",
    "spread_windows",
    "stdlib_corpus",
    "task_of",
    "unigram_bits",
]
