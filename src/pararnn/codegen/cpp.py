"""C++ for the host: a program and an I/O dtype in, compiled kernels out."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pararnn.cache import CPP, cached_or_error, load, on_clear
from pararnn.cells.base import Cell
from pararnn.codegen import headers
from pararnn.codegen.compiler import (
    compile_library,
    compiler_command,
    compiler_identity,
    flags,
    target_identity,
)
from pararnn.codegen.emit import IO_TYPES, source_file
from pararnn.errors import EngineError
from pararnn.program.program import Program

SOLVERS = ("sequential", "newton")
"""What runs both passes: each has a header of its name, and makes a library of its own."""

Kernel = Callable[[Sequence[int]], None]
"""Takes the words of a launch: see codegen/interface.py."""


@dataclass(frozen=True)
class Kernels:
    """The two entries of a compiled library."""

    forward: Kernel
    backward: Kernel


_KERNELS: dict[tuple[str, torch.dtype, str], Kernels | EngineError] = {}
on_clear(lambda: _KERNELS.clear())


def kernels_of(program: Program, dtype: torch.dtype, solver: str) -> Kernels:
    """The program's kernels for gates of `dtype` by one of SOLVERS: compiled at the first use, kept
    on disk.

    Raises EngineError: no compiler and nothing kept, a compiler that fails, or an op that has no
    spelling. A failure is remembered for the life of the process.
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
    """What makes the kernels of a cell, by key: they serve all sizes."""
    return {
        (program.key, dtype, solver): partial(kernels_of, program, dtype, solver)
        for solver in SOLVERS
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
