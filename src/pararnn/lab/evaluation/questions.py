"""Local task files: questions as JSON lines, without few-shot splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pararnn.lab.train.corpus.sources import DataError, json_rows

NAMES = {"openbook_qa": "openbookqa"}
"""Names of lm-eval's tasks by the names of files, where they differ."""


class Format(NamedTuple):
    """A kind of question.

    fields: names that a line must have. read: makes a question of a line, or raises ValueError.
    settings: lm-eval's task config, as in its YAML. The field "question" identifies a question, see
    `harness.OtherQuestions`.
    """

    fields: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    settings: dict[str, Any]


ACC, ACC_NORM, PERPLEXITY = (
    {"metric": metric, "aggregation": aggregation, "higher_is_better": aggregation == "mean"}
    for metric, aggregation in (("acc", "mean"), ("acc_norm", "mean"), ("perplexity", "perplexity"))
)


def _choose(row: Mapping[str, Any]) -> dict[str, Any]:
    choices, question = _texts(row, "choices"), _text(row, "query").rstrip()
    # As in lm-eval's tasks of ARC and PIQA, from which such files have their queries.
    if question.startswith("Question:") and not question.endswith("Answer:"):
        question += "\nAnswer:"
    return {"question": question, "choices": choices, "gold": _index(row, choices)}


def _fill(row: Mapping[str, Any]) -> dict[str, Any]:
    options = _texts(row, "context_options")
    continuation = _text(row, "continuation").strip()
    gold = _index(row, options)
    # Twins share their options, and the answer to one gives away the other's.
    question = "\n".join(options)
    return {"question": question, "options": options, "continuation": continuation, "gold": gold}


def _continue(row: Mapping[str, Any]) -> dict[str, Any]:
    continuation = " " + _text(row, "continuation").strip()
    return {"question": _text(row, "context").rstrip(), "continuation": continuation}


FORMATS = (
    Format(
        ("query", "choices", "gold"),
        _choose,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "question",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": [ACC, ACC_NORM],
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
            # The same text follows all options: its length changes nothing.
            "metric_list": [ACC],
        },
    ),
    Format(
        ("context", "continuation"),
        _continue,
        {
            "output_type": "loglikelihood",
            "doc_to_text": "question",
            "doc_to_target": "continuation",
            "target_delimiter": "",
            "metric_list": [PERPLEXITY, ACC],
        },
    ),
)
RULE = "each line must be a JSON object with " + "; or ".join(
    ", ".join(each.fields) for each in FORMATS
)


def task_name(path: Path) -> str:
    """Return lm-eval's name of the task in a file."""
    return NAMES.get(path.stem, path.stem)


def read_questions(path: Path) -> tuple[Format, list[dict[str, Any]]]:
    """Return the format of a file, which is that of its first line, and its questions.

    Raises DataError, which names the file and line, for a file that is missing, empty or corrupt,
    or of no format in FORMATS.
    """
    questions: list[dict[str, Any]] = []
    format_: Format | None = None
    for position, row in json_rows(path):
        if row is None:
            raise DataError(f"{position}: found no JSON object; {RULE}")
        format_ = format_ or _format_of(row, position)
        try:
            questions.append(format_.read(row))
        except ValueError as error:
            raise DataError(f"{position}: {error}") from error
    if format_ is None:
        raise DataError(f"{path} is empty; {RULE}")
    return format_, questions


def _format_of(row: Mapping[str, Any], position: str) -> Format:
    for each in FORMATS:
        if set(each.fields) <= set(row):
            return each
    fields = ", ".join(sorted(row)) or "of nothing"
    raise DataError(f"{position}: found the fields {fields}; {RULE}")


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
