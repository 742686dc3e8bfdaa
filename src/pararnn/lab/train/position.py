"""A run's position in a checkpoint: its step, and the states of random numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pararnn.base.atomic import write_text
from pararnn.base.device import Gpu, type_of
from pararnn.lab.train.checkpoints import reading

STEP_FILE = "trainer_state.json"
"""The file with the step, by the name that transformers' Trainer gives it."""
NUMPY_TYPES: list[Any] = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
]
"""Types in the state of NumPy's generator, which `torch.load` is to accept."""


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch, which users' cells may draw from."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def save_position(folder: Path, step: int, epoch: float, device: torch.device) -> None:
    """Write each process's random numbers into a checkpoint; the first also the step."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "cpu": torch.get_rng_state(),
    }
    if isinstance(type_of(device), Gpu):
        state["cuda"] = torch.get_device_module(device).get_rng_state(device)
    torch.save(state, folder / _random_file())
    if dist.get_rank() == 0:
        write_text(folder / STEP_FILE, json.dumps({"epoch": epoch, "global_step": step}) + "\n")


def load_position(folder: Path, device: torch.device) -> int:
    """Restore what `save_position` wrote; return the step. TrainingError if it cannot be read.

    Random numbers stay as they are in processes that the earlier run did not have.
    """
    with reading(folder, STEP_FILE, "the place in the run"):
        record = json.loads((folder / STEP_FILE).read_text(encoding="utf-8"))
        step = int(record["global_step"])
    file = folder / _random_file()
    if not file.exists():
        return step
    with reading(folder, file.name, "the states of random numbers"):
        with torch.serialization.safe_globals(NUMPY_TYPES):
            state = torch.load(file, weights_only=True)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        torch.set_rng_state(state["cpu"])
        if isinstance(type_of(device), Gpu) and "cuda" in state:
            own = state["cuda"]  # an earlier version has those of all GPUs
            own = own[device.index or 0] if isinstance(own, list) else own
            torch.get_device_module(device).set_rng_state(own, device)
    return step


def _random_file() -> str:
    """Return the name of this process's file of random numbers."""
    return f"rng_state_{dist.get_rank()}.pth" if dist.get_world_size() > 1 else "rng_state.pth"
