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
APPROXIMATE = frozenset({torch.bfloat16})
"""I/O dtypes that hide the error of the hardware's tanh."""


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
    family = family_of(program, solver)
    body = [
        *family.constants(program, dtype, target),
        *constants,
        functions or family.functions(program, dtype, target),
        interface_of(program, target, solver).declaration(),
    ]
    blocks = [([family.header], body)]
    return file_text(program, dtype, defines or {}, blocks, f"{family.name}/{solver}.h")


def file_text(
    program: Program,
    dtype: torch.dtype,
    defines: Mapping[str, int],
    blocks: Sequence[tuple[Sequence[str], Sequence[str]]],
    last: str,
) -> str:
    """Return a file for gates of `dtype`: macros, headers and lines of code that need them in
    blocks, and a last header."""
    macros = {"IO": IO_TYPES[dtype], "WIDE": int(compute_dtype(dtype) == torch.float64), **defines}
    lines = [f"// {program.cell_name}"]
    lines += [f"#define PARARNN_{name} {value}" for name, value in macros.items()]
    for headers, body in blocks:
        lines += [*map(_include, headers), "", "namespace pararnn {", "", *body]
        lines += ["}  // namespace pararnn", ""]
    return "\n".join([*lines, _include(last), ""])


def _include(header: str) -> str:
    return f'#include "{header}"'


def pass_defines(dtype: torch.dtype, direction: str, **others: int) -> dict[str, int]:
    """Return the macros of a pass on a GPU, for gates of a dtype."""
    backward = direction == "backward"
    return {
        "BACKWARD": int(backward),
        **others,
        "APPROXIMATE": int(dtype in APPROXIMATE),
        "REFINED": int(dtype == torch.float32 and backward),
    }


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
