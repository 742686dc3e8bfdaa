"""Checkpoints on disk: writing, reading, completeness, checksums, removal of old ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pararnn.base.atomic import flush, write_text
from pararnn.base.errors import TrainingError
from pararnn.lab.train.files import NEW
from pararnn.lab.train.sums import Sums, damage, mark_of, names_below, read_mark, sums_of

STATE = "state"
"""Folder in a checkpoint with weights and optimizer, by torch.distributed.checkpoint."""
MARKER = "complete"
"""File that is written last into a checkpoint: the sums of all others. Earlier versions left it
empty."""


def checkpoints(out: Path) -> list[tuple[int, Path]]:
    """Return the steps and folders of a run's checkpoints, complete or not, oldest first."""
    names = [path for path in out.glob("checkpoint-*") if path.name[11:].isdigit()]
    return sorted((int(path.name[11:]), path) for path in names)


def is_complete(folder: Path) -> bool:
    """Return True if a checkpoint was written to its end."""
    return (folder / MARKER).exists()


def last_complete(out: Path) -> tuple[int, Path] | None:
    """Return the newest checkpoint that was written to its end."""
    complete = [(step, path) for step, path in checkpoints(out) if is_complete(path)]
    return complete[-1] if complete else None


def goes_on(out: Path) -> str:
    """Return where a run in a folder goes on, in words."""
    last = last_complete(out)
    return str(last[1]) if last else "the start"


def last_whole(out: Path) -> tuple[int, Path] | None:
    """Return the newest checkpoint whose files are as they were written; all processes must call.

    Damaged ones are renamed, with a line for each.
    """
    first = dist.get_rank() == 0
    for step, path in reversed([each for each in checkpoints(out) if is_complete(each[1])]):
        problem = damage_of(path)
        if problem is None:
            return step, path
        if first:
            aside = path.with_name(f"{path.name}-damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            print(f"{path} is damaged, {problem}: it is {aside.name} now, and not gone on from")
    return None


def damage_of(folder: Path, part: str = "") -> str | None:
    """Return the damage of a checkpoint, in words; each process checks a part of its files.

    An earlier version left no sums, so that its checkpoints pass. part: beginning of the names of
    files to check.
    """
    mark, own = read_mark(folder / MARKER), None
    if mark is not None:
        names = [name for name in _own_part(list(mark.files)) if name.startswith(part)]
        own = damage(folder, {name: mark.files[name] for name in names})
    elif (folder / MARKER).stat().st_size:
        own = f"{MARKER} cannot be read"
    return next((each for each in all_of(own) if each is not None), None)


def _own_part(names: list[str]) -> list[str]:
    """Return this process's part of files."""
    return names[dist.get_rank() :: dist.get_world_size()]


def all_of(own: Any) -> list[Any]:
    """Return every process's value of an object."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return values


def sums_of_checkpoint(folder: Path) -> dict[str, str]:
    """Return the sums of a checkpoint's files; each process computes a part of them."""
    sums: dict[str, str] = {}
    for part in all_of(sums_of(folder, _own_part(names_below(folder)))):
        sums |= part
    return sums


def mark_complete(folder: Path, sums: Sums) -> None:
    """Mark a checkpoint as complete, once all of it is on the disk."""
    for path in sorted(folder.rglob("*")):
        flush(path)
    flush(folder)
    write_text(folder / MARKER, mark_of("checkpoint", sums).text())
    flush(folder / MARKER)
    flush(folder)


def scratch_of(out: Path, step: int) -> Path:
    """Return the path of a checkpoint until it is complete."""
    return out / NEW / f"checkpoint-{step}"


def finish(out: Path, step: int) -> None:
    """Rename a complete checkpoint to its own name."""
    os.replace(scratch_of(out, step), out / f"checkpoint-{step}")
    flush(out / NEW)
    flush(out)


def remove_unfinished(out: Path) -> list[str]:
    """Remove what a kill has left; return the names of incomplete checkpoints."""
    names = [path.name for _, path in checkpoints(out / NEW) if not is_complete(path)]
    if (out / NEW).exists():
        shutil.rmtree(out / NEW)
    return names


def remove_old(out: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints. A kill leaves part of one in `NEW` only."""
    for _, path in checkpoints(out)[:-keep]:
        old = out / NEW / path.name
        os.replace(path, old)
        shutil.rmtree(old)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise a process's own error in place of PyTorch's of all, which is no Exception."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and optimizer; each process writes its part."""
    weights, moments = get_state_dict(model, optimizer)
    with _own_errors():
        save({"model": weights, "optimizer": moments}, checkpoint_id=folder / STATE)


def load_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read what `save_state` wrote, on any number of processes; without optimizer only weights."""
    if optimizer is None:
        weights = get_model_state_dict(model)
        _read(folder, {"model": weights})
        set_model_state_dict(model, weights)
        return
    weights, moments = get_state_dict(model, optimizer)
    _read(folder, {"model": weights, "optimizer": moments})
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def _read(folder: Path, state: dict[str, Any]) -> None:
    """Fill a state from a checkpoint; TrainingError if it cannot be read."""
    with reading(folder, STATE, "the weights to go on from"), _own_errors():
        load(state, checkpoint_id=folder / STATE)


@contextmanager
def reading(checkpoint: Path, name: str, what: str) -> Iterator[None]:
    """Raise TrainingError if a file of a checkpoint cannot be read. what: its content, in words."""
    try:
        yield
    except Exception as error:
        raise TrainingError(
            f"{checkpoint / name}, {what}, cannot be read: {error}. Remove {checkpoint}, then the "
            "same command goes on from the checkpoint before"
        ) from error


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Return all weights on the CPU in the first process, {} in the others."""
    return get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


@contextmanager
def writing(path: Path, out: Path, errors: type[Exception] = Exception) -> Iterator[None]:
    """Raise TrainingError if `path` cannot be written, with where a run in `out` goes on."""
    try:
        yield
    except TrainingError:
        raise
    except errors as error:
        raise TrainingError(
            f"{path} could not be written: {error}. Make room or mend the folder, then the same "
            f"command goes on from {goes_on(out)}"
        ) from error
