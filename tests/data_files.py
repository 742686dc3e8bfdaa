"""Files of text for the tests of training data."""

import json

import pytest

from pararnn.lab.train.config import DataConfig

END = 256
TEXTS = ["Call me Ishmael.\r\n", "ὕβρις — hubris", "Some years ago", "x" * 40]


def json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def config(tmp_path):
    source = json_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    return DataConfig(train=source, holdout=0.45, sequence_length=8, cache=str(tmp_path / "cache"))


def tokens_of(rows):
    """All tokens of a part, those that are left over behind the rows too."""
    return rows.tokens.tolist()


def tokens_with_ends(texts):
    return [token for text in texts for token in [*text.encode(), END]]
