"""A run's figures as a table on disk, a row at a time."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pararnn.base.atomic import write_whole

COLUMNS = (
    "step",
    "tokens",
    "loss",
    "valid_loss",
    "valid_bits_per_byte",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "mfu",
    "memory_gib",
    "sweeps",
    "mended",
    "defect",
)
"""Columns of log.csv. loss is what is minimised, z-loss included, a mean since the row before;
valid_loss is without it. mfu is of the devices' bfloat16 peak. sweeps, mended and defect are lists,
a number a recurrent layer; defect is over the contract's limit, and more than 1 is wrong: see
`RunConfig.verify_every`. A row holds the values measured then, and is blank elsewhere."""


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row, below a header where there is none."""
    extra = set(row) - set(COLUMNS)
    if extra:
        raise KeyError(f"no column {min(extra)!r} in a log: {', '.join(COLUMNS)}")
    header = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerow(row)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the complete rows: a process that was killed may have left half a line."""
    if not path.exists():
        return []
    # Of damaged bytes Python's csv takes some for the end of all.
    text = path.read_text(encoding="utf-8", errors="replace").replace("\0", "\ufffd")
    lines = text.splitlines(keepends=True)
    return list(csv.DictReader(line for line in lines if line.endswith("\n")))


def is_row(row: Mapping[Any, Any]) -> bool:
    """Return True if a row is as `append_row` writes it: numbers or nothing, in known columns."""
    try:
        numbers = [float(part) for cell in row.values() for part in cell.split()]
        return set(row) <= set(COLUMNS) and bool(numbers) and int(row["step"]) >= 0
    except (ValueError, KeyError, AttributeError):
        return False


def forget_after(path: Path, step: int) -> None:
    """Drop the rows of later steps, which a run that goes on from `step` writes again.

    If some are damaged, the others stay, and a copy of the file; a line says so.
    """
    rows = read_rows(path)
    whole = [row for row in rows if is_row(row)]
    begin = path.read_bytes()[:4] if path.exists() else b""
    if len(whole) < len(rows) or not b"step".startswith(begin):
        copy = path.with_suffix(".damaged.csv")
        shutil.copyfile(path, copy)
        print(f"{path} is damaged: {len(whole)} rows of it can be read; {copy} is as it was")
    earlier = [row for row in whole if int(row["step"]) <= step]
    if not earlier:
        path.unlink(missing_ok=True)
        return
    with write_whole(path) as new:
        for row in earlier:
            append_row(new, row)
