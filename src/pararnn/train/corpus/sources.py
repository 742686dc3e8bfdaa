"""Documents: the texts of files, folders and datasets, one by one."""

from __future__ import annotations

import glob
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pararnn.train.corpus.hashes import hashes_of
from pararnn.train.corpus.readers import (
    DATASET,
    READERS,
    Reader,
    Row,
    cannot_read,
    dataset_builder,
    dataset_rows,
    named,
    no_column,
)
from pararnn.train.corpus.readers import DataError as DataError

SOURCES = (
    "a file or folder of text (.txt) or JSON lines (.jsonl), packed (.gz, .xz, .zst) or not, or "
    "Parquet (.parquet), a pattern of such files, or the name of a Hugging Face dataset"
)
PIECE = 1 << 18
"""Characters of a piece, at most."""
LOOK = 1000
"""Rows without a field of `drop` after which no row is thought to have it."""
MISSING = object()


class Piece(NamedTuple):
    """A document, or a part of a long one. ends: whether the document ends with it."""

    text: str
    ends: bool


def documents(source: str, column: str = "text", drop: str = "") -> Iterator[str]:
    """The texts of a source, in the order of paths and lines; arguments and errors: `pieces`."""
    parts = []
    for piece in pieces(source, column, drop):
        parts.append(piece.text)
        if piece.ends:
            yield "".join(parts)
            parts = []


def pieces(
    source: str, column: str = "text", drop: str = "", strict: bool = True
) -> Iterator[Piece]:
    """The texts of a source, long ones in pieces, in the order of paths and lines.

    Args:
        source: a file, a pattern of files with * or ?, or a folder with all files below it (hidden
            ones are left out), of text (each file is a document), JSON lines or Parquet; or a
            dataset of Hugging Face, "owner/name", "owner/name/configuration", each with ":split"
            behind it or not, which is streamed.
        column: the text's field in JSON lines, Parquet and datasets.
        drop: rows that are left out, "field=value" with commas between several; "a.b" is the field
            b in a. What is no text is compared as JSON writes it.
        strict: raise where no row has a field of `drop`, warn where none has its value.

    Raises DataError, which names the file and line, for what is missing, empty, corrupt or of
    another kind, and MissingExtra where a package is missing.
    """
    conditions = conditions_of(drop)
    for where, row in _kept(_rows(source, column, conditions), conditions, source, strict):
        yield from _cut(_field(row, column, where))


def fingerprint(source: str, index: Path | None = None) -> list[list[Any]]:
    """What a source's texts depend on: each file's name, size and hash; a dataset's revision.

    index: a file that keeps hashes, see `hashes_of`.
    """
    paths = files_of(source)
    if not paths:
        return [[source, dataset_builder(source).hash]]
    root = Path(source)
    root = root if root.is_dir() else Path(os.path.commonpath([path.parent for path in paths]))
    return [
        [path.relative_to(root).as_posix(), size, digest]
        for path, (size, digest) in zip(paths, hashes_of(paths, index), strict=True)
    ]


def files_of(source: str) -> list[Path]:
    """The files of a source, sorted by their paths; none where it is the name of a dataset."""
    root = Path(source)
    if source and root.is_dir():
        files = [path for path in _below(root) if not _hidden(path, root)]
        if not files:
            raise DataError(f"the folder {source} has no files; data are {SOURCES}")
    elif source and root.exists():
        files = [root]
    elif {"*", "?"} & set(source):
        files = [Path(path) for path in glob.glob(source, recursive=True) if os.path.isfile(path)]
        if not files:
            raise DataError(f"no file is like {source!r}; data are {SOURCES}")
    elif _kind(root) is None and DATASET.fullmatch(source):
        return []
    else:
        raise DataError(f"there is no file or folder {source!r}; data are {SOURCES}")
    for path in files:
        _reader(path)
        if not path.is_file():
            raise DataError(f"{path} is no file: a link to nothing, or a pipe; remove it")
    return sorted(files)


def conditions_of(drop: str) -> list[tuple[str, str]]:
    """Fields and values of `drop`."""
    parts = [part.partition("=") for part in drop.split(",")] if drop else []
    for field, equals, value in parts:
        if not (field.strip() and equals and value.strip()):
            raise DataError(
                "drop must be field=value, with commas between several and dots in nested fields, "
                f"such as meta.kind=book; got {drop!r}"
            )
    return [(field.strip(), value.strip()) for field, _, value in parts]


def _rows(source: str, column: str, conditions: Iterable[tuple[str, str]]) -> Iterator[Row]:
    others = tuple(name for field, _ in conditions for name in {field, field.partition(".")[0]})
    paths = files_of(source)
    if not paths:
        yield from dataset_rows(source)
    for path in paths:
        yield from _reader(path)(path, column, others)


def _with_fields(rows: Iterator[Row], fields: set[str], source: str) -> Iterator[Row]:
    """The rows; DataError, before the first, where none of the first `LOOK` has a field."""
    first: list[Row] = []
    unseen = set(fields)
    while unseen and len(first) < LOOK and (row := next(rows, None)) is not None:
        first.append(row)
        unseen -= {field for field in unseen if _value(row[1], field) is not MISSING}
    if unseen:
        has = f", the last has {sorted(first[-1][1])}" if first else ""
        raise DataError(
            f"drop: none of the first {len(first)} rows of {source} has {min(unseen)!r}{has}; name "
            "a field of JSON lines, Parquet or a dataset, or nothing: data.drop="
        )
    yield from first
    yield from rows


def _kept(
    rows: Iterator[Row], conditions: list[tuple[str, str]], source: str, strict: bool
) -> Iterator[Row]:
    """The rows that meet none of the conditions."""
    unmet = set(conditions)
    if strict:
        rows = _with_fields(rows, {field for field, _ in conditions}, source)
    for where, row in rows:
        hits = {each for each in conditions if _said(_value(row, each[0])) == each[1]}
        unmet -= hits
        if not hits:
            yield where, row
    if strict and unmet:
        # The value may be misspelt, and what it was to remove would be learned.
        never = ", ".join(f"{field}={value}" for field, value in sorted(unmet))
        warnings.warn(f"drop: no row of {source} has {never}", stacklevel=2)


def _value(row: Any, field: str) -> Any:
    if isinstance(row, Mapping) and field in row:
        return row[field]
    for name in field.split("."):
        if not isinstance(row, Mapping) or name not in row:
            return MISSING
        row = row[name]
    return row


def _said(value: Any) -> str | None:
    """A value as `drop` names it; None for what it cannot name."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else None


def _cut(blocks: Iterable[str]) -> Iterator[Piece]:
    """The pieces of a document's text; of an empty one, an empty piece."""
    rest = ""
    for block in blocks:
        rest += block
        at = 0
        while len(rest) - at > PIECE:
            end = _line_end(rest, at + PIECE // 2, at + PIECE) or at + PIECE
            yield Piece(rest[at:end], False)
            at = end
        rest = rest[at:]
    yield Piece(rest, True)


def _line_end(text: str, start: int, stop: int) -> int | None:
    """The last place, to `stop`, behind a line that no blanks end or follow.

    Tokenizers of words cut there too, so that a piece has the tokens that its text has elsewhere.
    """
    while (stop := text.rfind("\n", start, stop)) >= 0:
        line_end = stop - 1 if text[stop - 1] == "\r" else stop
        if not text[line_end - 1].isspace() and not text[stop + 1].isspace():
            return stop + 1
    return None


def _field(row: Mapping[str, Any], column: str, where: str) -> Iterable[str]:
    """The text of a row in blocks, which must be one that UTF-8 can say."""
    if column not in row:
        raise no_column(where, column, row)
    text = row[column]
    if isinstance(text, Iterator):
        return text
    if not isinstance(text, str):
        raise DataError(f"{where}: {column!r} must be text, found {named(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: found half a surrogate pair, {text[error.start]!r}; text must be UTF-8"
        ) from error
    return [text]


def _kind(path: Path) -> str | None:
    return next((kind for kind in READERS if path.name.endswith(kind)), None)


def _reader(path: Path) -> Reader:
    kind = _kind(path)
    if kind is None:
        raise DataError(
            f"{path} is of a kind that is not read; files must end in {', '.join(READERS)}"
        )
    return READERS[kind]


def _below(root: Path) -> Iterator[Path]:
    """All files below a folder; unlike Path.rglob, not without those that may not be read."""

    def stop(error: OSError) -> None:
        raise cannot_read(error.filename, error) from error

    for folder, _, names in os.walk(root, onerror=stop, followlinks=True):
        yield from (Path(folder, name) for name in names)


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
