"""Kernels for GPUs: a program and a variant (dtypes, sizes, layout) in, compiled CUDA out.

Another family of kernels needs a line in `CODE`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pararnn.base import cache as disk
from pararnn.base.errors import EngineError
from pararnn.cells.base import Cell
from pararnn.codegen import elementwise_cuda as elementwise
from pararnn.codegen import headers
from pararnn.codegen import mixing_cuda as mixing
from pararnn.codegen.chunks import CHUNKS, chunk_variants, launchable, source_of_chunks
from pararnn.codegen.cluster_layout import CLUSTERS
from pararnn.codegen.clusters import (
    cluster_kernels_in,
    cluster_variants,
    runs_in_clusters,
    source_of_clusters,
)
from pararnn.codegen.families import family_of
from pararnn.codegen.matrix_cuda import matrix_kernels_in, matrix_variants, source_of_matrix
from pararnn.codegen.mixing_cuda import Launchable
from pararnn.codegen.nvrtc import (
    OLDEST,
    Kernel,
    ToolchainError,
    architecture,
    capability_of,
    compile_cubin,
    identity,
    load_module,
    too_old,
)
from pararnn.codegen.source import IO_TYPES
from pararnn.program.program import ELEMENTWISE, MATRIX, MIXING, Program

_LOG = logging.getLogger("pararnn")

Capability = tuple[int, int]
"""Compute capability of a GPU."""


class Variant(Protocol):
    """Specialisation of a kernel, in addition to the cell: the pass, the gates' dtype, the solver,
    and what a family's own record adds."""

    @property
    def direction(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def solver(self) -> str: ...


class Code(NamedTuple):
    """Code of a family for GPUs.

    source(program, variant): the file to compile; EngineError for cells that do not fit, ops
    without a spelling and the like. blocks(program, variant): its kernels by name, each with the
    size of a block and its shared memory. variants(program, cell, dtype, weight_dtype, capability,
    solver): those of a layer's training and decoding without resets, for all batch sizes; without a
    cell those of a small size, which fail if any size does (EngineError where that is known).
    """

    source: Callable[[Program, Any], str]
    blocks: Callable[[Program, Any], Mapping[str, Launchable]]
    variants: Callable[..., Sequence[Variant]]


def _of_all_sizes(
    variants: Callable[[Program, torch.dtype, torch.dtype, Capability], Sequence[Variant]],
) -> Callable[..., Sequence[Variant]]:
    """Return `Code.variants` for kernels that serve all sizes."""
    return lambda program, cell, *layer: variants(program, *layer[:3])


CODE: Mapping[str, Code] = {
    ELEMENTWISE: Code(
        elementwise.source_of_elementwise, elementwise.blocks_in, elementwise.variants_of
    ),
    MIXING: Code(mixing.source_of_mixing, mixing.kernels_in, mixing.variants_of),
    MATRIX: Code(source_of_matrix, matrix_kernels_in, _of_all_sizes(matrix_variants)),
    CLUSTERS: Code(source_of_clusters, cluster_kernels_in, _of_all_sizes(cluster_variants)),
    CHUNKS: Code(
        source_of_chunks,
        lambda program, variant: {"run": launchable(program, variant)},
        _of_all_sizes(chunk_variants),
    ),
}
"""By the family's name, or that of a solver with kernels of its own."""


def code_name(program: Program, solver: str) -> str:
    """Return the name of the code, and of its headers, that runs a program by a solver. Raises
    EngineError as `family_of`."""
    return solver if solver in CODE else family_of(program, solver).name


def code_of(program: Program, solver: str) -> Code:
    """Return the code that runs a program by a solver. Raises EngineError as `family_of`."""
    return CODE[code_name(program, solver)]


def source_of(program: Program, variant: Variant) -> str:
    """Return the CUDA file of a variant. Raises EngineError, see `Code`."""
    return code_of(program, variant.solver).source(program, variant)


def blocks_of(program: Program, variant: Variant) -> Mapping[str, Launchable]:
    """Return the kernels of a pass by name: the size of a block, and its shared memory."""
    return code_of(program, variant.solver).blocks(program, variant)


def usual(
    program: Program,
    cell: Cell,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device | Capability,
) -> dict[object, Callable[[], object]]:
    """Return the jobs for the usual and the smallest variants of a cell, by key, for all solvers.

    For a compute capability in place of a device, GPUs may be absent: device code is cached on disk
    and not loaded. Raises ToolchainError for GPUs that are too old, EngineError for cells that do
    not fit.
    """
    make: Make = kernels_of
    family = family_of(program)
    if isinstance(device, torch.device):
        capability = capability_of(device)
    else:
        capability, make = device, _code_of
        if capability < OLDEST:
            raise ToolchainError(too_old("the requested GPU", capability))
    code = CLUSTERS if runs_in_clusters(program) else family.name
    variants = [
        variant
        for solver in family.solvers
        for sizes in ((None, dtype, dtype), (cell, dtype, weight_dtype))
        for variant in CODE[code].variants(program, *sizes, capability, solver)
    ]
    return {(program.key, v): partial(make, program, v, capability) for v in variants}


Make = Callable[[Program, Variant, Capability], object]
"""Function that compiles the kernels of a pass for a compute capability: `kernels_of`, or
`_code_of`, which only fills the cache on disk."""


def check_buildable(
    program: Program,
    dtype: torch.dtype,
    capability: Capability,
    solver: str = "sequential",
    compiles: bool = True,
) -> None:
    """Compile the smallest variants, or only generate them. Raises EngineError where that fails."""
    code = code_of(program, solver)
    for variant in code.variants(program, None, dtype, dtype, capability, solver):
        if compiles:
            kernels_of(program, variant, capability)
        else:
            code.source(program, variant)


_KERNELS: dict[tuple[str, Variant, Capability], dict[str, Kernel] | EngineError] = {}
disk.on_clear(lambda: _KERNELS.clear())


def kernels_of(program: Program, variant: Variant, capability: Capability) -> dict[str, Kernel]:
    """Return the kernels of a pass by name, compiled at the first use and cached on disk.

    Raises EngineError without NVRTC, if NVRTC fails, for cells that do not fit, and for ops without
    a spelling. A failure is cached for the life of the process.
    """

    def build() -> dict[str, Kernel]:
        module = load_module(_code_of(program, variant, capability))
        blocks = blocks_of(program, variant)
        return {name: Kernel(module, name, *block) for name, block in blocks.items()}

    return disk.cached_or_error(_KERNELS, (program.key, variant, capability), build)


def _code_of(program: Program, variant: Variant, capability: Capability) -> bytes:
    return cubin_of(program, variant, architecture(capability))


def cubin_of(program: Program, variant: Variant, arch: str) -> bytes:
    """Return the device code of a variant. Raises EngineError as `kernels_of`."""
    source = source_of(program, variant)
    name = (
        f"{program.cell_name}-{variant.solver}-{variant.direction}-{IO_TYPES[variant.dtype]}-{arch}"
    )
    key = "\n".join((source, headers.text("cuda", code_name(program, variant.solver)), arch))

    def build(file: Path, out: Path) -> None:
        _LOG.warning(
            "compiling %s's %s %s kernel for %s (once; cached in %s)",
            program.cell_name,
            variant.solver,
            variant.direction,
            arch,
            disk.cache_folder(),
        )
        compile_cubin(file, headers.folder("cuda"), out, arch)

    try:
        return disk.load(disk.CUDA, name, key, source, build, identity)
    except ToolchainError as error:
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        file = disk.write_failed(f"{name}-{digest}.cu", source)
        raise ToolchainError(f"{error}\nThe source is {file}") from error
