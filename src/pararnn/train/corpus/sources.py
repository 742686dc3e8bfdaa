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
    NO_TEXT,
    Damaged,
    Reader,
    Row,
    cannot_read,
    dataset_builder,
    dataset_rows,
    named,
    no_column,
    readers_of,
)
from pararnn.train.corpus.readers import DataError as DataError

SOURCES = (
    "a file or folder of text (.txt) or JSON lines (.jsonl), packed (.gz, .xz, .zst) or not, or "
    "Parquet (.parquet), a pattern of such files, the name of a Hugging Face dataset, or several "
    "of these with commas between them"
)
PIECE = 1 << 18
"""Characters of a piece, at most."""
LOOK = 1000
"""Rows without a field of `drop`, or without text, after which no row is thought to have it."""
NOT_UTF8_ROW = "rows that are not UTF-8"
MISSING = object()


class Piece(NamedTuple):
    """A document, or a part of a long one. ends: whether the document ends with it."""

    text: str
    ends: bool


class LeftOut:
    """What of data is left out, for it cannot be learned from: how much of each kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def add(self, kind: str, where: object) -> None:
        """Count one more, and remember where the first of its kind was."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.first.setdefault(kind, str(where))

    def lines(self) -> list[str]:
        """What was left out, a line for each kind."""
        return [
            f"left out {count:,} {kind}, the first: {self.first[kind]}"
            for kind, count in self.counts.items()
        ]


def documents(source: str, *args: Any, **options: Any) -> Iterator[str]:
    """The texts of a source, in the order of paths and lines; arguments and errors: `pieces`."""
    parts = []
    for piece in pieces(source, *args, **options):
        parts.append(piece.text)
        if piece.ends:
            yield "".join(parts)
            parts = []


def pieces(
    source: str,
    column: str = "text",
    drop: str = "",
    *,
    strict: bool = True,
    suffixes: str = "",
    left_out: LeftOut | None = None,
) -> Iterator[Piece]:
    """The texts of a source, long ones in pieces, in the order of paths and lines.

    Files and rows without text or with text that is not UTF-8, and lines that are not JSON, are
    left out, and counted in `left_out`.

    Args:
        source: a file, a pattern of files with * or ?, or a folder with all files below it (hidden
            ones are left out), of text (each file is a document), JSON lines or Parquet; or a
            dataset of Hugging Face, "owner/name", "owner/name/configuration", each with ":split"
            behind it or not, which is streamed; or several of these with commas between them.
        column: the text's field in JSON lines, Parquet and datasets.
        drop: rows that are left out, "field=value" with commas between several; "a.b" is the field
            b in a. What is no text is compared as JSON writes it.
        strict: raise where no row has a field of `drop`, warn where none has its value.
        suffixes: what files are read, by the ends of their names, see `readers_of`.

    Raises DataError, which names the file and line, for what is missing, cut short or of another
    kind, or where nothing is left; and MissingExtra where a package is missing.
    """
    conditions = conditions_of(drop)
    left_out = LeftOut() if left_out is None else left_out
    readers = readers_of(suffixes)
    paths = [files_of(part, suffixes) or part for part in sources_of(source)]
    problems: list[Damaged] = []
    found = False

    def leave_out(error: Damaged) -> None:
        left_out.add(error.kind, error)
        if not found:
            problems.append(error)
        if len(problems) == LOOK:  # as of a column that is misnamed
            raise problems[0]

    def good() -> Iterator[Row]:
        for row in _rows(paths, readers, column, conditions):
            if isinstance(row, Damaged):
                leave_out(row)
            else:
                yield row

    for where, row in _kept(good(), conditions, source, strict):
        try:
            text = _field(row, column, where)
        except Damaged as error:
            leave_out(error)
            continue
        found = True
        yield from _cut(text)
    if problems and not found:
        raise problems[0]


def sources_of(source: str) -> list[str]:
    """The sources that a text names: one, or several with commas between them."""
    if os.path.exists(source):  # whose name may have a comma
        return [source]
    return [part.strip() for part in source.split(",")]


def fingerprint(source: str, index: Path | None = None, suffixes: str = "") -> list[list[Any]]:
    """What a source's texts depend on: each file's name, size and hash; a dataset's revision.

    index: a file that keeps hashes, see `hashes_of`. suffixes: see `pieces`.
    """
    return [
        each for part in sources_of(source) for each in _fingerprint_of_one(part, index, suffixes)
    ]


def _fingerprint_of_one(source: str, index: Path | None, suffixes: str) -> list[list[Any]]:
    paths = files_of(source, suffixes)
    if not paths:
        return [[source, dataset_builder(source).hash]]
    root = Path(source)
    root = root if root.is_dir() else Path(os.path.commonpath([path.parent for path in paths]))
    return [
        [path.relative_to(root).as_posix(), size, digest]
        for path, (size, digest) in zip(paths, hashes_of(paths, index), strict=True)
    ]


def files_of(source: str, suffixes: str = "") -> list[Path]:
    """The files of one source, sorted by their paths; none where it is the name of a dataset.

    suffixes: only files whose names end so, of folders and patterns; see `readers_of`.
    """
    root, readers = Path(source), readers_of(suffixes)
    of_kinds = f" that end in {suffixes}" if suffixes else ""

    def wanted(path: Path) -> bool:
        return not suffixes or _kind(path, readers) is not None

    if source and root.is_dir():
        files = [path for path in _below(root) if not _hidden(path, root) and wanted(path)]
        if not files:
            raise DataError(f"the folder {source} has no files{of_kinds}; data are {SOURCES}")
    elif source and root.exists():
        files = [root]
    elif {"*", "?"} & set(source):
        found = [Path(path) for path in glob.glob(source, recursive=True) if os.path.isfile(path)]
        files = [path for path in found if wanted(path)]
        if not files:
            raise DataError(f"no file{of_kinds} is like {source!r}; data are {SOURCES}")
    elif _kind(root, readers) is None and DATASET.fullmatch(source):
        return []
    else:
        raise DataError(f"there is no file or folder {source!r}; data are {SOURCES}")
    for path in files:
        _reader(path, readers)
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


def _rows(
    parts: Iterable[list[Path] | str],
    readers: Mapping[str, Reader],
    column: str,
    conditions: Iterable[tuple[str, str]],
) -> Iterator[Row | Damaged]:
    """The rows of files, and of datasets by their names, and what of them is damaged."""
    others = tuple(name for field, _ in conditions for name in {field, field.partition(".")[0]})
    for part in parts:
        if isinstance(part, str):
            yield from dataset_rows(part)
            continue
        for path in part:
            yield from _reader(path, readers)(path, column, others)


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
        raise Damaged(NO_TEXT, f"{where}: {column!r} must be text, found {named(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Damaged(
            NOT_UTF8_ROW,
            f"{where}: found half a surrogate pair, {text[error.start]!r}; text must be UTF-8",
        ) from error
    return [text]


def _kind(path: Path, readers: Mapping[str, Reader]) -> str | None:
    return next((kind for kind in readers if path.name.endswith(kind)), None)


def _reader(path: Path, readers: Mapping[str, Reader]) -> Reader:
    kind = _kind(path, readers)
    if kind is None:
        raise DataError(
            f"{path} is of a kind that is not read; files must end in {', '.join(readers)}; "
            "data.suffixes=.md,.py reads other ends as text, and those files alone"
        )
    return readers[kind]


def _below(root: Path) -> Iterator[Path]:
    """All files below a folder; unlike Path.rglob, not without those that may not be read."""

    def stop(error: OSError) -> None:
        raise cannot_read(error.filename, error) from error

    for folder, _, names in os.walk(root, onerror=stop, followlinks=True):
        yield from (Path(folder, name) for name in names)


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
