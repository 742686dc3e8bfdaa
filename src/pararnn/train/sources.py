"""Documents: the texts of files, folders and datasets, one by one."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pararnn.errors import MissingExtra, PararnnError
from pararnn.extras import require

SOURCES = (
    "a file or folder of text (.txt, .txt.xz), JSON lines (.jsonl) or Parquet (.parquet), or the "
    "name of a Hugging Face dataset"
)
DATASET = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:/(\w[\w.-]*))?(?::(.+))?")
Reader = Callable[[Path, str], Iterator[str]]


class DataError(PararnnError, ValueError):
    """Data cannot be learned from: missing, empty, corrupt, or of a kind that is not read."""


def documents(source: str, column: str = "text") -> Iterator[str]:
    """The texts of a source, in the order of paths and lines.

    Args:
        source: a file, or a folder with all files below it (hidden ones are left out), of text
            (each file is a document), JSON lines or Parquet; or a dataset of Hugging Face,
            "owner/name", "owner/name/configuration", each with ":split" behind it or not, which is
            streamed.
        column: the text's field in JSON lines, Parquet and datasets.

    Raises DataError, which names the file and line, for what is missing, empty, corrupt or of
    another kind, and MissingExtra where a package is missing.
    """
    paths = files_of(source)
    if not paths:
        yield from _dataset(source, column)
    for path in paths:
        yield from _reader(path)(path, column)


def fingerprint(source: str) -> list[list[Any]]:
    """What a source's texts depend on: each file's name, size and hash; a dataset's revision."""
    paths = files_of(source)
    if not paths:
        return [[source, _builder(source).hash]]
    root = Path(source)
    root = root if root.is_dir() else root.parent
    return [[path.relative_to(root).as_posix(), path.stat().st_size, _hash(path)] for path in paths]


def files_of(source: str) -> list[Path]:
    """The files of a source, sorted by their paths; none where it is the name of a dataset."""
    root = Path(source)
    if source and root.is_dir():
        files = [path for path in root.rglob("*") if path.is_file() and not _hidden(path, root)]
        if not files:
            raise DataError(f"the folder {source} has no files; data are {SOURCES}")
    elif source and root.exists():
        files = [root]
    elif _kind(root) is None and DATASET.fullmatch(source):
        return []
    else:
        raise DataError(f"there is no file or folder {source!r}; data are {SOURCES}")
    for path in files:
        _reader(path)
    return sorted(files)


def _kind(path: Path) -> str | None:
    return next((kind for kind in READERS if path.name.endswith(kind)), None)


def _reader(path: Path) -> Reader:
    kind = _kind(path)
    if kind is None:
        raise DataError(
            f"{path} is of a kind that is not read; files must end in {', '.join(READERS)}"
        )
    return READERS[kind]


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _plain(path: Path, column: str) -> Iterator[str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    yield _text_of(data, path)


def _packed(path: Path, column: str) -> Iterator[str]:
    try:
        with lzma.open(path) as file:
            data = file.read()
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(
            f"{path} is not a whole xz file ({error}); copy it again, or unpack it to .txt"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    yield _text_of(data, path)


def _text_of(data: bytes, path: Path) -> str:
    """A text file's text; one with NUL is no text, or text of another encoding."""
    if not data:
        raise DataError(f"{path} is empty; a text file is a document and must have text")
    line = 1 + data.count(b"\n", 0, max(data.find(b"\0"), 0))
    if b"\0" in data:
        raise DataError(f"{path}, line {line}: found a NUL byte; text must be UTF-8")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: found the byte 0x{data[error.start]:02x}, which is not UTF-8 "
            f"there; text must be UTF-8"
        ) from error


def _json_lines(path: Path, column: str) -> Iterator[str]:
    rule = f"each line must be a JSON object with the text in {column!r}"
    found = False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                found = True
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line.decode("utf-8"))
                except ValueError as error:
                    start = line[:40].decode("utf-8", "backslashreplace").strip()
                    raise DataError(
                        f"{where}: found {start!r}, which is not JSON ({error}); {rule}"
                    ) from error
                if not isinstance(row, dict):
                    raise DataError(f"{where}: found {_named(row)}; {rule}")
                yield _field(row, column, where)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not found:
        raise DataError(f"{path} is empty; {rule}")


def _parquet(path: Path, column: str) -> Iterator[str]:
    parquet = require("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            raise DataError(
                f"{path}: no column {column!r}, it has {sorted(file.schema_arrow.names)}; name "
                "the one with the text as column"
            )
        number = 0
        for batch in file.iter_batches(columns=[column], batch_size=1024):
            for number, row in enumerate(batch.to_pylist(), number + 1):  # noqa: B020
                yield _field(row, column, f"{path}, row {number}")
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a whole Parquet file: {_first_line(error)}") from error
    if not number:
        raise DataError(f"{path} is empty; it must have rows with the text in {column!r}")


READERS: dict[str, Reader] = {
    ".txt": _plain,
    ".txt.xz": _packed,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
"""By the end of a file's name: its texts."""


def _dataset(source: str, column: str) -> Iterator[str]:
    split = _parts(source)[2] or "train"
    builder = _builder(source)
    found = False
    try:
        for number, row in enumerate(builder.as_streaming_dataset(split=split), 1):
            found = True
            yield _field(row, column, f"dataset {source}, row {number}")
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the dataset {source}: {_first_line(error)}") from error
    if not found:
        raise DataError(f"the dataset {source} has no rows in its split {split!r}")


def _builder(source: str) -> Any:
    """The builder of a dataset, whose hash is the revision."""
    name, configuration, _ = _parts(source)
    try:
        datasets = require("datasets")
    except MissingExtra as error:
        raise MissingExtra(
            f"there is no file or folder {source!r}, and for a dataset of that name {error}"
        ) from error
    try:
        return datasets.load_dataset_builder(name, configuration)
    except (OSError, ValueError) as error:
        raise DataError(
            f"there is no file or folder {source!r}, and no dataset of that name can be read: "
            f"{_first_line(error)}"
        ) from error


def _parts(source: str) -> tuple[str, str | None, str | None]:
    """Name, configuration and split of a dataset."""
    match = DATASET.fullmatch(source)
    assert match is not None, source
    name, configuration, split = match.groups()
    return name, configuration, split


def _field(row: dict[str, Any], column: str, where: str) -> str:
    """The text of a row, which must be one that UTF-8 can say."""
    if column not in row:
        raise DataError(
            f"{where}: no column {column!r}, it has {sorted(row)}; name the one with the text as "
            "column"
        )
    text = row[column]
    if not isinstance(text, str):
        raise DataError(f"{where}: {column!r} must be text, found {_named(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: found half a surrogate pair, {text[error.start]!r}; text must be UTF-8"
        ) from error
    return text


def _named(value: Any) -> str:
    return "nothing (null)" if value is None else f"a value of type {type(value).__name__}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
