"""Documents: the texts of files, folders and datasets, one by one."""

from __future__ import annotations

import glob
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from pararnn.lab.train.corpus.hashes import hashes_of
from pararnn.lab.train.corpus.readers import (
    DATASET,
    NO_TEXT,
    Damaged,
    Reader,
    Row,
    cannot_read,
    dataset_builder,
    dataset_rows,
    description,
    no_column,
    readers_of,
)
from pararnn.lab.train.corpus.readers import DataError as DataError

SOURCES = (
    "a file or folder of text (.txt) or JSON lines (.jsonl), packed (.gz, .xz, .zst) or not, or "
    "Parquet (.parquet), a pattern of such files, the name of a Hugging Face dataset, or several "
    "of these with commas between them"
)
PIECE = 1 << 18
"""Characters of a piece, at most."""
LOOK = 1000
"""Rows without text, or without a field of `drop`, after which the column counts as misnamed."""
NOT_UTF8_ROW = "rows that are not UTF-8"
MISSING = object()


class Piece(NamedTuple):
    """A document, or a part of a long one. ends: True if the document ends with it."""

    text: str
    ends: bool


class LeftOut:
    """Counts of data that cannot be learned from, by kind, with the first of each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def add(self, kind: str, position: object) -> None:
        """Count one more of a kind."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.first.setdefault(kind, str(position))

    def lines(self) -> list[str]:
        """Return one line for each kind."""
        return [
            f"left out {count:,} {kind}, the first: {self.first[kind]}"
            for kind, count in self.counts.items()
        ]


def documents(source: str, *args: Any, **options: Any) -> Iterator[str]:
    """Yield the texts of a source, in the order of paths and lines.

    Arguments and errors are those of `pararnn.lab.train.corpus.sources.pieces`.
    """
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
    """Yield the texts of a source, long ones in pieces, in the order of paths and lines.

    Files and rows without text or with text that is not UTF-8, and lines that are not JSON, are
    left out, and counted in `left_out`.

    Args:
        source: a file, a pattern of files with * or ?, or a folder with all files below it (hidden
            ones are left out), of text (each file is a document), JSON lines or Parquet; or a
            dataset of Hugging Face, "owner/name", "owner/name/configuration", each with ":split"
            behind it or not, which is streamed; or several of these with commas between them.
        column: the text's field in JSON lines, Parquet and datasets.
        drop: rows that are left out, "field=value" with commas between several; "a.b" is the field
            b in a. A value that is no text is compared as JSON writes it.
        strict: raise where no row has a field of `drop`, warn where none has its value.
        suffixes: ends of the names of files to read, see `readers_of`.

    Raises DataError, which names the file and line, for a source that is missing, cut short or of
    another kind, or where nothing is left; and MissingExtra where a package is missing.
    """
    conditions = conditions_of(drop)
    left_out = LeftOut() if left_out is None else left_out
    readers = readers_of(suffixes)
    parts = [files_of(part, suffixes) or part for part in sources_of(source)]
    problems: list[Damaged] = []
    learnable = False

    def leave_out(error: Damaged) -> None:
        left_out.add(error.kind, error)
        if not learnable:
            problems.append(error)
        if len(problems) == LOOK:  # the column may be misnamed
            raise problems[0]

    def good_rows() -> Iterator[Row]:
        for row in _rows(parts, readers, column, conditions):
            if isinstance(row, Damaged):
                leave_out(row)
            else:
                yield row

    for position, row in _drop_rows(conditions, good_rows(), source, strict):
        try:
            text = _field(row, column, position)
        except Damaged as error:
            leave_out(error)
            continue
        learnable = True
        yield from _cut(text)
    if problems and not learnable:
        raise problems[0]


def sources_of(source: str) -> list[str]:
    """Return the sources in a text: one, or several with commas between them."""
    if os.path.exists(source):  # its name may have a comma
        return [source]
    return [part.strip() for part in source.split(",")]


def fingerprint(source: str, index: Path | None = None, suffixes: str = "") -> list[list[Any]]:
    """Return all that texts of a source depend on: name, size and hash of files, or a revision.

    index: file that caches hashes, see `hashes_of`. suffixes: see `pieces`.
    """
    entries: list[list[Any]] = []
    for part in sources_of(source):
        paths, root = files_of(part, suffixes), Path(part)
        if not paths:
            entries.append([part, dataset_builder(part).hash])
            continue
        if not root.is_dir():
            root = Path(os.path.commonpath([path.parent for path in paths]))
        entries += (
            [path.relative_to(root).as_posix(), size, digest]
            for path, (size, digest) in zip(paths, hashes_of(paths, index), strict=True)
        )
    return entries


def files_of(source: str, suffixes: str = "") -> list[Path]:
    """Return the files of one source, sorted by their paths; none for the name of a dataset.

    suffixes: only files of folders and patterns whose names end so; see `readers_of`.
    """
    root, readers = Path(source), readers_of(suffixes)
    of_kinds = f" that end in {suffixes}" if suffixes else ""
    if source and root.is_dir():
        files = [path for path in _all_files(root) if not _hidden(path, root)]
        problem = f"the folder {source} has no files{of_kinds}; data are {SOURCES}"
    elif source and root.exists():
        return [_check_file(root, readers)]
    elif {"*", "?"} & set(source):
        files = [Path(path) for path in glob.glob(source, recursive=True) if os.path.isfile(path)]
        problem = f"no file{of_kinds} is like {source!r}; data are {SOURCES}"
    elif _reader(root, readers) is None and DATASET.fullmatch(source):
        return []
    else:
        raise DataError(f"there is no file or folder {source!r}; data are {SOURCES}")
    if suffixes:
        files = [path for path in files if _reader(path, readers) is not None]
    if not files:
        raise DataError(problem)
    return sorted(_check_file(path, readers) for path in files)


def conditions_of(drop: str) -> list[tuple[str, str]]:
    """Return fields and values of `drop`."""
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
    """Yield the rows of files, and of datasets by their names, and the damaged ones' errors."""
    others = tuple(name for field, _ in conditions for name in {field, field.partition(".")[0]})
    for part in parts:
        if isinstance(part, str):
            yield from dataset_rows(part)
            continue
        for path in part:
            reader = _reader(path, readers)
            assert reader is not None, path
            yield from reader(path, column, others)


def _drop_rows(
    conditions: list[tuple[str, str]], rows: Iterator[Row], source: str, strict: bool
) -> Iterator[Row]:
    """Yield the rows that meet none of the conditions.

    strict: raise DataError, before the first row, where none of the first `LOOK` has a field; warn
    at the end of conditions that no row meets.
    """
    unmet = set(conditions)
    missing = {field for field, _ in conditions} if strict else set()
    first: list[Row] = []
    for position, row in islice(rows, LOOK) if missing else ():
        first.append((position, row))
        missing -= {field for field in missing if _value(row, field) is not MISSING}
        if not missing:
            break
    if missing:
        has = f", the last has {sorted(first[-1][1])}" if first else ""
        raise DataError(
            f"drop: none of the first {len(first)} rows of {source} has {min(missing)!r}{has}; name"
            " a field of JSON lines, Parquet or a dataset, or nothing: data.drop="
        )
    for position, row in chain(first, rows):
        hits = {each for each in conditions if _as_text(_value(row, each[0])) == each[1]}
        unmet -= hits
        if not hits:
            yield position, row
    if strict and unmet:
        # The value may be misspelt: rows that it should remove would be learned.
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


def _as_text(value: Any) -> str | None:
    """Return a value as `drop` names it; None if it has no such name."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else None


def _cut(blocks: Iterable[str]) -> Iterator[Piece]:
    """Yield the pieces of a document's text; an empty piece for an empty text."""
    text = ""
    for block in blocks:
        text += block
        start = 0
        while len(text) - start > PIECE:
            end = _line_end(text, start + PIECE // 2, start + PIECE) or start + PIECE
            yield Piece(text[start:end], False)
            start = end
        text = text[start:]
    yield Piece(text, True)


def _line_end(text: str, start: int, stop: int) -> int | None:
    """Return the last index up to `stop` after a line that neither ends in nor precedes blanks.

    Tokenizers of words cut there too, so that a piece has the tokens that its text has elsewhere.
    """
    while (stop := text.rfind("\n", start, stop)) >= 0:
        line_end = stop - 1 if text[stop - 1] == "\r" else stop
        if not text[line_end - 1].isspace() and not text[stop + 1].isspace():
            return stop + 1
    return None


def _field(row: Mapping[str, Any], column: str, position: str) -> Iterable[str]:
    """Return the text of a row in blocks; raises Damaged unless UTF-8 can encode it."""
    if column not in row:
        raise no_column(position, column, row)
    text = row[column]
    if isinstance(text, Iterator):
        return text
    if not isinstance(text, str):
        raise Damaged(NO_TEXT, f"{position}: {column!r} must be text, found {description(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Damaged(
            NOT_UTF8_ROW,
            f"{position}: found half a surrogate pair, {text[error.start]!r}; text must be UTF-8",
        ) from error
    return [text]


def _reader(path: Path, readers: Mapping[str, Reader]) -> Reader | None:
    return next((reader for end, reader in readers.items() if path.name.endswith(end)), None)


def _check_file(path: Path, readers: Mapping[str, Reader]) -> Path:
    """Return a path, which must be a file of a kind that is read."""
    if _reader(path, readers) is None:
        raise DataError(
            f"{path} is of a kind that is not read; files must end in {', '.join(readers)}; "
            "data.suffixes=.md,.py reads other ends as text, and those files alone"
        )
    if not path.is_file():
        raise DataError(f"{path} is no file: a link to nothing, or a pipe; remove it")
    return path


def _all_files(root: Path) -> Iterator[Path]:
    """Yield all files in a folder; raises DataError for a folder in it that cannot be read."""

    def stop(error: OSError) -> None:
        raise cannot_read(error.filename, error) from error

    for folder, _, names in os.walk(root, onerror=stop, followlinks=True):
        yield from (Path(folder, name) for name in names)


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
