"""Source files: emitted functions and launch structs between a target's headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pararnn.base.errors import EngineError
from pararnn.base.numerics import check_io_dtype, compute_dtype
from pararnn.cells.base import Cell
from pararnn.codegen.families import family_of, interface_of
from pararnn.codegen.headers import LANGUAGES
from pararnn.program.program import Program, program_of

IO_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
"""C++ types of tensors in memory, by dtype."""


def emitted(cell: Cell, target: str = "cpp", dtype: torch.dtype = torch.float32) -> str:
    """Return the generated source of a cell, for all targets: step, Jacobian and gradient.

    The headers of `target` define the names in it. `dtype` is the gates'. `real` is a number in the
    compute dtype (in C++ a SIMD vector of them, one for each channel). Raises EngineError for
    cells without kernels, ops without a spelling and an unknown target, TypeError for other dtypes.
    """
    check_io_dtype(dtype, "dtype")
    if target not in LANGUAGES:
        raise EngineError(f"unknown target {target!r}; known: {', '.join(LANGUAGES)}")
    program = program_of(cell).of_kernels
    return family_of(program).functions(program, dtype, target)


def source_file(
    program: Program,
    dtype: torch.dtype,
    target: str,
    solver: str,
    *,
    defines: Mapping[str, int] | None = None,
    constants: Sequence[str] = (),
    functions: str | None = None,
) -> str:
    """Return the file to compile for gates of `dtype`.

    The header of the solver's name runs the functions; it needs `defines` and `constants` (C++
    lines). functions: emitted code, None for the family's. Raises EngineError for programs without
    kernels and ops without a spelling.
    """
    family, compute = family_of(program, solver), compute_dtype(dtype)
    macros = {"IO": IO_TYPES[dtype], "WIDE": int(compute == torch.float64), **(defines or {})}
    lines = [
        f"// {program.cell_name}",
        *(f"#define PARARNN_{name} {value}" for name, value in macros.items()),
        f'#include "{family.header}"',
        "",
        "namespace pararnn {",
        "",
        *family.constants(program, dtype, target),
        *constants,
        functions or family.functions(program, dtype, target),
        interface_of(program, target, solver).declaration(),
        "}  // namespace pararnn",
        "",
        f'#include "{family.name}/{solver}.h"',
        "",
    ]
    return "\n".join(lines)


def constant_line(name: str, value: int | tuple[bool, ...]) -> str:
    """Return the C++ of a constant: a number, a flag or an array of flags."""
    if isinstance(value, tuple):
        flags = ", ".join(str(flag).lower() for flag in value)
        return f"constexpr bool {name}[] = {{{flags or 'false'}}};"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name} = {str(value).lower()};"


def chunk_of(*offsets: int) -> int:
    """Return the bytes that may be copied at once for addresses and strides, 16 at most."""
    bits = 16
    for offset in offsets:
        bits |= offset
    return bits & -bits
