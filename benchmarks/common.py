"""Facts that every benchmark records next to its numbers."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pararnn.tune.timing import device_name

RESULTS = Path(__file__).parent / "results"
"""The folder of result files."""


def new_parser(
    doc: str | None, out: Path | None = RESULTS, help: str | None = None
) -> argparse.ArgumentParser:
    """Build a parser that shows a module's docstring, with the option --out, a folder."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=out, help=help)
    return parser


def provenance(device: torch.device | str = "cpu") -> dict[str, str]:
    """Commit (with '-dirty' where tracked files differ from it), device name and versions."""
    return {
        "commit": commit(),
        "device": device_name(torch.device(device)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit() -> str:
    """Return the short commit hash, with '-dirty' where tracked files differ from it.

    A copy without a git folder has its commit in PARARNN_COMMIT.
    """
    if "PARARNN_COMMIT" in os.environ:
        return os.environ["PARARNN_COMMIT"]
    folder = Path(__file__).parent

    def git(*args: str) -> str:
        result = subprocess.run(
            ["git", *args], cwd=folder, check=True, capture_output=True, text=True
        )
        return result.stdout.strip()

    dirty = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if dirty else "")


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows under the first one's keys; ValueError when there are none or keys differ."""
    if not rows:
        raise ValueError(f"no rows to write to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def add_row(path: Path, row: dict[str, Any], keys: Sequence[str]) -> None:
    """Put a row into a file, in place of one with the same values under `keys`; others stay."""
    rows: list[dict[str, Any]] = read_rows(path) if path.exists() else []
    names = list(dict.fromkeys(name for each in (*rows, row) for name in each))
    same = [all(str(old[key]) == str(row[key]) for key in keys) for old in rows]
    rows = [row if match else old for old, match in zip(rows, same, strict=True)]
    rows += [] if any(same) else [row]
    write_csv(path, [{name: each.get(name, "") for name in names} for each in rows])


class Record:
    """Rows of a file, printed and written as they are measured: what comes later may fail.

    path: None for rows that are only printed. shared: columns of all rows, before theirs. keys:
    columns that identify a case; its new row replaces the one in the file, and others stay. Without
    keys the file has the rows of this run alone.
    """

    def __init__(
        self, path: Path | None, shared: Mapping[str, Any], keys: Sequence[str] = ()
    ) -> None:
        self.path, self.shared, self.keys = path, shared, keys
        self.rows: list[dict[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        self.rows.append({**self.shared, **row})
        if self.path is not None and self.keys:
            add_row(self.path, self.rows[-1], self.keys)
        elif self.path is not None:
            write_csv(self.path, self.rows)

    def end(self) -> None:
        """Say where the rows are."""
        print(f"written to {self.path or 'nowhere (see --out)'}")


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
