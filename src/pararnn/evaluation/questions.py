"""Local task files: questions as JSON lines, without few-shot splits."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pararnn.train.corpus.sources import DataError

NAMES = {"openbook_qa": "openbookqa"}
"""Names of files, where they are not those of lm-eval's tasks."""


class Format(NamedTuple):
    """A kind of question. fields: what a line must have. read: a line as a question, or
    ValueError. settings: how lm-eval asks it.

    A question has under "asked" what no two of them share, see `harness.OtherQuestions`.
    """

    fields: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    settings: dict[str, Any]


def _metrics(*names: str) -> list[dict[str, Any]]:
    return [
        {
            "metric": name,
            "aggregation": "perplexity" if name == "perplexity" else "mean",
            "higher_is_better": name != "perplexity",
        }
        for name in names
    ]


def _choose(row: Mapping[str, Any]) -> dict[str, Any]:
    choices, asked = _texts(row, "choices"), _text(row, "query").rstrip()
    # As lm-eval's own tasks of ARC and PIQA ask, from where such files have their queries.
    if asked.startswith("Question:") and not asked.endswith("Answer:"):
        asked += "\nAnswer:"
    return {"asked": asked, "choices": choices, "gold": _index(row, choices)}


def _fill(row: Mapping[str, Any]) -> dict[str, Any]:
    options = _texts(row, "context_options")
    continuation = _text(row, "continuation").strip()
    gold = _index(row, options)
    # Twins share their options, and the answer of one is that the other's is the other.
    asked = "\n".join(options)
    return {"asked": asked, "options": options, "continuation": continuation, "gold": gold}


def _go_on(row: Mapping[str, Any]) -> dict[str, Any]:
    continuation = " " + _text(row, "continuation").strip()
    return {"asked": _text(row, "context").rstrip(), "continuation": continuation}


FORMATS = (
    Format(
        ("query", "choices", "gold"),
        _choose,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "asked",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": _metrics("acc", "acc_norm"),
        },
    ),
    Format(
        ("context_options", "continuation", "gold"),
        _fill,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "gold",
            "doc_to_choice": "options",
            "doc_to_target": "continuation",
            # All options are followed by the same text, whose length changes nothing.
            "metric_list": _metrics("acc"),
        },
    ),
    Format(
        ("context", "continuation"),
        _go_on,
        {
            "output_type": "loglikelihood",
            "doc_to_text": "asked",
            "doc_to_target": "continuation",
            "target_delimiter": "",
            "metric_list": _metrics("perplexity", "acc"),
        },
    ),
)
RULE = "each line must be a JSON object with " + "; or ".join(
    ", ".join(each.fields) for each in FORMATS
)


def task_name(path: Path) -> str:
    """What lm-eval calls the task in a file."""
    return NAMES.get(path.stem, path.stem)


def read_questions(path: Path) -> tuple[Format, list[dict[str, Any]]]:
    """The questions of a file and their format, which is that of its first line.

    Raises DataError, which names the file and line, for a file that is missing, empty or corrupt,
    or of no format in FORMATS.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    questions: list[dict[str, Any]] = []
    found: Format | None = None
    for number, line in enumerate(lines, 1):
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = _object(line, where)
        found = found or _format(row, where)
        try:
            questions.append(found.read(row))
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
    if found is None:
        raise DataError(f"{path} is empty; {RULE}")
    return found, questions


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError as error:
        start = line[:40].decode("utf-8", "backslashreplace").strip()
        raise DataError(f"{where}: found {start!r}, which is not JSON ({error}); {RULE}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: found a value of type {type(row).__name__}; {RULE}")
    return row


def _format(row: Mapping[str, Any], where: str) -> Format:
    for each in FORMATS:
        if set(each.fields) <= set(row):
            return each
    raise DataError(f"{where}: found the fields {', '.join(sorted(row)) or 'of nothing'}; {RULE}")


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field!r} must be text, got {value!r:.40}")
    value.encode("utf-8")  # half a surrogate pair is a ValueError
    return value


def _texts(row: Mapping[str, Any], field: str) -> list[str]:
    value = row.get(field)
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError(f"{field!r} must be a list of two texts or more, got {value!r:.60}")
    return [_text({field: each}, field) for each in value]


def _index(row: Mapping[str, Any], choices: list[str]) -> int:
    gold = row.get("gold")
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise ValueError(f"'gold' must be from 0 to {len(choices) - 1}, got {gold!r:.40}")
    return gold
