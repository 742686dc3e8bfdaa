"""Readers: the rows of text files, JSON lines, Parquet and datasets, with one line for each error.

The package `datasets` reads datasets here, but not files of text and JSON lines. Its reader of JSON
lines ends at the first bad line, at a type that changes and at a column that appears late; its
reader of text holds a whole file in memory, changes line ends, and lets NUL bytes and byte order
marks pass.
"""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pararnn.base.errors import MissingExtra, PararnnError
from pararnn.base.extras import require

BLOCK = 1 << 20
"""Bytes of a text file that are read at once."""
MAX_HELD = 1 << 24
"""Characters of a text file that stay in memory while the file is checked; longer ones are read
twice."""
DATASET = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:/(\w[\w.-]*))?(?::(.+))?")
"""Pattern of a dataset's name, configuration and split."""
EMPTY = "files without text"
NOT_UTF8 = "files that are not UTF-8"
NO_OBJECT = "lines that are no JSON object"
NO_TEXT = "rows without text"
"""Kinds of data that are left out, and counted."""


class DataError(PararnnError, ValueError):
    """Data cannot be learned from: missing, empty, corrupt, or of a kind that is not read."""


class Damaged(DataError):
    """A file or a row that cannot be learned from, and is left out if others can.

    kind: plural name of what it is one of. The message says where it is and what is wrong.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[1])


Row = tuple[str, Mapping[str, Any]]
"""Position of a row, for messages, and its fields. A text file is one row, its text in blocks."""
Reader = Callable[[Path, str, tuple[str, ...]], Iterator[Row | Damaged]]
"""Function of a path, the text's column, and other columns to read."""


def cannot_read(path: Path | str, error: OSError) -> DataError:
    """Return the error to raise for a file that the system refuses."""
    return DataError(f"cannot read {path}: {error.strerror or first_line(error)}")


def _of_zstandard(path: Path) -> Iterator[bytes]:
    zstandard = require("zstandard")
    frame = None
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from error
                block = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:  # the package does not report a file that was cut
        raise EOFError("it ends before its last frame does")


def _by(opener: Callable[..., Any], path: Path) -> Iterator[bytes]:
    with opener(path, "rb") as file:
        while block := file.read(BLOCK):
            yield block


PACKINGS: dict[str, tuple[str, Callable[[Path], Iterator[bytes]]]] = {
    "": ("", lambda path: _by(open, path)),
    ".gz": ("gzip", partial(_by, gzip.open)),
    ".xz": ("xz", partial(_by, lzma.open)),
    ".zst": ("zstandard", _of_zstandard),
}
"""Name of each way of packing, and the reader of unpacked bytes, by the end of a file's name."""


def _blocks(packing: str, path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, unpacked, in blocks that are not empty."""
    name, unpack = PACKINGS[packing]
    try:
        yield from filter(None, unpack(path))
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is not a whole {name} file ({error}); copy it again, or unpack it"
        ) from error
    except OSError as error:
        raise cannot_read(path, error) from error


def _text(
    packing: str, path: Path, column: str, others: tuple[str, ...]
) -> Iterator[Row | Damaged]:
    """Yield a text file as one row, after all of it has been checked."""
    blocks: list[str] = []
    size = 0
    try:
        for block in _characters(_blocks(packing, path), path):
            size += len(block)
            blocks.append(block)
            if size > MAX_HELD:
                blocks.clear()
    except Damaged as error:
        yield error
        return
    again = _characters(_blocks(packing, path), path)
    yield str(path), {column: iter(blocks) if size <= MAX_HELD else again}


def _characters(blocks: Iterator[bytes], path: Path) -> Iterator[str]:
    """Yield a text file's characters without a byte order mark.

    Raises Damaged for an empty file, and for bytes that are not UTF-8, NUL among them.
    """
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    line, empty = 1, True
    for block in chain(blocks, [b""]):
        if b"\0" in block:
            line += block.count(b"\n", 0, block.index(b"\0"))
            raise Damaged(NOT_UTF8, f"{path}, line {line}: found a NUL byte; text must be UTF-8")
        try:
            yield decode(block, final=not block)
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
            raise Damaged(
                NOT_UTF8,
                f"{path}, line {line}: found the byte 0x{error.object[error.start]:02x}, which is "
                "not UTF-8 there; text must be UTF-8",
            ) from error
        line, empty = line + block.count(b"\n"), empty and not block
    if empty:
        raise Damaged(EMPTY, f"{path} is empty; a text file is a document and must have text")


def _json_lines(
    packing: str, path: Path, column: str, others: tuple[str, ...]
) -> Iterator[Row | Damaged]:
    rule = f"each line must be a JSON object with the text in {column!r}"
    return json_objects(path, rule, packing)


def json_objects(path: Path, rule: str, packing: str = "") -> Iterator[Row | Damaged]:
    """Yield the objects of a file of JSON lines; `rule` ends the messages of errors."""
    empty = True
    for number, line in enumerate(_lines(_blocks(packing, path)), 1):
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        empty, position = False, f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            start = line[:40].decode("utf-8", "backslashreplace").strip()
            message = f"{position}: found {start!r}, which is not JSON ({error}); {rule}"
            yield Damaged(NO_OBJECT, message)
            continue
        if isinstance(row, dict):
            yield position, row
        else:
            yield Damaged(NO_OBJECT, f"{position}: found {description(row)}; {rule}")
    if empty:
        yield Damaged(EMPTY, f"{path} is empty; {rule}")


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file, without their ends."""
    fragments: list[bytes] = []
    for block in blocks:
        first, *others = block.split(b"\n")
        fragments.append(first)
        if others:
            yield b"".join(fragments)
            yield from others[:-1]
            fragments = others[-1:]
    yield b"".join(fragments)


def _parquet(path: Path, column: str, others: tuple[str, ...]) -> Iterator[Row | Damaged]:
    parquet = require("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise no_column(str(path), column, names)
            columns = [column, *(name for name in others if name in names and name != column)]
            for batch in file.iter_batches(columns=columns, batch_size=1024):
                for number, row in enumerate(batch.to_pylist(), number + 1):  # noqa: B020
                    yield f"{path}, row {number}", row
    except DataError:
        raise
    except PermissionError as error:
        raise cannot_read(path, error) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a whole Parquet file: {first_line(error)}") from error
    if not number:
        yield Damaged(EMPTY, f"{path} is empty; it must have rows with the text in {column!r}")


READERS: dict[str, Reader] = {
    end + packing: partial(reader, packing)
    for end, reader in ((".txt", _text), (".jsonl", _json_lines))
    for packing in PACKINGS
} | {".parquet": _parquet}
"""Readers by the end of a file's name."""


def readers_of(suffixes: str) -> dict[str, Reader]:
    """Return the readers of files whose names end in `suffixes`, separated by commas.

    The files may be packed. An end that `READERS` does not have is text. "" is all of `READERS`.
    Raises DataError for an impossible end of a name.
    """
    if not suffixes:
        return READERS
    ends = [end.strip() for end in suffixes.split(",")]
    if not all(end.startswith(".") and len(end) > 1 for end in ends):
        raise DataError(
            "suffixes must be ends of names that begin with a dot, with commas between several, "
            f"such as .md,.py; got {suffixes!r}"
        )
    return {
        end + packing: READERS.get(end + packing, partial(_text, packing))
        for end in ends
        for packing in PACKINGS
        if end + packing in READERS or end not in READERS  # a packed .parquet is not read
    }


def dataset_rows(source: str) -> Iterator[Row]:
    """Stream the rows of a dataset's split."""
    split = _name_parts(source)[2] or "train"
    builder = dataset_builder(source)
    number = 0
    try:
        for number, row in enumerate(builder.as_streaming_dataset(split=split), 1):
            yield f"dataset {source}, row {number}", row
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the dataset {source}: {first_line(error)}") from error
    if not number:
        raise DataError(f"the dataset {source} has no rows in its split {split!r}")


def dataset_builder(source: str) -> Any:
    """Return the builder of a dataset; its `hash` is the revision."""
    name, configuration, _ = _name_parts(source)
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
            f"{first_line(error)}"
        ) from error


def _name_parts(source: str) -> tuple[str, str | None, str | None]:
    """Return name, configuration and split of a dataset."""
    match = DATASET.fullmatch(source)
    assert match is not None, source
    name, configuration, split = match.groups()
    return name, configuration, split


def no_column(position: str, column: str, names: Any) -> Damaged:
    """Return the error of a row, or of a file, without the text's column."""
    return Damaged(
        NO_TEXT,
        f"{position}: no column {column!r}, it has {sorted(names)}; name the one with the text as "
        "column",
    )


def description(value: Any) -> str:
    """Describe a value of a wrong type."""
    return "nothing (null)" if value is None else f"a value of type {type(value).__name__}"


def first_line(error: Exception) -> str:
    """Return the first line of an error."""
    return str(error).partition("\n")[0] or type(error).__name__
