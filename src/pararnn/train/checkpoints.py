"""Checkpoints on disk: which ones were written to their end, and which may go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
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

from pararnn.errors import TrainingError

STATE = "state"
"""The folder in a checkpoint with weights and optimizer, as torch.distributed.checkpoint has it."""
MARKER = "complete"
"""The file that is written last into a checkpoint, and removed first."""


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


def mark_complete(folder: Path) -> None:
    """Say that a checkpoint is whole, once all of it is on the disk."""
    for path in sorted(folder.rglob("*")):
        _flush(path)
    _flush(folder)
    marker = folder / MARKER
    marker.touch()
    _flush(marker)
    _flush(folder)
    _flush(folder.parent)


def remove_unmarked(out: Path) -> list[Path]:
    """Remove checkpoints that were not written to their end, or not removed to it."""
    left = [path for _, path in checkpoints(out) if not is_complete(path)]
    for path in left:
        shutil.rmtree(path)
    return left


def remove_old(out: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; what a kill leaves of one has no marker."""
    for _, path in checkpoints(out)[:-keep]:
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)


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
    try:
        with _own_errors():
            load(state, checkpoint_id=folder / STATE)
    except Exception as error:
        raise TrainingError(
            f"{folder / STATE}, the weights to go on from, cannot be read: {error}. Remove "
            f"{folder}, then the same command goes on from the checkpoint before"
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
    except errors as error:
        found = last_complete(out)
        raise TrainingError(
            f"{path} could not be written: {error}. Make room or mend the folder, then the same "
            f"command goes on from {found[1] if found else 'the start'}"
        ) from error


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
