"""Documents: the texts of files, folders and datasets, one by one.

The package datasets reads datasets by name. Its readers of files change line ends, make dates of
texts, and take a .zst file that was cut short as whole, so files are read here.
"""

from __future__ import annotations

import glob
import io
import json
import lzma
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pararnn.base.errors import PararnnError
from pararnn.base.extras import require

KINDS = (".txt", ".jsonl", ".parquet")
PACKED = (".gz", ".xz", ".zst")
DATASET = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:/(\w[\w.-]*))?(?::(.+))?")
"""Pattern of a dataset's name, configuration and split."""
NO_TEXT = "documents without text in UTF-8"
LOOK = 1000
"""Documents without text after which the column counts as misnamed."""

LeftOut = dict[str, tuple[int, str]]
"""Documents that are left out: by kind their count, and the position of the first."""


class DataError(PararnnError, ValueError):
    """Data cannot be learned from: missing, empty, corrupt, or of a kind that is not read."""


def documents(
    source: str,
    column: str = "text",
    drop: str = "",
    suffixes: str = "",
    left_out: LeftOut | None = None,
) -> Iterator[str]:
    """Yield the texts of a source, in the order of paths and lines.

    source, column, drop, suffixes: as in `DataConfig`. Files and rows without text or with text
    that is not UTF-8, and lines that are no JSON object, are left out, and counted in `left_out`.

    Raises DataError for a source that is missing, cut short or of another kind, or where nothing is
    left; and MissingExtra where a package is missing.
    """
    left_out = {} if left_out is None else left_out
    conditions = conditions_of(drop)
    columns = {column, *(name for field, _ in conditions for name in (field, field.split(".")[0]))}
    files: list[Path | str] = []
    for name in sources_of(source):
        files += files_of(name, suffixes) or [name]
    found = False
    for position, row in (row for file in files for row in _rows(file, column, columns)):
        hits = [pair for pair in conditions if _value(row, pair[0]) == pair[1]]
        if not hits and _is_text(row.get(column)):
            found = True
            yield row[column]
            continue
        kind = kind_of(*hits[0]) if hits else NO_TEXT
        count, first = left_out.get(kind, (0, f"{position}, of {sorted(row)}"))
        left_out[kind] = count + 1, first
        if not (found or hits) and count == LOOK:
            break
    if not found:
        reason = "; ".join(lines_of(left_out)) or "it is empty"
        raise DataError(f"no document of {source} has text in {column!r}: {reason}")


def kind_of(field: str, value: str) -> str:
    """Return the kind of documents that a condition of `drop` leaves out."""
    return f"rows with {field}={value}"


def lines_of(left_out: LeftOut) -> list[str]:
    """Return one line for each kind that is left out."""
    kinds = left_out.items()
    return [f"left out {n:,} {kind}, the first: {first}" for kind, (n, first) in kinds]


def conditions_of(drop: str) -> list[tuple[str, str]]:
    """Return fields and values of `drop`."""
    conditions = [text.partition("=") for text in drop.split(",")] if drop else []
    pairs = [(field.strip(), value.strip()) for field, _, value in conditions]
    if not all(field and value for field, value in pairs):
        raise DataError(
            "drop must be field=value, with commas between several and dots in nested fields, "
            f"such as meta.kind=book; got {drop!r}"
        )
    return pairs


def sources_of(source: str) -> list[str]:
    """Return the sources in a text: one, or several with commas between them."""
    if os.path.exists(source):  # its name may have a comma
        return [source]
    return [name.strip() for name in source.split(",")]


def files_of(source: str, suffixes: str = "") -> list[Path]:
    """Return the files of one source, sorted by their paths; none for the name of a dataset.

    suffixes: as in `DataConfig`. Raises DataError if there are none.
    """
    ends = [end.strip() for end in suffixes.split(",") if end.strip()] or KINDS
    pattern = os.path.join(glob.escape(source), "**") if os.path.isdir(source) else source
    paths = [source] if os.path.isfile(source) else glob.glob(pattern, recursive=True)
    files = [Path(path) for path in paths if not os.path.isdir(path)]
    files = sorted(path for path in files if _ends(path, ends))
    is_name = DATASET.fullmatch(source) and not _ends(Path(source), ends)
    exists = os.path.exists(source)
    if not files and (exists or not is_name):
        problem = "has no files" if exists else "is no file or folder, and no pattern of files,"
        raise DataError(
            f"{source!r} {problem} that end in {', '.join(ends)}, packed ({', '.join(PACKED)}) or "
            "not; data are files, folders, patterns of files, names of Hugging Face datasets, or "
            "several of these with commas between them; data.suffixes=.md,.py reads other files as "
            "text"
        )
    return files


def fingerprint(source: str, suffixes: str = "") -> list[list[Any]]:
    """Return the identity of a source's texts: sizes and times of files, or a revision."""
    entries: list[list[Any]] = []
    for name in sources_of(source):
        files = files_of(name, suffixes)
        for path, stat in ((path, path.stat()) for path in files):
            times = [stat.st_mtime_ns, stat.st_ctime_ns]
            entries.append([str(path.absolute()), stat.st_size, *times])
        if not files:
            entries.append([name, _dataset(name)[0].hash])
    return entries


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield position and object of each line that is not blank; None if it is no JSON object."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)  # with a byte order mark or without
                except (ValueError, RecursionError):
                    row = None
                yield f"{path}, line {number}", row if isinstance(row, dict) else None


def _rows(source: Path | str, column: str, columns: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield positions and rows of a file, or of a dataset by its name."""
    try:
        if isinstance(source, str):
            builder, split = _dataset(source)
            dataset = builder.as_streaming_dataset(split=split)
            if dataset.column_names and column in dataset.column_names:
                dataset = dataset.select_columns(columns.intersection(dataset.column_names))
            yield from _numbered(source, dataset)
        elif _ends(source, [".parquet"]):
            with require("pyarrow.parquet").ParquetFile(source) as file:
                names = file.schema_arrow.names
                known = [name for name in names if name in columns or column not in names]
                batches = file.iter_batches(1024, columns=known)
                yield from _numbered(
                    source, (row for batch in batches for row in batch.to_pylist())
                )
        elif _ends(source, [".jsonl"]):
            yield from ((position, row or {}) for position, row in json_rows(source))
        else:
            yield str(source), {column: _text(source)}
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read {source}: {error}") from error


def _dataset(source: str) -> tuple[Any, str]:
    """Return the builder of a dataset, whose `hash` is its revision, and the name of a split."""
    match = DATASET.fullmatch(source)
    assert match is not None, source
    name, configuration, split = match.groups()
    try:
        builder = require("datasets").load_dataset_builder(name, configuration)
    except (OSError, ValueError) as error:
        raise DataError(
            f"there is no file or folder {source!r}, and no dataset of that name can be read: "
            f"{error}"
        ) from error
    return builder, split or "train"


def _numbered(source: object, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{source}, row {number}", row) for number, row in enumerate(rows, 1))


def _text(path: Path) -> str | None:
    """Return the text of a file without a byte order mark; None if it is not UTF-8."""
    with _open(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="\n") as text:
        try:
            return text.read()
        except UnicodeDecodeError:
            return None


def _open(path: Path) -> io.BufferedReader:
    """Open a file, unpacked; to read one that was cut short raises."""
    if path.suffix not in PACKED:
        return path.open("rb")
    reader = lzma.LZMAFile if path.suffix == ".xz" else require("pyarrow").input_stream
    return io.BufferedReader(reader(str(path)), 1 << 20)


def _value(row: Any, field: str) -> str | None:
    """Return the value of a field as `drop` names it; None if the row has no such field."""
    for name in [field] if field in row else field.split("."):
        if not isinstance(row, Mapping) or name not in row:
            return None
        row = row[name]
    return row if isinstance(row, str) else json.dumps(row, default=str)


def _is_text(text: Any) -> bool:
    """Return True for text that is not empty and that UTF-8 can encode."""
    try:
        return isinstance(text, str) and bool(text.encode())
    except UnicodeEncodeError:
        return False


def _ends(path: Path, ends: Sequence[str]) -> bool:
    """Return True if a file's name has one of some ends, packed or not."""
    name = path.stem if path.suffix in PACKED else path.name
    return name.endswith(tuple(ends))
