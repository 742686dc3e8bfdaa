"""Kernels for the host: a program and an I/O dtype in, compiled C++ out."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pararnn.base.cache import CPP, cached_or_error, load, on_clear
from pararnn.base.errors import EngineError
from pararnn.cells.base import Cell
from pararnn.codegen import headers
from pararnn.codegen.compiler import (
    compile_library,
    compiler_command,
    compiler_identity,
    flags,
    target_identity,
)
from pararnn.codegen.families import FAMILIES, family_of
from pararnn.codegen.source import IO_TYPES, source_file
from pararnn.program.program import Program

SOLVERS = FAMILIES["elementwise"].solvers
"""Solvers with kernels, which make a library each."""
Kernel = Callable[[Sequence[int]], None]
"""Function of the words of a launch, see `Interface.pack`."""


@dataclass(frozen=True)
class Kernels:
    """Both passes of a compiled library."""

    forward: Kernel
    backward: Kernel


_KERNELS: dict[tuple[str, torch.dtype, str], Kernels | EngineError] = {}
on_clear(lambda: _KERNELS.clear())


def kernels_of(program: Program, dtype: torch.dtype, solver: str) -> Kernels:
    """Return the program's kernels for gates of `dtype` and one of SOLVERS.

    They are compiled at the first use and cached on disk. Raises EngineError without a compiler and
    a cached library, if the compiler fails, and for ops without a spelling. A failure is cached for
    the life of the process.
    """
    return cached_or_error(
        _KERNELS, (program.key, dtype, solver), lambda: _build(program, dtype, solver)
    )


def usual(
    program: Program,
    cell: Cell,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
) -> dict[object, Callable[[], object]]:
    """Return the jobs that compile a cell's kernels, by key. Kernels serve all sizes."""
    return {
        (program.key, dtype, solver): partial(kernels_of, program, dtype, solver)
        for solver in family_of(program).solvers
    }


def _build(program: Program, dtype: torch.dtype, solver: str) -> Kernels:
    source = source_file(program, dtype, "cpp", solver)
    key = "\n".join((source, headers.text("cpp"), *flags(), target_identity()))
    name = f"{program.cell_name}-{IO_TYPES[dtype]}"

    def build(file: Path, out: Path) -> None:
        compile_library(file, headers.folder("cpp"), out)

    library = load(CPP, name, key, source, build, lambda: compiler_identity(*compiler_command()))
    return Kernels(_kernel(library.forward), _kernel(library.backward))


def _kernel(function: Any) -> Kernel:
    function.restype = None

    def call(words: Sequence[int]) -> None:
        function(struct.pack(f"{len(words)}q", *words))

    return call
