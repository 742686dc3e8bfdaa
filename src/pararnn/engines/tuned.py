"""Measurements of `autotune`: in memory, where the choice of an engine reads them, and on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pararnn.base import private
from pararnn.base.atomic import write_text
from pararnn.base.cache import cache_folder, on_clear
from pararnn.base.errors import BackendWarning, warn_user
from pararnn.engines.split import SplitRequest

MARGIN = 1.05
"""Factor by which another pair must be faster than the rule's choice to replace it."""


class Measured(NamedTuple):
    """Time of a pair on one workload, in ms, with the requested `split`."""

    solver: str
    backend: str
    split: SplitRequest
    ms: float


class Workload(NamedTuple):
    """Subject of a record: a program's key, (B, T, D), the gates' dtype, and the device.

    heads: of the matrices that a step multiplies by, 1 for steps without.
    """

    key: str
    size: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    heads: int = 1


class Record(NamedTuple):
    """Measurements of a workload in order of preference, and the reason for each."""

    workload: Workload
    rows: tuple[Measured, ...]
    why: tuple[str, ...]


# By program. A dictionary, which compiled code guards on.
_RECORDS: dict[str, tuple[Record, ...]] = {}
on_clear(lambda: _RECORDS.clear(), kernels=False)


def fastest(workload: Workload, solver: str, backend: str) -> tuple[Measured, str] | None:
    """Return the measurement to follow for a request ("auto" allows all names), and the reason."""
    key, size, dtype, device, heads = workload
    for record in records(key):
        measured = record.workload
        facts = measured.dtype, measured.device, measured.heads
        same = facts == (dtype, device, heads)
        # Sizes last: compiled code for any size then compares them only where it must.
        if same and not _is_of_any_size(size) and measured.size == size:
            for row, why in zip(record.rows, record.why, strict=True):
                if solver in (row.solver, "auto") and backend in (row.backend, "auto"):
                    return row, why
    return None


def _is_of_any_size(size: tuple[int, ...]) -> bool:
    """Return whether a program is exported for more sizes than this: its choice is one for all, and
    a comparison would have it refuse the sizes that are measured.

    Strict exports count as such: in Dynamo all sizes are int.
    """
    symbols = torch.compiler.is_dynamo_compiling() or any(type(n) is not int for n in size)
    return private.exporting() and symbols


def records(key: str) -> tuple[Record, ...]:
    """Return the records of a program."""
    return _RECORDS.get(key, ())


def remember(workload: Workload, rows: Sequence[Measured]) -> tuple[Measured, ...]:
    """Have `fastest` follow these measurements, of which the first is the rule's choice.

    Returns them in order of preference: the rule's first unless another is faster by MARGIN, then
    by time.
    """
    rule, *others = rows
    ranking = sorted(rows, key=lambda row: row.ms)
    if rule.ms <= MARGIN * ranking[0].ms:
        ranking = [rule, *sorted(others, key=lambda row: row.ms)]
        first = f"autotune measured nothing faster than the rule's choice: {rule.ms:.4g} ms"
    else:
        best = ranking[0].ms
        first = f"autotune measured it fastest: {best:.4g} ms against {rule.ms:.4g} ms by the rule"
    later = [
        f"autotune measured it fastest of the requested pairs: {row.ms:.4g} ms"
        for row in ranking[1:]
    ]
    record = Record(workload, tuple(ranking), (first, *later))
    forget(workload)
    _RECORDS[workload.key] = (*_RECORDS.get(workload.key, ()), record)
    return record.rows


def forget(workload: Workload) -> None:
    """Drop the records of a workload, in this process."""
    others = tuple(r for r in _RECORDS.pop(workload.key, ()) if r.workload != workload)
    if others:
        _RECORDS[workload.key] = others


def path_of(name: str, about: dict[str, Any]) -> Path:
    """Return the file of a record: `name` makes it readable, `about` is all that it depends on."""
    digest = hashlib.sha256(_text(about).encode()).hexdigest()
    return cache_folder() / "tuned" / f"{name}-{digest[:24]}.json"


def read(path: Path, about: dict[str, Any]) -> list[Measured] | None:
    """Return the measurements that `write` put into a file, or None if there is no file.

    A file that holds something else is ignored, with a BackendWarning.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["about"] != json.loads(_text(about)):
            raise ValueError("it is about something else")
        rows = [
            Measured(str(solver), str(backend), SplitRequest.check(*split), float(ms))
            for solver, backend, split, ms in record["measured"]
        ]
        if not rows:
            raise ValueError("it holds no measurement")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn_user(
            f"autotune measures anew, as its record {path} cannot be used: {error!r}",
            BackendWarning,
        )
        return None
    return rows


def write(path: Path, about: dict[str, Any], rows: Sequence[Measured]) -> None:
    """Write measurements, whole or not at all; warn with BackendWarning where that fails."""
    text = json.dumps({"about": about, "measured": rows}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text, concurrent=True)
    except OSError as error:
        warn_user(
            f"autotune's measurements cannot be written to {path.parent} ({error}), and hold for "
            "this process only; set PARARNN_CACHE_DIR to a folder that can be written",
            BackendWarning,
        )


def _text(about: dict[str, Any]) -> str:
    return json.dumps(about, sort_keys=True)
