"""From a program and an I/O dtype to its compiled kernels."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pararnn.cells.base import Cell
from pararnn.codegen.cache import load
from pararnn.codegen.compiler import (
    compile_library,
    compiler_identity,
    cpu_identity,
    find_compiler,
    flags,
)
from pararnn.codegen.emit import emit_program
from pararnn.errors import EngineError
from pararnn.numerics import check_io_dtype, compute_dtype
from pararnn.program import Program, program_of

HEADERS = Path(__file__).parents[1] / "kernels" / "cpp"

IO_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

Kernel = Callable[[Sequence[int], Sequence[int]], None]
"""Takes sizes and addresses, in the order in which kernels/cpp/sequential.h reads them."""


@dataclass(frozen=True)
class Kernels:
    """The two entries of a compiled library."""

    forward: Kernel
    backward: Kernel


MAX_STATES = 8

_KERNELS: dict[tuple[str, torch.dtype], Kernels | EngineError] = {}


def why_no_kernels(program: Program) -> str | None:
    """The reason why no kernels can be generated for a cell, whatever the machine, or None."""
    if program.structure is None:
        return f"{program.cell_name} is sequential-only: {program.why_sequential}"
    if program.couples_channels:
        return f"{program.cell_name} mixes channels; kernels are generated for elementwise steps"
    if program.num_states > MAX_STATES:
        return f"{program.cell_name} has {program.num_states} states; kernels take {MAX_STATES}"
    return None


def precompile(module: nn.Module, dtypes: Sequence[torch.dtype] | None = None) -> None:
    """Compile the kernels of every cell in `module` (a layer, a model, a cell) ahead of its use.

    `dtypes` are those of the gates: by default the parameters' (float32 for a cell without any);
    under autocast name its dtype. What is in the cache is not compiled again. Raises EngineError
    for cells that kernels cannot be generated for, without a compiler, and if it fails.
    """
    cells = [part for part in module.modules() if isinstance(part, Cell)]
    if not cells:
        raise EngineError(f"{type(module).__name__} holds no Cell: there is nothing to compile")
    jobs: dict[tuple[str, torch.dtype], Program] = {}
    for cell in cells:
        program = program_of(cell)
        reason = why_no_kernels(program)
        if reason is not None:
            raise EngineError(f"cannot precompile {type(module).__name__}: {reason}")
        own = next((p.dtype for p in module.parameters()), torch.float32)
        for dtype in (own,) if dtypes is None else dtypes:
            check_io_dtype(dtype, "dtypes")
            jobs[program.key, dtype] = program
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = [pool.submit(kernels_of, program, dtype) for (_, dtype), program in jobs.items()]
    for job in done:
        job.result()


def source_of(program: Program, dtype: torch.dtype) -> str:
    """The C++ file that is compiled for gates of `dtype`. EngineError as `emit_program`."""
    compute = compute_dtype(dtype)
    return (
        f"// {program.cell_name}\n"
        f"#define PARARNN_IO {IO_TYPES[dtype]}\n"
        f"#define PARARNN_WIDE {int(compute == torch.float64)}\n"
        f'#include "functions.h"\n\n{emit_program(program, compute, "cpp")}\n'
        '#include "sequential.h"\n'
    )


def kernels_of(program: Program, dtype: torch.dtype) -> Kernels:
    """The program's kernels for gates of `dtype`: compiled at the first use, kept on disk.

    Raises EngineError: no compiler, a compiler that fails, or an op that has no spelling. A failure
    is remembered for the life of the process.
    """
    found = _KERNELS.get((program.key, dtype))
    if found is None:
        try:
            found = _build(program, dtype)
        except EngineError as error:
            found = error
        _KERNELS[program.key, dtype] = found
    if isinstance(found, EngineError):
        raise found
    return found


def _build(program: Program, dtype: torch.dtype) -> Kernels:
    source = source_of(program, dtype)
    parts = (source, _header_text(), compiler_identity(find_compiler()), *flags(), cpu_identity())
    name = f"{program.cell_name}-{IO_TYPES[dtype]}"
    library = load(
        name, "\n".join(parts), source, lambda file, out: compile_library(file, HEADERS, out)
    )
    return Kernels(_kernel(library.forward), _kernel(library.backward))


def _kernel(function: Any) -> Kernel:
    function.restype = None

    def call(sizes: Sequence[int], addresses: Sequence[int]) -> None:
        function(
            (ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_void_p * len(addresses))(*addresses)
        )

    return call


@cache
def _header_text() -> str:
    files = sorted(HEADERS.glob("*.h"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
