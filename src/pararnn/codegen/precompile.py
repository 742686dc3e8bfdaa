"""Compilation ahead of use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from pararnn.base.device import type_of
from pararnn.base.errors import EngineError
from pararnn.base.numerics import check_io_dtype
from pararnn.cells.base import Cell
from pararnn.codegen import cuda
from pararnn.codegen.families import why_no_kernels
from pararnn.codegen.targets import Jobs, target_of
from pararnn.program.program import program_of


def precompile(
    module: nn.Module,
    dtypes: Sequence[torch.dtype] | None = None,
    *,
    capability: tuple[int, int] | None = None,
) -> None:
    """Compile the kernels of every cell in `module` (a layer, a model, a cell) ahead of its use.

    Kernels are for the device of the module's parameters, or for GPUs of a compute `capability`
    such as (9, 0). The latter needs no GPU, so that an image can be built on a machine without
    one, and the module may be on the meta device. `dtypes` are those of the gates: by default the
    parameters' (float32 for a cell without any); for autocast, name its dtype. On a CPU one
    compilation serves all sizes. On a GPU the usual variants are compiled (forward and backward for
    the layer's sizes, for few and for many rows); others, such as those with resets, are compiled
    at first use. Cached kernels are not compiled again. Raises EngineError for cells and devices
    without kernels, without a compiler, and if it fails; ValueError for a module on the meta
    device without `capability`, and for a `capability` that is no pair of integers.
    """
    cells = [child for child in module.modules() if isinstance(child, Cell)]
    if not cells:
        raise EngineError(f"{type(module).__name__} holds no Cell: there is nothing to compile")
    weight, jobs = next(module.parameters(), torch.empty(0)), Jobs()
    usual, device = _usual_for(weight.device, capability)
    for cell in cells:
        program = program_of(cell).of_kernels
        reason = why_no_kernels(program)
        if reason is not None:
            raise EngineError(f"cannot precompile {type(module).__name__}: {reason}")
        for dtype in (weight.dtype,) if dtypes is None else dtypes:
            check_io_dtype(dtype, "dtypes")
            # Language models in 16 bits have cells in float32.
            weight_dtype = next(cell.parameters(), weight).dtype
            jobs |= usual(program, cell, dtype, weight_dtype, device)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(job) for job in jobs.values()]:
            job.result()


def _usual_for(
    device: torch.device, capability: tuple[int, int] | None
) -> tuple[Callable[..., Jobs], Any]:
    """Return the function that lists the jobs, and its device or capability."""
    if capability is None:
        if not type_of(device).computes:
            raise ValueError(
                "a module on the meta device has none to compile for: move it, or name the GPUs' "
                "compute capability (capability=(9, 0))"
            )
        return target_of(device).usual, device
    numbers = tuple(capability)
    if len(numbers) != 2 or not all(isinstance(number, int) for number in numbers):
        raise ValueError(
            "capability must be two integers, as torch.cuda.get_device_capability() returns them, "
            f"got {capability!r}"
        )
    return cuda.usual, numbers
