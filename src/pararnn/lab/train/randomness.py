"""Random numbers of a run: their seed, and their states in a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from pararnn.base.device import Gpu, type_of


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch, which users' cells may draw from."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def random_state(device: torch.device) -> tuple[Any, ...]:
    """Return the states of this process's generators, none of which is a tensor."""
    gpu = isinstance(type_of(device), Gpu)
    return (
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002
        torch.get_rng_state().numpy(),
        torch.get_device_module(device).get_rng_state(device).numpy() if gpu else None,
    )


def set_random_state(state: tuple[Any, ...], device: torch.device) -> None:
    """Restore what `random_state` returned, on any device."""
    python, numpy, cpu, gpu = state
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(torch.from_numpy(cpu))
    if gpu is not None and isinstance(type_of(device), Gpu):
        torch.get_device_module(device).set_rng_state(torch.from_numpy(gpu), device)
