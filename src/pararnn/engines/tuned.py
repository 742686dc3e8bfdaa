"""What `autotune` has measured: in memory, where the choice of an engine reads it, and on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pararnn.atomic import write_text
from pararnn.cache import cache_folder, on_clear
from pararnn.engines.split import SplitRequest, pin
from pararnn.errors import BackendWarning, warn_user

MARGIN = 1.05
"""How many times slower than the fastest the rule's choice must be to be given up."""


class Measured(NamedTuple):
    """The time of a pair on one workload, in ms; `split` as asked, by the rule where it is not."""

    solver: str
    backend: str
    split: SplitRequest
    ms: float


class Workload(NamedTuple):
    """What a record is about: a program's key, (B, T, D), the gates' dtype, and the device."""

    key: str
    size: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device


class Record(NamedTuple):
    """The measurements of a workload, the one to take first, and why each would be taken."""

    workload: Workload
    measured: tuple[Measured, ...]
    why: tuple[str, ...]


# By program. A dictionary, which compiled code guards on.
_RECORDS: dict[str, tuple[Record, ...]] = {}
on_clear(lambda: _RECORDS.clear(), kernels=False)


def fastest(workload: Workload, solver: str, backend: str) -> tuple[Measured, str] | None:
    """The measurement to follow where a request leaves a part open by "auto", and why; if any."""
    key, size, dtype, device = workload
    for record in records(key):
        own = record.workload
        # Sizes last: compiled code for any size then asks about them where it must only.
        if own.dtype == dtype and own.device == device and own.size == size:
            for row, why in zip(record.measured, record.why, strict=True):
                if solver in (row.solver, "auto") and backend in (row.backend, "auto"):
                    return row, why
    return None


def records(key: str) -> tuple[Record, ...]:
    """What is remembered of a program."""
    return _RECORDS.get(key, ())


def remember(workload: Workload, measured: Sequence[Measured]) -> tuple[Measured, ...]:
    """Have `fastest` follow these measurements, of which the first is the rule's choice.

    Returns them in the order in which they are to be taken: the rule's first unless another is
    faster by MARGIN, then by time.
    """
    rule, *others = measured
    ordered = sorted(measured, key=lambda row: row.ms)
    if rule.ms <= MARGIN * ordered[0].ms:
        ordered = [rule, *sorted(others, key=lambda row: row.ms)]
        first = f"autotune measured nothing faster than the rule's choice: {rule.ms:.4g} ms"
    else:
        best = ordered[0].ms
        first = f"autotune measured it fastest: {best:.4g} ms against {rule.ms:.4g} ms by the rule"
    later = [
        f"autotune measured it fastest of what was asked for: {row.ms:.4g} ms"
        for row in ordered[1:]
    ]
    record = Record(workload, tuple(ordered), (first, *later))
    forget(workload)
    _RECORDS[workload.key] = (*_RECORDS.get(workload.key, ()), record)
    return record.measured


def forget(workload: Workload) -> None:
    """Drop what is remembered of a workload, in this process."""
    kept = tuple(r for r in _RECORDS.pop(workload.key, ()) if r.workload != workload)
    if kept:
        _RECORDS[workload.key] = kept


def path_of(name: str, about: dict[str, Any]) -> Path:
    """The file of a record: `name` makes it readable, `about` is all that it depends on."""
    digest = hashlib.sha256(_text(about).encode()).hexdigest()
    return cache_folder() / "tuned" / f"{name}-{digest[:24]}.json"


def read(path: Path, about: dict[str, Any]) -> list[Measured] | None:
    """The measurements in a file, as `write` had them, or None if there is no file.

    A file that holds something else is passed over, with a BackendWarning.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["about"] != json.loads(_text(about)):
            raise ValueError("it is about something else")
        rows = [
            Measured(str(solver), str(backend), pin(*split), float(ms))
            for solver, backend, split, ms in found["measured"]
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


def write(path: Path, about: dict[str, Any], measured: Sequence[Measured]) -> None:
    """Keep measurements, whole or not at all; a BackendWarning where the folder is read-only."""
    text = json.dumps({"about": about, "measured": measured}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text, concurrent=True)
    except OSError as error:
        warn_user(
            f"what autotune measured cannot be kept in {path.parent} ({error}), and holds for this "
            "process only; set PARARNN_CACHE_DIR to a folder that can be written",
            BackendWarning,
        )


def _text(about: dict[str, Any]) -> str:
    return json.dumps(about, sort_keys=True)
