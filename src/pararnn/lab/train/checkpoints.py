"""Checkpoints of a run, by torch.distributed.checkpoint: complete once they have their name."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pararnn.base.atomic import flush, remove
from pararnn.base.errors import TrainingError
from pararnn.base.extras import require
from pararnn.lab.train.files import MARK, NEW, damage, names_below, read_mark, sums_of, write_mark

KIND = "checkpoint"


def folders(out: Path) -> list[tuple[int, Path]]:
    """Return the steps and paths of all that has the name of a checkpoint, oldest first."""
    paths = [path for path in out.glob("checkpoint-*") if path.name[11:].isdigit()]
    return sorted((int(path.name[11:]), path) for path in paths)


def checkpoints(out: Path) -> list[tuple[int, Path]]:
    """Return the steps and folders of a run's checkpoints, oldest first."""
    return [(step, path) for step, path in folders(out) if (path / MARK).exists()]


def last_complete(out: Path) -> tuple[int, Path] | None:
    """Return the newest checkpoint."""
    return next(reversed(checkpoints(out)), None)


def resume_point(out: Path) -> str:
    """Return where a run in a folder resumes, in words."""
    last = last_complete(out)
    return str(last[1]) if last else "the start"


def last_whole(out: Path, step: int | None = None, aside: bool = False) -> tuple[int, Path] | None:
    """Return the newest undamaged checkpoint, or that of a step.

    Damaged ones are reported, and with `aside` renamed. All processes must call.
    """
    for number, path in reversed(checkpoints(out)):
        if step not in (None, number):
            continue
        problem = damage_of(path)
        if problem is None:
            return number, path
        if dist.get_rank() == 0:
            print(f"{path} is damaged, {problem}: it is not used", file=sys.stderr)
            if aside:
                remove(path.with_name(f"{path.name}-damaged"))
                path.rename(path.with_name(f"{path.name}-damaged"))
    return None


def damage_of(folder: Path) -> str | None:
    """Return the damage of a checkpoint, in words. Each process checks some of its files."""
    files = read_mark(folder, KIND)
    if files is None:
        return f"{MARK} cannot be read"
    problem = damage(folder, {name: files[name] for name in _share(list(files))})
    return next((problem for problem in all_of(problem) if problem is not None), None)


def save_checkpoint(out: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write a state as a step's checkpoint, and remove all but the newest `keep`.

    All processes must call.
    """
    new = out / NEW / f"checkpoint-{step}"
    new.mkdir(parents=True, exist_ok=True)
    save(state, checkpoint_id=new)
    sums = all_of(sums_of(new, _share(names_below(new))))
    if dist.get_rank() == 0:
        write_mark(new, KIND, {name: s for rank in sums for name, s in rank.items()})
        flush(new / MARK)
        flush(new)
        os.rename(new, out / new.name)
        flush(out)
        for _, path in checkpoints(out)[:-keep]:
            os.rename(path, out / NEW / path.name)  # a kill leaves an incomplete one only there
            shutil.rmtree(out / NEW / path.name)
    dist.barrier()


def load_weights(folder: Path, model: nn.Module) -> None:
    """Read a checkpoint's weights into a model, on any number of processes."""
    weights = get_model_state_dict(model)
    load({"model": weights}, checkpoint_id=folder)
    set_model_state_dict(model, weights)


def tensors_in(folder: Path, entry: str, device: torch.device) -> dict[str, Tensor]:
    """Return tensors, without values, that a checkpoint has in an entry of its state."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name.removeprefix(f"{entry}."): torch.empty(
            metadata.size, dtype=metadata.properties.dtype, device=device
        )
        for name, metadata in stored.items()
        if name.startswith(f"{entry}.") and isinstance(metadata, TensorStorageMetadata)
    }


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Return all weights on the CPU in the first process, {} in the others."""
    return get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


def all_of(value: Any) -> list[Any]:
    """Return every process's value of an object."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _share(names: list[str]) -> list[str]:
    """Return this process's share of files."""
    return names[dist.get_rank() :: dist.get_world_size()]


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise TrainingError, which says where the run resumes, if a file cannot be written."""
    try:
        yield
    except (OSError, CheckpointException, require("safetensors").SafetensorError) as error:
        first: BaseException = error
        if isinstance(error, CheckpointException):
            first = next(iter(error.failures.values()))[0]
        if isinstance(first, KeyboardInterrupt):  # PyTorch wraps it as a failure of the disk's
            raise first from None
        raise TrainingError(
            f"a file could not be written or read: {first}. Make room or repair the folder, then "
            f"the same command resumes from {resume_point(out)}"
        ) from error
