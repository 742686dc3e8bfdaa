"""A run's figures on disk: a line of JSON for each step that was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pararnn.base.atomic import write_text
from pararnn.lab.records import finite

LOG = "log.jsonl"
"""File in a run's folder.

step, tokens: learned so far. loss: what is minimised, z-loss included, the mean since the line
before; grad_norm, learning_rate: of the step; tokens_per_second: without validations; mfu: share of
the devices' bfloat16 peak; memory_gib. valid_loss: of held-out rows, without z-loss, in nats a
token; valid_bits_per_byte. sweeps, mended, defect: lists, a number for each recurrent layer; a
defect is over the contract's limit, see `RunConfig.verify_every`.
"""


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line; values that are not finite are null."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite(dict(row)), allow_nan=False) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows; a line that is damaged or was not written to its end is none."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def forget_after(path: Path, step: int) -> None:
    """Drop the rows of later steps, which a run that continues from `step` writes again."""
    rows = [row for row in read_rows(path) if row["step"] <= step]
    if path.exists():
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
