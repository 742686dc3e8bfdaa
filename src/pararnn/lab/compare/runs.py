"""Runs as their folders have them: config, validations, what they ran on, and how they ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pararnn.base.errors import TrainingError
from pararnn.lab.records import read_json
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.folder import CONFIG, config_of, content_of, ending_of, record_of
from pararnn.lab.train.log import is_row, read_rows
from pararnn.lab.train.overrides import texts_of

PARTS = ("model", "data", "optimiser", "steps")
"""Keys in the config.json of a run, and not of a model."""


class Point(NamedTuple):
    """Validation: step, tokens learned until then, seconds of training, bits per byte."""

    step: int
    tokens: int
    seconds: float
    bits: float


@dataclass(frozen=True)
class Run:
    """A run.

    content: hash of its tokens, "" if unknown. record: see `pararnn.lab.train.folder.RECORD`.
    ending: how it came to its end, in words, None if it has not.
    """

    folder: Path
    config: RunConfig
    content: str
    record: Mapping[str, Any]
    points: Sequence[Point]
    last_step: int
    ending: str | None

    @cached_property
    def values(self) -> dict[str, str]:
        """Values of the config by their keys, as texts."""
        return texts_of(self.config)

    @property
    def is_finished(self) -> bool:
        """True if the last step was made and validated."""
        return bool(self.points) and self.points[-1].step >= self.config.steps

    @property
    def state(self) -> str:
        """State in words: ended, or where the run stands."""
        if self.is_finished:
            return "ended"
        return self.ending or f"at step {self.last_step:,} of {self.config.steps:,}"

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices, with the number of processes where there were several."""
        starts = self.record.get("starts", [])
        names = (
            start["device"]
            if start["processes"] == 1
            else f"{start['processes']} x {start['device']}"
            for start in starts
        )
        return tuple(dict.fromkeys(names))

    @property
    def parameters(self) -> int | None:
        """Number of parameters, None if no record has it."""
        starts = self.record.get("starts", [])
        return starts[-1]["parameters"] if starts else None

    def at(self, name: str, where: float) -> float | None:
        """Return the bits at a number of tokens or seconds, linear between two validations.

        None before the first validation, and behind the last.
        """
        across = [getattr(point, name) for point in self.points]
        if not across or not across[0] <= where <= across[-1]:
            return None
        return float(np.interp(where, across, [point.bits for point in self.points]))


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs in folders, and why others are left out.

    A folder is a run's, or holds those of runs, as a sweep's does.
    """
    runs, left_out = [], []
    for folder in dict.fromkeys(folders):
        inner = [folder] if is_run(folder) else sorted(filter(is_run, _folders_in(folder)))
        if not inner:
            left_out.append(f"{folder} is no run's folder, and holds none")
        for each in inner:
            try:
                run = read_run(each)
            except TrainingError as error:
                left_out.append(f"{each}: {error}")
                continue
            if run.points:
                runs.append(run)
            else:
                left_out.append(f"{each} has no validation so far ({run.state})")
    return runs, left_out


def _folders_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a training run."""
    try:
        record = read_json((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and all(part in record for part in PARTS)


def read_run(folder: Path) -> Run:
    """Read a run; TrainingError if its config is of another version, or its record is damaged."""
    config = config_of(folder)
    rows = [row for row in read_rows(folder / "log.csv") if is_row(row)]
    return Run(
        folder,
        config,
        content_of(folder),
        record_of(folder),
        points_of(rows),
        max((int(row["step"]) for row in rows), default=0),
        ending_of(config, folder),
    )


def points_of(rows: Sequence[Mapping[str, str]]) -> list[Point]:
    """Return the validations in the rows of a log.

    Seconds are those of training alone, by the rows' tokens/s. The first row's time is that of the
    second one's speed: it holds what is done once, such as compilation.
    """
    speeds = [
        (int(row["tokens"]), float(row["tokens_per_second"]))
        for row in rows
        if row.get("tokens_per_second")
    ]
    if len(speeds) > 1:
        speeds[0] = speeds[0][0], speeds[1][1]
    tokens, seconds = [0], [0.0]
    for at, speed in speeds:
        seconds.append(seconds[-1] + (at - tokens[-1]) / speed)
        tokens.append(at)
    last = speeds[-1][1] if speeds else float("inf")
    points = {}
    for row in rows:
        if row.get("valid_bits_per_byte"):
            at = int(row["tokens"])
            time = np.interp(at, tokens, seconds) + max(0, at - tokens[-1]) / last
            bits = float(row["valid_bits_per_byte"])
            points[int(row["step"])] = Point(int(row["step"]), at, float(time), bits)
    return [points[step] for step in sorted(points)]
