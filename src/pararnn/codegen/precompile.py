"""Compiling ahead of use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from pararnn.cells.base import Cell
from pararnn.codegen.emit import why_no_kernels
from pararnn.codegen.targets import Jobs, target_of
from pararnn.errors import EngineError
from pararnn.numerics import check_io_dtype
from pararnn.program.program import program_of


def precompile(module: nn.Module, dtypes: Sequence[torch.dtype] | None = None) -> None:
    """Compile the kernels of every cell in `module` (a layer, a model, a cell) ahead of its use.

    For the device that the module's parameters are on. `dtypes` are those of the gates: by default
    the parameters' (float32 for a cell without any); under autocast name its dtype. On a CPU one
    compilation serves all sizes; on a GPU the usual variants are made (forward and backward for the
    layer's sizes, for few and for many rows), and others, such as those with resets, at first use.
    What is in the cache is not compiled again. Raises EngineError for cells that kernels cannot be
    generated for, without a compiler, and if it fails.
    """
    cells = [part for part in module.modules() if isinstance(part, Cell)]
    if not cells:
        raise EngineError(f"{type(module).__name__} holds no Cell: there is nothing to compile")
    own = next(module.parameters(), torch.empty(0))
    target, jobs = target_of(own.device), Jobs()
    for cell in cells:
        program = program_of(cell)
        reason = why_no_kernels(program)
        if reason is not None:
            raise EngineError(f"cannot precompile {type(module).__name__}: {reason}")
        for dtype in (own.dtype,) if dtypes is None else dtypes:
            check_io_dtype(dtype, "dtypes")
            jobs |= target.usual(program, cell, dtype, own.dtype, own.device)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(job) for job in jobs.values()]:
            job.result()
