"""Checkpoints on disk: which ones were written to their end, and which may go."""

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

from pararnn.atomic import flush, write_text
from pararnn.errors import TrainingError
from pararnn.train.files import NEW
from pararnn.train.sums import Sums, damage, mark_of, names_below, read_mark, sums_of

STATE = "state"
"""The folder in a checkpoint with weights and optimizer, as torch.distributed.checkpoint has it."""
MARKER = "complete"
"""The file that is written last into a checkpoint: the sums of all others. Earlier versions left it
empty."""


def checkpoints(out: Path) -> list[tuple[int, Path]]:
    """The steps and folders of all checkpoints in a run's folder, complete or not, oldest first."""
    names = [path for path in out.glob("checkpoint-*") if path.name[11:].isdigit()]
    return sorted((int(path.name[11:]), path) for path in names)


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    return (folder / MARKER).exists()


def last_complete(out: Path) -> tuple[int, Path] | None:
    """The newest checkpoint that was written to its end."""
    found = [(step, path) for step, path in checkpoints(out) if is_complete(path)]
    return found[-1] if found else None


def goes_on(out: Path) -> str:
    """Return what a run in a folder goes on from, in words."""
    found = last_complete(out)
    return str(found[1]) if found else "the start"


def last_whole(out: Path) -> tuple[int, Path] | None:
    """Return the newest checkpoint whose files are as they were written; all processes must call.

    Those that are damaged are said in a line each, and renamed.
    """
    first = dist.get_rank() == 0
    for step, path in reversed([each for each in checkpoints(out) if is_complete(each[1])]):
        wrong = damage_of(path)
        if wrong is None:
            return step, path
        if first:
            aside = path.with_name(f"{path.name}-damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            print(f"{path} is damaged, {wrong}: it is {aside.name} now, and not gone on from")
    return None


def damage_of(folder: Path, part: str = "") -> str | None:
    """Return what is wrong with a checkpoint, in words; each process looks at a share of its files.

    Of one that an earlier version wrote nothing is known. part: what the names of files that matter
    begin with.
    """
    mark, own = read_mark(folder / MARKER), None
    if mark is not None:
        names = [name for name in _share(list(mark.files)) if name.startswith(part)]
        own = damage(folder, {name: mark.files[name] for name in names})
    elif (folder / MARKER).stat().st_size:
        own = f"{MARKER} cannot be read"
    return next((each for each in _all(own) if each is not None), None)


def _share(names: list[str]) -> list[str]:
    """This process's share of files."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _all(own: Any) -> list[Any]:
    """What each process has of something."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def sums_of_checkpoint(folder: Path) -> dict[str, str]:
    """Return the sums of a checkpoint's files: each process takes a share of them."""
    found: dict[str, str] = {}
    for part in _all(sums_of(folder, _share(names_below(folder)))):
        found |= part
    return found


def mark_complete(folder: Path, sums: Sums) -> None:
    """Say that a checkpoint is whole, once all of it is on the disk."""
    for path in sorted(folder.rglob("*")):
        flush(path)
    flush(folder)
    write_text(folder / MARKER, mark_of("checkpoint", sums).text())
    flush(folder / MARKER)
    flush(folder)


def unfinished(out: Path, step: int) -> Path:
    """Return where a checkpoint is until it is whole."""
    return out / NEW / f"checkpoint-{step}"


def finish(out: Path, step: int) -> None:
    """Give a checkpoint that is whole its place."""
    os.replace(unfinished(out, step), out / f"checkpoint-{step}")
    flush(out / NEW)
    flush(out)


def remove_unfinished(out: Path) -> list[str]:
    """Remove what a kill has left; the names of checkpoints that were not written to their end."""
    left = [path.name for _, path in checkpoints(out / NEW) if not is_complete(path)]
    if (out / NEW).exists():
        shutil.rmtree(out / NEW)
    return left


def remove_old(out: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; what a kill leaves of one has not its place."""
    for _, path in checkpoints(out)[:-keep]:
        old = out / NEW / path.name
        os.replace(path, old)
        shutil.rmtree(old)


@contextmanager
def _own_errors() -> Iterator[None]:
    """A process's own error in place of PyTorch's of all, which is no Exception."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and optimizer, each process its part."""
    weights, moments = get_state_dict(model, optimizer)
    with _own_errors():
        save({"model": weights, "optimizer": moments}, checkpoint_id=folder / STATE)


def load_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read what `save_state` wrote, on however many processes; weights only without optimizer."""
    if optimizer is None:
        weights = get_model_state_dict(model)
        _read(folder, {"model": weights})
        set_model_state_dict(model, weights)
        return
    weights, moments = get_state_dict(model, optimizer)
    _read(folder, {"model": weights, "optimizer": moments})
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def _read(folder: Path, state: dict[str, Any]) -> None:
    """Fill a state with what a checkpoint has; TrainingError where it cannot be read."""
    with reading(folder, STATE, "the weights to go on from"), _own_errors():
        load(state, checkpoint_id=folder / STATE)


@contextmanager
def reading(checkpoint: Path, name: str, what: str) -> Iterator[None]:
    """TrainingError where a file of a checkpoint cannot be read. what: is in it, in words."""
    try:
        yield
    except Exception as error:
        raise TrainingError(
            f"{checkpoint / name}, {what}, cannot be read: {error}. Remove {checkpoint}, then the "
            "same command goes on from the checkpoint before"
        ) from error


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """All weights on the CPU, in the first process; the others have {}."""
    return get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


@contextmanager
def writing(path: Path, out: Path, errors: type[Exception] = Exception) -> Iterator[None]:
    """TrainingError where `path` cannot be written, with what a run in `out` goes on from."""
    try:
        yield
    except TrainingError:
        raise
    except errors as error:
        raise TrainingError(
            f"{path} could not be written: {error}. Make room or mend the folder, then the same "
            f"command goes on from {goes_on(out)}"
        ) from error
