"""A run's folder: its lock, the files that may be written there, and the config of its run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pararnn.base.atomic import remove, write_text, write_whole
from pararnn.base.errors import TrainingError
from pararnn.lab.locks import lock
from pararnn.lab.records import flat, to_json
from pararnn.lab.train.checkpoints import checkpoints, folders, last_complete
from pararnn.lab.train.config import DataConfig, RunConfig, read_config
from pararnn.lab.train.files import MARK, NEW
from pararnn.lab.train.log import LOG
from pararnn.lm.checkpoint import MODEL

if TYPE_CHECKING:
    from pararnn.lab.train.setup import TrainingData

FIXED = ("model", "data", "optimiser", "batch", "seed", "init_from")
"""Keys that may not change, as a resumed run continues weights, data order and AdamW's groups."""
FREE = ("data.cache",)
"""Exceptions to `FIXED`."""
ROWS = ("sequence_length", "resets", "stateful")
BY_CONTENT = tuple(f"data.{field.name}" for field in fields(DataConfig) if field.name not in ROWS)
"""Keys that may change as long as the tokens are the same, see `DATA`."""

CONFIG = "config.json"
DATA = "data.json"
"""File with a hash of the tokens that a run learns."""
TOKENIZER = "tokenizer"
"""Folder in a run's folder with its tokenizer."""
RECORD = "record.json"
"""File with the hardware of each start of a run, and the step in which it diverged."""
OURS = (MODEL, TOKENIZER, DATA, RECORD, LOG, "tensorboard")
"""Names that a run writes, in addition to its config and its checkpoints."""


def claim(out: Path) -> AbstractContextManager[Any]:
    """Make and lock a run's folder, in which one run works at a time; return the lock.

    The system does so when the process ends, in whatever way. Raises TrainingError if another run
    holds the lock, or the file system has none.
    """
    return lock(
        out / ".run.lock",
        f"another run is at work in {out}: wait for its end, or give this one another folder "
        "(out=...)",
    )


def check_folder(config: RunConfig, out: Path) -> None:
    """Check that a run may write into a folder, and resume the run in it.

    Raises TrainingError if an earlier run of another config, or something else, is in its way.
    """
    odd = sorted({*folders(out)} - {*checkpoints(out)})
    if (out / CONFIG).exists():
        _check_same(config, out, FREE + BY_CONTENT * (out / DATA).exists())
    else:
        names = [path.name for _, path in folders(out)] + [n for n in OURS if (out / n).exists()]
        if names:
            raise TrainingError(
                f"{out} has {names[0]} and no {CONFIG}, so it is not a run's folder: give this run "
                "another folder (out=...)"
            )
    if odd:
        raise TrainingError(
            f"{odd[0][1]} is not a checkpoint as this version of pararnn writes it, and would "
            "be in the way: move it or remove it"
        )


def check_same_data(config: RunConfig, data: TrainingData, out: Path) -> None:
    """Check that the data have the tokens of the run in a folder; their paths may differ.

    Raises TrainingError if they do not.
    """
    if not (out / DATA).exists():
        return
    previous = content_of(out)
    content = getattr(data, "content", "")
    if content and content == previous:
        return
    _check_same(config, out, FREE)
    if content:
        raise TrainingError(
            f"the data of {config.data.train} have changed: their tokens are not those that the "
            f"run in {out} learns. Put them back as they were, or give this run another folder "
            "(out=...)"
        )


def open_folder(config: RunConfig, data: TrainingData, out: Path) -> None:
    """Make a run's folder, or make one ready to resume."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / CONFIG, json.dumps(asdict(config), indent=1) + "\n")
    if content := getattr(data, "content", ""):
        write_text(out / DATA, json.dumps({"content": content}) + "\n")
    if not (out / TOKENIZER).exists():
        with write_whole(out / TOKENIZER) as new:
            new.mkdir()
            data.tokenizer.save(new)
    remove(out / NEW)  # left by a process that was killed


def add_start(out: Path, facts: Mapping[str, Any]) -> None:
    """Add a start to a run's record: its step, its device and so on."""
    starts = record_of(out).get("starts", [])
    write_text(out / RECORD, to_json({"starts": [*starts, facts]}))


def mark_diverged(config: RunConfig, step: int) -> None:
    """Write into a run's record that it diverged, until it is started again."""
    out = Path(config.out)
    divergence = {"step": step, "steps": config.steps}
    write_text(out / RECORD, to_json({**record_of(out), "diverged": divergence}))


def record_of(out: Path) -> dict[str, Any]:
    """Return a run's record, {} for one of an earlier version."""
    return _record(out / RECORD) if (out / RECORD).exists() else {}


def content_of(out: Path) -> str:
    """Return the hash of the tokens that the run in a folder learns, "" if it is unknown."""
    return str(_record(out / DATA).get("content", "")) if (out / DATA).exists() else ""


def ending_of(config: RunConfig, out: Path) -> str | None:
    """Return how a run with this number of steps came to its end, in words; None if it has not."""
    last = last_complete(out)
    if last is not None and last[0] >= config.steps and (out / MODEL / MARK).exists():
        return "has ended"
    divergence = record_of(out).get("diverged")
    if divergence is not None and divergence["steps"] == config.steps:
        return f"diverged in step {divergence['step']}"
    return None


def config_of(out: Path) -> RunConfig:
    """Return the config of the run in a folder; TrainingError if there is none."""
    if not (out / CONFIG).is_file():
        raise TrainingError(f"{out} is no run's folder: it has no {CONFIG}")
    record = _record(out / CONFIG)
    if "model_type" in record:
        raise TrainingError(f"{out} is a model's folder, and no run's: name the run's")
    return read_config(record)


def _record(path: Path) -> dict[str, Any]:
    """Return the record in a file of JSON."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
        error = "it holds no record"
    except (OSError, ValueError) as reason:
        error = str(reason)
    raise TrainingError(
        f"{path} cannot be read: {error}. It says what the run in {path.parent} is of: put back a "
        "copy of it, or give this run another folder (out=...)"
    )


def _check_same(config: RunConfig, out: Path, free: Collection[str]) -> None:
    """Raise TrainingError if this config cannot resume the run in a folder."""
    path = out / CONFIG
    # Keys that an earlier version did not have are as they are by default.
    theirs = flat({"data": asdict(DataConfig()), "init_from": ""}) | flat(_record(path))
    ours = flat(json.loads(json.dumps(asdict(config))))
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        matters = key.partition(".")[0] in FIXED and key not in free
        if matters and ours.get(key) != theirs.get(key):
            raise TrainingError(
                f"{path} has {key} = {theirs.get(key)!r}, and this run {ours.get(key)!r}: give it "
                "another folder (out=...), or remove that one"
            )
