"""Readers: the rows of files of each kind, and of datasets, with what is wrong said in a line."""

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

from pararnn.errors import MissingExtra, PararnnError
from pararnn.extras import require

BLOCK = 1 << 20
"""Bytes of a text file that are read at once."""
DATASET = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:/(\w[\w.-]*))?(?::(.+))?")
EMPTY = "files without text"
NOT_UTF8 = "files that are not UTF-8"
NO_OBJECT = "lines that are no JSON object"
NO_TEXT = "rows without text"
"""What of data is left out, and counted."""
HELD = 1 << 24
"""Characters of a text file that are held until all of it is known to be text."""


class DataError(PararnnError, ValueError):
    """Data cannot be learned from: missing, empty, corrupt, or of a kind that is not read."""


class Damaged(DataError):
    """A file or a row that cannot be learned from, and is left out where others can.

    kind: what it is one of, in the plural; then where it is, and what is wrong.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[1])


Row = tuple[str, Mapping[str, Any]]
"""Where it is, for messages, and its fields. A text file is one row, its text in blocks."""
Reader = Callable[[Path, str, tuple[str, ...]], Iterator[Row | Damaged]]


def cannot_read(path: Path | str, error: OSError) -> DataError:
    """What to raise for a file that the system does not give."""
    return DataError(f"cannot read {path}: {error.strerror or first_line(error)}")


def _stored(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from _read(file)


def _of_gzip(path: Path) -> Iterator[bytes]:
    with gzip.open(path) as file:
        yield from _read(file)


def _of_xz(path: Path) -> Iterator[bytes]:
    with lzma.open(path) as file:
        yield from _read(file)


def _of_zstandard(path: Path) -> Iterator[bytes]:
    zstandard = require("zstandard")
    frame = None
    with path.open("rb") as file:
        for block in _read(file):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from error
                block = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:  # the package says nothing of a file that was cut
        raise EOFError("it ends before its last frame does")


def _read(file: Any) -> Iterator[bytes]:
    return iter(lambda: file.read(BLOCK), b"")


PACKED: dict[str, tuple[str, Callable[[Path], Iterator[bytes]]]] = {
    "": ("", _stored),
    ".gz": ("gzip", _of_gzip),
    ".xz": ("xz", _of_xz),
    ".zst": ("zstandard", _of_zstandard),
}
"""By the end of a file's name: what packed it, and its bytes in blocks."""


def _blocks(packing: str, path: Path) -> Iterator[bytes]:
    """A file's bytes, unpacked, in blocks that are not empty."""
    name, unpacked = PACKED[packing]
    try:
        yield from filter(None, unpacked(path))
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is not a whole {name} file ({error}); copy it again, or unpack it"
        ) from error
    except OSError as error:
        raise cannot_read(path, error) from error


def _text(
    packing: str, path: Path, column: str, others: tuple[str, ...]
) -> Iterator[Row | Damaged]:
    held: list[str] = []
    size = 0
    try:
        for block in _decoded(_blocks(packing, path), path):  # to the end, before any is learned
            size += len(block)
            held.append(block)
            if size > HELD:
                held.clear()
    except Damaged as error:
        yield error
        return
    blocks = iter(held) if size <= HELD else _decoded(_blocks(packing, path), path)
    yield str(path), {column: blocks}


def _decoded(blocks: Iterator[bytes], path: Path) -> Iterator[str]:
    """A text file's text, without a byte order mark; one with NUL is of another encoding."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    line, found = 1, False
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
                f"not UTF-8 there; text must be UTF-8",
            ) from error
        line, found = line + block.count(b"\n"), found or bool(block)
    if not found:
        raise Damaged(EMPTY, f"{path} is empty; a text file is a document and must have text")


def _json_lines(
    packing: str, path: Path, column: str, others: tuple[str, ...]
) -> Iterator[Row | Damaged]:
    rule = f"each line must be a JSON object with the text in {column!r}"
    found = False
    for number, line in enumerate(_lines(_blocks(packing, path)), 1):
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        found = True
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            start = line[:40].decode("utf-8", "backslashreplace").strip()
            wrong = f"{where}: found {start!r}, which is not JSON ({error}); {rule}"
            yield Damaged(NO_OBJECT, wrong)
            continue
        if isinstance(row, dict):
            yield where, row
        else:
            yield Damaged(NO_OBJECT, f"{where}: found {named(row)}; {rule}")
    if not found:
        yield Damaged(EMPTY, f"{path} is empty; {rule}")


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of a file, without their ends."""
    begun: list[bytes] = []
    for block in blocks:
        first, *others = block.split(b"\n")
        begun.append(first)
        if others:
            yield b"".join(begun)
            yield from others[:-1]
            begun = others[-1:]
    yield b"".join(begun)


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
    kind + packing: partial(reader, packing)
    for kind, reader in ((".txt", _text), (".jsonl", _json_lines))
    for packing in PACKED
} | {".parquet": _parquet}
"""By the end of a file's name: its rows, where at least the fields that are named are read."""


def readers_of(suffixes: str) -> dict[str, Reader]:
    """The readers of files whose names end in `suffixes`, which have commas between them.

    They may be packed. An end that `READERS` does not have is of text. "" is all of `READERS`.
    Raises DataError for what is no end of a name.
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
        for packing in PACKED
        if end + packing in READERS or end not in READERS  # a packed .parquet is not read
    }


def dataset_rows(source: str) -> Iterator[Row]:
    """The rows of a dataset's split, streamed."""
    split = _parts(source)[2] or "train"
    builder = dataset_builder(source)
    found = False
    try:
        for number, row in enumerate(builder.as_streaming_dataset(split=split), 1):
            found = True
            yield f"dataset {source}, row {number}", row
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the dataset {source}: {first_line(error)}") from error
    if not found:
        raise DataError(f"the dataset {source} has no rows in its split {split!r}")


def dataset_builder(source: str) -> Any:
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
            f"{first_line(error)}"
        ) from error


def _parts(source: str) -> tuple[str, str | None, str | None]:
    """Name, configuration and split of a dataset."""
    match = DATASET.fullmatch(source)
    assert match is not None, source
    name, configuration, split = match.groups()
    return name, configuration, split


def no_column(where: str, column: str, names: Any) -> Damaged:
    """What to say where the text's field is not."""
    return Damaged(
        NO_TEXT,
        f"{where}: no column {column!r}, it has {sorted(names)}; name the one with the text as "
        "column",
    )


def named(value: Any) -> str:
    """A value that is not as it must be, in words."""
    return "nothing (null)" if value is None else f"a value of type {type(value).__name__}"


def first_line(error: Exception) -> str:
    """An error in a line."""
    return str(error).partition("\n")[0] or type(error).__name__
